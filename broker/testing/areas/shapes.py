"""Conformance tests of the ways to consume: each delivers the same messages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from broker.messages import Message, MessageBatch
from broker.testing.case import ConformanceCase
from broker.testing.harness import Harness
from broker.testing.promises import promise
from broker.testing.waiting import bodies, eventually, nothing_more, numbered, once, until_seen
from broker.threads.messages import BlockingMessage, BlockingMessageBatch

__all__ = ["Shapes"]

current: ContextVar[str] = ContextVar("current", default="none")


Reader = Callable[[Any, int], Awaitable[list[bytes | None]]]


class Shapes(ConformanceCase):
    """The six ways to consume."""

    async def _check(self, harness: Harness, read: Reader) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(60))
            async with asyncio.timeout(2 * harness.patience):
                assert sorted(body or b"" for body in await read(inbox, 60)) == numbered(60)
        async with bus.messages(topic, subscription="readers") as inbox:
            await nothing_more(inbox, harness.quiet)

    @promise("messages.shape-next-message", "`next_message` delivers every message, one at a time.")
    async def test_shape_next_message(self, harness: Harness) -> None:
        async def read(inbox: Any, count: int) -> list[bytes | None]:
            return [message.data for message in await until_seen(inbox, numbered(count), harness.patience)]

        await self._check(harness, read)

    @promise(
        "messages.shape-next-batch",
        "`next_batch` delivers the available messages, at least one and at most the requested number.",
    )
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
        "`async for message` delivers every message, and `break` needs no clean-up.",
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

    @promise("messages.shape-batches", "`async for batch in batches()` delivers every message in batches.")
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

    @promise(
        "messages.shape-receive",
        "`receive` calls the handler with every message and acks the message when the handler returns.",
    )
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

    @promise("messages.shape-receive-batches", "`receive_batches` calls the handler with batches and acks them.")
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
        "messages.batch-handler-settles-each",
        "When a batch handler fails some messages, only those are redelivered.",
    )
    async def test_batch_handler_settles_each(self, harness: Harness) -> None:
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
        "messages.batch-waits-to-fill",
        "With `max_wait` a batch is handed over when it is full, or when its first message has waited so long.",
    )
    async def test_batch_waits_to_fill(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        batches: list[list[bytes | None]] = []
        filled = asyncio.Event()

        async def handle(batch: MessageBatch[bytes]) -> None:
            batches.append([message.data for message in batch])
            filled.set()

        async with bus.messages(topic, subscription="readers") as inbox:
            work = asyncio.ensure_future(inbox.receive_batches(handle, max_messages=5, max_wait=10 * harness.patience))
            for half in (numbered(5)[:3], numbered(5)[3:]):
                await asyncio.wait((work,), timeout=2 * harness.quiet)
                assert batches == []
                await bus.topic(topic).publish_batch(half)
            async with asyncio.timeout(harness.patience):
                await filled.wait()
            assert sorted(body or b"" for body in batches[0]) == numbered(5)
            inbox.stop()
            await work
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(3, "old"))
            seen: list[Message[bytes]] = []
            while len(seen) < 3:
                batch = await inbox.next_batch(5, timeout=harness.patience, max_wait=harness.quiet)
                assert batch, f"Only {len(seen)} of 3 messages arrived"
                await batch.ack()
                seen += batch
            assert bodies(seen) == once(numbered(3, "old"))

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

    @promise(
        "messages.plain-handlers-run-in-threads",
        "Handlers that are not `async def` run in `concurrency` threads and may settle there; the event loop goes on.",
    )
    async def test_plain_handlers_run_in_threads(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        begun: list[bytes | None] = []
        handled: list[bytes | None] = []
        stood_still: list[bytes | None] = []
        gate = threading.Event()
        unlucky = numbered(20)[7]

        def handle(message: BlockingMessage[bytes]) -> None:
            begun.append(message.data)
            # Only the event loop opens the gate.
            if not gate.wait(harness.patience):
                stood_still.append(message.data)
            if message.data == unlucky and begun.count(unlucky) == 1:
                message.nack(delay=0)
            else:
                handled.append(message.data)

        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(20))
            work = asyncio.ensure_future(inbox.receive(handle, concurrency=3))
            await eventually(lambda: len(begun) >= 3, harness.patience, "three handlers at once")
            assert len(begun) == 3
            gate.set()
            await eventually(lambda: len(set(handled)) >= 20, harness.patience, "all messages")
            await inbox.close()
            await work
        assert stood_still == []
        assert sorted(body or b"" for body in set(handled)) == numbered(20)
        async with bus.messages(topic, subscription="readers") as inbox:
            await nothing_more(inbox, harness.quiet)

    @promise(
        "messages.plain-batch-handlers-run-in-threads",
        "A batch handler that is not `async def` runs in a thread while the event loop goes on; its results count.",
    )
    async def test_plain_batch_handlers_run_in_threads(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        begun: list[bytes | None] = []
        stood_still: list[int] = []
        gate = threading.Event()
        unlucky = numbered(20)[7]

        def handle(batch: BlockingMessageBatch[bytes]) -> Sequence[BaseException | None]:
            begun.extend(message.data for message in batch)
            if not gate.wait(harness.patience):
                stood_still.append(len(batch))
            return [
                ValueError("raised by the test") if message.data == unlucky and begun.count(unlucky) == 1 else None
                for message in batch
            ]

        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(20))
            work = asyncio.ensure_future(inbox.receive_batches(handle, max_messages=10))
            await eventually(lambda: begun, harness.patience, "a batch")
            gate.set()
            await eventually(
                lambda: len(set(begun)) >= 20 and begun.count(unlucky) >= 2, harness.patience, "all messages"
            )
            await inbox.close()
            await work
        assert stood_still == []
        assert sorted(body or b"" for body in set(begun)) == numbered(20)

    @promise("messages.handlers-are-isolated", "Context variables set by a handler are not visible to other handlers.")
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
        "Ten tasks that call `next_message` together receive every message once.",
    )
    async def test_concurrent_callers_share(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        seen: list[Message[bytes]] = []

        async with bus.messages(topic, subscription="readers") as inbox:

            async def call() -> None:
                while len(seen) < 200:
                    message = await inbox.next_message(harness.quiet)
                    if message is not None:
                        seen.append(message)
                        await message.ack()

            publishing = asyncio.ensure_future(bus.topic(topic).publish_batch(numbered(200)))
            with suppress(TimeoutError):
                async with asyncio.timeout(3 * harness.patience):
                    await asyncio.gather(*(call() for _ in range(10)))
            await publishing
            await nothing_more(inbox, harness.quiet)
        assert bodies(seen) == once(numbered(200))
