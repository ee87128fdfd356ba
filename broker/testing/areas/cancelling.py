"""Conformance tests of cancellation: no message is lost, no settlement undone."""

from __future__ import annotations

import asyncio
import random

import pytest

from broker.messages import Message
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise
from broker.testing.waiting import bodies, nothing_more, numbered, once, take, until_seen

__all__ = ["Cancelling"]


class Cancelling(ConformanceCase):
    """The effects of cancellation."""

    @promise(
        "cancel.waiters-lose-nothing", "Cancelling waiting calls at random while messages arrive loses no message."
    )
    async def test_waiters_lose_nothing(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        chance = random.Random(7)
        seen: list[Message[bytes]] = []
        idle = 0

        def collect(task: asyncio.Future[Message[bytes] | None]) -> None:
            nonlocal idle
            if not task.cancelled():
                message = task.result()
                if message is None:
                    idle += 1
                else:
                    seen.append(message)

        async with bus.messages(topic, subscription="readers") as inbox:
            publishing = asyncio.ensure_future(bus.topic(topic).publish_batch(numbered(200)))
            for _ in range(300):
                calls = [asyncio.ensure_future(inbox.next_message(timeout=harness.quiet)) for _ in range(2)]
                for call in calls:
                    call.add_done_callback(collect)
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                calls[chance.randrange(2)].cancel()
                await asyncio.wait(calls)
                if len(seen) >= 200 or (idle > 5 and publishing.done()):
                    break
            await publishing
            while len(seen) < 200:
                seen += await take(inbox, 1, harness.patience)
            await nothing_more(inbox, harness.quiet)
            assert bodies(seen) == once(numbered(200))

    @promise("cancel.one-of-two-waiters", "Cancelling one of two waiting calls leaves the message to the other.")
    async def test_one_of_two_waiters(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            first = asyncio.ensure_future(inbox.next_message())
            second = asyncio.ensure_future(inbox.next_message())
            await asyncio.wait({first, second}, timeout=harness.quiet)
            first.cancel()
            await bus.topic(topic).publish(b"x")
            async with asyncio.timeout(harness.patience):
                message = await second
            assert message is not None and message.data == b"x"

    @promise("cancel.batch-loses-nothing", "A cancelled `next_batch` leaves its messages to the next call.")
    async def test_batch_loses_nothing(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            publishing = asyncio.ensure_future(bus.topic(topic).publish_batch(numbered(100)))
            for _ in range(50):
                call = asyncio.ensure_future(inbox.next_batch(10))
                await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait({call})
                if not call.cancelled():
                    await call.result().nack(delay=0)
            await publishing
            assert set(bodies(await until_seen(inbox, numbered(100), harness.patience))) == set(numbered(100))

    @promise(
        "cancel.receive-releases",
        "Cancelling `receive` releases its messages: none is acked, none is lost.",
    )
    async def test_receive_releases(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        started = asyncio.Event()

        async def handle(_: Message[bytes]) -> None:
            started.set()
            await asyncio.Event().wait()

        async with bus.messages(topic, subscription="readers", prefetch=10) as inbox:
            receiving = asyncio.ensure_future(inbox.receive(handle, concurrency=3))
            await bus.topic(topic).publish_batch(numbered(10))
            async with asyncio.timeout(harness.patience):
                await started.wait()
                receiving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await receiving
        async with bus.messages(topic, subscription="readers") as again:
            assert bodies(await until_seen(again, numbered(10), harness.patience)) == once(numbered(10))

    @promise("cancel.block-releases", "A cancelled `async with message` block releases the message without an ack.")
    async def test_block_releases(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        entered = asyncio.Event()

        async def work(message: Message[bytes]) -> None:
            async with message:
                entered.set()
                await asyncio.Event().wait()

        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            task = asyncio.ensure_future(work(message))
            await entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert bodies(await until_seen(inbox, [b"x"], harness.patience)) == once([b"x"])

    @promise("cancel.ack-completes", "A cancelled call to `ack` still acks the message.")
    async def test_ack_completes(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(50))
            acks = [asyncio.ensure_future(message.ack()) for message in await take(inbox, 50, harness.patience)]
            await asyncio.sleep(0)
            for ack in acks:
                ack.cancel()
            await asyncio.wait(acks)
        async with bus.messages(topic, subscription="readers") as again:
            await nothing_more(again, harness.quiet)

    @promise(
        "cancel.break-loses-nothing", "`break` out of an iteration leaves the remaining messages to the next reader."
    )
    async def test_break_loses_nothing(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        seen: list[Message[bytes]] = []
        async with bus.messages(topic, subscription="readers", prefetch=20) as inbox:
            await bus.topic(topic).publish_batch(numbered(40))
            async for message in inbox:
                await message.ack()
                seen.append(message)
                if len(seen) == 10:
                    break
            async for batch in inbox.batches(5):
                await batch.ack()
                seen.extend(batch)
                break
        async with bus.messages(topic, subscription="readers") as again:
            rest = [body for body in numbered(40) if body not in bodies(seen)]
            seen += await until_seen(again, rest, harness.patience)
        assert bodies(seen) == once(numbered(40))
