"""What becomes of calls of the client whose caller is gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from broker.hooks import Hooks
from broker_pulsar.connection import Connection
from broker_pulsar.settings import PulsarSettings


async def test_what_is_made_for_a_caller_that_was_cancelled_is_discarded():
    """Else a consumer stays on the broker, which sends it messages that nobody gets."""
    connection = Connection(PulsarSettings(), Hooks())
    begun, go_on, discarded = threading.Event(), threading.Event(), threading.Event()
    kept: list[str] = []

    def make() -> str:
        begun.set()
        go_on.wait(10)
        return "consumer"

    def discard(made: str) -> None:
        kept.append(made)
        discarded.set()

    making = asyncio.ensure_future(connection.create(make, discard))
    await asyncio.to_thread(begun.wait, 10)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    go_on.set()
    assert await asyncio.to_thread(discarded.wait, 10)
    assert kept == ["consumer"]
    assert await connection.create(make, discard) == "consumer"
    assert kept == ["consumer"]
    await connection.close()
