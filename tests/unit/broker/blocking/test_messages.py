"""Messages without await: settled one by one, in blocks, by batch and by handlers in threads."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import broker.blocking
import broker.messages
from broker.consuming.retry.policy import Retry
from broker.errors import (
    ConfigurationError,
)
from broker.hooks import HandlerFailed, PublishCall
from broker.messages import SettleState
from broker.outbound import OutboundMessage
from tests.unit.broker.blocking.common import TOPIC, publish, waiting


def test_messages_one_by_one_with_every_way_to_settle(bus: broker.blocking.Bus) -> None:
    bus.admin.ensure_topic("orders.dead")
    bus.topic(TOPIC).publish(OutboundMessage(b"body", "key", {"a": "b"}, id="order-1"))
    with bus.messages(TOPIC, subscription="billing", dead_letter="orders.dead") as inbox:
        message = inbox.next_message()
        assert message is not None
        assert (message.topic, message.id, message.key, message.data) == (TOPIC, "order-1", b"key", b"body")
        assert (dict(message.attributes), message.payload, message.delivery_attempt) == ({"a": "b"}, b"body", 1)
        assert message.state is SettleState.OPEN
        assert not message.lease_lost
        assert message.publish_time is not None
        assert OutboundMessage.from_message(message).id == "order-1"
        message.extend(60)
        message.nack(delay=0)
        again = inbox.next_message(timeout=60)
        assert again is not None
        assert again.delivery_attempt == 2
        again.reject("no use")
        publish(bus, 1)
        acked = inbox.next_message(timeout=60)
        assert acked is not None
        acked.ack()
        acked.ack()
        assert acked.state is SettleState.SETTLED
        assert inbox.next_message(timeout=0.01) is None
    assert waiting(bus) == (0, 0)
    (letter,) = bus.admin.list_dead("orders.dead")
    assert letter.reason == "no use"
    assert bus.admin.redrive("orders.dead", to=["orders"]).moved == 1


def test_iterating_with_blocks_acks_and_retries(bus: broker.blocking.Bus) -> None:
    publish(bus, 10)
    failed: list[HandlerFailed] = []
    bus.hooks.listen(lambda event: failed.append(event) if isinstance(event, HandlerFailed) else None)
    done: list[bytes | None] = []
    retry = Retry(initial=0.0, jitter=0.0)
    with bus.messages(TOPIC, subscription="billing", retry=retry, stop_when_idle=0.2) as inbox:
        for message in inbox:
            with message:
                if message.data == b"3" and not failed:
                    raise ValueError("not yet")
                done.append(message.data)
    assert sorted(done, key=lambda body: int(body or b"")) == [b"%d" % n for n in range(10)]
    assert [str(event.error) for event in failed] == ["not yet"]
    assert waiting(bus) == (0, 0)


def test_a_paused_consumer_hands_nothing_over(bus: broker.blocking.Bus) -> None:
    publish(bus, 3)
    inbox = bus.messages(TOPIC, subscription="billing")
    inbox.pause()
    with inbox:
        assert inbox.next_message(timeout=0.02) is None
        inbox.resume()
        message = inbox.next_message(timeout=60)
        assert message is not None
        message.ack()
        handled: list[bytes | None] = []

        def handle(message: broker.blocking.BlockingMessage[bytes]) -> None:
            inbox.pause()
            handled.append(message.data)
            threading.Timer(0.02, inbox.resume if len(handled) == 1 else inbox.stop).start()

        inbox.receive(handle)
        assert len(handled) == 2
    inbox.pause()
    inbox.resume()


def test_the_topics_of_a_pattern(bus: broker.blocking.Bus) -> None:
    publish(bus, 1)
    pattern = broker.TopicPattern("ord.*")
    with bus.messages(pattern, subscription="billing") as inbox, bus.records(pattern, group="audit") as log:
        message = inbox.next_message(timeout=60)
        assert message is not None
        message.ack()
        assert len(log.next_batch(timeout=60)) == 1


def test_batches_wait_to_fill(bus: broker.blocking.Bus) -> None:
    with bus.messages(TOPIC, subscription="billing") as inbox:
        threading.Timer(0.05, lambda: publish(bus, 2)).start()
        publish(bus, 1)
        batch = inbox.next_batch(3, max_wait=60)
        assert len(batch) == 3
        batch.ack()
        publish(bus, 2)
        first = next(inbox.batches(2, max_wait=60))
        assert len(first) == 2
        first.ack()
        publish(bus, 3)
        sizes: list[int] = []

        def handle(batch: broker.blocking.BlockingMessageBatch[bytes]) -> None:
            sizes.append(len(batch))
            inbox.stop()

        inbox.receive_batches(handle, max_messages=3, max_wait=60)
        assert sizes == [3]
    with bus.records(TOPIC, group="audit") as log:
        assert len(log.next_batch(8, max_wait=60)) == 8
        publish(bus, 2)
        assert len(next(log.batches(2, max_wait=60))) == 2


def test_leaving_the_loop_releases_the_rest(bus: broker.blocking.Bus) -> None:
    publish(bus, 10)
    with bus.messages(TOPIC, subscription="billing") as inbox:
        for message in inbox:
            message.ack()
            break
    assert waiting(bus) == (9, 0)


def test_batches_are_settled_together_or_one_by_one(bus: broker.blocking.Bus) -> None:
    publish(bus, 10)
    with bus.messages(TOPIC, subscription="billing", stop_when_idle=0.2) as inbox:
        batch = inbox.next_batch(4, timeout=5)
        assert 1 <= len(batch) <= 4
        assert [message.data for message in batch[1:]] == [message.data for message in batch][1:]
        batch[0].ack()
        batch.nack(delay=0)
        seen = 1
        for more in inbox.batches(3):
            assert 1 <= len(more) <= 3
            seen += len(more)
            more.ack()
        assert seen == 10
        with pytest.raises(ConfigurationError):
            inbox.batches(5000)
    assert waiting(bus) == (0, 0)


def test_receive_runs_at_most_concurrency_handlers_in_threads(bus: broker.blocking.Bus) -> None:
    publish(bus, 30)
    running = 0
    most = 0
    lock = threading.Lock()
    meeting = threading.Barrier(3)
    threads: set[int] = set()

    def handle(message: broker.blocking.BlockingMessage) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            threads.add(threading.get_ident())
        meeting.wait(timeout=10)
        with lock:
            running -= 1

    with bus.messages(TOPIC, subscription="billing", stop_when_idle=0.2) as inbox:
        inbox.receive(handle, concurrency=3)
    assert most == 3
    assert len(threads) == 3
    assert threading.get_ident() not in threads
    assert waiting(bus) == (0, 0)


def test_receive_settles_by_the_outcome_of_the_handler(bus: broker.blocking.Bus) -> None:
    publish(bus, 5)
    tried: list[bytes | None] = []

    def handle(message: broker.blocking.BlockingMessage) -> None:
        tried.append(message.data)
        if message.data == b"0" and tried.count(b"0") == 1:
            raise StopIteration
        if message.data == b"1":
            message.ack()

    retry = Retry(initial=0.0, jitter=0.0)
    with bus.messages(TOPIC, subscription="billing", retry=retry, stop_when_idle=0.2) as inbox:
        inbox.receive(handle)
    assert sorted(tried, key=str) == [b"0", b"0", b"1", b"2", b"3", b"4"]
    assert waiting(bus) == (0, 0)


def test_receive_batches_takes_a_result_per_message(bus: broker.blocking.Bus) -> None:
    publish(bus, 6)
    tried: list[bytes | None] = []

    def handle(batch: broker.blocking.BlockingMessageBatch) -> list[BaseException | None]:
        bodies = [message.data for message in batch]
        results = [ValueError("not yet") if body == b"2" and body not in tried else None for body in bodies]
        tried.extend(bodies)
        return list(results)

    retry = Retry(initial=0.0, jitter=0.0)
    with bus.messages(TOPIC, subscription="billing", retry=retry, stop_when_idle=0.2) as inbox:
        inbox.receive_batches(handle, max_messages=4)
    assert sorted(tried, key=str) == [b"0", b"1", b"2", b"2", b"3", b"4", b"5"]
    assert waiting(bus) == (0, 0)


def test_coroutine_function_is_refused_as_a_handler(bus: broker.blocking.Bus) -> None:
    async def handle(message: object) -> None:
        """Would never be awaited."""

    with bus.messages(TOPIC, subscription="billing") as inbox, pytest.raises(ConfigurationError, match="coroutine"):
        inbox.receive(handle)


def test_stop_from_another_thread_ends_receive(bus: broker.blocking.Bus) -> None:
    publish(bus, 3)
    with bus.messages(TOPIC, subscription="billing") as inbox:
        inbox.receive(lambda _: inbox.stop())
    assert waiting(bus)[1] == 0


def test_handler_that_takes_too_long_fails_and_others_continue(bus: broker.blocking.Bus) -> None:
    publish(bus, 3)
    release = threading.Event()
    done: list[bytes | None] = []

    def handle(message: broker.blocking.BlockingMessage) -> None:
        if message.data == b"0" and not done:
            release.wait(timeout=30)
            return
        done.append(message.data)

    retry = Retry(initial=0.0, jitter=0.0, timeout=0.1)
    try:
        with bus.messages(TOPIC, subscription="billing", retry=retry, stop_when_idle=0.3, prefetch=1) as inbox:
            inbox.receive(handle)
    finally:
        release.set()
    assert {b"1", b"2"} <= set(done)


def test_close_returns_within_its_deadline_despite_a_stuck_handler(bus: broker.blocking.Bus) -> None:
    publish(bus, 1)
    started, release = threading.Event(), threading.Event()

    def handle(message: object) -> None:
        started.set()
        release.wait(timeout=30)

    inbox = bus.messages(TOPIC, subscription="billing", close_timeout=0.1)
    try:
        with inbox, ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(inbox.receive, handle)
            started.wait(timeout=10)
            inbox.close()
            receiving.result(timeout=10)
    finally:
        release.set()
    assert waiting(bus) == (1, 0)


def test_exit_of_a_handler_ends_receive_where_it_was_called(bus: broker.blocking.Bus) -> None:
    publish(bus, 3)

    def handle(message: object) -> None:
        raise SystemExit(3)

    with bus.messages(TOPIC, subscription="billing") as inbox:
        with pytest.raises(SystemExit) as raised:
            inbox.receive(handle)
        assert raised.value.code == 3
        assert bus.health().ok
    assert waiting(bus) == (3, 0)


def test_context_of_interceptors_applies_to_the_block_only(bus: broker.blocking.Bus) -> None:
    current: contextvars.ContextVar[str] = contextvars.ContextVar("current", default="none")

    @contextmanager
    def trace(message: broker.messages.Message[Any]) -> Generator[None]:
        token = current.set(message.id)
        yield
        current.reset(token)

    bus.hooks.around_handling(trace)
    bus.topic(TOPIC).publish_batch([OutboundMessage(b"", id="one"), OutboundMessage(b"", id="two")])
    seen: list[str] = []
    with bus.messages(TOPIC, subscription="billing", stop_when_idle=0.2) as inbox:
        message = inbox.next_message()
        assert message is not None
        with message:
            assert current.get() == message.id
        assert current.get() == "none"
        assert message.state in (SettleState.SETTLING, SettleState.SETTLED)
        inbox.receive(lambda message: seen.append(current.get() + message.id))
    assert seen in (["twotwo"], ["oneone"])


def test_context_of_interceptors_applies_to_a_block_of_a_thread_without_variables(
    bus: broker.blocking.Bus, caplog: pytest.LogCaptureFixture
) -> None:
    # Such as the main thread of a script; that of pytest has variables.
    contextvars.Context().run(test_context_of_interceptors_applies_to_the_block_only, bus)
    assert "An interceptor failed" not in caplog.text


def test_context_of_the_caller_is_seen_by_publish_interceptors(bus: broker.blocking.Bus) -> None:
    current: contextvars.ContextVar[str] = contextvars.ContextVar("current", default="none")
    seen: list[str] = []

    @contextmanager
    def intercept(call: PublishCall) -> Generator[None]:
        seen.append(current.get())
        yield

    bus.hooks.around_publishing(intercept)
    current.set("request-1")
    bus.topic(TOPIC).publish(b"")
    bus.topic(TOPIC).enqueue(b"").result()
    assert seen == ["request-1", "request-1"]
