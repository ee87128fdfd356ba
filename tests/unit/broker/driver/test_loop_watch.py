"""What holds the event loop is named once, with its seconds; a loop that workers do not leave gets its turns."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from broker.driver.loop_watch import LoopWatch, _processor_time
from broker.hooks import Hooks
from broker.messages import Message, MessageBatch, Outcome
from tests.unit.broker.consuming.scripted_source import ScriptedSource, consuming, received

LEASE = 3.0
"""The limit is 1 s."""


class Watched:
    """A watch whose clock the test sets, and the task that its loop runs."""

    def __init__(self) -> None:
        self.now = 100.0
        self.computed = 0.0
        self.task: asyncio.Task[Any] | None = None
        self.watch = LoopWatch(
            asyncio.get_running_loop(),
            clock=lambda: self.now,
            running=lambda loop: self.task,
            computed=lambda: self.computed,
        )
        self.watch.add(LEASE)

    def hold(self, task: asyncio.Task[Any] | None, seconds: float) -> None:
        """The loop runs this task for so long, and then beats."""
        self.task = task
        self.look_for(seconds)
        self.task = None
        self.watch.beat()

    def look_for(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.25)
            self.watch.look()


@pytest.fixture
async def watched() -> Watched:
    return Watched()


async def idle() -> None:
    await asyncio.sleep(0)


async def test_a_handler_that_holds_the_loop_is_named_once_with_its_seconds(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    bill, ship = asyncio.create_task(idle()), asyncio.create_task(idle())
    watched.watch.named([bill], "bill")
    watched.watch.named([ship], "ship")
    watched.hold(bill, 0.9)
    assert caplog.messages == []
    watched.hold(bill, 2.5)
    watched.hold(bill, 2.5)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("Handler bill held the event loop for 2.5 s, longer than 1 s: meanwhile")
    assert "plain function" in caplog.messages[0]
    assert "asyncio.to_thread" in caplog.messages[0]
    watched.hold(ship, 1.5)
    assert caplog.messages[1].startswith("Handler ship held the event loop for 1.5 s")
    watched.watch.leave(LEASE)


async def test_a_handler_that_never_returns_is_named_while_it_holds_the_loop(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    bill = asyncio.create_task(idle())
    watched.watch.named([bill], "bill")
    watched.task = bill
    watched.look_for(3.0)
    assert caplog.messages == []
    watched.look_for(0.25)
    assert caplog.messages[0].startswith("Handler bill has held the event loop for 3.2 s and still does")
    watched.watch.beat()
    assert len(caplog.messages) == 1
    watched.watch.leave(LEASE)


async def test_a_task_of_the_application_is_named_too(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.hold(asyncio.create_task(idle()), 2.0)
    assert caplog.messages[0].startswith("Task idle held the event loop for 2.0 s")
    watched.hold(asyncio.create_task(idle(), name="group a, partition 3 of b"), 2.0)
    assert caplog.messages[1].startswith("Task idle (group a, partition 3 of b) held the event loop for 2.0 s")
    watched.watch.leave(LEASE)


@pytest.mark.parametrize("share", [0.9, 0.1])
async def test_a_computation_that_lets_no_other_thread_run_is_named(
    watched: Watched, caplog: pytest.LogCaptureFixture, share: float
) -> None:
    bill = asyncio.create_task(idle())
    watched.watch.named([bill], "bill")
    watched.task = bill
    watched.look_for(0.25)
    # The thread looks again when the one call has ended, and before the handler does.
    watched.now += 2.5
    watched.computed += share * 2.5
    watched.watch.look()
    watched.watch.beat()
    # With little time of the processor the process was starved instead.
    assert [text.partition(",")[0] for text in caplog.messages] == (
        ["Handler bill held the event loop for 2.8 s"] if share > 0.5 else []
    )
    watched.watch.leave(LEASE)


def test_the_processor_time_is_that_of_the_thread_that_asked() -> None:
    read, found = _processor_time(), list[float]()
    other = threading.Thread(target=lambda: found.append(read()))
    before = time.thread_time()
    other.start()
    other.join()
    assert before <= found[0] <= time.thread_time()


async def test_a_suspended_process_blames_nobody(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    bill = asyncio.create_task(idle())
    watched.watch.named([bill], "bill")
    # The process was stopped within a step of the handler: the thread sees the gap once.
    watched.now += 3600
    watched.task = bill
    watched.watch.look()
    watched.watch.beat()
    # Waiting for I/O, the loop runs no task.
    watched.hold(None, 5.0)
    # Many short steps after another.
    for _ in range(8):
        watched.task = asyncio.create_task(idle())
        watched.now += 0.25
        watched.watch.look()
    watched.watch.beat()
    assert caplog.messages == []
    watched.watch.leave(LEASE)


async def test_the_shortest_lease_counts(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    bill = asyncio.create_task(idle())
    watched.watch.named([bill], "bill")
    watched.watch.add(None)
    watched.hold(bill, 1.5)
    assert len(caplog.messages) == 1
    watched.watch.leave(LEASE)
    ship = asyncio.create_task(idle())
    watched.watch.named([ship], "ship")
    watched.hold(ship, 3.0)
    assert len(caplog.messages) == 1
    watched.now = 0.0
    watched.watch.beat()
    watched.hold(ship, 5.0)
    assert "longer than 3.33 s" in caplog.messages[1]
    watched.watch.leave(None)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "broker-loop-watch"]


async def test_consumers_of_a_loop_share_a_thread_that_ends_with_them() -> None:
    before = len(watchers())
    async with consuming(ScriptedSource()), consuming(ScriptedSource()):
        assert len(watchers()) == before + 1
    assert len(watchers()) == before


async def test_the_thread_names_a_handler_that_blocks(caplog: pytest.LogCaptureFixture) -> None:
    source = ScriptedSource()
    source.add("1", "2")
    async with consuming(source, lease_seconds=0.3, stop_when_idle=0.01) as consumer:

        async def block(message: Message[Any]) -> None:
            time.sleep(1.0)  # noqa: ASYNC251  # this test is about a blocked loop

        await consumer.receive(block)
    warnings = [text for text in caplog.messages if "event loop" in text]
    assert len(warnings) == 1
    assert "block has held the event loop for " in warnings[0] or "block held the event loop for " in warnings[0]


@pytest.mark.parametrize("shape", ["receive", "receive_batches", "next_message", "next_batch"])
async def test_work_that_never_suspends_lets_the_loop_renew_leases(shape: str) -> None:
    """Each step blocks for a fraction of the lease, all of them for several leases."""
    source = ScriptedSource(redelivers=False)
    ids = [str(number) for number in range(60)]
    extended: list[int] = []
    handled: list[str] = []

    def block(message: Message[Any]) -> None:
        handled.append(message.id)
        extended.append(len(source.extended))
        time.sleep(0.02)

    async with consuming(source, lease_seconds=0.3, stop_when_idle=0.01, prefetch=60) as consumer:
        source.add(*ids)

        async def handle(message: Message[Any]) -> None:
            block(message)

        async def handle_batch(batch: MessageBatch[Any]) -> None:
            for message in batch:
                block(message)

        if shape == "receive":
            await consumer.receive(handle)
        elif shape == "receive_batches":
            await consumer.receive_batches(handle_batch, max_messages=2)
        else:
            while len(handled) < 60:
                if shape == "next_message":
                    messages = [await received(consumer)]
                else:
                    messages = list(await consumer.next_batch(2, timeout=60))
                for message in messages:
                    block(message)
                    await message.ack()
    assert len(source.outcomes(Outcome.ACK)) == 60
    # Renewals came between the handlers, not only at the end.
    assert extended[-1] > 0


async def test_several_workers_that_block_leave_the_loop_its_turns() -> None:
    source = ScriptedSource(redelivers=False)
    beats: list[int] = []
    async with consuming(source, lease_seconds=0.3, stop_when_idle=0.01, hooks=Hooks()) as consumer:
        source.add(*(str(number) for number in range(24)))
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.create_task(tick())

        async def handle(message: Message[Any]) -> None:
            beats.append(ticks)
            time.sleep(0.06)  # noqa: ASYNC251  # this test is about a blocked loop

        await consumer.receive(handle, concurrency=8)
        ticking.cancel()
    # A worker in eight would else handle three messages before the loop turns.
    assert len(set(beats)) > len(beats) / 2
