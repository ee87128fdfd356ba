"""Errors of nats-py, the server and TLS as errors of `broker`. Pure functions."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Final

import nats.errors

from broker import (
    AuthenticationFailed,
    BackendError,
    BrokerError,
    ConnectionFailed,
    InvalidMessage,
    MessageTooLarge,
    NotAuthorized,
    OperationTimeout,
    StorageFailed,
    SubscriptionNotFound,
    TopicNotFound,
    Unsupported,
)
from broker.driver import read_answer as read_json
from broker.driver import reads_answer

__all__ = ["STREAM_IN_USE", "NoTls", "api_error", "connect_error", "read_answer", "translate"]

STREAM_NOT_FOUND: Final = 10059
CONSUMER_NOT_FOUND: Final = 10014
STREAM_IN_USE: Final = 10058
_TOO_LARGE: Final = frozenset({10054, 10097})
_NOT_ENABLED: Final = frozenset({10039, 10076})
_STORE_FAILED: Final = 10077
_LIMITS_REACHED: Final = frozenset({10002, 10023, 10028, 10047})
"""Of the account, or of the server: no resources."""
_UNWRITABLE: Final = frozenset({10012, 10049})
"""The server could not create the files of a consumer or a stream."""
_FULL: Final = ("maximum messages", "maximum bytes")
_REFUSALS: Final = (
    "authorization violation",
    "authentication expired",
    "authentication revoked",
    "nonce",
    "maximum connections",
)
_ALERTS: Final = (
    "certificate required",
    "unknown ca",
    "bad certificate",
    "alert certificate",
    "certificate unknown",
    "access denied",
    "decrypt error",
    "certificate_required",
)


class NoTls(nats.errors.Error):
    """The settings ask for TLS and the server offers none."""

    def __str__(self) -> str:
        return "nats: the server offers no TLS"


def read_answer(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object of an answer of the server, in which `error`, if present, is an object too.

    :param what: the object of the call: "Topic 'orders'".
    :raises BackendError: the answer is something else.
    """
    with reads_answer(what):
        answer = {**read_json(data, what)}
        if answer.get("error"):
            answer["error"] = {**answer["error"]}
        return answer


def api_error(error: Mapping[str, Any], what: str) -> BrokerError:
    """The error in an answer of the JetStream API.

    :param what: the object of the call: "Topic 'orders'".
    """
    code, status = _number(error.get("err_code")), _number(error.get("code"))
    text = str(error.get("description") or "unknown error")
    native = nats.errors.Error(f"nats: {text} (code {status}, err_code {code})")
    if code == STREAM_NOT_FOUND:
        return TopicNotFound(f"{what}: the topic's stream does not exist", native=native)
    if code == CONSUMER_NOT_FOUND:
        return SubscriptionNotFound(f"{what}: the subscription's consumer does not exist", native=native)
    if code in _TOO_LARGE:
        return MessageTooLarge(
            f"{what}: {text}", native=native, advice="Store the body elsewhere and publish a reference"
        )
    if code in _NOT_ENABLED:
        return Unsupported(
            f"{what}: {text}", native=native, advice="Start nats-server with -js, and enable JetStream for the account"
        )
    if code == _STORE_FAILED and any(bound in text for bound in _FULL):
        return StorageFailed(
            f"{what}: the topic is full, {text}",
            native=native,
            retriable=False,
            advice="Set a retention, raise its limits with ensure_topic(max_messages=, max_bytes=), or drop the oldest "
            'messages with discard="old"',
        )
    if code in _LIMITS_REACHED:
        return StorageFailed(
            f"{what}: the storage of the server or the account is used up: {text}",
            native=native,
            advice="Delete topics or let retention drop messages, or raise max_file_store of the server or the limits "
            "of the account",
        )
    if code in _UNWRITABLE:
        return StorageFailed(
            f"{what}: the server cannot write: {text}",
            native=native,
            advice="Look at the server's log and its disk; after a failed write nats-server needs a restart",
        )
    if status == 503:
        return ConnectionFailed(f"{what}: {text}", native=native, advice="JetStream is not ready; repeat the call")
    if status == 400 and "schedule" in text:
        return InvalidMessage(f"{what}: {text}", native=native)
    return BackendError(f"{what}: {text} (err_code {code})", native=native, retriable=status >= 500)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def translate(error: BaseException, what: str) -> BrokerError:
    """An error of nats-py as an error of `broker`."""
    if isinstance(error, BrokerError):
        return error
    text = str(error).lower()
    if isinstance(error, nats.errors.AuthorizationError) or any(refusal in text for refusal in _REFUSALS):
        return AuthenticationFailed(f"{what}: the server refused the credentials", native=error)
    if "permissions violation" in text:
        return NotAuthorized(f"{what}: {error}", native=error)
    if isinstance(error, nats.errors.MaxPayloadError):
        return MessageTooLarge(f"{what}: {error}", native=error)
    if isinstance(error, NoTls):
        return ConnectionFailed(
            f"{what}: the server offers no TLS, and the settings ask for it; nothing was sent",
            native=error,
            retriable=False,
            advice="Configure TLS in the server; remove tls:// and every tls_ setting only if the network is trusted",
        )
    if isinstance(error, ssl.SSLError):
        return _tls_error(error, what)
    if isinstance(error, TimeoutError):
        return OperationTimeout(f"{what}: no answer in time", native=error)
    if isinstance(
        error, OSError | nats.errors.ConnectionClosedError | nats.errors.NoServersError | nats.errors.UnexpectedEOF
    ):
        return ConnectionFailed(f"{what}: {error}", native=error)
    return BackendError(f"{what}: {error}", native=error)


def connect_error(error: BaseException, servers: str, *, tls: bool) -> BrokerError:
    """The error of a failed connection attempt."""
    what = f"Connecting to {servers}"
    text = str(error).lower()
    if isinstance(error, TimeoutError):
        return ConnectionFailed(f"{what}: no answer in time", native=error)
    if (
        tls
        and not isinstance(error, ssl.SSLError)
        and isinstance(error, BrokenPipeError | ConnectionResetError | nats.errors.UnexpectedEOF)
    ):
        # In TLS 1.3 a server refuses a client certificate after the handshake, by closing the connection.
        return AuthenticationFailed(
            f"{what}: the server ended the TLS connection",
            native=error,
            advice="It may require a client certificate: set tls_cert and tls_key",
        )
    if "empty response" in text:
        return ConnectionFailed(
            f"{what}: the server sent no greeting",
            native=error,
            advice="Check that this is a NATS server; set tls_handshake_first if the server starts with TLS",
        )
    mapped = translate(error, what)
    if isinstance(mapped, BackendError | OperationTimeout):
        return ConnectionFailed(mapped.message, native=error)
    return mapped


def _tls_error(error: ssl.SSLError, what: str) -> BrokerError:
    text = str(error).lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConnectionFailed(
            f"{what}: the server's certificate is not trusted: {error.verify_message or error}",
            native=error,
            retriable=False,
            advice="Set tls_ca to the authority that signed the certificate, and tls_hostname if it names another host",
        )
    if any(alert in text for alert in _ALERTS):
        return AuthenticationFailed(
            f"{what}: the server refused the client's certificate: {error.reason or error}",
            native=error,
            advice="Set tls_cert and tls_key to a certificate that the server's authority signed",
        )
    return ConnectionFailed(f"{what}: TLS failed: {error.reason or error}", native=error)
