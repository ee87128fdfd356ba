"""Every error that `broker` raises, as one tree.

    BrokerError
    ├── ConfigurationError (ValueError)      invalid settings, URL or options
    │   ├── UnknownScheme                    no backend has the URL's scheme
    │   ├── UnknownSetting                   the backend has no such parameter
    │   ├── InvalidSetting                   the value of a parameter is invalid
    │   ├── InvalidName                      a topic, subscription or group name is invalid
    │   └── MissingClient                    the backend's client library is not installed
    ├── Unsupported                          the backend lacks the feature
    ├── InvalidMessage (ValueError)          the message is invalid
    │   └── MessageTooLarge                  the message exceeds a limit of the broker
    ├── ConnectionFailed                     no server, or the connection broke (retriable)
    ├── AuthenticationFailed                 the server rejected the credentials
    ├── NotAuthorized                        the server rejected the operation
    ├── NotFound
    │   ├── TopicNotFound
    │   │   └── TopicRecreated               the topic was deleted and recreated: positions mean other records
    │   └── SubscriptionNotFound
    ├── OperationTimeout (TimeoutError)      no answer in time; the outcome is unknown (retriable)
    ├── PublishError                         some messages of a batch failed; `outcomes` has each result
    ├── SettleError                          an ack, nack, reject or commit failed
    │   ├── LeaseLost                        the consumer no longer holds the message or partition
    │   └── AlreadySettled                   the message was settled differently before
    ├── DecodeError (ValueError)             the codec cannot decode the payload
    ├── OffsetOutOfRange                     the log does not hold the position
    ├── TransactionAborted                   the transaction was rolled back: repeat the work (retriable)
    ├── TransactionFatal                     the publisher is fenced or broken: open a new one
    ├── Closed                               the object is closed
    ├── WrongEventLoop (RuntimeError)        the object belongs to another event loop
    └── BackendError                         any other error of a backend
        └── StorageFailed                    the broker cannot store: its disk or a limit is full (retriable)

Every error has `retriable` (whether the same call may succeed later), `native` (the exception of the client library,
or None) and `advice` (one sentence that says what to do).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from broker.receipts import Receipt

__all__ = [
    "AlreadySettled",
    "AuthenticationFailed",
    "BackendError",
    "BrokerError",
    "Closed",
    "ConfigurationError",
    "ConnectionFailed",
    "DecodeError",
    "InvalidMessage",
    "InvalidName",
    "InvalidSetting",
    "LeaseLost",
    "MessageTooLarge",
    "MissingClient",
    "NotAuthorized",
    "NotFound",
    "OffsetOutOfRange",
    "OperationTimeout",
    "PublishError",
    "SettleError",
    "StorageFailed",
    "SubscriptionNotFound",
    "TopicNotFound",
    "TopicRecreated",
    "TransactionAborted",
    "TransactionFatal",
    "UnknownScheme",
    "UnknownSetting",
    "Unsupported",
    "WrongEventLoop",
]


class BrokerError(Exception):
    """Base class of all errors of `broker` and its backends.

    :ivar retriable: whether the same call may succeed later.
    :ivar native: the exception of the client library that caused this error, or None.
    :ivar advice: one sentence that says what to do; may be empty.
    """

    default_retriable: ClassVar[bool] = False
    default_advice: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        retriable: bool | None = None,
        native: BaseException | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retriable = self.default_retriable if retriable is None else retriable
        self.native = native
        self.advice = self.default_advice if advice is None else advice

    def __str__(self) -> str:
        return f"{self.message}. {self.advice}" if self.advice else self.message


class ConfigurationError(BrokerError, ValueError):
    """A setting, URL, name or option is invalid."""


class UnknownScheme(ConfigurationError):
    """No backend has the URL's scheme."""


class UnknownSetting(ConfigurationError):
    """The backend has no such setting or URL parameter."""


class InvalidSetting(ConfigurationError):
    """The value of a setting is invalid."""


