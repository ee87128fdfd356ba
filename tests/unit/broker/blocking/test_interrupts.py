"""KeyboardInterrupt and signals in blocking calls: nothing is lost, running handlers finish."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import broker.blocking
from broker.consuming.retry.policy import DROP
from broker.errors import Closed, TopicNotFound
from broker.messages import SettleState
from broker.threads.portal import Call, Portal
from tests.unit.broker.blocking.common import TOPIC, publish


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Python's own handler: parallel test runs ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal()
    yield portal
    portal.close()


def press_ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class Waiting:
    """A coroutine that interrupts the main thread when it waits, and may then refuse to be cancelled."""

    def __init__(self, when_cancelled: Callable[[], Any] | None = None) -> None:
        self._when_cancelled = when_cancelled
        self.cancelled = False

    async def __call__(self, *_: object, **__: object) -> Any:
        asyncio.get_running_loop().call_soon(press_ctrl_c)
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled = True
            if self._when_cancelled is None:
                raise
            result = self._when_cancelled()
            return await result if asyncio.iscoroutine(result) else result


def test_interrupt_cancels_the_call(portal: Portal) -> None:
    call = Waiting()
    with pytest.raises(KeyboardInterrupt):
        portal.call(call)
    assert call.cancelled
    assert portal.run(lambda: 1) == 1


def test_late_result_is_passed_to_undelivered_before_the_interrupt_is_raised(portal: Portal) -> None:
    given: list[int] = []

    async def undelivered(result: int) -> None:
        await asyncio.sleep(0)
        given.append(result)

    with pytest.raises(KeyboardInterrupt):
        portal.wait(Call(Waiting(lambda: 42), undelivered=undelivered))
    assert given == [42]


def test_second_interrupt_does_not_wait(portal: Portal) -> None:
    ended = threading.Event()

    async def stubborn() -> None:
        asyncio.get_running_loop().call_soon(press_ctrl_c)
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            press_ctrl_c()
            await asyncio.get_running_loop().run_in_executor(None, ended.wait, 30)

    with pytest.raises(KeyboardInterrupt):
        portal.call(stubborn)
    assert not ended.is_set()
    ended.set()


def test_close_ends_waiting_calls(portal: Portal) -> None:
    async def wait() -> None:
        threading.Thread(target=portal.close).start()
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Closed, match="during the call"):
        portal.call(wait)
    with pytest.raises(Closed):
        portal.call(wait)


def test_interrupted_wait_for_a_message_takes_none(bus: broker.blocking.Bus) -> None:
    with bus.messages(TOPIC, subscription="billing") as inbox:
        timer = threading.Timer(0.05, press_ctrl_c)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            inbox.next_message()
        publish(bus, 1)
        for message in inbox:
            message.ack()
            break
    assert bus.admin.lag(TOPIC, "billing").waiting == 0


@pytest.mark.parametrize("shape", ["next_message", "next_batch"])
def test_late_message_is_released(bus: broker.blocking.Bus, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(bus, 1)
    with bus.messages(TOPIC, subscription="billing") as inbox:
        inner = inbox._consumer
        take = getattr(inner, shape)
        with monkeypatch.context() as patched:
            patched.setattr(inner, shape, Waiting(take))
            with pytest.raises(KeyboardInterrupt):
                getattr(inbox, shape)()
        message = inbox.next_message(timeout=60)
        assert message is not None
        assert message.data == b"0"
        message.ack()


@pytest.mark.parametrize("shape", ["next_record", "next_batch"])
def test_late_record_is_read_again_and_not_committed(
    bus: broker.blocking.Bus, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(bus, 3)
    with bus.records(TOPIC, group="audit") as log:
        first = log.next_record()
        assert first is not None
        first.commit()
        take = getattr(log.asynchronous, shape)
        with monkeypatch.context() as patched:
            patched.setattr(log.asynchronous, shape, Waiting(take))
            with pytest.raises(KeyboardInterrupt):
                getattr(log, shape)()
        log.commit()
        assert log.committed() == {(TOPIC, 0): 1}
        rest: list[int] = []
        while len(rest) < 2:
            rest += [record.offset for record in log.next_batch(timeout=60)]
        assert rest == [1, 2]


@pytest.mark.parametrize("outcome", ["returns", "raises"])
def test_interrupted_receive_lets_running_handlers_end_and_releases_the_rest(
    bus: broker.blocking.Bus, outcome: str
) -> None:
    publish(bus, 5)
    handled: list[broker.blocking.BlockingMessage] = []
    release = threading.Event()

    def handle(message: broker.blocking.BlockingMessage) -> None:
        handled.append(message)
        press_ctrl_c()
        release.wait(timeout=30)
        if outcome == "raises":
            raise ValueError("no use")

    with bus.messages(TOPIC, subscription="billing", dead_letter=DROP) as inbox:
        threading.Timer(0.1, release.set).start()
        with pytest.raises(KeyboardInterrupt):
            inbox.receive(handle)
        assert len(handled) == 1
        assert release.is_set(), "the handler was still running"
        if outcome == "returns":
            assert handled[0].state is SettleState.SETTLED
        again = inbox.next_message(timeout=60)
        assert again is not None, "the consumer is still of use"
    left = bus.admin.lag(TOPIC, "billing")
    assert (left.waiting, left.unsettled) == (4 if outcome == "returns" else 5, 0)


def test_interrupted_batch_handler_settles_each_by_its_result(bus: broker.blocking.Bus) -> None:
    publish(bus, 100)
    sizes: list[int] = []
    release = threading.Event()

    def handle(batch: broker.blocking.BlockingMessageBatch) -> list[BaseException | None]:
        sizes.append(len(batch))
        if len(batch) == 1:
            return [None]
        threading.Timer(0.1, release.set).start()
        press_ctrl_c()
        release.wait(timeout=30)
        return [ValueError("no use"), *[None] * (len(batch) - 1)]

    with bus.messages(TOPIC, subscription="billing") as inbox, pytest.raises(KeyboardInterrupt):
        inbox.receive_batches(handle, max_messages=4)
    assert 2 <= sizes[-1] <= 4
    left = bus.admin.lag(TOPIC, "billing")
    assert (left.waiting, left.unsettled) == (100 - sum(sizes) + 1, 0)


def test_interrupt_in_a_with_block_releases_the_message(bus: broker.blocking.Bus) -> None:
    publish(bus, 1)
    with bus.messages(TOPIC, subscription="billing") as inbox:
        message = inbox.next_message()
        assert message is not None
        with pytest.raises(KeyboardInterrupt), message:
            signal.raise_signal(signal.SIGINT)
        again = inbox.next_message(timeout=60)
        assert again is not None
        again.ack()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_ends_at_a_signal_and_loses_nothing(bus: broker.blocking.Bus, number: signal.Signals) -> None:
    publish(bus, 5)
    done: list[bytes | None] = []

    def handle(message: broker.blocking.BlockingMessage) -> None:
        if first.acquire(blocking=False):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        done.append(message.data)

    first = threading.Lock()
    before = signal.getsignal(number)
    services = [bus.messages(TOPIC, subscription="billing").handled_by(handle, concurrency=2)]
    broker.blocking.run(*services)
    assert signal.getsignal(number) is before
    left = bus.admin.lag(TOPIC, "billing")
    assert left.unsettled == 0
    assert left.waiting + len(done) == 5
    assert done


def test_run_raises_the_first_failure_and_stops_the_others(bus: broker.blocking.Bus) -> None:
    good = bus.messages(TOPIC, subscription="billing").handled_by(lambda _: None)
    bad = bus.messages("missing", subscription="billing").handled_by(lambda _: None)
    with pytest.raises(TopicNotFound):
        broker.blocking.run(good, bad)
    assert good.consumer.closed
