"""Retries, dead letters and undecodable messages."""

from __future__ import annotations

import asyncio

import pytest

from broker.capabilities import Limits
from broker.consuming.dead_letters import make_dead_letter
from broker.consuming.retry.policy import Retry
from broker.errors import ConnectionFailed
from broker.messages import Message, Outcome
from broker.records import Record
from tests.unit.broker.consuming.scripted_source import VIEW, Letters, Raw, ScriptedSource, consuming, until

FAST = Retry(max_attempts=3, initial=0.001, maximum=0.002)


async def test_a_close_during_a_dead_letter_write_releases_the_original() -> None:
    source = ScriptedSource(redelivers=False)
    letters = Letters()
    letters.failures = [ConnectionFailed("down")] * 1000
    source.add("1")
    async with consuming(source, letters=letters) as consumer:
        message = await consumer.next_message(timeout=60)
        assert message is not None
        rejecting = asyncio.create_task(message.reject("no"))
        await until(lambda: letters.tried)
        async with asyncio.timeout(60):
            await consumer.close()
        with pytest.raises(ConnectionFailed):
            await rejecting
    assert source.outcomes(Outcome.ACK) == []
    assert source.outcomes(Outcome.RELEASE) == ["1"]


async def test_a_close_waits_for_a_running_dead_letter_write() -> None:
    source = ScriptedSource(redelivers=False)
    letters = Letters()
    letters.gate.clear()
    source.add("1")
    async with consuming(source, letters=letters) as consumer:
        message = await consumer.next_message(timeout=60)
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


async def test_without_dead_letters_a_rejected_message_is_redelivered_at_the_longest_backoff() -> None:
    source = ScriptedSource(redelivers=False)
    source.add("1")
    async with consuming(source, retry=Retry(initial=1, maximum=40)) as consumer:
        message = await consumer.next_message(timeout=60)
        assert message is not None
        await message.reject("no")
        await until(lambda: source.settled)
    assert [(s.outcome, s.delay) for s in source.settled] == [(Outcome.NACK, 40)]


async def test_only_an_explicit_drop_drops() -> None:
    source = ScriptedSource()
    source.add("1")
    async with consuming(source, drop=True) as consumer:
        message = await consumer.next_message(timeout=60)
        assert message is not None
        await message.reject("unwanted")
    assert [(s.outcome, s.reason) for s in source.settled] == [(Outcome.REJECT, "unwanted")]


async def test_max_deliveries_gives_up_a_message_that_kills_the_process() -> None:
    source = ScriptedSource()
    letters = Letters()
    source.add("1", attempt=31)
    async with consuming(source, retry=FAST, letters=letters) as consumer:
        assert await consumer.next_message(timeout=0.05) is None
    assert letters.written[0].attributes["dead-letter-reason"] == "delivered 30 times without being settled"


@pytest.mark.parametrize("ordered_by_key", [False, True])
async def test_the_last_delivery_is_given_up_without_a_waiting_reader(ordered_by_key: bool) -> None:
    source, letters = ScriptedSource(), Letters()
    source.add("1", key=b"k")
    source.add("2", attempt=10, key=b"k")
    async with consuming(
        source, letters=letters, delivery_limit=10, prefetch=10, ordered_by_key=ordered_by_key
    ) as consumer:
        message = await consumer.next_message(timeout=60)
        assert message is not None
        await until(lambda: source.fetched == 2)
        await message.ack()
        if ordered_by_key:
            assert await consumer.next_message(timeout=0.01) is None
    (letter,) = letters.written
    assert letter.attributes["dead-letter-reason"] == "delivered 10 times, after which the broker drops it"
    assert source.outcomes(Outcome.RELEASE) == []


async def test_releasing_counts_no_attempt() -> None:
    source = ScriptedSource()
    letters = Letters()
    source.add("1", attempt=30)
    async with consuming(source, retry=FAST, letters=letters) as consumer:
        for _ in range(5):
            message = await consumer.next_message(timeout=60)
            assert message is not None

            async def cancelled(message: Message) -> None:
                async with message:
                    await asyncio.Event().wait()

            task = asyncio.create_task(cancelled(message))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        message = await consumer.next_message(timeout=60)
        assert message is not None
        await message.ack()
    assert letters.written == []


def test_the_place_of_a_dead_letter_is_complete_or_absent() -> None:
    record: Record[bytes] = Record("orders", 12, 3456789, None, b"", Raw("1", None, 1, {}), VIEW)
    limits = Limits(message=2000)
    found: set[tuple[str | None, str | None]] = set()
    for size in range(1600, 2000):
        record.data = b"x" * size
        letter = make_dead_letter(
            record, id="1", reason="r" * 50, error=None, attempts=3, subscription="billing", limits=limits
        )
        attributes = letter.attributes
        found.add((attributes.get("dead-letter-partition"), attributes.get("dead-letter-offset")))
    assert found == {("12", "3456789"), ("12", None), (None, None)}


def test_dead_letters_are_truncated_to_the_limits() -> None:
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
