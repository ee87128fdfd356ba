"""Unsubscribing while messages arrive: none may bypass the handler."""

from __future__ import annotations

import asyncio

from broker_jetstream.connection import Connection
from broker_jetstream.transport import Outgoing
from tests.jetstream.conftest import Open

BURST = [Outgoing(b"flood", b"", b"", b"x" * 100)] * 1000


def unexpected(connection: Connection) -> int:
    """How many messages bypassed the handlers: only nats-py's own path counts them."""
    return connection.client.stats["in_msgs"]


async def test_a_handler_gets_every_message_until_it_is_removed(open_backend: Open) -> None:
    sender, receiver = [(await open_backend())._connection for _ in range(2)]
    flowing = asyncio.Event()

    async def flood() -> None:
        while True:
            await sender.send(BURST)
            await asyncio.sleep(0)

    flooding = asyncio.create_task(flood())
    try:
        before = unexpected(receiver)
        for _ in range(30):
            flowing.clear()
            listener = await receiver.listen("flood", lambda *_: flowing.set())
            await flowing.wait()
            await receiver.unlisten(listener)
        assert unexpected(receiver) == before
    finally:
        flooding.cancel()
