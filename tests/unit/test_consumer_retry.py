"""Retry, dead letters and poison."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from broker.capabilities import Limits
from broker.codecs import Json
from broker.consuming.dead_letter import make_dead_letter
from broker.consuming.retry import Attempts, Retry
from broker.errors import ConnectionFailed, InvalidSetting
from broker.hooks import DeadLettered, DeadLetterFailed, Event, HandlerFailed, Hooks
from broker.messages import Message, MessageBatch, Outcome
from tests.unit.scripted_source import VIEW, Letters, Raw, ScriptedSource, consuming, until

FAST = Retry(max_attempts=3, initial=0.001, maximum=0.002)


async def test_a_failing_handler_is_retried_then_dead_lettered() -> None:
    source = ScriptedSource()
    letters = Letters()
    events: list[Event] = []
    source.add("1", key=b"k", attributes={"colour": "red"})
    attempts = 0
    async with consuming(source, retry=FAST, letters=letters, events=events, stop_when_idle=0.05) as consumer:

        async def handle(message: Message) -> None:
            nonlocal attempts
            attempts += 1
            raise RuntimeError("broken handler")

        await consumer.receive(handle)
    assert attempts == 3
    (letter,) = letters.written
    assert (letter.data, letter.key) == (b"data", b"k")
    assert letter.attributes["colour"] == "red"
    assert letter.attributes["dead-letter-reason"] == "failed 3 times"
    assert letter.attributes["dead-letter-error"] == "RuntimeError: broken handler"
    assert letter.attributes["dead-letter-attempts"] == "3"
    assert letter.attributes["dead-letter-topic"] == "orders"
    assert letter.attributes["dead-letter-subscription"] == "billing"
    assert letter.attributes["dead-letter-id"] == "1"
    assert source.outcomes(Outcome.ACK) == ["1"]
    assert [event.failures for event in events if isinstance(event, HandlerFailed)] == [1, 2, 3]
    assert [event.target for event in events if isinstance(event, DeadLettered)] == ["orders.dead"]


async def test_a_block_that_raises_is_retried_and_the_loop_goes_on() -> None:
    source = ScriptedSource()
    source.add("1")
    tries = 0
    async with consuming(source, retry=FAST) as consumer:
        async for message in consumer:
            async with message:
                tries += 1
                if tries < 3:
                    raise RuntimeError("not yet")
            if tries == 3:
                break
    assert source.outcomes(Outcome.ACK) == ["1"]
    assert source.outcomes(Outcome.NACK) == ["1", "1"]


async def test_a_failed_dead_letter_write_repeats_the_write_not_the_handler() -> None:
    source = ScriptedSource()
    letters = Letters()
    letters.failures = [ConnectionFailed("down"), ConnectionFailed("down")]
    events: list[Event] = []
    source.add("1")
    handled = 0
    async with consuming(source, letters=letters, events=events, stop_when_idle=0.05) as consumer:

        async def handle(message: Message) -> None:
            nonlocal handled
            handled += 1
            assert not source.outcomes(Outcome.ACK)
            await message.reject("no departure")

        await consumer.receive(handle)
    assert handled == 1
    assert letters.tried == 3
    assert letters.written[0].attributes["dead-letter-reason"] == "no departure"
    assert len([event for event in events if isinstance(event, DeadLetterFailed)]) == 2
    assert source.outcomes(Outcome.ACK) == ["1"]


async def test_a_close_during_a_dead_letter_write_gives_the_original_back() -> None:
    source = ScriptedSource(redelivers=False)
    letters = Letters()
    letters.failures = [ConnectionFailed("down")] * 1000
    source.add("1")
    async with consuming(source, letters=letters) as consumer:
        message = await consumer.next_message(timeout=5)
        assert message is not None
        rejecting = asyncio.create_task(message.reject("no"))
        await until(lambda: letters.tried)
        async with asyncio.timeout(5):
            await consumer.close()
        with pytest.raises(ConnectionFailed):
            await rejecting
    assert source.outcomes(Outcome.ACK) == []
    assert source.outcomes(Outcome.RELEASE) == ["1"]


async def test_a_close_lets_a_dead_letter_write_that_is_under_way_end() -> None:
    source = ScriptedSource(redelivers=False)
    letters = Letters()
    letters.gate.clear()
    source.add("1")
    async with consuming(source, letters=letters) as consumer:
        message = await consumer.next_message(timeout=5)
        assert message is not None
        rejecting = asyncio.create_task(message.reject("no"))
        await until(lambda: letters.tried)
        closing = asyncio.create_task(consumer.close())
        await until(lambda: not consumer._engine.running)  # pyright: ignore[reportOptionalMemberAccess]
        letters.gate.set()
        await closing
        await rejecting
    assert len(letters.written) == 1
    assert source.outcomes(Outcome.ACK) == ["1"]


async def test_exceptions_that_are_never_retried_give_up_at_once() -> None:
    source = ScriptedSource()
    letters = Letters()
    source.add("1")
    retry = Retry(max_attempts=5, initial=0.001, maximum=0.01, never=(ValueError,))
    async with consuming(source, retry=retry, letters=letters, stop_when_idle=0.05) as consumer:

        async def handle(message: Message) -> None:
            raise ValueError("never")

        await consumer.receive(handle)
    assert letters.written[0].attributes["dead-letter-reason"] == "ValueError is not retried"


async def test_without_dead_letters_a_rejected_message_comes_back_at_the_longest_backoff() -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1")
    async with consuming(source, retry=Retry(initial=1, maximum=40)) as consumer:
        message = await consumer.next_message(timeout=5)
        assert message is not None
        await message.reject("no")
        await until(lambda: source.settled)
    assert [(s.outcome, s.delay) for s in source.settled] == [(Outcome.NACK, 40)]


async def test_drop_takes_an_explicit_word() -> None:
    source = ScriptedSource()
    source.add("1")
    async with consuming(source, drop=True) as consumer:
        message = await consumer.next_message(timeout=5)
        assert message is not None
        await message.reject("unwanted")
    assert [(s.outcome, s.reason) for s in source.settled] == [(Outcome.REJECT, "unwanted")]


async def test_an_undecodable_payload_is_a_dead_letter_not_a_crash() -> None:
    source = ScriptedSource()
    letters = Letters()
    source.add("1", data=b"{")
    source.add("2", data=b'{"a": 1}')
    async with consuming(source, letters=letters, codec=Json(dict)) as consumer:
        message = await consumer.next_message(timeout=5)
        assert message is not None
        assert message.payload == {"a": 1}
        await message.ack()
        await until(lambda: letters.written)
    assert letters.written[0].attributes["dead-letter-reason"].startswith("cannot be decoded")


async def test_a_message_that_kills_the_process_is_given_up_by_its_deliveries() -> None:
    source = ScriptedSource()
    letters = Letters()
    source.add("1", attempt=31)
    async with consuming(source, retry=FAST, letters=letters) as consumer:
        assert await consumer.next_message(timeout=0.05) is None
    assert letters.written[0].attributes["dead-letter-reason"] == "delivered 30 times without being settled"


async def test_giving_back_does_not_burn_attempts() -> None:
    source = ScriptedSource()
    letters = Letters()
    source.add("1", attempt=30)
    async with consuming(source, retry=FAST, letters=letters) as consumer:
        for _ in range(5):
            message = await consumer.next_message(timeout=5)
            assert message is not None

            async def cancelled(message: Message) -> None:
                async with message:
                    await asyncio.Event().wait()

            task = asyncio.create_task(cancelled(message))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        message = await consumer.next_message(timeout=5)
        assert message is not None
        await message.ack()
    assert letters.written == []


async def test_a_handler_that_takes_too_long_fails() -> None:
    source = ScriptedSource()
    letters = Letters()
    source.add("1")
    retry = Retry(max_attempts=1, timeout=0.01, initial=0, maximum=0)
    async with consuming(source, retry=retry, letters=letters, stop_when_idle=0.05) as consumer:

        async def handle(message: Message) -> None:
            await asyncio.Event().wait()

        await consumer.receive(handle)
    error = letters.written[0].attributes["dead-letter-error"]
    assert error == "TimeoutError: the handler ran for more than 0.01 s"


async def test_a_batch_handler_settles_each_by_its_result() -> None:
    source = ScriptedSource()
    letters = Letters()
    source.add("1", "2", "3")
    once = Retry(max_attempts=1, initial=0, maximum=0)
    async with consuming(source, retry=once, letters=letters, stop_when_idle=0.05) as consumer:

        async def handle(batch: MessageBatch) -> list[BaseException | None]:
            return [RuntimeError("two") if message.id == "2" else None for message in batch]

        await consumer.receive_batches(handle)
    assert [letter.attributes["dead-letter-id"] for letter in letters.written] == ["2"]
    assert sorted(source.outcomes(Outcome.ACK)) == ["1", "2", "3"]


async def test_a_cancelled_batch_handler_gives_the_whole_batch_back() -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1", "2", "3", "4")
    async with consuming(source) as consumer:
        held: list[str] = []

        async def handle(batch: MessageBatch) -> None:
            held.extend(message.id for message in batch)
            await asyncio.Event().wait()

        async def receive() -> None:
            await consumer.receive_batches(handle, max_messages=4, concurrency=4)

        receiving = asyncio.create_task(receive())
        await until(lambda: len(held) == 4)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        await until(lambda: len(source.outcomes(Outcome.RELEASE)) == 4)


async def test_a_batch_handler_that_takes_too_long_fails() -> None:
    source = ScriptedSource()
    letters = Letters()
    source.add("1", "2")
    retry = Retry(max_attempts=1, timeout=0.01, initial=0, maximum=0)
    async with consuming(source, retry=retry, letters=letters, stop_when_idle=0.05) as consumer:

        async def handle(batch: MessageBatch) -> None:
            await asyncio.Event().wait()

        await consumer.receive_batches(handle)
    assert sorted(letter.attributes["dead-letter-id"] for letter in letters.written) == ["1", "2"]


async def test_interceptors_surround_handlers_blocks_and_batches() -> None:
    source = ScriptedSource()
    hooks = Hooks()
    seen: list[str] = []

    @contextmanager
    def around(message: Message) -> Generator[None]:
        seen.append(f"begin {message.id}")
        yield
        seen.append(f"end {message.id}")

    hooks.around_handling(around)
    source.add("1")
    async with consuming(source, hooks=hooks) as consumer:

        async def handle(message: Message) -> None:
            seen.append("handler")
            consumer.stop()

        await consumer.receive(handle)
    source.add("2")
    async with consuming(source, hooks=hooks) as consumer:
        message = await consumer.next_message(timeout=5)
        assert message is not None
        async with message:
            seen.append("block")
    source.add("3")
    async with consuming(source, hooks=hooks) as consumer:

        async def handle_batch(batch: MessageBatch) -> None:
            seen.append("batch")
            consumer.stop()

        await consumer.receive_batches(handle_batch)
    assert seen == [
        *("begin 1", "handler", "end 1"),
        *("begin 2", "block", "end 2"),
        *("begin 3", "batch", "end 3"),
    ]


async def test_an_interceptor_that_raises_changes_nothing() -> None:
    source = ScriptedSource()
    hooks = Hooks()

    @contextmanager
    def fails_before(message: Message) -> Generator[None]:
        raise RuntimeError("before")
        yield

    @contextmanager
    def fails_after(message: Message) -> Generator[None]:
        yield
        raise RuntimeError("after")

    hooks.around_handling(fails_before)
    hooks.around_handling(fails_after)
    source.add("1")
    async with consuming(source, hooks=hooks) as consumer:

        async def handle(message: Message) -> None:
            consumer.stop()

        await consumer.receive(handle)
    assert source.outcomes(Outcome.ACK) == ["1"]


def test_dead_letters_are_cut_to_the_limits() -> None:
    original = Message("orders", b"x" * 100, Raw("1", b"k", 1, {"mine": "v"}), VIEW)
    letter = make_dead_letter(
        original,
        id="1",
        reason="failed",
        error=RuntimeError("é" * 5000),
        attempts=3,
        subscription="billing",
        limits=Limits(attribute_value=64, attributes=4, message=4000),
    )
    assert letter.attributes["mine"] == "v"
    assert len(letter.attributes) == 4
    assert letter.attributes["dead-letter-reason"] == "failed"
    assert all(len(value.encode()) <= 64 for value in letter.attributes.values())
    tiny = make_dead_letter(
        original, id="1", reason="failed", error=None, attempts=None, subscription="s", limits=Limits(message=120)
    )
    assert tiny.data == original.data
    assert dict(tiny.attributes) == {"mine": "v"}


def test_backoff_grows_to_its_maximum() -> None:
    retry = Retry(initial=1, multiplier=2, maximum=10, jitter=0)
    assert [retry.delay(n) for n in (1, 2, 3, 4, 5, 5000)] == [1, 2, 4, 8, 10, 10]
    jittered = Retry(initial=1, maximum=10, jitter=0.5)
    assert all(0.5 <= jittered.delay(1) <= 1.5 for _ in range(100))


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_attempts", 0), ("initial", -1.0), ("multiplier", 0.5), ("maximum", 0.1), ("jitter", 1.0), ("timeout", 0.0)],
)
def test_a_policy_that_makes_no_sense_names_the_field(field: str, value: float) -> None:
    with pytest.raises(InvalidSetting, match=field):
        Retry(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "takes"),
    [
        ("max_attempts", 2.0, "an int"),
        ("max_attempts", True, "an int"),
        ("max_attempts", "3", "an int"),
        ("max_deliveries", 10.0, "an int"),
        ("max_deliveries", True, "an int"),
        ("initial", "1", "seconds"),
        ("initial", math.nan, "seconds"),
        ("multiplier", None, "1 or more"),
        ("maximum", "60", "at least"),
        ("jitter", math.nan, "below 1"),
        ("timeout", "3", "seconds"),
        ("timeout", math.inf, "seconds"),
        ("on", OSError, "tuple of exception classes"),
        ("on", [OSError], "tuple of exception classes"),
        ("never", ("OSError",), "tuple of exception classes"),
        ("never", (OSError("x"),), "tuple of exception classes"),
        ("never", (int,), "tuple of exception classes"),
        ("never", None, "tuple of exception classes"),
    ],
)
def test_a_policy_of_the_wrong_types_names_field_value_and_what_it_takes(field: str, value: object, takes: str) -> None:
    with pytest.raises(InvalidSetting) as raised:
        Retry(**{field: value})  # type: ignore[arg-type]
    assert raised.value.message == f"Retry.{field} is {value!r}"
    assert takes in raised.value.advice


def test_attempts_are_forgotten_when_done() -> None:
    attempts = Attempts()
    assert not attempts
    assert [attempts.failed("a"), attempts.failed("a")] == [1, 2]
    attempts.released("a")
    assert attempts.releases("a") == 1
    attempts.forget("a")
    assert not attempts
