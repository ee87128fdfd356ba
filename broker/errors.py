"""Every error that `broker` raises, as one tree.

    BrokerError
    ├── ConfigurationError (ValueError)      settings, URLs, options
    │   ├── UnknownScheme                    no backend answers to the URL's scheme
    │   ├── UnknownSetting                   a parameter that the backend does not have
    │   ├── InvalidSetting                   a parameter whose value cannot be used
    │   ├── InvalidName                      a topic or subscription name that is not portable
    │   └── MissingClient                    the backend's client library is not installed
    ├── Unsupported                          the backend cannot honour what was asked for
    ├── InvalidMessage (ValueError)          a message that cannot be carried as it is
    │   └── MessageTooLarge                  … because it is larger than the broker takes
    ├── ConnectionFailed                     no server, or the connection broke (retriable)
    ├── AuthenticationFailed                 the server refused who we are
    ├── NotAuthorized                        the server knows us and refuses the operation
    ├── NotFound
    │   ├── TopicNotFound
    │   └── SubscriptionNotFound
    ├── OperationTimeout (TimeoutError)      no answer in time; the outcome is unknown (retriable)
    ├── PublishError                         some messages of a batch failed; tells each one's fate
    ├── SettleError                          an ack, nack, reject or commit was not carried out
    │   ├── LeaseLost                        the message or partition is no longer ours
    │   └── AlreadySettled                   it was settled the other way before
    ├── DecodeError (ValueError)             a payload that its codec cannot read
    ├── OffsetOutOfRange                     the log no longer, or not yet, holds that position
    ├── TransactionAborted                   undone and rewound: do it again (retriable)
    ├── TransactionFatal                     this producer is fenced or broken: make a new one
    ├── Closed                               the object was closed before the call
    └── BackendError                         anything else a backend reports

Each carries `retriable` (whether the same call may succeed later without a change), `native` (the
client library's own exception, or None) and `advice` (what to do, one sentence).
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
    "SubscriptionNotFound",
    "TopicNotFound",
    "TransactionAborted",
    "TransactionFatal",
    "UnknownScheme",
    "UnknownSetting",
    "Unsupported",
]


class BrokerError(Exception):
    """Base of every error raised by `broker` and its backends.

    :ivar retriable: whether the same call may succeed later without a change.
    :ivar native: the client library's own exception, if one caused this.
    :ivar advice: what the reader should do about it, one sentence; may be empty.
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
    """Settings, a URL or options that cannot be used."""


class UnknownScheme(ConfigurationError):
    """No built-in backend and no entry point answers to the URL's scheme."""


class UnknownSetting(ConfigurationError):
    """A URL parameter or setting that the backend does not have."""


class InvalidSetting(ConfigurationError):
    """A setting whose value cannot be used."""


class InvalidName(ConfigurationError):
    """A topic, subscription or group name that is not portable, or that is another's.

    :ivar topic: the topic that nobody may consume, where that is what is wrong.
    """

    portable_advice = "Use a letter, then letters, digits, '.', '_' or '-', 3 to 200 in all"
    default_advice = f"{portable_advice}; a name in the broker's own form goes through native_name(...)"

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
    """The backend's client library is not installed; the advice is the exact pip line."""


class Unsupported(BrokerError):
    """The backend cannot honour what was asked for; see `bus.capabilities`."""


class InvalidMessage(BrokerError, ValueError):
    """A message that cannot be carried as it is."""


class MessageTooLarge(InvalidMessage):
    """A body, key, id or attribute larger than the broker takes."""


class ConnectionFailed(BrokerError):
    """The server cannot be reached, or the connection broke and did not come back."""

    default_retriable = True
    default_advice = "Check that the server runs and that the URL names it"


class AuthenticationFailed(BrokerError):
    """The server refused the credentials, or wants some."""

    default_advice = "Check the credentials and the security settings of the URL"


class NotAuthorized(BrokerError):
    """The server accepts the credentials but not the operation."""

    default_advice = "Grant this user the permission on the topic or subscription"


class NotFound(BrokerError):
    """What was named does not exist on the server."""


class TopicNotFound(NotFound):
    """The topic does not exist."""

    default_advice = "Create it with `await bus.admin.ensure_topic(name)`"


class SubscriptionNotFound(NotFound):
    """The subscription does not exist, and the consumer was told not to create it."""

    default_advice = "Create it with `await bus.admin.ensure_subscription(topic, name)`"


class OperationTimeout(BrokerError, TimeoutError):
    """The server did not answer in time; whether it acted is unknown."""

    default_retriable = True


class PublishError(BrokerError):
    """Some messages of a batch were not published.

    :ivar outcomes: one entry per message of the batch, in its order: the Receipt of a message that is on the
        broker (None where no receipts were asked for), or the error of one that is not.
    """

    def __init__(self, outcomes: Sequence[Receipt | BrokerError | None]) -> None:
        failed = [outcome for outcome in outcomes if isinstance(outcome, BrokerError)]
        first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(outcomes)} messages were not published; first: {first.message}",
            retriable=all(error.retriable for error in failed),
            native=first.native,
            advice=first.advice or "See `outcomes` for the fate of each message",
        )
        self.outcomes = tuple(outcomes)


class SettleError(BrokerError):
    """An ack, nack, reject, extension or commit was not carried out."""


class LeaseLost(SettleError):
    """The message, or its partition, is no longer held here: the broker gives it to somebody again."""

    default_advice = (
        "Make the work repeatable, since it runs again; raise max_lease or call extend() for messages whose lease is "
        "renewed, and be done sooner where capabilities.messages.lease is fixed"
    )


class AlreadySettled(SettleError):
    """The message was settled another way before."""

    default_advice = "Settle each message once"


class DecodeError(BrokerError, ValueError):
    """A payload that the codec cannot read.

    :ivar record: of Kafka's `GroupConsumer`: the `Record`, handed over with the error, to be marked like any other;
        None elsewhere.
    """

    record: Any = None


class OffsetOutOfRange(BrokerError):
    """The position was removed by retention, or lies beyond the end of the log."""

    default_advice = "Ask `bounds(topic)` for what the log holds, and decide what the loss means"


class TransactionAborted(BrokerError):
    """The transaction was undone and its consumer rewound: do the work again."""

    default_retriable = True
    default_advice = "Read the records again and repeat the work"


class TransactionFatal(BrokerError):
    """The transactional publisher was fenced by another of the same id, or is broken for good."""

    default_advice = "Close this publisher; open a new one only if no other process uses its id"


class Closed(BrokerError):
    """The bus, topic or consumer was closed before the call."""


class BackendError(BrokerError):
    """What a backend reports and no other class describes; `native` has the detail."""
