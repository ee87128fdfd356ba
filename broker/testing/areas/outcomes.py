"""Conformance tests of outcomes: idle, cancelled, closed, retriable and fatal differ."""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import BackendError, Closed, ConnectionFailed, SettleError
from broker.hooks import Event, FetchFailed, HandlerFailed, SettleFailed
from broker.messages import Message, SettleState
from broker.testing.case import ConformanceCase
from broker.testing.faults import Faults
from broker.testing.harness import Harness
from broker.testing.promises import promise
from broker.testing.waiting import bodies, eventually, numbered, once, take, until_seen

__all__ = ["Outcomes"]


class Outcomes(ConformanceCase):
    """How consumers report idleness, closes and failures."""

    @promise(
        "outcomes.idle-returns-none",
        "An idle wait returns None or an empty batch, and can be repeated.",
    )
    async def test_idle_returns_none(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            assert await inbox.next_message(timeout=harness.quiet) is None
            assert len(await inbox.next_batch(10, timeout=harness.quiet)) == 0
            assert await inbox.next_message(timeout=0) is None
            await bus.topic(topic).publish(b"x")
            await until_seen(inbox, [b"x"], harness.patience)
            assert await inbox.next_message(timeout=harness.quiet) is None

    @promise(
        "outcomes.timeout-is-not-a-cancellation",
        "A timeout of the caller raises TimeoutError, and loses no message.",
    )
    async def test_timeout_is_not_a_cancellation(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(harness.quiet):
                    await inbox.next_message()
            await bus.topic(topic).publish(b"x")
            await until_seen(inbox, [b"x"], harness.patience)

    @promise("outcomes.wait-ends-on-arrival", "A waiting `next_message` returns as soon as a message arrives.")
    async def test_wait_ends_on_arrival(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            waiting = asyncio.ensure_future(inbox.next_message())
            await asyncio.wait({waiting}, timeout=harness.quiet)
            assert not waiting.done()
            await bus.topic(topic).publish(b"x")
            async with asyncio.timeout(harness.patience):
                message = await waiting
            assert message is not None and message.data == b"x"

    @promise(
        "outcomes.cancelled-wait-raises",
        "A cancelled wait raises CancelledError; a wait in a cancelled task raises it at once.",
    )
    async def test_cancelled_wait_raises(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            started = asyncio.ensure_future(inbox.next_message())
            await asyncio.wait({started}, timeout=harness.quiet)
            unstarted = asyncio.ensure_future(inbox.next_message())
            publish = asyncio.ensure_future(bus.topic(topic).publish(b"never"))
            for task in (started, unstarted, publish):
                task.cancel()
            ended = await asyncio.gather(started, unstarted, publish, return_exceptions=True)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in ended)
            await bus.topic(topic).publish(b"x")
            await until_seen(inbox, [b"x"], harness.patience)

    @promise("outcomes.read-after-close-raises", "After a close, every way to read raises Closed, and iterations end.")
    async def test_read_after_close_raises(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        async with bus.messages(topic, subscription="readers") as inbox:
            await inbox.close()
            with pytest.raises(Closed):
                await inbox.next_message(timeout=0)
            with pytest.raises(Closed):
                await inbox.next_batch(timeout=0)
            assert [message async for message in inbox] == []
            assert [batch async for batch in inbox.batches()] == []

    @promise(
        "outcomes.close-wakes-waiters",
        "A close wakes every waiting call with Closed, and ends iterations and handlers.",
    )
    async def test_close_wakes_waiters(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()

        async def iterate() -> str:
            async for _ in inbox:
                pass
            return "ended"

        async def handle(_: Message[bytes]) -> None: ...

        async with bus.messages(topic, subscription="readers") as inbox:
            waiters = [asyncio.ensure_future(inbox.next_message()) for _ in range(3)]
            iteration = asyncio.ensure_future(iterate())
            receiving = asyncio.ensure_future(inbox.receive(handle))
            await asyncio.wait({*waiters, iteration, receiving}, timeout=harness.quiet)
            await inbox.close()
            async with asyncio.timeout(harness.patience):
                ended = await asyncio.gather(*waiters, return_exceptions=True)
                assert [type(outcome) for outcome in ended] == [Closed] * 3
                assert await iteration == "ended"
                assert await receiving is None

    @promise("outcomes.retriable-is-an-event", "A retriable fetch failure is an event; reading continues.")
    async def test_retriable_is_an_event(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic = await harness.connect(wrap=faults), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)
        async with bus.messages(topic, subscription="readers") as inbox:
            faults.fail_fetch(ConnectionFailed("broken by the test"))
            await bus.topic(topic).publish_batch(numbered(10))
            assert bodies(await until_seen(inbox, numbered(10), harness.patience)) == once(numbered(10))
            failures = [event for event in events if isinstance(event, FetchFailed)]
            assert [event.topic for event in failures] == [topic]
            assert "broken by the test" in str(failures[0].error)

    @promise(
        "outcomes.fatal-is-raised-once",
        "A fatal failure is raised once, at once, by the waiting call; nothing is delivered after it.",
    )
    async def test_fatal_is_raised_once(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic = await harness.connect(wrap=faults), await harness.topic()
        consumer = bus.messages(topic, subscription="readers")
        async with consumer as inbox:
            waiting = asyncio.ensure_future(inbox.next_message())
            await asyncio.wait({waiting}, timeout=harness.quiet)
            faults.fail_fetch(BackendError("fatal by the test"))
            async with asyncio.timeout(harness.patience):
                with pytest.raises(BackendError, match="fatal by the test"):
                    await waiting
            with pytest.raises(Closed):
                await inbox.next_message(timeout=harness.quiet)

    @promise(
        "outcomes.fatal-ends-receive",
        "A fatal failure ends `receive` with that error, after its running handlers.",
    )
    async def test_fatal_ends_receive(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic = await harness.connect(wrap=faults), await harness.topic()
        started, finish, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handle(_: Message[bytes]) -> None:
            started.set()
            await finish.wait()
            finished.set()

        async with bus.messages(topic, subscription="readers") as inbox:
            receiving = asyncio.ensure_future(inbox.receive(handle))
            await bus.topic(topic).publish(b"x")
            async with asyncio.timeout(harness.patience):
                await started.wait()
                faults.fail_fetch(BackendError("fatal by the test"))
                await eventually(lambda: not faults.fetch, harness.patience, "the fatal fetch")
                finish.set()
                with pytest.raises(BackendError, match="fatal by the test"):
                    await receiving
            assert finished.is_set()
        async with (await harness.bus()).messages(topic, subscription="readers") as inbox:
            assert await inbox.next_message(timeout=harness.quiet) is None, "A finished handler's ack was lost"

    @promise(
        "outcomes.handler-error-is-reported",
        "A handler's exception is an event with the error and the message; other messages continue.",
    )
    async def test_handler_error_is_reported(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            async with message:
                raise ValueError("raised by the test")
            failed = [event for event in events if isinstance(event, HandlerFailed)]
            assert [str(event.error) for event in failed] == ["raised by the test"]
            assert (failed[0].failures, failed[0].message.id) == (1, message.id)

    @promise(
        "outcomes.refused-ack-is-reported",
        "An ack that the broker refuses is reported by an exception or an event, never only by the log.",
    )
    async def test_refused_ack_is_reported(self, harness: Harness) -> None:
        faults = Faults()
        bus, topic = await harness.connect(wrap=faults), await harness.topic()
        events: list[Event] = []
        bus.hooks.listen(events.append)
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish(b"x")
            (message,) = await take(inbox, 1, harness.patience)
            faults.settle.append(SettleError("refused by the test"))
            raised: list[SettleError] = []
            try:
                await message.ack()
            except SettleError as error:
                raised.append(error)
            await eventually(
                lambda: raised or any(isinstance(event, SettleFailed) for event in events),
                harness.patience,
                "the news of the refused ack",
            )
            assert message.state is not SettleState.SETTLED

    @promise(
        "outcomes.listener-errors-are-isolated", "A listener that raises affects neither publishers nor consumers."
    )
    async def test_listener_errors_are_isolated(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()

        def explode(_: Event) -> None:
            raise RuntimeError("raised by the listener")

        bus.hooks.listen(explode)
        async with bus.messages(topic, subscription="readers") as inbox:
            await bus.topic(topic).publish_batch(numbered(5))
            assert bodies(await until_seen(inbox, numbered(5), harness.patience)) == once(numbered(5))

    @promise(
        "outcomes.stop-when-idle",
        "With `stop_when_idle`, an iteration ends without an error when no more messages arrive.",
    )
    async def test_stop_when_idle(self, harness: Harness) -> None:
        bus, topic = await harness.bus(), await harness.topic()
        await bus.admin.ensure_subscription(topic, "readers")
        await bus.topic(topic).publish_batch(numbered(20))
        async with asyncio.timeout(2 * harness.patience):
            async with bus.messages(topic, subscription="readers", stop_when_idle=2 * harness.quiet) as inbox:
                seen: list[Message[bytes]] = []
                async for message in inbox:
                    await message.ack()
                    seen.append(message)
        assert bodies(seen) == once(numbered(20))
