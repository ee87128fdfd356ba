"""The leases of messages that wait in a source are renewed."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from broker.driver.fetching import LeaseRenewer
from broker.errors import BrokerError, ConnectionFailed
from broker.messages import Message
from tests.unit.broker.consuming.warp import WarpLoop

LEASE = 30.0


class Renewed:
    """A source with a list of received messages that records the renewals."""

    def __init__(self, lease: float = LEASE) -> None:
        self.waiting: list[Message[Any]] = []
        self.calls: list[tuple[float, int]] = []
        self.answers: list[BrokerError | Exception | None] = []
        self.leases = LeaseRenewer("Queue 'q'", lease, lambda: self.waiting, self.extend)

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        self.calls.append((asyncio.get_running_loop().time(), len(messages)))
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None and not isinstance(answer, BrokerError):
            raise answer
        return [answer] * len(messages)


def message() -> Message[Any]:
    return Message("q", b"x", None, None, None, 1)  # type: ignore[arg-type]


def in_warp(test: Callable[[], Awaitable[None]]) -> None:
    """Run the test in simulated time."""

    async def run() -> None:
        await test()

    with asyncio.Runner(loop_factory=WarpLoop) as runner:
        runner.run(run())


def test_waiting_messages_are_renewed_each_third_of_a_lease():
    async def test() -> None:
        source = Renewed()
        source.waiting += [message(), message()]
        source.leases.watch()
        source.leases.watch()
        await asyncio.sleep(LEASE)
        source.waiting.pop()
        await asyncio.sleep(LEASE / 3)
        source.waiting.clear()
        await asyncio.sleep(10 * LEASE)
        assert [(round(at), count) for at, count in source.calls] == [(10, 2), (20, 2), (30, 2), (40, 1)]

    in_warp(test)


def test_later_messages_are_renewed_too():
    async def test() -> None:
        source = Renewed()
        source.leases.watch()
        await asyncio.sleep(LEASE)
        assert source.calls == []
        source.waiting.append(message())
        source.leases.watch()
        await asyncio.sleep(LEASE / 2)
        assert [count for _, count in source.calls] == [1]

    in_warp(test)


@pytest.mark.parametrize("answer", [ConnectionFailed("away"), ValueError("a defect")])
def test_a_failed_renewal_is_logged_and_retried(answer: BrokerError | Exception, caplog: pytest.LogCaptureFixture):
    async def test() -> None:
        source = Renewed()
        source.answers.append(answer)
        source.waiting.append(message())
        source.leases.watch()
        await asyncio.sleep(LEASE)
        assert len(source.calls) >= 2

    with caplog.at_level(logging.DEBUG, "broker"):
        in_warp(test)
    assert any("Queue 'q'" in record.getMessage() for record in caplog.records)


def test_nothing_is_renewed_after_a_close():
    async def test() -> None:
        source = Renewed()
        source.waiting.append(message())
        source.leases.watch()
        source.leases.close()
        source.leases.watch()
        await asyncio.sleep(10 * LEASE)
        assert source.calls == []

    in_warp(test)


def test_a_close_cancels_a_running_renewal():
    async def test() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def extend(messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return []

        leases = LeaseRenewer("Queue 'q'", LEASE, lambda: [message()], extend)
        leases.watch()
        await begun.wait()
        assert not ended.is_set()
        leases.close()
        await ended.wait()
        begun.clear()
        await asyncio.sleep(10 * LEASE)
        assert not begun.is_set()

    in_warp(test)


def test_without_leases_nothing_is_renewed():
    async def test() -> None:
        source = Renewed(lease=math.inf)
        source.waiting.append(message())
        source.leases.watch()
        await asyncio.sleep(LEASE)
        assert source.calls == []

    in_warp(test)
