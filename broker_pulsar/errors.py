"""The client's exceptions and results, and the HTTP API's statuses, as errors of `broker`. Pure functions."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from broker import (
    AuthenticationFailed,
    BackendError,
    BrokerError,
    Closed,
    ConnectionFailed,
    InvalidMessage,
    MessageTooLarge,
    NotAuthorized,
    NotFound,
    OperationTimeout,
    SubscriptionNotFound,
    TopicNotFound,
)
from broker_pulsar.client import exceptions

__all__ = ["answer_passes", "failure_passes", "http_error", "result_error", "translate"]

_CLASSES: Final[Mapping[str, type[BrokerError]]] = {
    "Timeout": OperationTimeout,
    "ConnectError": ConnectionFailed,
    "ReadError": ConnectionFailed,
    "LookupError": ConnectionFailed,
    "NotConnected": ConnectionFailed,
    "ServiceUnitNotReady": ConnectionFailed,
    "BrokerMetadataError": ConnectionFailed,
    "BrokerPersistenceError": ConnectionFailed,
    "TooManyLookupRequestException": ConnectionFailed,
    "Disconnected": ConnectionFailed,
    "AuthenticationError": AuthenticationFailed,
    "ErrorGettingAuthenticationData": AuthenticationFailed,
    "AuthorizationError": NotAuthorized,
    "TopicNotFound": TopicNotFound,
    "SubscriptionNotFound": SubscriptionNotFound,
    "AlreadyClosed": Closed,
    "MessageTooBig": MessageTooLarge,
    "InvalidMessage": InvalidMessage,
}
_ADVICE: Final[Mapping[str, str]] = {
    "ConnectError": "Check that the broker runs, that the URL names it, and that tls_ca vouches for it",
    "ConsumerBusy": "Somebody else reads the subscription in another way: ordered and unordered consumers, messages "
    "and records each need a subscription of their own",
    "ProducerBusy": "Another producer uses this producer_name; give each process its own",
    "ProducerFenced": "Another producer has exclusive access to the topic; see the setting access_mode",
    "ProducerBlockedQuotaExceededError": "The topic's backlog quota is used up; consume, or raise it",
    "ProducerBlockedQuotaExceededException": "The topic's backlog quota is used up; consume, or raise it",
    "ProducerQueueIsFull": "Lower publish_window, or publish less at once",
    "MemoryBufferIsFull": "Publish less at once",
    "MessageTooBig": "Lower max_message_bytes to the brokers' maxMessageSize; with batching=off&chunking=true larger "
    "messages go in chunks",
    "TopicTerminated": "The topic was terminated and takes no more messages",
    "IncompatibleSchema": "The topic has a schema that bytes do not fit; publish to a topic without one",
}
_RETRIABLE: Final = frozenset(
    {
        "ProducerQueueIsFull",
        "MemoryBufferIsFull",
        "ProducerBlockedQuotaExceededError",
        "ProducerBlockedQuotaExceededException",
    }
)
_STACK: Final = "--- An unexpected error occurred in the server ---\n\nMessage:"
_PASSING: Final = (
    # A topic cannot be opened or written: its bookies or its metadata are away, or it is just being closed.
    "PersistenceException",
    "ManagedLedgerException",
    "MetadataStoreException",
    "ServiceUnitNotReadyException",
    "TopicFencedException",
    # The broker could not ask another one, or itself.
    "ConnectException",
    "Connection refused",
    "ClosedChannelException",
    "TimeoutException",
    "AlreadyClosedException",
)
"""What a broker names in a 500 that is over in a moment."""
_BUSY: Final = "Subscription Busy"
"""What it says with a 412 while it puts a subscription to its place for somebody else."""


def translate(error: Exception, what: str) -> BrokerError:
    """The error of a call of the client; `what` was asked for, as 'Publishing to topic ...'."""
    if isinstance(error, BrokerError):
        return error
    name = type(error).__name__
    if not isinstance(error, exceptions.PulsarException):
        return BackendError(f"{what}: {name}: {error}", native=error)
    return _make(name, what, error)


def result_error(result: Any, what: str) -> BrokerError:
    """The error of a result that a callback of the client got."""
    return _make(result.name, what, None)


def _make(name: str, what: str, native: Exception | None) -> BrokerError:
    kind = _CLASSES.get(name, BackendError)
    return kind(
        f"{what}: Pulsar says {name}",
        native=native,
        advice=_ADVICE.get(name),
        retriable=True if name in _RETRIABLE else None,
    )


def http_error(status: int, reason: str, what: str, path: str = "") -> BrokerError:
    """The error that an answer of the HTTP API stands for; `path` is what was asked for there."""
    told = f"{what}: the broker answers {status}{f': {_first_line(reason)}' if reason else ''}"
    if status == 401 and not reason:
        return AuthenticationFailed(told)
    if status in (401, 403):
        return NotAuthorized(told)
    if status == 412 and "does not exist" in reason:
        return TopicNotFound(told)
    if status == 404 and reason.startswith(("Namespace ", "Tenant ")):
        space = "/".join(unquote(path).split("/")[2:4])
        return NotFound(
            f"{told}: {space!r}",
            advice=f"Create it by `pulsar-admin namespaces create {space}`, or name another in the URL's path",
        )
    if status == 404:
        return SubscriptionNotFound(told) if "ubscription" in reason else TopicNotFound(told)
    if status in (408, 504):
        return OperationTimeout(told)
    if status == 429:
        return ConnectionFailed(
            told, advice="It bounds the requests to its HTTP API: httpRequestsMaxPerSecond says how many"
        )
    if status in (307, 500, 502, 503) or (status == 412 and _BUSY in reason):
        return ConnectionFailed(told, advice="The broker is not ready, or not the owner of the topic yet")
    return BackendError(told)


def _first_line(reason: str) -> str:
    """What a broker says, without the stack of its Java that it may send along."""
    said = reason.partition(_STACK)[2] or reason
    return said.strip().partition("\n")[0].strip()


def answer_passes(status: int, reason: str) -> bool:
    """Whether this answer of the HTTP API is one for a moment, after which the same request may succeed."""
    if status == 500:
        return any(each in reason for each in _PASSING)
    if status == 412:
        return _BUSY in reason
    # A redirection that reaches us names no broker: the topic has no owner yet.
    return status in (307, 429, 502, 503, 504)


def failure_passes(failure: ConnectionFailed) -> bool:
    """Whether the HTTP API may be reached by the next try; TLS that was refused will be again."""
    native = failure.native
    return failure.retriable and (not isinstance(native, ssl.SSLError) or isinstance(native, ssl.SSLEOFError))
