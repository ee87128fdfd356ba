"""Conformance tests of leases: renewal while a message is held, and a reported end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from broker.errors import LeaseLost
from broker.hooks import Event, LeaseExpired
from broker.messages import Message, SettleState
from broker.testing.areas.retry import QUICK
from broker.testing.case import ConformanceCase
from broker.testing.faults import Faults
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import Inbox, bodies, eventually, let_pass, nothing_more, numbered, once, take, until_seen
from broker.threads.messages import BlockingMessage

__all__ = ["Leases"]


class Leases(ConformanceCase):
    """Renewal, extension, expiry and crashes."""

    @requires("messages.lease")
    @promise(
        "leases.held-is-renewed", "A message held for three leases goes to no other consumer, and its ack is valid."
    )
    async def test_held_is_renewed(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with (
            bus.messages(topic, subscription="readers") as first,
            bus.messages(topic, subscription="readers") as second,
        ):
            await bus.topic(topic).publish(b"x")
            holder, other, message = await _first_of(first, second, harness.patience)
            await nothing_more(other, 3 * harness.lease_seconds)
            assert not message.lease_lost
            await message.ack()
            await nothing_more(holder, harness.quiet)

    @requires("messages.lease")
    @promise(
        "leases.buffered-is-renewed",
        "Messages that are buffered for two leases are kept, and delivered once.",
    )
    async def test_buffered_is_renewed(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(topic, subscription="readers", prefetch=20) as inbox:
            await bus.topic(topic).publish_batch(numbered(40))
            await _ack_some(inbox, 20, harness.patience)
            await let_pass(2 * harness.lease_seconds)
            rest = await take(inbox, 20, harness.patience)
            assert {message.delivery_attempt for message in rest} <= {1, None}
            for message in rest:
                await message.ack()
            await nothing_more(inbox, 1.5 * harness.lease_seconds)

    @requires("messages.lease")
    @promise(
        "leases.paused-is-renewed",
        "A consumer that is paused for two leases keeps what it has fetched, and delivers it once.",
    )
    async def test_paused_is_renewed(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(topic, subscription="readers", prefetch=20) as inbox:
            inbox.pause()
            waiting = asyncio.ensure_future(inbox.next_batch(20))
            await bus.topic(topic).publish_batch(numbered(20))
            await let_pass(2 * harness.lease_seconds)
            assert not waiting.done(), "A paused consumer handed messages over"
            inbox.resume()
            async with asyncio.timeout(harness.patience):
                seen = [*await waiting]
            for message in seen:
                await message.ack()
            seen += await until_seen(inbox, set(numbered(20)) - {message.data for message in seen}, harness.patience)
            assert bodies(seen) == once(numbered(20))
            assert {message.delivery_attempt for message in seen} <= {1, None}
            await nothing_more(inbox, 1.5 * harness.lease_seconds)

    @requires("messages.lease")
    @promise(
        "leases.handling-is-renewed", "A handler that runs for three leases keeps its message, which is handled once."
    )
    async def test_handling_is_renewed(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        calls: list[bytes | None] = []
        finish = asyncio.Event()

        async def handle(message: Message[bytes]) -> None:
            calls.append(message.data)
            await finish.wait()

        async with (
            bus.messages(topic, subscription="readers") as first,
            bus.messages(topic, subscription="readers") as second,
        ):
            work = [asyncio.ensure_future(inbox.receive(handle, concurrency=2)) for inbox in (first, second)]
            await bus.topic(topic).publish(b"x")
            await asyncio.wait(work, timeout=3 * harness.lease_seconds)
            finish.set()
            for inbox in (first, second):
                await inbox.close()
            await asyncio.gather(*work)
        assert calls == [b"x"]

    @requires("messages.lease")
    @promise(
        "leases.plain-handling-is-renewed",
        "A plain handler that blocks its thread for three leases keeps its message, which is handled once.",
    )
    async def test_plain_handling_is_renewed(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        calls: list[bytes | None] = []
        finish = threading.Event()

        def handle(message: BlockingMessage[bytes]) -> None:
            calls.append(message.data)
            finish.wait()

        async with (
            bus.messages(topic, subscription="readers") as first,
            bus.messages(topic, subscription="readers") as second,
        ):
            work = [asyncio.ensure_future(inbox.receive(handle, concurrency=2)) for inbox in (first, second)]
            try:
                await bus.topic(topic).publish(b"x")
                await asyncio.wait(work, timeout=3 * harness.lease_seconds)
            finally:
                finish.set()
            for inbox in (first, second):
                await inbox.close()
            await asyncio.gather(*work)
        assert calls == [b"x"]

    @requires("messages.lease")
    @promise(
        "leases.max-lease-expires",
        "After `max_lease` the message is lost: it is flagged and reported, its ack raises, and it is redelivered.",
    )
    async def test_max_lease_expires(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)
        async with bus.messages(topic, subscription="readers", max_lease=0.5, retry=QUICK) as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            (again,) = await take(inbox, 1, harness.patience)
            assert again.id == message.id
            assert message.lease_lost
            assert message.state is SettleState.LOST
            assert [event.message.id for event in events if isinstance(event, LeaseExpired)] == [message.id]
            with pytest.raises(LeaseLost):
                await message.ack()
            with pytest.raises(LeaseLost):
                await message.extend(1.0)
            await again.ack()
            await nothing_more(inbox, 1.5 * harness.lease_seconds)

    @requires("messages.lease")
    @promise("leases.max-lease-starts-at-delivery", "Time in the buffer does not count towards `max_lease`.")
    async def test_max_lease_starts_at_delivery(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(topic, subscription="readers", max_lease=0.6, retry=QUICK) as inbox:
            await bus.topic(topic).publish_batch(numbered(2))
            await (await take(inbox, 1, harness.patience))[0].ack()
            await let_pass(1.0)
            (message,) = await take(inbox, 1, harness.patience)
            await message.ack()
            assert message.state is not SettleState.LOST
            await nothing_more(inbox, harness.quiet)

    @requires("messages.lease")
    @promise(
        "leases.extend-exceeds-max-lease",
        "`extend(seconds)` keeps a message beyond `max_lease`, and its ack is valid.",
    )
    async def test_extend_exceeds_max_lease(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(topic, subscription="readers", max_lease=0.4, retry=QUICK) as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            await message.extend(2.5 * harness.lease_seconds)
            await nothing_more(inbox, 1.8 * harness.lease_seconds)
            assert not message.lease_lost
            await message.ack()
            await nothing_more(inbox, 1.2 * harness.lease_seconds)

    @requires("messages.lease")
    @promise(
        "leases.expired-handler-cannot-settle",
        "A handler that outlives its lease cannot settle the message of the next holder.",
    )
    async def test_expired_handler_cannot_settle(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(topic, subscription="readers", max_lease=0.3, retry=QUICK) as inbox:
            await bus.topic(topic).publish(b"x")
            (late,) = await take(inbox, 1, harness.patience)
            (again,) = await take(inbox, 1, harness.patience)
            with pytest.raises(LeaseLost):
                await late.ack()
            with pytest.raises(LeaseLost):
                await late.nack(delay=0)
            await again.nack(delay=0)
            assert bodies(await until_seen(inbox, [b"x"], harness.patience)) == once([b"x"])

    @requires("messages.lease")
    @promise(
        "leases.lost-by-the-clock",
        "When the event loop was blocked for longer than a lease, `lease_lost` is true at once, and the message is "
        "redelivered.",
    )
    async def test_lost_by_the_clock(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(topic, subscription="readers", retry=QUICK) as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            time.sleep(1.5 * harness.lease_seconds)  # noqa: ASYNC251  # this promise is about a blocked loop
            assert message.lease_lost
            (again,) = await take(inbox, 1, harness.patience)
            assert again.id == message.id
            await again.ack()

    @requires("messages.lease=renew", "messages.confirmed_ack")
    @promise(
        "leases.refused-ack-raises",
        "An ack after the broker ended the lease raises LeaseLost, and the message is redelivered.",
    )
    async def test_refused_ack_raises(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic = await harness.connect(short_lease=True, wrap=faults), await harness.topic()
        async with bus.messages(topic, subscription="readers", confirm_acks=True) as inbox:
            faults.lose_extends = True
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            (again,) = await take(inbox, 1, harness.patience)
            assert again.id == message.id
            with pytest.raises(LeaseLost):
                await message.ack()
            await again.ack()

    @requires("messages.lease", "harness.crash")
    @promise(
        "leases.crash-releases-messages",
        "Unacked messages of a crashed consumer are redelivered when their leases end; acked ones are not.",
    )
    async def test_crash_releases_messages(self, harness: Harness) -> None:
        doomed, topic = await harness.connect(short_lease=True), await harness.topic()
        inbox = doomed.messages(topic, subscription="readers")
        await inbox.__aenter__()
        await doomed.topic(topic).publish_batch(numbered(10))
        held = await take(inbox, 10, harness.patience)
        for message in held[:4]:
            await message.ack()
        await eventually(lambda: held[3].state is SettleState.SETTLED, harness.patience, "the acks")
        await harness.crash(doomed)
        bus = await harness.connect(short_lease=True)
        async with bus.messages(topic, subscription="readers") as again:
            rest = [message.data or b"" for message in held[4:]]
            assert bodies(await until_seen(again, rest, harness.patience)) == once(rest)
            await nothing_more(again, 1.5 * harness.lease_seconds)

    @requires("messages.lease", "shared", "harness.worker")
    @promise(
        "leases.killed-process-releases-messages",
        "After SIGKILL of a consumer process, every unacked message is redelivered.",
    )
    async def test_killed_process_releases_messages(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(topic, subscription="readers"):
            pass
        await bus.topic(topic).publish_batch(numbered(100))
        worker = await harness.worker(topic, "readers", handle=30)
        await worker.until_holding(3 * harness.patience)
        await worker.kill()
        async with bus.messages(topic, subscription="readers") as inbox:
            rest = [body for body in numbered(100) if body not in worker.handled]
            seen = bodies(await until_seen(inbox, rest, harness.patience))
            assert set(seen) >= set(rest)
            # The last acks before the kill may not have arrived.
            assert len(set(seen) - set(rest)) <= 30

    @requires("messages.lease", "shared", "harness.worker")
    @promise(
        "leases.frozen-process-loses-its-lease",
        "Messages of a process that was frozen for longer than a lease go to another process; none is lost.",
    )
    async def test_frozen_process_loses_its_lease(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(topic, subscription="readers"):
            pass
        await bus.topic(topic).publish_batch(numbered(20))
        worker = await harness.worker(topic, "readers", handle=5)
        await worker.until_holding(3 * harness.patience)
        worker.freeze()
        try:
            async with bus.messages(topic, subscription="readers") as inbox:
                rest = [body for body in numbered(20) if body not in worker.handled]
                await until_seen(inbox, rest, harness.patience)
                worker.thaw()
                await nothing_more(inbox, 1.5 * harness.lease_seconds)
        finally:
            worker.thaw()
        await worker.kill()


async def _first_of(first: Inbox, second: Inbox, patience: float) -> tuple[Inbox, Inbox, Message[bytes]]:
    """Which of two consumers got the only message, the other one, and the message."""
    inboxes = (first, second)
    waits = [asyncio.ensure_future(inbox.next_message(patience)) for inbox in inboxes]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    winner = 0 if waits[0].done() else 1
    waits[1 - winner].cancel()
    message = await waits[winner]
    assert message is not None
    return inboxes[winner], inboxes[1 - winner], message


async def _ack_some(inbox: Inbox, count: int, patience: float) -> None:
    """Take and ack so many."""
    for message in await take(inbox, count, patience):
        await message.ack()
