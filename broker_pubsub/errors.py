"""Errors of gRPC and Pub/Sub as errors of `broker`. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import grpc
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from broker import (
    AuthenticationFailed,
    BackendError,
    BrokerError,
    ConnectionFailed,
    InvalidMessage,
    MessageTooLarge,
    NotAuthorized,
    OperationTimeout,
    SubscriptionNotFound,
    TopicNotFound,
    Unsupported,
)

__all__ = ["NO_TOKEN", "REFUSED_TOKEN", "Kind", "failed_ack_ids", "is_status", "translate"]

Kind = Literal["topic", "subscription", "other"]
"""The object of a request, to interpret NOT_FOUND."""

_Code = grpc.StatusCode
_RETRIABLE: Final = frozenset({_Code.ABORTED, _Code.INTERNAL, _Code.UNKNOWN, _Code.CANCELLED})
_NEVER_SENT: Final = ("failed to connect", "connection refused", "name resolution", "dns resolution")
_TOO_LARGE: Final = ("too large", "larger than", "exceeds", "maximum size")
NO_TOKEN: Final = "no token can be fetched for now"  # noqa: S105 - a text
REFUSED_TOKEN: Final = "these credentials get no token"  # noqa: S105 - a text
_DETAILS: Final = "grpc-status-details-bin"


def is_status(error: BaseException, *codes: grpc.StatusCode) -> bool:
    """Whether a call ended with one of these codes."""
    return isinstance(error, grpc.aio.AioRpcError) and error.code() in codes


def translate(error: BaseException, what: str, kind: Kind = "other") -> BrokerError:
    """An error of gRPC as an error of `broker`.

    :param what: the operation: "Publishing to topic 'orders'".
    """
    if isinstance(error, BrokerError):
        return error
    # The traceback's frames keep the call alive, and its finalizer takes a second.
    native = error.with_traceback(None)
    if not isinstance(error, grpc.aio.AioRpcError):
        return _of_credentials(native, what)
    code, text = error.code(), error.details() or error.code().name
    summary = f"{what}: {text} ({code.name})"
    if code is _Code.NOT_FOUND:
        return _missing(summary, text, native, kind)
    if code is _Code.UNAVAILABLE:
        return _unavailable(summary, text.lower(), native)
    if code is _Code.INVALID_ARGUMENT or code is _Code.RESOURCE_EXHAUSTED:
        return _refused(summary, text.lower(), native, code, kind)
    if code is _Code.DEADLINE_EXCEEDED:
        return OperationTimeout(f"{what}: no answer in time", native=native)
    if code is _Code.UNAUTHENTICATED:
        return AuthenticationFailed(summary, native=native)
    if code is _Code.PERMISSION_DENIED:
        return NotAuthorized(summary, native=native, advice="Grant this account the role on the topic or subscription")
    if code is _Code.UNIMPLEMENTED:
        return Unsupported(summary, native=native, advice="Emulators do not support every call of the service")
    return BackendError(summary, native=native, retriable=code in _RETRIABLE)


def _missing(summary: str, text: str, native: BaseException, kind: Kind) -> BrokerError:
    if kind == "topic" or (kind == "subscription" and "opic" in text and "ubscription" not in text):
        return TopicNotFound(summary, native=native)
    if "napshot" in text:
        return BackendError(
            summary, native=native, advice="The snapshot was never created, was deleted, or is older than seven days"
        )
    if kind == "subscription":
        return SubscriptionNotFound(summary, native=native)
    return BackendError(summary, native=native)


def _unavailable(summary: str, text: str, native: BaseException) -> BrokerError:
    # Checked first, because the cause of a missing token may mention a connection, too.
    if REFUSED_TOKEN in text:
        return AuthenticationFailed(summary, native=native)
    if NO_TOKEN in text:
        return ConnectionFailed(summary, native=native, advice="Nothing was sent; check the token server")
    if any(sign in text for sign in _NEVER_SENT):
        return ConnectionFailed(summary, native=native)
    return OperationTimeout(summary, native=native, advice="The connection broke; the outcome is unknown")


def _refused(summary: str, text: str, native: BaseException, code: grpc.StatusCode, kind: Kind) -> BrokerError:
    if any(sign in text for sign in _TOO_LARGE):
        return MessageTooLarge(summary, native=native)
    if code is _Code.RESOURCE_EXHAUSTED:
        return BackendError(summary, native=native, retriable=True, advice="Request more quota, or send less")
    return InvalidMessage(summary, native=native) if kind == "topic" else BackendError(summary, native=native)


def _of_credentials(error: BaseException, what: str) -> BrokerError:
    if type(error).__module__.startswith("google.auth"):
        return AuthenticationFailed(f"{what}: {error}", native=error)
    return BackendError(f"{what}: {error!r}", native=error)


def failed_ack_ids(error: grpc.aio.AioRpcError) -> Mapping[str, str]:
    """The answer of an exactly-once subscription per ack id: PERMANENT_FAILURE_… or TRANSIENT_FAILURE_…."""
    found: dict[str, str] = {}
    for name, value in error.trailing_metadata() or ():
        if name != _DETAILS:
            continue
        status: Any = Status.FromString(value if isinstance(value, bytes) else value.encode())
        for detail in status.details:
            info = ErrorInfo()
            if detail.Unpack(info):
                found.update(
                    (ack_id, reason)
                    for ack_id, reason in info.metadata.items()
                    if reason.startswith(("PERMANENT_FAILURE", "TRANSIENT_FAILURE"))
                )
    return found
