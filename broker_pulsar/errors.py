"""Exceptions and results of the client, and statuses of the HTTP API, as errors of `broker`. Pure functions."""

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
    StorageFailed,
    SubscriptionNotFound,
    TopicNotFound,
)
from broker_pulsar.client import exceptions

__all__ = ["http_error", "is_transient_failure", "is_transient_status", "result_error", "seek_error", "translate"]

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
    # A result for which pulsar-client has no name: its core returns "repeat the call" while it reconnects.
    "???": ConnectionFailed,
    "AuthenticationError": AuthenticationFailed,
    "ErrorGettingAuthenticationData": AuthenticationFailed,
    "AuthorizationError": NotAuthorized,
    "TopicNotFound": TopicNotFound,
    "SubscriptionNotFound": SubscriptionNotFound,
    "AlreadyClosed": Closed,
    "ProducerBlockedQuotaExceededError": StorageFailed,
    "ProducerBlockedQuotaExceededException": StorageFailed,
    "MessageTooBig": MessageTooLarge,
    "InvalidMessage": InvalidMessage,
}
_ADVICE: Final[Mapping[str, str]] = {
    "ConnectError": "Check that the broker runs, that the URL names it, and that tls_ca trusts its certificate",
    "ConsumerBusy": "Another consumer uses the subscription in another mode: ordered and unordered consumers, messages "
    "and records need separate subscriptions",
    "ProducerBusy": "Another producer uses this producer_name; give each process its own",
    "ProducerFenced": "Another producer has exclusive access to the topic; see the setting access_mode",
    "ProducerBlockedQuotaExceededError": "The topic's backlog quota is exceeded; consume, or raise the quota",
    "ProducerBlockedQuotaExceededException": "The topic's backlog quota is exceeded; consume, or raise the quota",
    "ProducerQueueIsFull": "Lower publish_window, or publish less at once",
    "MemoryBufferIsFull": "Publish less at once",
    "MessageTooBig": "Lower max_message_bytes to the brokers' maxMessageSize, or publish larger messages "
    "in chunks with batching=off&chunking=true",
    "TopicTerminated": "The topic was terminated and accepts no more messages",
    "IncompatibleSchema": "The topic has a schema; publish to a topic without one",
}
_RETRIABLE: Final = frozenset(
    {
        "ProducerQueueIsFull",
        "MemoryBufferIsFull",
        "ProducerBlockedQuotaExceededError",
        "ProducerBlockedQuotaExceededException",
    }
)
_LONGEST_REASON: Final = 1000
_STACK: Final = "--- An unexpected error occurred in the server ---\n\nMessage:"
_TRANSIENT: Final = (
    # The topic cannot be opened or written: bookies or metadata are unavailable, or it is being closed.
    "PersistenceException",
    "ManagedLedgerException",
    "MetadataStoreException",
    "ServiceUnitNotReadyException",
    "TopicFencedException",
    # The broker could not reach another broker, or itself.
    "ConnectException",
    "Connection refused",
    "ClosedChannelException",
    "TimeoutException",
    "AlreadyClosedException",
)
"""Exceptions in the text of a transient status 500."""
_BUSY: Final = "Subscription Busy"
"""In a transient status 412, while the broker moves the subscription's cursor for another client."""


def translate(error: Exception, what: str) -> BrokerError:
    """The error of a call of the client; `what` is the operation, as in 'Publishing to topic ...'."""
    if isinstance(error, BrokerError):
        return error
    name = type(error).__name__
    if not isinstance(error, exceptions.PulsarException):
        return BackendError(f"{what}: {name}: {error}", native=error)
    return _make(name, what, error)


def result_error(result: Any, what: str) -> BrokerError:
    """The error of a result in a callback of the client."""
    return _make(result.name, what, None)


def seek_error(error: BrokerError) -> BrokerError:
    """The error of a seek. The broker reports every failure as unknown; most often another client moves the cursor."""
    if type(error.native).__name__ != "UnknownError":
        return error
    return ConnectionFailed(
        f"{error.message}: the broker did not move the cursor", native=error.native, advice="Repeat the seek"
    )


def _make(name: str, what: str, native: Exception | None) -> BrokerError:
    kind = _CLASSES.get(name, BackendError)
    return kind(
        f"{what}: Pulsar says {name}",
        native=native,
        advice=_ADVICE.get(name),
        retriable=True if name in _RETRIABLE else None,
    )


def http_error(status: int, reason: str, what: str, path: str = "") -> BrokerError:
    """The error of an answer of the HTTP API to a request for `path`."""
    text = f"{what}: the broker answers {status}{f': {_first_line(reason)}' if reason else ''}"
    if status == 401 and not reason:
        return AuthenticationFailed(text)
    if status in (401, 403):
        return NotAuthorized(text)
    if status == 412 and "does not exist" in reason:
        return TopicNotFound(text)
    if status == 404 and reason.startswith(("Namespace ", "Tenant ")):
        space = "/".join(unquote(path).split("/")[2:4])
        return NotFound(
            f"{text}: {space!r}",
            advice=f"Create it with `pulsar-admin namespaces create {space}`, or name another in the URL's path",
        )
    if status == 404:
        return SubscriptionNotFound(text) if "ubscription" in reason else TopicNotFound(text)
    if status in (408, 504):
        return OperationTimeout(text)
    if status == 429:
        return ConnectionFailed(text, advice="The broker limits requests to its HTTP API: see httpRequestsMaxPerSecond")
    if status in (307, 500, 502, 503) or (status == 412 and _BUSY in reason):
        return ConnectionFailed(text, advice="The broker is not ready, or does not own the topic yet")
    return BackendError(text)


def _first_line(reason: str) -> str:
    """The broker's reason without its stack trace, shortened."""
    text = reason.partition(_STACK)[2] or reason
    return text.strip().partition("\n")[0].strip()[:_LONGEST_REASON]


def is_transient_status(status: int, reason: str) -> bool:
    """Whether the same request may succeed a moment later."""
    if status == 500:
        return any(each in reason for each in _TRANSIENT)
    if status == 412:
        return _BUSY in reason
    # A redirect without a location: the topic has no owner yet.
    return status in (307, 429, 502, 503, 504)


def is_transient_failure(failure: ConnectionFailed) -> bool:
    """Whether the next try may succeed; a TLS failure is permanent."""
    native = failure.native
    return failure.retriable and (not isinstance(native, ssl.SSLError) or isinstance(native, ssl.SSLEOFError))