class InvalidName(ConfigurationError):
    """A topic, subscription or group name is not portable, or reserved.

    :ivar topic: the reserved topic that no application may consume, or None.
    """

    portable_advice = "Use a letter, then letters, digits, '.', '_' or '-', 3 to 200 characters in all"
    default_advice = f"{portable_advice}; or pass native_name(...) for a name in the broker's own form"

    def __init__(
        self,
        message: str,
        *,
        topic: str | None = None,
        retriable: bool | None = None,
        native: BaseException | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(message, retriable=retriable, native=native, advice=advice)
        self.topic = topic


class MissingClient(ConfigurationError):
    """The client library of the backend is not installed; the advice is the pip command."""


class Unsupported(BrokerError):
    """The backend lacks a feature; see `bus.capabilities`."""


class InvalidMessage(BrokerError, ValueError):
    """A message is invalid, or the broker cannot carry it."""


class MessageTooLarge(InvalidMessage):
    """A message, or its body, key, id or an attribute, exceeds a limit of the broker."""


class ConnectionFailed(BrokerError):
    """The server cannot be reached, or the connection broke and could not be restored."""

    default_retriable = True
    default_advice = "Check that the server is running and that the URL is correct"


class AuthenticationFailed(BrokerError):
    """The server rejected the credentials, or requires credentials."""

    default_advice = "Check the credentials and the security settings"


class NotAuthorized(BrokerError):
    """The credentials do not permit the operation."""

    default_advice = "Grant this user permission on the topic or subscription"


class NotFound(BrokerError):
    """A topic, partition, subscription or group does not exist."""


class TopicNotFound(NotFound):
    """The topic does not exist."""

    default_advice = "Create it with `await bus.admin.ensure_topic(name)`"


class TopicRecreated(TopicNotFound):
    """The topic was deleted and recreated while it was read, so positions mean other records."""

    default_advice = "Discard the positions and what was built from the records, and open it again from the start"


class SubscriptionNotFound(NotFound):
    """The subscription or group does not exist."""

    default_advice = "Create it with `await bus.admin.ensure_subscription(topic, name)`"


class OperationTimeout(BrokerError, TimeoutError):
    """The server did not answer in time; the outcome is unknown."""

    default_retriable = True


class PublishError(BrokerError):
    """Some messages of a batch were not published.

    :ivar outcomes: the result of each message, in the order of the batch: a `Receipt` (None with `receipts=False`) if
        the message is on the broker, otherwise its error.
    """

    def __init__(self, outcomes: Sequence[Receipt | BrokerError | None]) -> None:
        failed = [outcome for outcome in outcomes if isinstance(outcome, BrokerError)]
        first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(outcomes)} messages were not published; first: {first.message}",
            retriable=all(error.retriable for error in failed),
            native=first.native,
            advice=first.advice or "`outcomes` has the result of each message",
        )
        self.outcomes = tuple(outcomes)


class SettleError(BrokerError):
    """An ack, nack, reject, lease extension or commit failed."""


class LeaseLost(SettleError):
    """The consumer no longer holds the message or partition; the broker delivers the message again."""

    default_advice = (
        "Make the work idempotent, because the message is delivered again; raise max_lease or call extend(), or finish "
        'sooner if capabilities.messages.lease is "fixed"; if the handler blocked the event loop, which renews leases, '
        "make it a plain function, which runs in a thread, or use asyncio.to_thread"
    )


class AlreadySettled(SettleError):
    """The message was settled differently before."""

    default_advice = "Settle each message once"


class DecodeError(BrokerError, ValueError):
    """The codec cannot decode the payload.

    :ivar record: the `Record`, if Kafka's `GroupConsumer` raised the error: mark it like any other. None otherwise.
    """

    record: Any = None


class OffsetOutOfRange(BrokerError):
    """Retention removed the position, or it is beyond the end of the log."""

    default_advice = "Call `bounds(topic)` for the offsets that the log holds, and choose where to continue"


class TransactionAborted(BrokerError):
    """The transaction was rolled back and its consumer rewound: repeat the work."""

    default_retriable = True
    default_advice = "Read the records again and repeat the work"


class TransactionFatal(BrokerError):
    """The publisher was fenced by a newer one with the same id, or cannot recover."""

    default_advice = "Close this publisher; open a new one only if no other process uses its transactional id"


class Closed(BrokerError):
    """The bus, topic, consumer or transaction is closed."""


class WrongEventLoop(BrokerError, RuntimeError):
    """A bus, or an object of one, was used outside the event loop that opened it; nothing was done."""


class BackendError(BrokerError):
    """Any other error of a backend; `native` has the details."""


class StorageFailed(BackendError):
    """The broker cannot store: its disk or a limit of its storage is full, or its disk fails."""

    default_retriable = True
    default_advice = "Make room on the broker's disk or raise its limits, then repeat the call"
