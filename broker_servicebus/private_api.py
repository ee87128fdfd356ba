"""Private calls of azure-servicebus: each saves a round trip per message, or an encoding.

`available` checks that the installed version has all of them with the expected arguments. If it has not, or a setting
forbids them, public calls do the same for one message at a time. A test fails when they change.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Sequence
from enum import Enum
from functools import cache
from time import monotonic
from typing import Any, Final
from weakref import WeakKeyDictionary

from aiohttp import ClientError
from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch, ServiceBusReceivedMessage
from azure.servicebus.aio import ServiceBusReceiver, ServiceBusSender
from azure.servicebus.exceptions import MessageSizeExceededError

from broker.driver import logger

__all__ = [
    "add",
    "available",
    "buffered",
    "close",
    "explained",
    "has_session",
    "is_closed",
    "may_receive",
    "open_",
    "receive",
    "refusal",
    "release",
    "remember_connection",
    "renew",
    "settle",
    "withdraw_credit",
]

_CALLS: Final = {
    "_settle_message_via_mgmt_link": ("self", "settlement", "lock_tokens", "dead_letter_details"),
    "_renew_locks": ("self", "lock_tokens", "timeout"),
}
_LATER: Final = 0.001
"""Seconds to wait for further messages of a batch after the first."""
_LONGEST_READ: Final = 1.0
_SMALL: Final = 256
"""Message size from which its length takes four bytes in a batch instead of one."""
_STANDARD: Final = 262_144
_PREMIUM: Final = 1_048_576
_connections: Final[WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()


class _NoSession(logging.Filter):
    """Drops the client's log line for each link that was attached without a session."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not (text.startswith("Callback for link attach raised error") and "NoneType" in text)


logging.getLogger("azure.servicebus._pyamqp.aio._link_async").addFilter(_NoSession())


@cache
def available() -> bool:
    """Whether the installed client has all these calls."""
    for name, parameters in _CALLS.items():
        call = getattr(ServiceBusReceiver, name, None)
        if call is None or tuple(inspect.signature(call).parameters)[: len(parameters)] != parameters:
            return False
    try:
        from azure.servicebus._common import tracing
        from azure.servicebus._pyamqp.aio import ReceiveClientAsync
        from azure.servicebus._pyamqp.aio._connection_async import Connection
        from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
        from azure.servicebus.aio import _async_utils
    except ImportError:
        return False
    needed = (
        (tracing, "trace_message"),
        (_async_utils, "create_authentication"),
        (ReceiveClientAsync, "settle_messages_async"),
        (ReceiveClientAsync, "client_ready_async"),
        (Connection, "listen"),
        (PyamqpTransport, "to_outgoing_amqp_message"),
        (PyamqpTransport, "encode_message"),
        (PyamqpTransport, "set_batch_envelope_properties"),
    )
    return all(callable(getattr(owner, name, None)) for owner, name in needed)


async def open_(owner: Any) -> None:
    """Open a link as `__aenter__` does, without its sleep of 50 ms after every frame.

    Ends the client's keep-alive task: it would read the same socket, and a close would wait for its sleep.
    """
    from azure.servicebus.aio._async_utils import create_authentication  # pyright: ignore[reportUnknownVariableType]

    kind: object = owner
    if isinstance(kind, ServiceBusReceiver):
        owner._receive_context.set()
    owner._create_handler(await create_authentication(owner))
    handler: Any = owner._handler
    try:
        await handler.open_async(connection=None)
    finally:
        remember_connection(owner)
    while not await handler.client_ready_async():
        pass
    owner._running = True
    task, handler._keep_alive_thread = handler._keep_alive_thread, None
    if task is not None:
        task.cancel()
    if isinstance(kind, ServiceBusSender):
        # A refusal arrives right after the open; without this wait the client reports only a failed send.
        await handler._connection.listen(wait=_LATER)
        handler._link.get_state()
        transport = owner._amqp_transport
        largest = transport.get_remote_max_message_size(handler) or _STANDARD
        owner._max_message_size_on_link = largest
        batch = transport.get_remote_max_message_batch_size(handler)
        owner._max_batch_size_on_link = batch or (_PREMIUM if largest >= _PREMIUM else _STANDARD)


def add(batch: ServiceBusMessageBatch, message: ServiceBusMessage) -> None:
    """As `ServiceBusMessageBatch.add_message`, which encodes a message twice: for its size, and for the batch.

    :raises MessageSizeExceededError: the message does not fit; the batch is unchanged.
    """
    from azure.servicebus._common.tracing import trace_message  # pyright: ignore[reportUnknownVariableType]

    target: Any = batch
    outgoing: Any = message
    transport = target._amqp_transport
    outgoing._message = trace_message(
        transport.to_outgoing_amqp_message(message.raw_amqp_message),
        amqp_transport=transport,
        additional_attributes=target._tracing_attributes,
    )
    encoded = transport.encode_message(message)
    size = batch.size_in_bytes + len(encoded) + (5 if len(encoded) < _SMALL else 8)
    if size > batch.max_size_in_bytes:
        raise MessageSizeExceededError(message=f"The batch has reached its limit of {batch.max_size_in_bytes} bytes")
    if not target._messages:
        transport.set_batch_envelope_properties(
            target._message, message.message_id, message.session_id, message.partition_key
        )
    target._message[5].append(encoded)
    target._messages.append(message)
    target._count += 1
    target._size = size


