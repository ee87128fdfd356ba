"""Conformance tests of what opening and closing leaves in the process: nothing, however often it is done."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import broker.blocking
from broker.errors import TopicNotFound
from broker.messages import Message
from broker.names import ephemeral
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness, unique
from broker.testing.leftovers import Leftovers
from broker.testing.promises import promise, requires
from broker.testing.waiting import read, take

__all__ = ["Leaks"]

_SECONDS = 3600.0
"""Far more than any number of cycles takes."""


class Leaks(ConformanceCase):
    """Cycles of opening and closing leave no object, task or thread."""

    @promise(
        "leaks.message-consumers",
        "Message consumers that open and close on one bus, however often, leave no object, task or thread.",
        seconds=_SECONDS,
    )
    async def test_message_consumers(self, harness: Harness) -> None:
        topic, dead, left = await harness.topic(), await harness.topic(), Leftovers()
        bus = await harness.connect(wrap=left)
        outlet = (await harness.bus()).topic(topic)

        async def cycle() -> None:
            async with left.note(bus.messages(topic, subscription="readers", dead_letter=dead)) as inbox:
                await outlet.publish_batch([b"kept", b"bad"])
                good, bad = await take(inbox, 2, harness.patience)
                await good.ack()
                await bad.reject("bad")

        await left.none_of(cycle, harness.cycles, harness.patience)

    @promise(
        "leaks.handlers",
        "Consumers with handlers, which end by `stop_when_idle`, leave nothing.",
        seconds=_SECONDS,
    )
    async def test_handlers(self, harness: Harness) -> None:
        topic, left = await harness.topic(), Leftovers()
        bus = await harness.connect(wrap=left)
        outlet = (await harness.bus()).topic(topic)

        async def handle(_: Message[bytes]) -> None: ...

        async def cycle() -> None:
            await outlet.publish(b"x")
            inbox = left.note(bus.messages(topic, subscription="readers", stop_when_idle=harness.quiet))
            async with inbox:
                await inbox.receive(handle)

        await left.none_of(cycle, harness.cycles, harness.patience)

    @requires("messages.ephemeral")
    @promise("leaks.ephemeral-consumers", "Consumers of ephemeral subscriptions leave nothing.", seconds=_SECONDS)
    async def test_ephemeral_consumers(self, harness: Harness) -> None:
        topic, left = await harness.topic(), Leftovers()
        bus = await harness.connect(wrap=left)

        async def cycle() -> None:
            async with left.note(bus.messages(topic, subscription=ephemeral(), start="latest")):
                pass

        await left.none_of(cycle, harness.cycles, harness.patience)

    @promise(
        "leaks.failed-openings",
        "Consumers whose opening fails or is cancelled leave nothing.",
        seconds=_SECONDS,
    )
    async def test_failed_openings(self, harness: Harness) -> None:
        topic, missing, left = await harness.topic(), unique("missing"), Leftovers()
        bus = await harness.connect(wrap=left)
        async with bus.messages(topic, subscription="readers"):
            pass

        async def cycle() -> None:
            with suppress(TopicNotFound):
                await left.note(bus.messages([topic, missing], subscription="readers")).__aenter__()
            opening = asyncio.ensure_future(left.note(bus.messages(topic, subscription="readers")).__aenter__())
            await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait({opening})
            if not opening.cancelled():
                await opening.result().close()

        await left.none_of(cycle, harness.cycles, harness.patience)

    @requires("messages.ordered_delivery")
    @promise("leaks.ordered-consumers", "Consumers with `ordered_by_key=True` leave nothing.", seconds=_SECONDS)
    async def test_ordered_consumers(self, harness: Harness) -> None:
        topic, left = await harness.topic(), Leftovers()
        bus = await harness.connect(wrap=left)
        outlet = (await harness.bus()).topic(topic)

        async def cycle() -> None:
            async with left.note(bus.messages(topic, subscription="readers", ordered_by_key=True)) as inbox:
                await outlet.publish(b"x", key="k")
                for message in await take(inbox, 1, harness.patience):
                    await message.ack()

        await left.none_of(cycle, harness.cycles, harness.patience)

    @requires("records")
    @promise(
        "leaks.record-consumers",
        "Consumers of records, and of records as messages, leave nothing.",
        seconds=_SECONDS,
    )
    async def test_record_consumers(self, harness: Harness) -> None:
        topic, left = await harness.topic(partitions=1), Leftovers()
        bus = await harness.connect(wrap=left)
        outlet = (await harness.bus()).topic(topic)

        async def cycle() -> None:
            await outlet.publish(b"x")
            async with left.note(bus.records(topic, group="readers")) as log:
                for record in await read(log, 1, harness.patience):
                    await record.commit()
            async with left.note(bus.records(topic, group="workers").as_messages()) as inbox:
                for message in await take(inbox, 1, harness.patience):
                    await message.ack()

        await left.none_of(cycle, harness.cycles, harness.patience)

    @requires("records.log_reader")
    @promise("leaks.log-reads", "Reads of the log, finished or abandoned, leave nothing.", seconds=_SECONDS)
    async def test_log_reads(self, harness: Harness) -> None:
        topic, left = await harness.topic(partitions=1), Leftovers()
        bus = await harness.connect(wrap=left)
        outlet = (await harness.bus()).topic(topic)
        await outlet.publish_batch([b"x"] * 10)

        async def cycle() -> None:
            async for _ in left.note(bus.log.read(topic, 0)):
                pass
            async for _ in left.note(bus.log.read(topic, 0, max_records=1)):
                break

        await left.none_of(cycle, harness.cycles, harness.patience)

    @requires("records.follow")
    @promise("leaks.followed-logs", "Followed logs that were closed leave nothing.", seconds=_SECONDS)
    async def test_followed_logs(self, harness: Harness) -> None:
        topic, left = await harness.topic(partitions=1), Leftovers()
        bus = await harness.connect(wrap=left)
        outlet = (await harness.bus()).topic(topic)

        async def cycle() -> None:
            await outlet.publish(b"x")
            async with left.note(bus.log.follow(topic)) as log:
                async for _ in log.batches():
                    if not log.behind:
                        break

        await left.none_of(cycle, harness.cycles, harness.patience)

    @promise(
        "leaks.publishers",
        "Topics that were closed leave nothing, also with a codec that equals no other.",
        seconds=_SECONDS,
    )
    async def test_publishers(self, harness: Harness) -> None:
        name, left = await harness.topic(), Leftovers()
        bus = await harness.connect(wrap=left)

        async def cycle() -> None:
            for topic in (bus.topic(name), bus.topic(name, left.note(_Plain()))):
                left.note(topic)
                await topic.publish(b"x")
                await topic.publish_batch([b"x"])
                await topic.enqueue(b"x")
                await topic.close()

        await left.none_of(cycle, harness.cycles, harness.patience)

    @requires("publish.transactions")
    @promise("leaks.transactional-publishers", "Transactional publishers leave nothing.", seconds=_SECONDS)
    async def test_transactional_publishers(self, harness: Harness) -> None:
        topic, name, left = await harness.topic(), unique("tx"), Leftovers()
        bus = await harness.connect(wrap=left)

        async def cycle() -> None:
            async with bus.transactional_publisher(name) as publisher:
                left.note(publisher)
                async with publisher.transaction() as tx:
                    await tx.publish(topic, b"x")

        await left.none_of(cycle, harness.cycles, harness.patience)

    @promise("leaks.buses", "A bus that was used and closed leaves nothing.", seconds=_SECONDS)
    async def test_buses(self, harness: Harness) -> None:
        topic, left = await harness.topic(), Leftovers()

        async def cycle() -> None:
            async with left.note(harness.open_bus(harness.url(), left)) as bus:
                inbox = left.note(bus.messages(topic, subscription="readers"))
                await inbox.__aenter__()
                await bus.topic(topic).publish(b"x")
                (message,) = await take(inbox, 1, harness.patience)
                # A server in the process of the test would keep the message.
                await message.ack()

        await left.none_of(cycle, harness.cycles, harness.patience)

    @promise(
        "leaks.blocking-buses",
        "A bus of `broker.blocking`, its consumers and its topics leave nothing.",
        seconds=_SECONDS,
    )
    async def test_blocking_buses(self, harness: Harness) -> None:
        topic, left = await harness.topic(), Leftovers()

        def work() -> None:
            with left.note(broker.blocking.Bus(harness.open_bus(harness.url(), left))) as bus:
                for _ in range(2):
                    outlet = left.note(bus.topic(topic, left.note(_Plain())))
                    with left.note(bus.messages(topic, subscription="readers")) as inbox:
                        outlet.publish(b"x")
                        outlet.close()
                        message = inbox.next_message(timeout=harness.patience)
                        assert message is not None
                        message.ack()

        await left.none_of(lambda: asyncio.to_thread(work), harness.cycles, harness.patience)


class _Plain:
    """A codec that equals no other."""

    def encode(self, payload: bytes) -> bytes:
        return payload

    def decode(self, data: bytes | None) -> bytes:
        return data or b""
