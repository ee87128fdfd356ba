"""Blocking calls of the client whose caller was cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from broker.hooks import Hooks
from broker_pulsar.connection import Connection
from broker_pulsar.settings import PulsarSettings


async def test_a_result_is_discarded_when_its_caller_was_cancelled():
    """Otherwise the broker would keep sending messages to a consumer that nothing reads."""
    connection = Connection(PulsarSettings(), Hooks())
    started, finish, discarded = threading.Event(), threading.Event(), threading.Event()
    closed: list[str] = []

    def create() -> str:
        started.set()
        finish.wait(10)
        return "consumer"

    def discard(made: str) -> None:
        closed.append(made)
        discarded.set()

    creating = asyncio.ensure_future(connection.create(create, discard))
    await asyncio.to_thread(started.wait, 10)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    finish.set()
    assert await asyncio.to_thread(discarded.wait, 10)
    assert closed == ["consumer"]
    assert await connection.create(create, discard) == "consumer"
    assert closed == ["consumer"]
    await connection.close()
