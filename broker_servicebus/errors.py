"""Errors of azure-servicebus and azure-core as errors of `broker`. Pure functions."""

from __future__ import annotations

import asyncio
import re
import ssl

from aiohttp import ClientConnectorCertificateError, ClientError
from azure.core import exceptions as core
from azure.servicebus import exceptions as client

from broker import (
    AuthenticationFailed,
    BackendError,
    BrokerError,
    ConfigurationError,
    ConnectionFailed,
    LeaseLost,
    MessageTooLarge,
    NotAuthorized,
    NotFound,
    OperationTimeout,
    TopicNotFound,
)

__all__ = ["is_broken", "is_busy", "translate"]

_DETAIL = re.compile(r"<Detail>([^<]*)")
_NO_RIGHT = ("claim", "unauthorized access")
_SESSIONS = (
    "Without administration rights, ordered_by_key must match the subscription: True if it has sessions, else False"
)
_BUSY = "The namespace throttles requests; use fewer or larger batches, or a larger tier"


def translate(
    error: BaseException, what: str, *, missing: type[NotFound] = TopicNotFound, retry_unexpected: bool = False
) -> BrokerError:
    """An error of the client as an error of `broker`.

    :param what: the operation: "Publishing to topic 'orders'".
    :param missing: the error for an entity that does not exist.
    :param retry_unexpected: whether an unexpected exception, such as a ValueError, means that the link broke.
    """
    if isinstance(error, BrokerError):
        return error
    text = _text(error)
    if isinstance(error, client.ServiceBusAuthenticationError):
        return AuthenticationFailed(f"{what}: {text}", native=error)
    if isinstance(error, client.ServiceBusAuthorizationError):
        return NotAuthorized(f"{what}: {text}", native=error)
    if isinstance(error, client.MessagingEntityNotFoundError):
        return missing(f"{what}: the entity does not exist", native=error)
    if isinstance(error, client.MessagingEntityDisabledError):
        return BackendError(
            f"{what}: the entity is disabled", native=error, advice="Set the status of the entity to Active"
        )
    if isinstance(error, client.MessageSizeExceededError):
        return MessageTooLarge(f"{what}: {text}", native=error)
    if isinstance(error, client.MessageLockLostError | client.SessionLockLostError):
        return LeaseLost(f"{what}: {text}", native=error)
    if isinstance(error, client.MessageNotFoundError):
        return BackendError(f"{what}: {text}", native=error, advice="It was delivered, cancelled, or never existed")
    if isinstance(error, client.ServiceBusServerBusyError):
        return BackendError(f"{what}: {text}", native=error, retriable=True, advice=_BUSY)
    if isinstance(error, client.ServiceBusQuotaExceededError):
        return BackendError(
            f"{what}: {text}",
            native=error,
            retriable=False,
            advice="The entity is full, or too many connections are open: consume it, raise its size, or close some",
        )
    if isinstance(error, client.OperationTimeoutError | TimeoutError | asyncio.TimeoutError):
        return OperationTimeout(f"{what}: no answer in time", native=error)
    if isinstance(
        error, client.ServiceBusConnectionError | client.ServiceBusCommunicationError | OSError | ClientError
    ):
        return _unreachable(error, what)
    if isinstance(error, core.AzureError) and not isinstance(error, client.ServiceBusError):
        return _management_error(error, what, missing=missing)
    if isinstance(error, client.ServiceBusError):
        return _of_link(error, what)
    # The client accesses objects that it has closed, or fields that the server's last frame lacks.
    broken = retry_unexpected or isinstance(error, AttributeError | IndexError)
    return BackendError(f"{what}: {type(error).__name__}: {error}", native=error, retriable=broken)


def _management_error(error: core.AzureError, what: str, *, missing: type[NotFound] = TopicNotFound) -> BrokerError:
    """The error of an answer of the administration endpoint."""
    text = _text(error)
    if isinstance(error, core.ResourceNotFoundError):
        return missing(f"{what}: it does not exist", native=error)
    if isinstance(error, core.ClientAuthenticationError):
        # A missing permission has status 401, too; the reason is in the body.
        detail = _DETAIL.search(str(error))
        reason = detail.group(1).rstrip(".") if detail else text
        if any(each in reason.lower() for each in _NO_RIGHT):
            return NotAuthorized(f"{what}: {reason}", native=error, advice="Administration needs the Manage claim")
        return AuthenticationFailed(f"{what}: the namespace refused the credentials", native=error)
    if isinstance(error, core.ServiceRequestError | core.ServiceResponseError):
        return ConnectionFailed(f"{what}: {text}", native=error)
    if isinstance(error, core.HttpResponseError):
        status = error.status_code or 0
        if status == 403:
            return NotAuthorized(f"{what}: {text}", native=error)
        return BackendError(f"{what}: {text}", native=error, retriable=status in (408, 429) or status >= 500)
    return BackendError(f"{what}: {text}", native=error)


def _of_link(error: client.ServiceBusError, what: str) -> BrokerError:
    text = _text(error)
    if "sessionful" in text:
        return ConfigurationError(f"{what}: {text}", native=error, advice=_SESSIONS)
    # Any other error of a broken link; a retry shows whether it persists.
    return BackendError(f"{what}: {text}", native=error, retriable=True)


def _unreachable(error: BaseException, what: str) -> BrokerError:
    if isinstance(error, ssl.SSLCertVerificationError | ClientConnectorCertificateError):
        return ConnectionFailed(
            f"{what}: the server's certificate is not trusted",
            native=error,
            retriable=False,
            advice="Set tls_ca to the authority that signed the certificate",
        )
    return ConnectionFailed(f"{what}: {_text(error)}", native=error)


def is_broken(error: BrokerError) -> bool:
    """Whether the link or connection must be recreated."""
    return error.retriable and not is_busy(error)


def is_busy(error: BrokerError) -> bool:
    """Whether the namespace throttles."""
    return isinstance(error.native, client.ServiceBusServerBusyError)


def _text(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
