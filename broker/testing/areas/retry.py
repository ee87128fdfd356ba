"""Conformance tests of the retry policy: backoff, bounds, and restarts that cost no attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from broker.capabilities import LeaseMode
from broker.consuming.retry.policy import Retry
from broker.errors import ConfigurationError, Unsupported
from broker.hooks import Event, HandlerFailed
from broker.messages import Message
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, nothing_more, numbered, once, take, until_seen

__all__ = ["QUICK", "Retrying", "handling"]

QUICK = Retry(max_attempts=3, initial=0.05, multiplier=2.0, maximum=0.2, jitter=0.0)
RESTARTS = 12
"""More than `Retry.delivery_bound` of a policy with one attempt."""


class Retrying(ConformanceCase):
    """The retry policy of handlers."""

    @promise(
        "retry.failure-is-redelivered",
        "A message whose handler raises is redelivered; a message whose handler returns is not.",
    )
    async def test_failure_is_redelivered(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        calls: list[bytes | None] = []

        async def handle(message: Message[bytes]) -> None:
            calls.append(message.data)
            if message.data == b"m-000003" and calls.count(message.data) < 3:
                raise ValueError("raised by the test")

        async with bus.messages(topic, subscription="readers", retry=QUICK) as inbox:
            await bus.topic(topic).publish_batch(numbered(10))
            await handling(inbox.receive(handle), lambda: len(calls) >= 12, inbox, harness.patience)
        assert {body: calls.count(body) for body in calls} == {**once(numbered(10)), b"m-000003": 3}
        async with bus.messages(topic, subscription="readers", retry=QUICK) as inbox:
            await nothing_more(inbox, harness.quiet)

    @promise(
        "retry.backoff-grows",
        "Each retry waits longer than the one before, up to the maximum, and never less than configured.",
    )
    async def test_backoff_grows(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        loop = asyncio.get_running_loop()
        times: list[float] = []

        async def handle(_: Message[bytes]) -> None:
            times.append(loop.time())
            if len(times) < 5:
                raise ValueError("raised by the test")

        policy = Retry(max_attempts=10, initial=0.1, multiplier=2.0, maximum=0.4, jitter=0.0)
        async with bus.messages(topic, subscription="readers", retry=policy) as inbox:
            await bus.topic(topic).publish(b"x")
            await handling(inbox.receive(handle), lambda: len(times) >= 5, inbox, harness.patience)
        waits = [after - before for before, after in pairwise(times)]
        for waited, due in zip(waits, [0.1, 0.2, 0.4, 0.4], strict=True):
            assert due - 0.02 <= waited <= due + 0.5 * harness.patience, f"Waited {waited:.3f} s instead of {due} s"

    @promise("retry.backoff-does-not-block", "While a failed message waits, the consumer handles others.")
    async def test_backoff_does_not_block(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        calls: list[bytes | None] = []

        async def handle(message: Message[bytes]) -> None:
            calls.append(message.data)
            if message.data == b"bad" and calls.count(b"bad") == 1:
                raise ValueError("raised by the test")

        policy = Retry(max_attempts=3, initial=1.0, jitter=0.0)
        async with bus.messages(topic, subscription="readers", retry=policy) as inbox:
            await bus.topic(topic).publish(b"bad")
            work = asyncio.ensure_future(
                handling(inbox.receive(handle), lambda: len(calls) >= 22, inbox, harness.patience)
            )
            await bus.topic(topic).publish_batch(numbered(20))
            await work
        assert calls.count(b"bad") == 2
        assert calls[-1] == b"bad"

    @promise(
        "retry.attempts-are-bounded",
        "After `max_attempts` failures the handler does not receive the message again.",
    )
    async def test_attempts_are_bounded(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        calls: list[bytes | None] = []

        async def handle(message: Message[bytes]) -> None:
            calls.append(message.data)
            raise ValueError("raised by the test")

        async with (
            bus.messages(topic, subscription="readers", retry=QUICK, dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers") as letters,
        ):
            await bus.topic(topic).publish(b"x")
            work = asyncio.ensure_future(inbox.receive(handle))
            await until_seen(letters, [b"x"], harness.patience)
            await asyncio.wait({work}, timeout=2 * harness.quiet)
            await inbox.close()
            await work
        assert calls == [b"x"] * 3

    @promise(
        "retry.failures-are-counted",
        "Each failure is an event with its number, and with the time of the redelivery, if any.",
    )
    async def test_failures_are_counted(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)

        async def handle(_: Message[bytes]) -> None:
            raise ValueError("raised by the test")

        def failed() -> list[HandlerFailed]:
            return [event for event in events if isinstance(event, HandlerFailed)]

        async with bus.messages(topic, subscription="readers", retry=QUICK, dead_letter=dead) as inbox:
            await bus.topic(topic).publish(b"x")
            await handling(inbox.receive(handle), lambda: len(failed()) >= 3, inbox, harness.patience)
        assert [(event.failures, event.retry_in) for event in failed()] == [(1, 0.05), (2, 0.1), (3, None)]

    @promise("retry.never-is-not-retried", "An exception in `never`, or not in `on`, is not retried.")
    async def test_never_is_not_retried(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        calls: list[bytes | None] = []

        async def handle(message: Message[bytes]) -> None:
            calls.append(message.data)
            raise {b"key": KeyError, b"type": TypeError, b"index": IndexError}[message.data or b""]

        policy = Retry(max_attempts=3, initial=0.05, jitter=0.0, on=(LookupError,), never=(IndexError,))
        async with (
            bus.messages(topic, subscription="readers", retry=policy, dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers") as letters,
        ):
            await bus.topic(topic).publish_batch([b"key", b"type", b"index"])
            work = asyncio.ensure_future(inbox.receive(handle))
            seen = await until_seen(letters, [b"key", b"type", b"index"], harness.patience)
            await inbox.close()
            await work
        assert {letter.data: letter.attributes["dead-letter-reason"] for letter in seen} == {
            b"key": "failed 3 times",
            b"type": "TypeError is not retried",
            b"index": "IndexError is not retried",
        }
        assert {body: calls.count(body) for body in calls} == {b"key": 3, b"type": 1, b"index": 1}

    @promise(
        "retry.timeout-is-a-failure",
        "A handler that exceeds `Retry.timeout` is cancelled, which counts as a failure.",
    )
    async def test_timeout_is_a_failure(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        calls: list[bytes | None] = []

        async def handle(message: Message[bytes]) -> None:
            calls.append(message.data)
            if len(calls) == 1:
                await asyncio.Event().wait()

        policy = Retry(max_attempts=3, initial=0.05, jitter=0.0, timeout=0.2)
        async with bus.messages(topic, subscription="readers", retry=policy) as inbox:
            await bus.topic(topic).publish(b"x")
            await handling(inbox.receive(handle), lambda: len(calls) >= 2, inbox, harness.patience)
        assert calls == [b"x", b"x"]

    @promise(
        "retry.exhausted-is-redelivered-slowly",
        "Without a dead-letter topic, an exhausted message is redelivered at the longest backoff; it is never dropped.",
    )
    async def test_exhausted_is_redelivered_slowly(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        loop = asyncio.get_running_loop()
        times: list[float] = []

        async def handle(_: Message[bytes]) -> None:
            times.append(loop.time())
            raise ValueError("raised by the test")

        policy = Retry(max_attempts=1, initial=0.05, maximum=0.6, jitter=0.0)
        async with bus.messages(topic, subscription="readers", retry=policy) as inbox:
            await bus.topic(topic).publish(b"x")
            await handling(inbox.receive(handle), lambda: len(times) >= 3, inbox, harness.patience)
        waits = [after - before for before, after in pairwise(times)]
        assert min(waits) >= 0.58, f"Waited {min(waits):.3f} s instead of 0.6 s"

    @requires("messages.unlimited_deliveries")
    @promise(
        "retry.restarts-count-no-attempts",
        "Being released by many restarts does not exhaust a message.",
    )
    async def test_restarts_count_no_attempts(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        policy = Retry(max_attempts=2, initial=0.05, jitter=0.0)
        async with bus.messages(topic, subscription="readers", retry=policy, dead_letter=dead):
            pass
        await bus.topic(topic).publish(b"x")
        for _ in range(10):
            async with bus.messages(topic, subscription="readers", retry=policy, dead_letter=dead) as inbox:
                await take(inbox, 1, harness.patience)
        async with (
            bus.messages(topic, subscription="readers", retry=policy, dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers", start="earliest") as letters,
        ):
            assert bodies(await until_seen(inbox, [b"x"], harness.patience)) == once([b"x"])
            await nothing_more(letters, harness.quiet)

    @requires("messages.unlimited_deliveries")
    @promise(
        "retry.restarts-count-no-deliveries",
        "A message that many consumers, each on its own connection, receive and release unhandled is not given up.",
        seconds=180,
    )
    async def test_restarts_count_no_deliveries(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        async with bus.messages(topic, subscription="readers"):
            pass
        await bus.topic(topic).publish_batch(numbered(3))
        # To the broker each consumer is a process that stops gracefully. One attempt makes for a low bound.
        policy = Retry(max_attempts=1, initial=0.05, jitter=0.0)
        for _ in range(RESTARTS):
            successor = await harness.connect()
            async with successor.messages(topic, subscription="readers", retry=policy, dead_letter=dead) as inbox:
                await take(inbox, 1, harness.patience)
            await successor.close()
        attempts: list[int | None] = []

        async def handle(message: Message[bytes]) -> None:
            attempts.append(message.delivery_attempt)

        async with (
            bus.messages(topic, subscription="readers", retry=policy, dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers", start="earliest") as letters,
        ):
            await handling(inbox.receive(handle), lambda: len(attempts) >= 3, inbox, harness.patience)
            await nothing_more(letters, harness.quiet)
        assert len(attempts) == 3
        messages = bus.capabilities.messages
        if messages is not None and messages.delivery_attempt and messages.release_keeps_attempt:
            assert attempts == [1, 1, 1], "Releases count as attempts"

    @requires("messages.release_keeps_attempt", "messages.delivery_attempt")
    @promise(
        "retry.release-is-no-attempt",
        "A message that was released unhandled is redelivered with the same `delivery_attempt`.",
    )
    async def test_release_is_no_attempt(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers"):
            pass
        await bus.topic(topic).publish_batch(numbered(5))
        for _ in range(3):
            async with bus.messages(topic, subscription="readers", prefetch=5) as inbox:
                await take(inbox, 1, harness.patience)
        async with bus.messages(topic, subscription="readers") as inbox:
            messages = await take(inbox, 5, harness.patience)
            assert [message.delivery_attempt for message in messages] == [1] * 5

    @requires("messages.delivery_attempt")
    @promise(
        "retry.deliveries-are-bounded",
        "`max_deliveries` gives up a message that is redelivered repeatedly without a result of its handler.",
    )
    async def test_deliveries_are_bounded(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(), await harness.topic()
        policy = Retry(max_attempts=2, max_deliveries=4)
        async with (
            bus.messages(topic, subscription="readers", retry=policy, dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers") as letters,
        ):
            await bus.topic(topic).publish(b"x")
            for _ in range(4):
                (message,) = await take(inbox, 1, harness.patience)
                await message.nack(delay=0)
            await nothing_more(inbox, harness.quiet)
            (letter,) = await take(letters, 1, harness.patience)
            assert letter.data == b"x"
            assert "delivered 4 times" in letter.attributes["dead-letter-reason"]

    @promise(
        "retry.impossible-delay-is-refused",
        "A delay that is too long for the broker raises: at open for the retry policy, at the call for `nack`.",
    )
    async def test_impossible_delay_is_refused(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        messages = bus.capabilities.messages
        assert messages is not None
        endless = 10_000_000.0
        if messages.lease is LeaseMode.NONE or messages.native_delay >= endless:
            async with bus.messages(topic, subscription="readers", retry=Retry(maximum=endless)):
                return
        with pytest.raises((ConfigurationError, Unsupported)):
            async with bus.messages(topic, subscription="readers", retry=Retry(maximum=endless)):
                pass
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            with pytest.raises(Unsupported):
                await message.nack(delay=endless)
            await message.ack()

    @requires("harness.advance", "messages.native_delay")
    @promise(
        "retry.long-delay-on-a-clock",
        "A delay of an hour ends by the broker's clock, and not before.",
    )
    async def test_long_delay_on_a_clock(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            await message.nack(delay=3600)
            await nothing_more(inbox, harness.quiet)
            await harness.advance(3500)
            await nothing_more(inbox, harness.quiet)
            await harness.advance(101)
            (again,) = await take(inbox, 1, harness.patience)
            assert again.id == message.id


async def handling(work: Coroutine[Any, Any, None], done: Callable[[], bool], inbox: Any, patience: float) -> None:
    """Run `receive` until `done()`, then close the consumer and wait for the end of both."""
    receiving = asyncio.ensure_future(work)
    try:
        async with asyncio.timeout(2 * patience):
            while not done() and not receiving.done():
                await asyncio.wait({receiving}, timeout=0.01)
    finally:
        await inbox.close()
        await receiving
