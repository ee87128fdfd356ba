"""Since when a consumer is a member of its share group, and when it is idle."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import BackendError, OperationTimeout, Unsupported
from broker_kafka.settings import KafkaSettings
from broker_kafka.share.messages import JoinState


class Clock:
    """The time of the running loop, as a test wants it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)


SETTINGS = KafkaSettings(fetch_wait_max_ms=500, request_timeout=10)


async def test_it_is_idle_after_its_first_answered_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration with a short `stop_when_idle` ended before the group had given it anything."""
    clock = Clock(monkeypatch)
    join = JoinState("orders", SETTINGS)
    clock.now += 9
    assert not join.is_idle()
    join.succeeded()
    clock.now += 0.9
    assert not join.is_idle()
    join.succeeded()  # by messages, too
    clock.now += 0.1
    assert join.is_idle()
    monkeypatch.undo()


async def test_a_consumer_that_never_joins_becomes_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    join = JoinState("orders", SETTINGS)
    clock.now += 10
    assert join.is_idle()
    monkeypatch.undo()


async def test_waiting_ends_with_the_join_the_failure_or_the_timeout() -> None:
    join = JoinState("orders", SETTINGS)
    join.succeeded()
    join.failed(Unsupported("no share groups"))
    await join.wait()

    refused = JoinState("orders", SETTINGS)
    refused.failed(BackendError("a broker is away", retriable=True))
    refused.failed(Unsupported("no share groups"))
    with pytest.raises(Unsupported, match="no share groups"):
        await refused.wait()

    with pytest.raises(OperationTimeout, match=r"orders: no partition was assigned in 0\.01 s"):
        await JoinState("orders", KafkaSettings(request_timeout=0.01)).wait()
