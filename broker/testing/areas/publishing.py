"""Conformance tests of publishing: a receipt means stored, and every failure is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

import pytest

from broker.errors import (
    BackendError,
    BrokerError,
    Closed,
    ConfigurationError,
    ConnectionFailed,
    InvalidMessage,
    PublishError,
    TopicNotFound,
    Unsupported,
)
from broker.hooks import Published
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.partitioners import Partitioner
from broker.receipts import Receipt
from broker.testing.case import ConformanceCase
from broker.testing.faults import Faults
from broker.testing.harness import Harness, unique
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, drain, let_pass, nothing_more, numbered, once, read, take, until_seen

__all__ = ["Publishing"]

_HASHED: Final = (b"23456", b"this is another string with more length to it perhaps", b"hejsan")
_HASHES: Final[Mapping[Literal["murmur2", "crc32", "fnv1a"], Sequence[int]]] = {
    "murmur2": (0x058D780F, 0x4F7703DA, 0x5EC19395),
    "crc32": (0xB1B451D7, 0xB0150DF7, 0xD077037E),
    "fnv1a": (0x27E6F469, 0x155E3E5F, 0x17B1E27A),
}
"""What the tests of librdkafka expect for these keys; those of murmur2 come from the Java client."""


def _by_length(topic: str, key: bytes, partitions: int) -> int:
    return len(key) % partitions


class Publishing(ConformanceCase):
    """Publishing one by one, in batches and through the pipeline."""

    @promise("publishing.receipt-has-the-message-id", "A receipt has the id that consumers see as `message.id`.")
    async def test_receipt_has_the_message_id(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            receipts = await bus.topic(topic).publish_batch(numbered(5))
            messages = await take(inbox, 5, harness.patience)
            assert {receipt.id for receipt in receipts} == {message.id for message in messages}
            assert len({message.id for message in messages}) == 5

    @promise("publishing.id-is-kept", "Consumers see the id that the publisher set.")
    async def test_id_is_kept(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            given = unique("order 1/ä")
            receipt = await bus.topic(topic).publish(OutboundMessage(b"x", id=given))
            (message,) = await take(inbox, 1, harness.patience)
            assert (receipt.id, message.id) == (given, given)

    @promise(
        "publishing.confirmed-messages-arrive",
        "With twenty concurrent publishers, every message with a receipt arrives.",
    )
    async def test_confirmed_messages_arrive(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:

            async def publish(number: int) -> None:
                for body in numbered(25, f"p{number}"):
                    await bus.topic(topic).publish(body)

            await asyncio.gather(*(publish(number) for number in range(20)))
            wanted = [body for number in range(20) for body in numbered(25, f"p{number}")]
            assert bodies(await until_seen(inbox, wanted, harness.patience)) == once(wanted)

    @promise("publishing.batch-returns-receipts", "`publish_batch` returns a receipt for each message, in order.")
    async def test_batch_returns_receipts(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        messages = [OutboundMessage(body, id=f"id-{body.decode()}") for body in numbered(50)]
        receipts = await bus.topic(topic).publish_batch(messages)
        assert [receipt.id for receipt in receipts] == [message.id for message in messages]

    @promise(
        "publishing.batch-without-receipts",
        "`publish_batch(..., receipts=False)` keeps the order of each key, returns None and reports each failure.",
    )
    async def test_batch_without_receipts(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic = await harness.connect(wrap=faults), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch([], receipts=False)
            await bus.topic(topic).publish_batch(numbered(20), receipts=False)
            await until_seen(inbox, numbered(20), harness.patience)
            faults.publish[topic].append(BackendError("refused by the test"))
            with pytest.raises(PublishError) as raised:
                await bus.topic(topic).publish_batch(numbered(4, "second"), receipts=False)
            outcomes = raised.value.outcomes
            failed = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, BrokerError)]
            assert (len(outcomes), failed) == (4, [0])
            await until_seen(inbox, numbered(4, "second")[1:], harness.patience)
            await nothing_more(inbox, harness.quiet)

    @promise("publishing.empty-batch", "An empty batch publishes nothing, without an error.")
    async def test_empty_batch(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            assert await bus.topic(topic).publish_batch([]) == []
            await nothing_more(inbox, harness.quiet)

    @requires("records|messages.ordered_delivery")
    @promise("publishing.batch-keeps-order", "Messages of a key arrive in the order of their batch.")
    async def test_batch_keeps_order(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        wanted = numbered(500)
        if bus.capabilities.records:
            await bus.topic(topic).publish_batch([OutboundMessage(body, key="k") for body in wanted])
            async with bus.records(topic, group="readers") as log:
                assert [record.data for record in await read(log, 500, harness.patience)] == wanted
        else:
            async with bus.messages(topic, subscription="readers") as inbox:
                await bus.topic(topic).publish_batch([OutboundMessage(body, key="k") for body in wanted])
                assert [message.data for message in await take(inbox, 500, harness.patience)] == wanted

    @promise(
        "publishing.partial-failure-reports-each-outcome",
        "A partly failed batch raises PublishError with a receipt or an error per message; the other messages arrive.",
    )
    async def test_partial_failure_reports_each_outcome(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic = await harness.connect(wrap=faults), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            faults.publish[topic].append(BackendError("refused by the test"))
            with pytest.raises(PublishError) as raised:
                await bus.topic(topic).publish_batch(numbered(4))
            outcomes = raised.value.outcomes
            assert len(outcomes) == 4
            failed = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, BrokerError)]
            assert len(failed) == 1
            assert all(isinstance(outcome, Receipt) for index, outcome in enumerate(outcomes) if index not in failed)
            wanted = [body for index, body in enumerate(numbered(4)) if index not in failed]
            await until_seen(inbox, wanted, harness.patience)
            await nothing_more(inbox, harness.quiet)

    @promise(
        "publishing.refused-publish-raises",
        "A publish that the broker refuses raises an error.",
    )
    async def test_refused_publish_raises(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic = await harness.connect(wrap=faults), await harness.topic()
        faults.publish[topic].append(BackendError("refused by the test"))
        with pytest.raises(BackendError, match="refused by the test"):
            await bus.topic(topic).publish(b"x")

    @promise("publishing.enqueue-returns-receipts", "Each future of `enqueue` returns the receipt of its message.")
    async def test_enqueue_returns_receipts(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        futures = [
            await bus.topic(topic).enqueue(OutboundMessage(body, id=f"id-{body.decode()}")) for body in numbered(300)
        ]
        await bus.topic(topic).flush()
        assert all(future.done() for future in futures)
        assert [future.result().id for future in futures] == [f"id-{body.decode()}" for body in numbered(300)]

    @requires("records|messages.ordered_delivery")
    @promise("publishing.enqueue-keeps-order", "The pipeline publishes messages of a key in the order of the calls.")
    async def test_enqueue_keeps_order(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "queue")
        wanted = numbered(500)
        for body in wanted:
            await bus.topic(topic).enqueue(body, key="k")
        await bus.topic(topic).flush()
        if bus.capabilities.records:
            async with bus.records(topic, group="readers") as log:
                assert [record.data for record in await read(log, 500, harness.patience)] == wanted
        else:
            async with bus.messages(topic, subscription="queue") as inbox:
                assert [message.data for message in await take(inbox, 500, harness.patience)] == wanted

    @requires("records|messages.ordered_delivery")
    @promise(
        "publishing.pipeline-retries-in-order",
        "The pipeline repeats a failed message by itself, once, before later messages of its key.",
    )
    async def test_pipeline_retries_in_order(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic = await harness.connect(wrap=faults), await harness.topic()
        await bus.admin.ensure_subscription(topic, "queue")
        faults.publish[topic].extend(ConnectionFailed("broken by the test") for _ in range(50))
        wanted = numbered(50)
        for body in wanted:
            await bus.topic(topic).enqueue(body, key="k")
        await bus.topic(topic).flush()
        if bus.capabilities.records:
            async with bus.records(topic, group="readers") as log:
                assert [record.data for record in await read(log, 50, harness.patience)] == wanted
                assert await log.next_record(timeout=harness.quiet) is None
        else:
            async with bus.messages(topic, subscription="queue") as inbox:
                assert [message.data for message in await take(inbox, 50, harness.patience)] == wanted
                await nothing_more(inbox, harness.quiet)

    @promise("publishing.close-flushes", "Closing right after the last `enqueue` loses no message.")
    async def test_close_flushes(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            other = await harness.connect()
            for body in numbered(1000):
                await other.topic(topic).enqueue(body)
            await other.close()
            assert bodies(await until_seen(inbox, numbered(1000), harness.patience)) == once(numbered(1000))

    @promise(
        "publishing.flush-raises-unseen-failures",
        "`flush` raises the failure of a future whose outcome was not retrieved.",
    )
    async def test_flush_raises_unseen_failures(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic = await harness.connect(wrap=faults), await harness.topic()
        faults.publish[topic].append(BackendError("refused by the test"))
        await bus.topic(topic).enqueue(b"x")
        with pytest.raises(PublishError, match="refused by the test"):
            await bus.topic(topic).flush()

    @promise("publishing.opening-is-lazy", "Opening a topic does no I/O; a missing topic raises at the first publish.")
    async def test_opening_is_lazy(self, harness: Harness) -> None:
        bus = await harness.bus()
        topic = bus.topic(unique("missing"))
        assert topic is bus.topic(topic.name)
        with pytest.raises(TopicNotFound):
            await topic.publish(b"x")

    @promise(
        "publishing.missing-topic-can-be-created",
        "After a missing topic was created, the same topic object publishes.",
    )
    async def test_missing_topic_can_be_created(self, harness: Harness) -> None:
        bus, name = await harness.bus(), unique("late")
        topic = bus.topic(name)
        with pytest.raises(TopicNotFound):
            await topic.publish(b"x")
        await harness.create_topic(name)
        assert (await topic.publish(b"x")).id

    @promise(
        "publishing.publish-after-close-raises",
        "Publishing after the close raises Closed; a second close does nothing.",
    )
    async def test_publish_after_close_raises(self, harness: Harness) -> None:
        bus, name = await harness.connect(), await harness.topic()
        topic = bus.topic(name)
        await bus.close()
        await bus.close()
        with pytest.raises(Closed):
            await topic.publish(b"x")
        with pytest.raises(Closed):
            await topic.publish_batch([b"x"])
        with pytest.raises(Closed):
            await topic.enqueue(b"x")

    @promise(
        "publishing.cancelled-call-is-isolated",
        "A cancelled publish does not affect other calls or the topic.",
    )
    async def test_cancelled_call_is_isolated(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            calls = [asyncio.ensure_future(bus.topic(topic).publish(body)) for body in numbered(20)]
            await asyncio.sleep(0)
            for call in calls[::2]:
                call.cancel()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(outcome, (Receipt, asyncio.CancelledError)) for outcome in ended)
            kept = [body for body, outcome in zip(numbered(20), ended, strict=True) if isinstance(outcome, Receipt)]
            assert set(kept) >= set(numbered(20)[1::2])
            await bus.topic(topic).publish(b"after")
            await until_seen(inbox, [*kept, b"after"], harness.patience)

    @promise("publishing.topics-are-isolated", "Topics with similar names never mix.")
    async def test_topics_are_isolated(self, harness: Harness) -> None:
        bus, base = await harness.bus(), unique("mix")
        names: list[str] = []
        for name in (f"{base}.a", f"{base}_a", f"{base}-a", f"{base}.A", f"{base}.a.b"):
            try:
                await harness.create_topic(name)
            except ConfigurationError:
                # A broker may refuse a name that it cannot distinguish from another.
                continue
            await bus.admin.ensure_subscription(name, "readers")
            names.append(name)
        assert len(names) >= 4
        for name in names:
            await bus.topic(name).publish_batch([f"{name} {number}".encode() for number in range(5)])
        for name in names:
            async with bus.messages(name, subscription="readers", start="earliest") as inbox:
                wanted = [f"{name} {number}".encode() for number in range(5)]
                seen = await until_seen(inbox, wanted, harness.patience) + await drain(inbox, harness.quiet)
                assert bodies(seen) == once(wanted)
                assert {message.topic for message in seen} == {name}

    @promise(
        "publishing.many-topics-at-once",
        "Ten topics that are written and read concurrently each receive all their messages.",
    )
    async def test_many_topics_at_once(self, harness: Harness) -> None:
        bus = await harness.bus()
        names = [await harness.topic() for _ in range(10)]

        async def exchange(name: str) -> None:
            async with bus.messages(name, subscription="readers") as inbox:
                await bus.topic(name).publish_batch(numbered(50, name))
                assert bodies(await until_seen(inbox, numbered(50, name), harness.patience)) == once(numbered(50, name))

        await asyncio.gather(*(exchange(name) for name in names))

    @requires("publish.deduplication")
    @promise(
        "publishing.duplicates-are-dropped",
        "A second message with the same id is dropped; its receipt says so if the broker reports it.",
    )
    async def test_duplicates_are_dropped(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            first = await bus.topic(topic).publish(OutboundMessage(b"x", id="same"))
            second = await bus.topic(topic).publish(OutboundMessage(b"x", id="same"))
            assert (first.duplicate, second.duplicate) == (False, bus.capabilities.publish.reports_duplicates)
            await bus.topic(topic).publish(b"last")
            assert bodies(await until_seen(inbox, [b"x", b"last"], harness.patience)) == once([b"x", b"last"])
            await nothing_more(inbox, harness.quiet)

    @requires("publish.deduplication", "publish.reports_duplicates")
    @promise(
        "publishing.duplicates-are-told",
        "Every way of publishing tells that the broker dropped a message as a duplicate.",
    )
    async def test_duplicates_are_told(self, harness: Harness) -> None:
        told: list[int] = []
        bus, topic = await harness.bus(), await harness.topic()
        bus.hooks.listen(lambda event: told.append(event.duplicates) if isinstance(event, Published) else None)
        again = OutboundMessage(b"x", id="same")
        orders = bus.topic(topic)
        await orders.publish(again)
        told.clear()
        assert (await orders.publish(again)).duplicate
        new, known = await orders.publish_batch([b"new", again])
        assert (new.duplicate, known.duplicate) == (False, True)
        await orders.publish_batch([again], receipts=False)
        assert (await (await orders.enqueue(again))).duplicate
        assert told == [1, 1, 1, 1]

    @requires("publish.deduplication")
    @promise(
        "publishing.made-ids-count-too",
        "A second message with the id that was made for the first, as its receipt says, is dropped.",
    )
    async def test_made_ids_count_too(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            for body, key in ((b"1", None), (b"2", "key")):
                first = await bus.topic(topic).publish(body, key=key)
                second = await bus.topic(topic).publish(OutboundMessage(b"again", key=key, id=first.id))
                assert (second.id, second.duplicate) == (first.id, bus.capabilities.publish.reports_duplicates)
            await bus.topic(topic).publish(b"last")
            wanted = [b"1", b"2", b"last"]
            assert bodies(await until_seen(inbox, wanted, harness.patience)) == once(wanted)
            await nothing_more(inbox, harness.quiet)

    @requires("publish.deliver_at")
    @promise("publishing.scheduled-is-not-early", "A message with `deliver_at` arrives, and not before that time.")
    async def test_scheduled_is_not_early(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            due = datetime.now(UTC) + timedelta(seconds=1.5)
            await bus.topic(topic).publish(OutboundMessage(b"later", key="k", attributes={"a": "b"}, deliver_at=due))
            await bus.topic(topic).publish(b"now")
            found: dict[bytes | None, tuple[Message[bytes], datetime]] = {}
            while len(found) < 2:
                (message,) = await take(inbox, 1, harness.patience)
                found[message.data] = message, datetime.now(UTC)
            # On a busy machine both may arrive after the scheduled time, in any order.
            later, came = found[b"later"]
            assert came >= due - timedelta(milliseconds=20)
            assert (later.key, dict(later.attributes)) == (b"k", {"a": "b"})
            assert found.keys() == {b"later", b"now"}

    @requires("publish.ttl")
    @promise("publishing.expired-is-not-delivered", "A message is not delivered after its `ttl`.")
    async def test_expired_is_not_delivered(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "readers")
        await bus.topic(topic).publish_batch(
            [OutboundMessage(b"brief", ttl=1.0), OutboundMessage(b"lasting", ttl=3600)]
        )
        await let_pass(1.5)
        async with bus.messages(topic, subscription="readers", start="earliest") as inbox:
            await until_seen(inbox, [b"lasting"], harness.patience)
            await nothing_more(inbox, harness.quiet)

    @requires("publish.partitions", "records")
    @promise("publishing.partition-is-honoured", "A message goes to its `partition`, which its receipt confirms.")
    async def test_partition_is_honoured(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=4)
        receipts = await bus.topic(topic).publish_batch([OutboundMessage(b"x", partition=n) for n in (3, 1, 0, 2)])
        assert [receipt.partition for receipt in receipts] == [3, 1, 0, 2]
        async with bus.records(topic, group="readers") as log:
            assert sorted(record.partition for record in await read(log, 4, harness.patience)) == [0, 1, 2, 3]

    @requires("publish.partitions", "records")
    @promise(
        "publishing.key-maps-to-one-partition",
        "All messages of a key go to one partition; keys spread over the partitions.",
    )
    async def test_key_maps_to_one_partition(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=4)
        keys = [f"key-{number}" for number in range(40)]
        chosen: dict[str, set[int | None]] = {key: set() for key in keys}
        for _ in range(2):
            for key in keys:
                chosen[key].add((await bus.topic(topic).publish(b"x", key=key)).partition)
        assert all(len(partitions) == 1 for partitions in chosen.values())
        assert {partition for partitions in chosen.values() for partition in partitions} == {0, 1, 2, 3}

    @requires("publish.partition_of")
    @promise(
        "publishing.partition-of-tells-where",
        "`bus.partition_of` returns the partition to which messages with the key are published.",
    )
    async def test_partition_of_tells_where(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=3)
        texts = [b"k", b"key-17", "kéy €".encode(), b"a-much-longer-key-that-needs-several-rounds-of-the-hash"]
        keys = [*texts, b"\x00", b"\xff\xfe\x80", *(f"key-{number}".encode() for number in range(30))]
        told = [await bus.partition_of(topic, key) for key in keys]
        assert set(told) == {0, 1, 2}
        receipts = await bus.topic(topic).publish_batch([OutboundMessage(b"x", key) for key in keys])
        assert [receipt.partition for receipt in receipts] == told
        assert await bus.partition_of(topic, "key-17") == await bus.partition_of(topic, b"key-17")
        with pytest.raises(TopicNotFound):
            await bus.partition_of(unique("missing"), b"k")

    @requires("publish.partitions", "records.log_reader")
    @promise(
        "publishing.partitioner-places-keys",
        "With a `partitioner`, a key goes where its hash or function says, the same on every backend, and a key's "
        "messages keep their order.",
    )
    async def test_partitioner_places_keys(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=4)
        partitioners: dict[Partitioner, list[int]] = {
            name: [hashed % 4 for hashed in hashes] for name, hashes in _HASHES.items()
        }
        partitioners[_by_length] = [len(key) % 4 for key in _HASHED]
        for partitioner, wanted in partitioners.items():
            out = bus.topic(topic, partitioner=partitioner)
            assert [await bus.partition_of(topic, key, partitioner=partitioner) for key in _HASHED] == wanted
            receipts = await out.publish_batch(
                [OutboundMessage(b"x", key, attributes={"n": "1"} if n else None) for n, key in enumerate(_HASHED)]
            )
            assert [receipt.partition for receipt in receipts] == wanted
            assert (await out.publish(b"x", key=_HASHED[0], partition=3 - wanted[0])).partition == 3 - wanted[0]
            assert (await out.publish(b"x")).partition in range(4)
        out = bus.topic(topic, partitioner=_by_length)
        for future in [await out.enqueue(body, key="abc") for body in numbered(20)]:
            assert (await future).partition == 3
        start, stop = (await bus.log.bounds(topic))[3]
        found = [r.data async for batch in bus.log.read(topic, 3, start, stop) for r in batch if r.key == b"abc"]
        assert found == numbered(20)

    @requires("publish.partitions", "records.log_reader")
    @promise(
        "publishing.partitioner-failure-is-the-messages",
        "A partitioner that raises, or returns no partition of the topic, fails its message only.",
    )
    async def test_partitioner_failure_is_the_messages(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic(partitions=2)

        def odd(_: str, key: bytes, __: int) -> int:
            return {b"one": 1, b"far": 2, b"less": -1}[key]

        out = bus.topic(topic, partitioner=odd)
        with pytest.raises(PublishError) as raised:
            await out.publish_batch([OutboundMessage(b"x", key) for key in ("one", "far", "less", "unknown", "one")])
        outcomes = raised.value.outcomes
        assert [index for index, outcome in enumerate(outcomes) if isinstance(outcome, InvalidMessage)] == [1, 2, 3]
        assert [getattr(outcomes[index], "partition", None) for index in (0, 4)] == [1, 1]
        with pytest.raises(InvalidMessage, match="far"):
            await bus.partition_of(topic, "far", partitioner=odd)

    @promise(
        "publishing.unsupported-is-refused",
        "A feature that the backend lacks raises Unsupported; nothing is sent.",
    )
    async def test_unsupported_is_refused(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        can = bus.capabilities.publish
        features = {
            "deliver_at": OutboundMessage(b"x", deliver_at=datetime.now(UTC) + timedelta(seconds=60)),
            "ttl": OutboundMessage(b"x", ttl=60.0),
            "partitions": OutboundMessage(b"x", partition=0),
            "tombstones": OutboundMessage(None),
        }
        async with bus.messages(topic, subscription="readers") as inbox:
            for feature, message in features.items():
                if not getattr(can, feature):
                    with pytest.raises(Unsupported):
                        await bus.topic(topic).publish(message)
            if not can.partitions:
                with pytest.raises(Unsupported):
                    bus.topic(topic, partitioner="murmur2")
            if not can.partition_of:
                with pytest.raises(Unsupported):
                    await bus.partition_of(topic, "k")
            await nothing_more(inbox, harness.quiet)
