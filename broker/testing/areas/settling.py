"""Conformance tests of settling: each message on its own, and redelivery only without an ack."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import AlreadySettled
from broker.messages import SettleState
from broker.outbound import OutboundMessage
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, eventually, nothing_more, numbered, once, take, until_seen

__all__ = ["Settling"]


class Settling(ConformanceCase):
    """Ack and nack."""

    @promise("messages.ack-is-final", "An acked message is never redelivered, not even after the consumer was closed.")
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
        "An acked message is not redelivered at the time when its lease would have ended.",
    )
    async def test_ack_is_final_past_the_lease(self, harness: Harness) -> None:
        bus, topic = await harness.connect(short_lease=True), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(10))
            await until_seen(inbox, numbered(10), harness.patience)
            await nothing_more(inbox, 1.5 * harness.lease_seconds)

    @promise("messages.nack-redelivers", "Two nacked messages are both redelivered, with the same ids.")
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

    @promise("messages.nack-delay-is-kept", "`nack(delay=)` redelivers a message after the delay, and not before.")
    async def test_nack_delay_is_kept(self, harness: Harness) -> None:
        bus, topic, delay = await harness.bus(), await harness.topic(), 0.8
        loop = asyncio.get_running_loop()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            nacked = loop.time()
            await message.nack(delay=delay)
            await take(inbox, 1, harness.patience)
            assert loop.time() - nacked >= delay - 0.02

    @promise("messages.delayed-does-not-block", "While one message waits for its delay, others arrive.")
    async def test_delayed_does_not_block(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"late")
            (late,) = await take(inbox, 1, harness.patience)
            await late.nack(delay=1.0)
            await bus.topic(topic).publish_batch(numbered(20))
            seen = await until_seen(inbox, [*numbered(20), b"late"], harness.patience)
            assert seen[-1].data == b"late"

    @promise("messages.nacks-among-many", "With two nacks among a hundred messages, all hundred arrive.")
    async def test_nacks_among_many(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(100))
            for message in await take(inbox, 2, harness.patience):
                await message.nack(delay=0)
            assert bodies(await until_seen(inbox, numbered(100), harness.patience)) == once(numbered(100))

    @requires("messages.unlimited_deliveries")
    @promise(
        "messages.recover-after-many-nacks",
        "After three consumers each nacked repeatedly, all messages arrive.",
    )
    async def test_recover_after_many_nacks(self, harness: Harness) -> None:
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

    @promise(
        "messages.settle-twice", "Settling twice the same way does no harm; settling differently raises AlreadySettled."
    )
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
                    with pytest.raises(AlreadySettled):
                        await message.reject()
                else:
                    await message.nack(delay=0)
                    await message.nack(delay=0)
                    with pytest.raises(AlreadySettled):
                        await message.ack()
            assert bodies(await until_seen(inbox, [b"nacked"], harness.patience)) == once([b"nacked"])
            await nothing_more(inbox, harness.quiet)

    @requires("messages.delivery_attempt")
    @promise(
        "messages.attempts-are-counted",
        "`delivery_attempt` starts at 1 and grows by one with every redelivery.",
    )
    async def test_attempts_are_counted(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            for attempt in (1, 2, 3):
                (message,) = await take(inbox, 1, harness.patience)
                assert message.delivery_attempt == attempt
                await message.nack(delay=0)

    @promise("messages.batch-ack", "`batch.ack()` acks all messages of the batch that are still open.")
    async def test_batch_ack(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(20))
            nacked: list[bytes] = []
            count = 0
            while count < 20:
                batch = await inbox.next_batch(10, timeout=harness.patience)
                assert 1 <= len(batch) <= 10
                count += len(batch)
                if not nacked:
                    nacked = [batch[0].data or b""]
                    await batch[0].nack(delay=0.5)
                await batch.ack()
            assert bodies(await until_seen(inbox, nacked, harness.patience)) == once(nacked)
            await nothing_more(inbox, harness.quiet)

    @promise("messages.batch-nack", "`batch.nack()` redelivers every message of the batch.")
    async def test_batch_nack(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(20))
            batch = await inbox.next_batch(10, timeout=harness.patience)
            assert batch
            await batch.nack(delay=0)
            assert bodies(await until_seen(inbox, numbered(20), harness.patience)) == once(numbered(20))

    @promise("messages.block-acks", "`async with message` acks the message when the block ends.")
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

    @promise("messages.block-retries", "`async with message` redelivers the message when its block raises.")
    async def test_block_retries(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            async with message:
                raise ValueError("raised by the test")
            (again,) = await take(inbox, 1, harness.patience)
            assert again.id == message.id
