"""What receiving promises: every message reaches each subscription, in every shape, and is settled on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import pytest

from broker.errors import AlreadySettled
from broker.messages import Message, MessageBatch, OutboundMessage, SettleState
from broker.names import ephemeral
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, drain, eventually, nothing_more, numbered, once, take, until_seen

__all__ = ["Delivery", "Settling", "Shapes"]

current: ContextVar[str] = ContextVar("current", default="nobody")


class Delivery(ConformanceCase):
    """Who gets what."""

    @promise("messages.arrive-equal", "Messages come back with the body, key, attributes and id they were sent with.")
    async def test_arrive_equal(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        sent = [
            OutboundMessage(body, key=b"k-" + body, attributes={"n": body.decode(), "kind": "test"}, id=f"id-{n}")
            for n, body in enumerate(numbered(100))
        ]
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(sent)
            seen = await until_seen(inbox, numbered(100), harness.patience)
        got = {(m.id, m.topic, m.key, m.data, frozenset(m.attributes.items())) for m in seen}
        assert got == {(s.id, topic, s.key, s.data, frozenset(s.attributes.items())) for s in sent}
        assert len(seen) == 100

    @promise("messages.each-subscription-gets-all", "Two subscriptions of a topic each receive every message.")
    async def test_each_subscription_gets_all(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with (
            bus.messages(topic, subscription="first") as first,
            bus.messages(topic, subscription="second") as second,
        ):
            await bus.topic(topic).publish_batch(numbered(50))
            for inbox in (first, second):
                assert bodies(await until_seen(inbox, numbered(50), harness.patience)) == once(numbered(50))

    @promise("messages.consumers-share-a-subscription", "Twenty consumers of one subscription get each message once.")
    async def test_consumers_share_a_subscription(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        seen: list[Message[bytes]] = []
        complete = asyncio.Event()

        async def handle(message: Message[bytes]) -> None:
            seen.append(message)
            if len(seen) >= 1000:
                complete.set()

        inboxes = [bus.messages(topic, subscription="readers") for _ in range(20)]
        for inbox in inboxes:
            await inbox.__aenter__()
        work = [asyncio.ensure_future(inbox.receive(handle, concurrency=2)) for inbox in inboxes]
        await asyncio.gather(*(bus.topic(topic).publish_batch(numbered(50, f"p{n}")) for n in range(20)))
        async with asyncio.timeout(3 * harness.patience):
            await complete.wait()
        for inbox in inboxes:
            await inbox.close()
        await asyncio.gather(*work)
        assert bodies(seen) == once([body for n in range(20) for body in numbered(50, f"p{n}")])

    @promise("messages.subscription-remembers", "A subscription keeps what is published while nobody reads it.")
    async def test_subscription_remembers(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers"):
            pass
        await bus.topic(topic).publish_batch(numbered(20))
        async with bus.messages(topic, subscription="readers") as inbox:
            assert bodies(await until_seen(inbox, numbered(20), harness.patience)) == once(numbered(20))

    @promise(
        "messages.subscription-made-by-admin",
        "A subscription made by `ensure_subscription` keeps messages at once.",
    )
    async def test_subscription_made_by_admin(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "readers", start="latest")
        await bus.topic(topic).publish_batch(numbered(20))
        async with bus.messages(topic, subscription="readers", create=False) as inbox:
            assert bodies(await until_seen(inbox, numbered(20), harness.patience)) == once(numbered(20))

    @requires("records|messages.start_time")
    @promise(
        "messages.earliest-sees-history",
        "A new subscription that starts at the earliest gets what the topic holds.",
    )
    async def test_earliest_sees_history(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.topic(topic).publish_batch(numbered(20))
        for subscription in ("first", "second"):
            async with bus.messages(topic, subscription=subscription, start="earliest") as inbox:
                assert bodies(await until_seen(inbox, numbered(20), harness.patience)) == once(numbered(20))

    @requires("messages.start_latest")
    @promise(
        "messages.latest-skips-history",
        "A new subscription that starts at the latest gets only what comes after.",
    )
    async def test_latest_skips_history(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.topic(topic).publish_batch(numbered(20, "old"))
        async with bus.messages(topic, subscription="readers", start="latest") as inbox:
            await bus.topic(topic).publish_batch(numbered(5, "new"))
            assert bodies(await until_seen(inbox, numbered(5, "new"), harness.patience)) == once(numbered(5, "new"))
            await nothing_more(inbox, harness.quiet)

    @requires("messages.start_time")
    @promise(
        "messages.start-at-a-time",
        "A new subscription that starts at a time gets what the broker took from then on.",
    )
    async def test_start_at_a_time(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.topic(topic).publish_batch(numbered(5, "old"))
        async with bus.messages(topic, subscription="clock", start="earliest") as inbox:
            newest = max(m.broker_time for m in await take(inbox, 5, harness.patience) if m.broker_time is not None)
        await eventually(lambda: datetime.now(UTC) > newest, harness.patience, "the clock's next tick")
        boundary = datetime.now(UTC)
        await bus.topic(topic).publish_batch(numbered(5, "new"))
        async with bus.messages(topic, subscription="readers", start=boundary) as inbox:
            assert bodies(await until_seen(inbox, numbered(5, "new"), harness.patience)) == once(numbered(5, "new"))
            await nothing_more(inbox, harness.quiet)

    @requires("messages.ephemeral")
    @promise(
        "messages.ephemeral-is-ones-own",
        "Ephemeral consumers each get a copy from when they open, and miss what came while they were away.",
    )
    async def test_ephemeral_is_ones_own(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="kept"):
            pass
        async with (
            bus.messages(topic, subscription=ephemeral(), start="latest") as first,
            bus.messages(topic, subscription=ephemeral(), start="latest") as second,
        ):
            await bus.topic(topic).publish_batch(numbered(5, "seen"))
            for inbox in (first, second):
                assert bodies(await until_seen(inbox, numbered(5, "seen"), harness.patience)) == once(
                    numbered(5, "seen")
                )
        await bus.topic(topic).publish_batch(numbered(5, "missed"))
        async with bus.messages(topic, subscription=ephemeral(), start="latest") as third:
            await nothing_more(third, harness.quiet)

        async def only_the_kept() -> bool:
            return await bus.admin.subscriptions(topic) == ["kept"]

        await eventually(only_the_kept, harness.patience, "the end of the ephemeral subscriptions")

    @promise("messages.several-topics", "One consumer reads several topics, and each message tells its own.")
    async def test_several_topics(self, harness: Harness) -> None:
        bus, topics = await harness.bus(), [await harness.topic() for _ in range(3)]
        async with bus.messages(topics, subscription="readers") as inbox:
            for topic in topics:
                await bus.topic(topic).publish_batch(numbered(10, topic))
            wanted = [body for topic in topics for body in numbered(10, topic)]
            seen = await until_seen(inbox, wanted, harness.patience)
            assert bodies(seen) == once(wanted)
            assert all((message.data or b"").startswith(message.topic.encode()) for message in seen)

    @promise("messages.one-stops-the-other-goes-on", "Closing one of two consumers leaves the other receiving.")
    async def test_one_stops_the_other_goes_on(self, harness: Harness) -> None:
        bus, topics = await harness.bus(), [await harness.topic(), await harness.topic()]
        async with (
            bus.messages(topics[0], subscription="readers") as first,
            bus.messages(topics[1], subscription="readers") as second,
        ):
            await first.close()
            for topic in topics:
                await bus.topic(topic).publish_batch(numbered(10, topic))
            wanted = numbered(10, topics[1])
            assert bodies(await until_seen(second, wanted, harness.patience)) == once(wanted)

    @promise(
        "messages.slow-subscription-blocks-no-other",
        "A subscription that does not settle holds up no other one.",
    )
    async def test_slow_subscription_blocks_no_other(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with (
            bus.messages(topic, subscription="stuck", max_outstanding=1) as stuck,
            bus.messages(topic, subscription="moving") as moving,
        ):
            await bus.topic(topic).publish_batch(numbered(100))
            await take(stuck, 1, harness.patience)
            assert bodies(await until_seen(moving, numbered(100), harness.patience)) == once(numbered(100))

    @promise("messages.unsettled-is-nobody-elses", "A message that is held unsettled goes to nobody else meanwhile.")
    async def test_unsettled_is_nobody_elses(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with (
            bus.messages(topic, subscription="readers") as first,
            bus.messages(topic, subscription="readers") as second,
        ):
            await bus.topic(topic).publish(b"only one")
            waits = {asyncio.ensure_future(inbox.next_message(harness.patience)) for inbox in (first, second)}
            done, waiting = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result() is not None for task in done] == [True]
            _, still_waiting = await asyncio.wait(waiting, timeout=2 * harness.quiet)
            assert still_waiting == waiting, "The same message went to two consumers"
            for task in waiting:
                task.cancel()

    @promise("messages.foreign-object-is-reachable", "`native` is the client library's own object, not None.")
    async def test_foreign_object_is_reachable(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            assert message.native is not None
            assert message.id in repr(message)


class Settling(ConformanceCase):
    """Ack, nack and their repetition."""

    @promise("messages.ack-is-final", "An acked message never comes again, not even after the consumer was closed.")
    async def test_ack_is_final(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(10))
            for message in await take(inbox, 10, harness.patience):
                await message.ack()
                assert message.state in (SettleState.SETTLING, SettleState.SETTLED)
            await nothing_more(inbox, harness.quiet)
        async with bus.messages(topic, subscription="readers") as inbox:
            await nothing_more(inbox, harness.quiet)

    @promise(
        "messages.ack-is-final-past-the-lease",
        "An acked message does not come again when its lease would have ended.",
    )
    async def test_ack_is_final_past_the_lease(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(10))
            await until_seen(inbox, numbered(10), harness.patience)
            await nothing_more(inbox, 1.5 * harness.lease_seconds)

    @promise("messages.nack-redelivers", "Two nacked messages both come again, with the ids they had.")
    async def test_nack_redelivers(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(
                [OutboundMessage(b, key="k", attributes={"a": "b"}) for b in (b"1", b"2")]
            )
            first = await take(inbox, 2, harness.patience)
            for message in first:
                await message.nack(delay=0)
            again = await take(inbox, 2, harness.patience)
            assert {(m.id, m.data, m.key) for m in again} == {(m.id, m.data, m.key) for m in first}
            assert all(dict(message.attributes) == {"a": "b"} for message in again)

    @promise("messages.nack-delay-is-kept", "`nack(delay=)` brings a message again after the delay, and not before.")
    async def test_nack_delay_is_kept(self, harness: Harness) -> None:
        bus, topic, delay = await harness.bus(), await harness.topic(), 0.8
        loop = asyncio.get_running_loop()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            asked = loop.time()
            await message.nack(delay=delay)
            await take(inbox, 1, harness.patience)
            assert loop.time() - asked >= delay - 0.02

    @promise("messages.delayed-blocks-no-other", "While one message waits out its delay, others come.")
    async def test_delayed_blocks_no_other(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"late")
            (late,) = await take(inbox, 1, harness.patience)
            await late.nack(delay=1.0)
            await bus.topic(topic).publish_batch(numbered(20))
            seen = await until_seen(inbox, [*numbered(20), b"late"], harness.patience)
            assert seen[-1].data == b"late"

    @promise("messages.nacks-among-many", "Two nacks among a hundred messages: all hundred still arrive.")
    async def test_nacks_among_many(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(100))
            for message in await take(inbox, 2, harness.patience):
                await message.nack(delay=0)
            assert bodies(await until_seen(inbox, numbered(100), harness.patience)) == once(numbered(100))

    @promise(
        "messages.go-on-after-many-nacks",
        "After three consumers each nacked again and again, everything arrives.",
    )
    async def test_go_on_after_many_nacks(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "readers")
        await bus.topic(topic).publish_batch(numbered(30))
        for _ in range(3):
            async with bus.messages(topic, subscription="readers") as inbox:
                for _ in range(50):
                    (message,) = await take(inbox, 1, harness.patience)
                    await message.nack(delay=0)
        async with bus.messages(topic, subscription="readers") as inbox:
            assert bodies(await until_seen(inbox, numbered(30), harness.patience)) == once(numbered(30))

    @promise("messages.settle-twice", "Settling twice the same way is harmless; the other way raises AlreadySettled.")
    async def test_settle_twice(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch([b"acked", b"nacked"])
            for message in await take(inbox, 2, harness.patience):
                if message.data == b"acked":
                    await asyncio.gather(message.ack(), message.ack())
                    await message.ack()
                    with pytest.raises(AlreadySettled):
                        await message.nack()
                else:
                    await message.nack(delay=0)
                    await message.nack(delay=0)
                    with pytest.raises(AlreadySettled):
                        await message.ack()
            assert bodies(await drain(inbox, 2 * harness.quiet)) == once([b"nacked"])

    @requires("messages.delivery_attempt")
    @promise(
        "messages.attempts-are-counted",
        "`delivery_attempt` is 1 at first and grows by one with every redelivery.",
    )
    async def test_attempts_are_counted(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            for attempt in (1, 2, 3):
                (message,) = await take(inbox, 1, harness.patience)
                assert message.delivery_attempt == attempt
                await message.nack(delay=0)

    @promise("messages.batch-ack", "`batch.ack()` settles the whole batch and skips what was settled before.")
    async def test_batch_ack(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(20))
            nacked: bytes | None = None
            count = 0
            while count < 20:
                batch = await inbox.next_batch(10, timeout=harness.patience)
                assert 1 <= len(batch) <= 10
                count += len(batch)
                if nacked is None:
                    nacked = batch[0].data
                    await batch[0].nack(delay=0.5)
                await batch.ack()
            assert [message.data for message in await drain(inbox, 0.5 + 2 * harness.quiet)] == [nacked]

    @promise("messages.batch-nack", "`batch.nack()` brings every message of the batch again.")
    async def test_batch_nack(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(20))
            batch = await inbox.next_batch(10, timeout=harness.patience)
            assert batch
            await batch.nack(delay=0)
            assert bodies(await until_seen(inbox, numbered(20), harness.patience)) == once(numbered(20))

    @promise("messages.block-acks", "`async with message` acks when the block ends.")
    async def test_block_acks(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            async with message:
                pass
            await eventually(lambda: message.state is SettleState.SETTLED, harness.patience, "the ack")
        async with bus.messages(topic, subscription="readers") as inbox:
            await nothing_more(inbox, harness.quiet)

    @promise("messages.block-retries", "`async with message` has a message come again when its block raises.")
    async def test_block_retries(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            async with message:
                raise ValueError("raised by the test")
            (again,) = await take(inbox, 1, harness.patience)
            assert again.id == message.id


Reader = Callable[[Any, int], Awaitable[list[bytes | None]]]


class Shapes(ConformanceCase):
    """The six ways of consuming."""

    async def _check(self, harness: Harness, read: Reader) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(60))
            async with asyncio.timeout(2 * harness.patience):
                assert sorted(body or b"" for body in await read(inbox, 60)) == numbered(60)
        async with bus.messages(topic, subscription="readers") as inbox:
            await nothing_more(inbox, harness.quiet)

    @promise("messages.shape-next-message", "`next_message` hands over every message, one at a time.")
    async def test_shape_next_message(self, harness: Harness) -> None:
        async def read(inbox: Any, count: int) -> list[bytes | None]:
            return [message.data for message in await until_seen(inbox, numbered(count), harness.patience)]

        await self._check(harness, read)

    @promise("messages.shape-next-batch", "`next_batch` hands over what is there, at least one and at most as asked.")
    async def test_shape_next_batch(self, harness: Harness) -> None:
        async def read(inbox: Any, count: int) -> list[bytes | None]:
            seen: list[bytes | None] = []
            while len(seen) < count:
                batch: MessageBatch[bytes] = await inbox.next_batch(7, timeout=harness.patience)
                assert 1 <= len(batch) <= 7
                await batch.ack()
                seen.extend(message.data for message in batch)
            return seen

        await self._check(harness, read)

    @promise(
        "messages.shape-async-for",
        "`async for message` hands over every message, and `break` needs no clean-up.",
    )
    async def test_shape_async_for(self, harness: Harness) -> None:
        async def read(inbox: Any, count: int) -> list[bytes | None]:
            seen: list[bytes | None] = []
            while len(seen) < count:
                async for message in inbox:
                    async with message:
                        seen.append(message.data)
                    if len(seen) % 20 == 0:
                        break
            return seen

        await self._check(harness, read)

    @promise("messages.shape-batches", "`async for batch in batches()` hands over every message in batches.")
    async def test_shape_batches(self, harness: Harness) -> None:
        async def read(inbox: Any, count: int) -> list[bytes | None]:
            seen: list[bytes | None] = []
            async for batch in inbox.batches(9):
                assert 1 <= len(batch) <= 9
                await batch.ack()
                seen.extend(message.data for message in batch)
                if len(seen) >= count:
                    break
            return seen

        await self._check(harness, read)

    @promise("messages.shape-receive", "`receive` runs the handler on every message and acks it when it returns.")
    async def test_shape_receive(self, harness: Harness) -> None:
        async def read(inbox: Any, count: int) -> list[bytes | None]:
            seen: list[bytes | None] = []

            async def handle(message: Message[bytes]) -> None:
                seen.append(message.data)
                if len(seen) == count:
                    closing.append(asyncio.ensure_future(inbox.close()))

            closing: list[asyncio.Future[None]] = []
            await inbox.receive(handle, concurrency=4)
            await closing[0]
            return seen

        await self._check(harness, read)

    @promise("messages.shape-receive-batches", "`receive_batches` runs the handler on batches and acks them.")
    async def test_shape_receive_batches(self, harness: Harness) -> None:
        async def read(inbox: Any, count: int) -> list[bytes | None]:
            seen: list[bytes | None] = []

            async def handle(batch: MessageBatch[bytes]) -> None:
                assert 1 <= len(batch) <= 8
                seen.extend(message.data for message in batch)
                if len(seen) == count:
                    closing.append(asyncio.ensure_future(inbox.close()))

            closing: list[asyncio.Future[None]] = []
            await inbox.receive_batches(handle, max_messages=8, concurrency=2)
            await closing[0]
            return seen

        await self._check(harness, read)

    @promise(
        "messages.batch-handler-tells-each",
        "A batch handler that fails some messages has those, and only those, again.",
    )
    async def test_batch_handler_tells_each(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        calls: list[bytes | None] = []
        complete = asyncio.Event()
        unlucky = numbered(20)[7]

        async def handle(batch: MessageBatch[bytes]) -> Sequence[BaseException | None]:
            calls.extend(message.data for message in batch)
            if len(calls) >= 21:
                complete.set()
            return [
                ValueError("raised by the test") if message.data == unlucky and calls.count(unlucky) == 1 else None
                for message in batch
            ]

        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(20))
            work = asyncio.ensure_future(inbox.receive_batches(handle, max_messages=10))
            async with asyncio.timeout(harness.patience):
                await complete.wait()
            await inbox.close()
            await work
        assert sorted(body or b"" for body in calls) == sorted([*numbered(20), unlucky])

    @promise(
        "messages.concurrency-is-bounded-and-reached",
        "`receive(concurrency=n)` runs n handlers at once, never more.",
    )
    async def test_concurrency_is_bounded_and_reached(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        running = peak = handled = 0
        together, complete = asyncio.Event(), asyncio.Event()

        async def handle(_: Message[bytes]) -> None:
            nonlocal running, peak, handled
            running += 1
            peak = max(peak, running)
            if running == 5:
                together.set()
            await together.wait()
            await asyncio.sleep(0)
            running -= 1
            handled += 1
            if handled == 50:
                complete.set()

        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(50))
            work = asyncio.ensure_future(inbox.receive(handle, concurrency=5))
            async with asyncio.timeout(harness.patience):
                await complete.wait()
            await inbox.close()
            await work
        assert peak == 5

    @promise("messages.handlers-are-isolated", "Context variables set by one handler are not seen by another's.")
    async def test_handlers_are_isolated(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        before: list[str] = []
        complete = asyncio.Event()
        current.set("the test")

        async def handle(message: Message[bytes]) -> None:
            before.append(current.get())
            current.set(message.id)
            await asyncio.sleep(0)
            assert current.get() == message.id
            if len(before) == 20:
                complete.set()

        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(20))
            work = asyncio.ensure_future(inbox.receive(handle, concurrency=2))
            async with asyncio.timeout(harness.patience):
                await complete.wait()
            await inbox.close()
            await work
        assert before == ["the test"] * 20

    @promise(
        "messages.concurrent-callers-share",
        "Ten tasks calling `next_message` get every message once between them.",
    )
    async def test_concurrent_callers_share(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        seen: list[Message[bytes]] = []

        async with bus.messages(topic, subscription="readers") as inbox:

            async def call() -> None:
                while len(seen) < 200 and (message := await inbox.next_message(2 * harness.quiet)) is not None:
                    seen.append(message)
                    await message.ack()

            publishing = asyncio.ensure_future(bus.topic(topic).publish_batch(numbered(200)))
            await asyncio.gather(*(call() for _ in range(10)))
            await publishing
        assert bodies(seen) == once(numbered(200))
