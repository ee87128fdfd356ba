"""Conformance tests of closing: nothing fetched is lost, and the close ends in time."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from broker.consuming.runner import serve
from broker.errors import Closed, LeaseLost
from broker.messages import Message
from broker.protocols import MessageStream
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise, requires
from broker.testing.waiting import bodies, eventually, nothing_more, numbered, once, take, until_seen

__all__ = ["Closing"]


class Closing(ConformanceCase):
    """The effects of closing a consumer or a bus."""

    @promise("close.releases-the-buffer", "A close releases fetched and undelivered messages at once.")
    async def test_releases_the_buffer(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers", prefetch=50) as inbox:
            await bus.topic(topic).publish_batch(numbered(50))
            acked = await take(inbox, 5, harness.patience)
            for message in acked:
                await message.ack()
        async with bus.messages(topic, subscription="readers") as inbox:
            rest = await take(inbox, 45, harness.patience)
            assert bodies([*acked, *rest]) == once(numbered(50))

    @promise(
        "close.ignores-forgotten-messages",
        "A close does not wait for a message that the application forgot to settle; the message is redelivered.",
    )
    async def test_ignores_forgotten_messages(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        inbox = bus.messages(topic, subscription="readers", close_timeout=30)
        async with inbox:
            await bus.topic(topic).publish_batch(numbered(3))
            await take(inbox, 3, harness.patience)
            async with asyncio.timeout(5):
                await inbox.close()
        async with bus.messages(topic, subscription="readers") as again:
            assert bodies(await until_seen(again, numbered(3), harness.patience)) == once(numbered(3))

    @promise("close.waits-for-running-handlers", "A close waits for running handlers, and their messages are acked.")
    async def test_waits_for_running_handlers(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        started, finish = asyncio.Event(), asyncio.Event()
        ended: list[bytes | None] = []

        async def handle(message: Message[bytes]) -> None:
            started.set()
            await finish.wait()
            ended.append(message.data)

        async with bus.messages(topic, subscription="readers") as inbox:
            receiving = asyncio.ensure_future(inbox.receive(handle))
            await bus.topic(topic).publish(b"x")
            async with asyncio.timeout(harness.patience):
                await started.wait()
                closing = asyncio.ensure_future(inbox.close())
                await asyncio.wait({closing}, timeout=harness.quiet)
                assert not closing.done()
                finish.set()
                await closing
                await receiving
        assert ended == [b"x"]
        async with bus.messages(topic, subscription="readers") as inbox:
            await nothing_more(inbox, harness.quiet)

    @promise(
        "close.has-a-deadline",
        "A handler that never returns is cancelled after `close_timeout`, and its message is redelivered.",
    )
    async def test_has_a_deadline(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def handle(_: Message[bytes]) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async with bus.messages(topic, subscription="readers", close_timeout=0.3) as inbox:
            receiving = asyncio.ensure_future(inbox.receive(handle))
            await bus.topic(topic).publish(b"x")
            async with asyncio.timeout(harness.patience):
                await started.wait()
                await inbox.close()
                await receiving
        assert cancelled.is_set()
        async with bus.messages(topic, subscription="readers") as inbox:
            assert bodies(await until_seen(inbox, [b"x"], harness.patience)) == once([b"x"])

    @requires("messages.subscription_admin")
    @promise("close.deletes-nothing", "A close deletes neither the subscription nor the topic.")
    async def test_deletes_nothing(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers"):
            pass
        assert await bus.admin.subscriptions(topic) == ["readers"]
        assert topic in await bus.admin.topics()

    @promise("close.is-idempotent", "Closing twice, in turn or concurrently, does no harm.")
    async def test_close_is_idempotent(self, harness: Harness) -> None:
        bus, topic = await harness.connect(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await asyncio.gather(inbox.close(), inbox.close(), inbox.close())
            await inbox.close()
        await asyncio.gather(bus.close(), bus.close())
        await bus.close()

    @promise(
        "close.bus-closes-its-consumers",
        "Closing the bus closes its consumers and releases their messages.",
    )
    async def test_bus_closes_its_consumers(self, harness: Harness) -> None:
        bus, other, topic = await harness.connect(), await harness.bus(), await harness.topic()
        inbox = bus.messages(topic, subscription="readers", prefetch=10)
        await inbox.__aenter__()
        await bus.topic(topic).publish_batch(numbered(10))
        await take(inbox, 2, harness.patience)
        waiting = asyncio.ensure_future(_drain(inbox))
        await bus.close()
        async with asyncio.timeout(harness.patience):
            await waiting
        with pytest.raises(Closed):
            await inbox.next_message(timeout=0)
        async with other.messages(topic, subscription="readers") as again:
            await until_seen(again, numbered(10), harness.patience)

    @promise(
        "close.late-settle-raises",
        "Settling a message or batch after a close released it raises LeaseLost, which names the close.",
    )
    async def test_late_settle_raises(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(2))
            message = await inbox.next_message(timeout=harness.patience)
            batch = await inbox.next_batch(timeout=harness.patience)
            assert message is not None and len(batch) == 1
        for late in (message.ack, message.nack, message.reject, batch[0].ack, batch.ack, batch[0].nack):
            with pytest.raises(LeaseLost, match="its consumer closed") as caught:
                await late()
            assert "max_lease" not in caught.value.advice

    @promise("close.flushes-acks", "Acks sent right before a close are carried out.")
    async def test_flushes_acks(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(100))
            for message in await take(inbox, 100, harness.patience):
                await message.ack()
        async with bus.messages(topic, subscription="readers") as inbox:
            await nothing_more(inbox, harness.quiet)

    @promise(
        "close.after-an-exception",
        "Leaving the block by an exception closes the consumer and releases its messages.",
    )
    async def test_after_an_exception(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        with pytest.raises(ZeroDivisionError):
            async with bus.messages(topic, subscription="readers", prefetch=10) as inbox:
                await bus.topic(topic).publish_batch(numbered(10))
                await take(inbox, 3, harness.patience)
                raise ZeroDivisionError
        async with bus.messages(topic, subscription="readers") as again:
            assert bodies(await until_seen(again, numbered(10), harness.patience)) == once(numbered(10))

    @requires("messages.unlimited_deliveries")
    @promise(
        "close.many-short-lived-consumers",
        "Many short-lived consumers lose no message and see no acked message again.",
    )
    async def test_many_short_lived_consumers(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "readers")
        await bus.topic(topic).publish_batch(numbered(200))
        seen: list[Message[bytes]] = []
        while len(seen) < 200:
            async with bus.messages(topic, subscription="readers", prefetch=20) as inbox:
                for message in await take(inbox, 20, harness.patience):
                    await message.ack()
                    seen.append(message)
        assert bodies(seen) == once(numbered(200))

    @promise(
        "close.ten-at-once",
        "Ten consumers that open and close at the same time lose nothing: all later messages arrive.",
    )
    async def test_ten_at_once(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "readers")

        async def visit() -> None:
            async with bus.messages(topic, subscription="readers"):
                pass

        await asyncio.gather(*(visit() for _ in range(10)))
        await bus.topic(topic).publish_batch(numbered(50))
        async with bus.messages(topic, subscription="readers") as inbox:
            assert bodies(await until_seen(inbox, numbered(50), harness.patience)) == once(numbered(50))

    @promise("close.leaves-no-task", "A closed bus leaves no task behind.")
    async def test_leaves_no_task(self, harness: Harness) -> None:
        topic = await harness.topic()
        before = asyncio.all_tasks()
        bus = await harness.connect()
        inbox = bus.messages(topic, subscription="readers")
        await inbox.__aenter__()
        await bus.topic(topic).publish_batch(numbered(10))
        await bus.topic(topic).enqueue(b"x")
        await take(inbox, 3, harness.patience)
        await bus.close()
        await eventually(
            lambda: not {task for task in asyncio.all_tasks() - before if not task.done()}, 2.0, "the end of all tasks"
        )

    @promise(
        "close.sigterm-loses-nothing",
        "On SIGTERM `broker.run` waits for its running handlers and ends; no message is lost.",
    )
    async def test_sigterm_loses_nothing(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        handled: list[bytes] = []
        some = asyncio.Event()

        async def handle(message: Message[bytes]) -> None:
            await asyncio.sleep(0)
            handled.append(message.data or b"")
            if len(handled) == 20:
                some.set()

        # Before and after the handler of `run`, the signal must not end the test run.
        previous = signal.signal(signal.SIGTERM, _ignore)
        try:
            await bus.admin.ensure_subscription(topic, "readers")
            await bus.topic(topic).publish_batch(numbered(200))
            running = asyncio.ensure_future(serve(bus.messages(topic, subscription="readers").handled_by(handle)))
            async with asyncio.timeout(2 * harness.patience):
                await some.wait()
                os.kill(os.getpid(), signal.SIGTERM)
                await running
        finally:
            signal.signal(signal.SIGTERM, previous)
        async with bus.messages(topic, subscription="readers") as inbox:
            rest = [body for body in numbered(200) if body not in set(handled)]
            assert rest, "SIGTERM came after all messages were handled: the test shows nothing"
            seen = await until_seen(inbox, rest, harness.patience)
            assert bodies(seen) == once(rest)


def _ignore(number: int, frame: object) -> None: ...


async def _drain(inbox: MessageStream[bytes]) -> None:
    async for _ in inbox:
        pass
