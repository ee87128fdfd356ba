"""Conformance tests of flow control: bounds on unsettled messages, and a fair share for every consumer."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import ConfigurationError
from broker.hooks import Event, FlowBlocked
from broker.messages import Message
from broker.testing.case import ConformanceCase
from broker.testing.faults import Faults
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, eventually, nothing_more, numbered, once, take, until_seen

__all__ = ["Flow"]


class Flow(ConformanceCase):
    """Bounds on unsettled messages."""

    @promise(
        "flow.never-more-than-n-unsettled",
        "With `max_outstanding` messages unsettled none is delivered; settling one lets one more through.",
    )
    async def test_never_more_than_n_unsettled(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers", max_outstanding=5) as inbox:
            await bus.topic(topic).publish_batch(numbered(20))
            held = await take(inbox, 5, harness.patience)
            for _ in range(15):
                await nothing_more(inbox, harness.quiet / 5)
                await held.pop(0).ack()
                held += await take(inbox, 1, harness.patience)

    @requires("messages.shared_by_message")
    @promise(
        "flow.bound-counts-the-buffer",
        "The bound includes buffered messages: other consumers receive all messages beyond it.",
    )
    async def test_bound_counts_the_buffer(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers", max_outstanding=5, prefetch=5) as first:
            await bus.topic(topic).publish_batch(numbered(20))
            await take(first, 1, harness.patience)
            async with bus.messages(topic, subscription="readers", max_outstanding=20, prefetch=20) as second:
                await take(second, 15, harness.patience)

    @requires("messages.subscription_admin")
    @promise(
        "flow.bytes-are-bounded",
        "Unsettled messages exceed `max_outstanding_bytes` by at most one message; other consumers receive the rest.",
    )
    async def test_bytes_are_bounded(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "readers")
        await bus.topic(topic).publish_batch([bytes(1000)] * 100)
        async with bus.messages(
            topic, subscription="readers", max_outstanding=100, prefetch=100, max_outstanding_bytes=5000
        ) as inbox:
            held: list[Message[bytes]] = []
            while (
                message := await inbox.next_message(harness.patience if len(held) < 4 else harness.quiet)
            ) is not None:
                held.append(message)
            assert 4 <= len(held) <= 6, f"{len(held)} messages of 1000 bytes were held under a bound of 5000"
            unsettled = (await bus.admin.lag(topic, "readers")).unsettled
            assert unsettled is None or unsettled <= 6, f"{unsettled} messages were fetched, {len(held)} delivered"
            messages = bus.capabilities.messages
            if messages is not None and messages.shared_by_message:
                async with bus.messages(topic, subscription="readers", max_outstanding=100) as other:
                    await take(other, 94, harness.patience)
            for message in held:
                await message.ack()
            await take(inbox, 4, harness.patience)

    @promise("flow.oversized-message-is-delivered", "A message larger than `max_outstanding_bytes` arrives, alone.")
    async def test_oversized_message_is_delivered(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers", max_outstanding_bytes=100) as inbox:
            await bus.topic(topic).publish_batch([bytes(5000), bytes(5001)])
            sizes: list[int] = []
            for _ in range(2):
                (message,) = await take(inbox, 1, harness.patience)
                sizes.append(len(message.data or b""))
                await nothing_more(inbox, harness.quiet)
                await message.ack()
            assert sorted(sizes) == [5000, 5001]

    @promise(
        "flow.batch-above-the-bound-raises",
        "Requesting a batch larger than `max_outstanding` raises at once.",
    )
    async def test_batch_above_the_bound_raises(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers", max_outstanding=5) as inbox:
            with pytest.raises(ConfigurationError):
                await inbox.next_batch(6, timeout=0)
            assert len(await inbox.next_batch(5, timeout=0)) == 0

    @promise(
        "flow.forgotten-messages-are-named",
        "A consumer that is blocked by forgotten messages warns, and names them.",
    )
    async def test_forgotten_messages_are_named(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)
        async with bus.messages(topic, subscription="readers", max_outstanding=2, blocked_after=0.3) as inbox:
            await bus.topic(topic).publish_batch(numbered(5))
            held = await take(inbox, 2, harness.patience)
            await eventually(
                lambda: any(isinstance(event, FlowBlocked) for event in events),
                harness.patience,
                "the warning of blocked flow",
            )
            (blocked, *_) = [event for event in events if isinstance(event, FlowBlocked)]
            assert {message.id for message in blocked.oldest} == {message.id for message in held}
            assert blocked.outstanding == 2

    @requires("messages.shared_by_message")
    @promise(
        "flow.slow-consumer-does-not-hoard",
        "A consumer that works on one message for long leaves the others to other consumers.",
    )
    async def test_slow_consumer_does_not_hoard(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as slow:
            await bus.topic(topic).publish_batch(numbered(100))
            await take(slow, 1, harness.patience)
            async with bus.messages(topic, subscription="readers") as quick:
                seen: list[Message[bytes]] = []
                while (message := await quick.next_message(4 * harness.quiet)) is not None:
                    await message.ack()
                    seen.append(message)
                assert len(seen) >= 95, f"The slow consumer holds {100 - len(seen)} messages, working on one"

    @promise(
        "flow.busy-consumer-keeps-up",
        "A consumer that settles at once gets thousands of messages through a small bound.",
        seconds=180,
    )
    async def test_busy_consumer_keeps_up(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers", max_outstanding=10) as inbox:
            await bus.topic(topic).publish_batch(numbered(3000))
            assert bodies(await until_seen(inbox, numbered(3000), harness.patience)) == once(numbered(3000))

    @promise(
        "flow.paused-hands-nothing-over",
        "A paused consumer hands nothing over, in any shape; its running handlers end, and `resume` continues.",
    )
    async def test_paused_hands_nothing_over(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        handled: list[bytes | None] = []
        begun, finish, complete = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handle(message: Message[bytes]) -> None:
            begun.set()
            await finish.wait()
            handled.append(message.data)
            if len(handled) == 20:
                complete.set()

        async with bus.messages(topic, subscription="readers", prefetch=10) as inbox:
            work = asyncio.ensure_future(inbox.receive(handle))
            await bus.topic(topic).publish_batch(numbered(10))
            async with asyncio.timeout(harness.patience):
                await begun.wait()
            inbox.pause()
            finish.set()
            await bus.topic(topic).publish_batch(numbered(10, "later"))
            await nothing_more(inbox, harness.quiet)
            assert len(await inbox.next_batch(5, timeout=harness.quiet)) == 0
            assert len(handled) == 1
            inbox.resume()
            async with asyncio.timeout(harness.patience):
                await complete.wait()
            inbox.pause()
            await inbox.close()
            await work
        assert sorted(body or b"" for body in handled) == sorted(numbered(10) + numbered(10, "later"))

    @requires("messages.shared_by_message")
    @promise(
        "flow.paused-intake-is-bounded",
        "A paused consumer holds `max_outstanding` messages at most: other consumers receive the rest.",
    )
    async def test_paused_intake_is_bounded(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers", max_outstanding=5, prefetch=5) as paused:
            paused.pause()
            waiting = asyncio.ensure_future(paused.next_batch(5))
            await bus.topic(topic).publish_batch(numbered(20))
            async with bus.messages(topic, subscription="readers", max_outstanding=15, prefetch=15) as other:
                await take(other, 15, harness.patience)
                assert not waiting.done()
                paused.resume()
                async with asyncio.timeout(harness.patience):
                    await (await waiting).ack()

    @promise(
        "flow.rate-is-bounded",
        "With `max_rate`, messages are handed over no faster on average, and all arrive.",
    )
    async def test_rate_is_bounded(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers", max_rate=10) as inbox:
            await bus.topic(topic).publish_batch(numbered(12))
            (first,) = await take(inbox, 1, harness.patience)
            await first.ack()
            time = asyncio.get_running_loop().time
            began = time()
            rest = set(numbered(12)) - {first.data}
            assert bodies(await until_seen(inbox, rest, harness.patience)) == once(rest)
            assert time() - began >= 0.9, "11 messages at 10 a second, with one saved up, take a second"

    @promise("flow.idle-consumer-does-not-spin", "An idle consumer polls the broker at most a few times a second.")
    async def test_idle_consumer_does_not_spin(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic = await harness.connect(wrap=faults), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await nothing_more(inbox, harness.quiet)
            before = faults.fetches
            await nothing_more(inbox, 1.0)
            assert faults.fetches - before <= 20

    @promise(
        "flow.handlers-within-the-bound",
        "`receive` never has more messages in handlers than `max_outstanding`.",
    )
    async def test_handlers_within_the_bound(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        running = peak = handled = 0
        complete = asyncio.Event()

        async def handle(_: Message[bytes]) -> None:
            nonlocal running, peak, handled
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0)
            running -= 1
            handled += 1
            if handled == 100:
                complete.set()

        async with bus.messages(topic, subscription="readers", max_outstanding=3) as inbox:
            await bus.topic(topic).publish_batch(numbered(100))
            work = asyncio.ensure_future(inbox.receive(handle, concurrency=3))
            async with asyncio.timeout(harness.patience):
                await complete.wait()
            await inbox.close()
            await work
        assert peak <= 3