def remember_connection(owner: Any) -> None:
    """Remember the connection of an open receiver or sender: the client drops it after an error."""
    connection = getattr(getattr(owner, "_handler", None), "_connection", None)
    if connection is not None:
        _connections[owner] = connection


def has_session(receiver: ServiceBusReceiver) -> bool:
    """Whether an open receiver for the next free session got one."""
    session: Any = receiver.session
    return session is not None and isinstance(session.session_id, str) and not isinstance(session.session_id, Enum)


def is_closed(owner: Any) -> bool:
    """Whether the client itself closed a receiver or sender that was open."""
    return getattr(owner, "_handler", owner) is None


async def receive(receiver: Any, most: int, wait: float) -> list[ServiceBusReceivedMessage]:
    """Receive at most `most` messages; returns after the first arrives, or empty after `wait` seconds. Cancelling loses
    no message."""
    handler = receiver._handler
    waiting, link = handler._received_messages, handler._link
    until = monotonic() + wait
    wanted = most - waiting.qsize()
    if wanted > 0:
        # Sent each time, because the client treats a cancelled flow frame as sent.
        await link.flow(link_credit=wanted)
    while waiting.empty():
        left = until - monotonic()
        if left <= 0:
            return []
        if await handler.client_ready_async():
            await handler._connection.listen(wait=min(left, _LONGEST_READ))
    before = -1
    while before < waiting.qsize() < most:
        before = waiting.qsize()
        await handler._connection.listen(wait=_LATER, batch=most - before)
    return buffered(receiver, most)


def buffered(receiver: Any, most: int) -> list[ServiceBusReceivedMessage]:
    """Take arrived messages without waiting."""
    if receiver._handler is None:
        return []
    waiting = receiver._handler._received_messages
    found: list[ServiceBusReceivedMessage] = []
    while not waiting.empty() and len(found) < most:
        found.append(receiver._build_received_message(waiting.get()))
        waiting.task_done()
    return found


def may_receive(receiver: Any) -> bool:
    """Whether the link has credit or unreceived messages."""
    handler = receiver._handler
    link = getattr(handler, "_link", None)
    if link is None:
        return False
    return getattr(link, "current_link_credit", 0) > 0 or not handler._received_messages.empty()


async def withdraw_credit(receiver: Any) -> None:
    """Withdraw the link credit; messages in flight still arrive."""
    await receiver._handler._link.flow(link_credit=0, drain=True)


async def settle(
    receiver: Any, how: str, tokens: Sequence[Any], reason: str | None = None, description: str | None = None
) -> None:
    """Settle messages by one request with one answer."""
    details = None
    if reason is not None:
        details = {"deadletter-reason": reason, "deadletter-description": description or ""}
    await receiver._settle_message_via_mgmt_link(how, list(tokens), dead_letter_details=details)


async def renew(receiver: Any, tokens: Sequence[Any], timeout: float) -> None:
    """Renew locks by one request."""
    await receiver._renew_locks(*tokens, timeout=timeout)


async def release(receiver: Any, message: Any) -> None:
    """Release a message without counting the delivery; there is no answer."""
    await receiver._handler.settle_messages_async(message._delivery_id, message._delivery_tag, "released")


async def refusal(receiver: Any) -> Exception | None:
    """The server's reason for detaching a link right after the attach, if it has arrived."""
    try:
        await receiver._handler._connection.listen(wait=_LATER)
        receiver._handler._link.get_state()
    except Exception as error:
        return explained(receiver, error)
    return None


def explained(receiver: Any, error: Exception) -> Exception:
    """The client's exception for one of its AMQP library."""
    cause = error.__cause__
    if isinstance(cause, OSError | ClientError):
        # An unreachable gateway, which the client reports as wrong credentials.
        return cause
    if type(error).__module__.startswith("azure.servicebus._pyamqp"):
        return receiver._amqp_transport.create_servicebus_exception(logger, error)
    return error


async def close(owner: Any, seconds: float) -> None:
    """Close a receiver or sender, and in any case its socket, which the client leaks after some errors."""
    remember_connection(owner)
    connection = _connections.pop(owner, None)
    try:
        async with asyncio.timeout(seconds):
            await owner.close()
    except Exception as error:
        logger.debug("Closing %s: %s", type(owner).__name__, error)
    finally:
        transport = getattr(connection, "_transport", None)
        writer = getattr(transport, "writer", None)
        if writer is not None:
            writer.transport.abort()
        web = getattr(transport, "session", None)
        if web is not None and not web.closed:
            await web.close()
