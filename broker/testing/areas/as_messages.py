"""Conformance tests of records served as messages: settled one by one, committed contiguously."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.testing.areas.retry import QUICK, handling
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, eventually, nothing_more, numbered, once, read, take, until_seen

__all__ = ["AsMessages"]


class AsMessages(ConformanceCase):
    """Record consumers that serve messages."""

    @requires("records")
    @promise(
        "as-messages.arrive-unchanged",
        "Records served as messages keep their body, key, attributes and id, and are settled one by one.",
    )
    async def test_served_records_arrive_unchanged(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=2)
        sent = [OutboundMessage(b, key=b"k" + b, attributes={"b": b.decode()}, id=b.decode()) for b in numbered(50)]
        await bus.topic(topic).publish_batch(sent)
        async with bus.records(topic, group="workers").as_messages() as inbox:
            seen = await until_seen(inbox, numbered(50), harness.patience)
            assert {(m.id, m.key, m.data, tuple(m.attributes.items())) for m in seen} == {
                (s.id, s.key, s.data, tuple(s.attributes.items())) for s in sent
            }
        async with bus.records(topic, group="workers").as_messages() as inbox:
            await nothing_more(inbox, 2 * harness.quiet)

    @requires("records")
    @promise(
        "as-messages.commit-is-contiguous",
        "Acks out of order commit the highest contiguous finished offset; unfinished records are redelivered.",
    )
    async def test_commit_is_contiguous(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(10))
        async with bus.records(topic, group="workers").as_messages() as inbox:
            messages = {message.data: message for message in await take(inbox, 10, harness.patience)}
            for number in (9, 3, 1, 0):
                await messages[numbered(10)[number]].ack()
        async with bus.records(topic, group="workers").as_messages() as inbox:
            # A backend may remember that 3 and 9 are finished, or deliver them again.
            again: dict[bytes | None, Message[bytes]] = {}
            while not again.keys() >= set(numbered(10)[4:9]) | {numbered(10)[2]}:
                (message,) = await take(inbox, 1, harness.patience)
                again[message.data] = message
            assert again.keys() <= set(numbered(10)[2:])
            for number in (2, 5, 3):
                if numbered(10)[number] in again:
                    await again[numbered(10)[number]].ack()
        async with bus.records(topic, group="workers") as log:
            assert [record.data for record in await read(log, 6, harness.patience)] == numbered(10)[4:]

    @requires("records")
    @promise(
        "as-messages.commit-stops-at-stuck-record",
        "The commit does not pass an unfinished record, even with thousands of finished records after it.",
    )
    async def test_commit_stops_at_stuck_record(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(3000))
        async with bus.records(topic, group="workers").as_messages(max_outstanding=1000) as inbox:
            (stuck,) = await take(inbox, 1, harness.patience)
            for _ in range(2999):
                await (await take(inbox, 1, harness.patience))[0].ack()
        async with bus.records(topic, group="workers") as log:
            record = await log.next_record(timeout=harness.patience)
            assert record is not None
            assert record.data == stuck.data == b"m-000000"

    @requires("records")
    @promise(
        "as-messages.max-gap-pauses",
        "At most `max_gap` records are finished after a stuck record; then the partition waits for it.",
    )
    async def test_max_gap_pauses(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(400))
        async with (
            bus.records(topic, group="workers").as_messages(max_gap=50, max_outstanding=20) as inbox,
        ):
            (stuck,) = await take(inbox, 1, harness.patience)
            passed = 0
            while (message := await inbox.next_message(timeout=3 * harness.quiet)) is not None:
                await message.ack()
                passed += 1
            assert 50 <= passed <= 50 + 20, f"{passed} records were finished above a stuck one, with max_gap=50"
            await stuck.ack()
            assert len(await until_seen(inbox, numbered(400)[1 + passed :], harness.patience)) == 399 - passed

    @requires("records")
    @promise(
        "as-messages.failure-is-retried",
        "A record whose handler fails is retried, and dead-lettered when its attempts are exhausted.",
    )
    async def test_failure_is_retried(self, harness: Harness) -> None:
        bus, topic, dead = await harness.bus(), await harness.topic(partitions=1), await harness.topic()
        calls: defaultdict[bytes | None, int] = defaultdict(int)

        async def handle(message: Message[bytes]) -> None:
            calls[message.data] += 1
            if message.data == b"m-000002" or (message.data == b"m-000005" and calls[message.data] == 1):
                raise ValueError("raised by the test")

        await bus.topic(topic).publish_batch(numbered(10))
        async with (
            bus.records(topic, group="workers").as_messages(retry=QUICK, dead_letter=dead) as inbox,
            bus.messages(dead, subscription="readers", start="earliest") as letters,
        ):
            work = asyncio.ensure_future(inbox.receive(handle, concurrency=2))
            (letter,) = await take(letters, 1, harness.patience)
            assert letter.data == b"m-000002"
            assert letter.attributes["dead-letter-topic"] == topic
            await eventually(lambda: len(calls) == 10, harness.patience, "the handling of all records")
            await inbox.close()
            await work
        assert (calls[b"m-000002"], calls[b"m-000005"]) == (3, 2)
        async with bus.records(topic, group="workers") as log:
            assert await log.next_record(timeout=2 * harness.quiet) is None

    @requires("records")
    @promise(
        "as-messages.keys-stay-in-order",
        "With `ordered_by_key`, records of a key are handled in order, and keys of a partition in parallel.",
    )
    async def test_keys_stay_in_order(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=2)
        running: set[bytes | None] = set()
        seen: defaultdict[bytes | None, list[bytes | None]] = defaultdict(list)

        async def handle(message: Message[bytes]) -> None:
            assert message.key not in running
            running.add(message.key)
            await asyncio.sleep(0)
            seen[message.key].append(message.data)
            running.discard(message.key)

        await bus.topic(topic).publish_batch(
            [OutboundMessage(body, key=f"key-{key}") for body in numbered(30) for key in range(8)]
        )
        async with bus.records(topic, group="workers").as_messages(ordered_by_key=True) as inbox:
            await handling(
                inbox.receive(handle, concurrency=8),
                lambda: sum(map(len, seen.values())) >= 240,
                inbox,
                harness.patience,
            )
        assert all(handled == numbered(30) for handled in seen.values())

    @requires("records")
    @promise(
        "as-messages.restart-redelivers-unfinished",
        "After a close, unfinished records are redelivered, and records below them are not.",
    )
    async def test_restart_redelivers_unfinished(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(20))
        async with bus.records(topic, group="workers").as_messages() as inbox:
            messages = {message.data: message for message in await take(inbox, 20, harness.patience)}
            for body in numbered(20):
                if body != b"m-000012":
                    await messages[body].ack()
        async with bus.records(topic, group="workers").as_messages() as inbox:
            seen = bodies(await until_seen(inbox, [b"m-000012"], harness.patience))
            assert not set(seen) & set(numbered(12))

    @requires("records")
    @promise(
        "as-messages.nack-redelivers",
        "A nacked record is redelivered after its delay, without rewinding the others.",
    )
    async def test_nacked_record_is_redelivered(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=1)
        await bus.topic(topic).publish_batch(numbered(5))
        async with bus.records(topic, group="workers").as_messages() as inbox:
            for message in await take(inbox, 5, harness.patience):
                await (message.nack(delay=0.2) if message.data == b"m-000002" else message.ack())
            assert bodies(await until_seen(inbox, [b"m-000002"], harness.patience)) == once([b"m-000002"])
            await nothing_more(inbox, harness.quiet)

    @requires("records.rebalance")
    @promise(
        "as-messages.rebalance-loses-nothing",
        "No record is lost while members join and leave and records are handled as messages.",
        seconds=300.0,
    )
    async def test_rebalance_of_messages_loses_nothing(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=4)
        handled: Counter[bytes | None] = Counter()

        async def handle(message: Message[bytes]) -> None:
            await asyncio.sleep(0.001)
            handled[message.data] += 1

        async def member(stop: asyncio.Event) -> None:
            other = await harness.connect()
            async with other.records(topic, group="workers").as_messages() as inbox, asyncio.TaskGroup() as tasks:
                tasks.create_task(inbox.receive(handle, concurrency=4))
                await stop.wait()
                await inbox.close()

        def count() -> int:
            for each in members:
                if each.done():
                    each.result()
            return len(handled)

        await bus.topic(topic).publish_batch(
            [OutboundMessage(b, key=f"k-{n % 32}") for n, b in enumerate(numbered(2000))]
        )
        stops = [asyncio.Event() for _ in range(3)]
        members: list[asyncio.Future[None]] = []
        for stop in stops:
            wanted = len(handled) + 200
            members.append(asyncio.ensure_future(member(stop)))
            await eventually(lambda wanted=wanted: count() >= wanted, 2 * harness.patience, f"{wanted} records")
        stops[0].set()
        await members[0]
        await eventually(lambda: count() == 2000, 2 * harness.patience, "the handling of all 2000 records")
        # One after the other: who takes over from a member that closes may begin a bit below its last commit.
        for stop, leaving in zip(stops, members, strict=True):
            stop.set()
            await leaving
        async with bus.records(topic, group="workers") as log:
            assert await log.next_record(timeout=2 * harness.quiet) is None, "Finished records were not committed"
