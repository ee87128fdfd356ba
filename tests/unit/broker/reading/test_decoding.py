"""Payloads of the record consumer: decoded, raised in their place, or written to the dead letters."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from broker.codecs import Json
from broker.driver.contract import RecordSubscription
from broker.errors import Closed, ConfigurationError, ConnectionFailed, DecodeError, TopicNotFound
from broker.hooks import DeadLettered, DeadLetterFailed, Hooks
from broker.reading.record_consumer import RecordConsumer
from tests.unit.broker.reading.record_bench import P0, P1, bench
from tests.unit.broker.reading.record_fakes import FakeBackend


async def test_payloads_are_decoded() -> None:
    async with bench(codec=Json(int)) as b:
        b.source.append(1, 2)
        await b.buffered(2)
        assert [r.payload for r in await b.consumer.next_batch()] == [1, 2]
        assert b.consumer._codec is not None


async def test_an_undecodable_record_raises_in_its_place_and_the_next_call_continues() -> None:
    async with bench(codec=Json(int)) as b:
        b.source.append(1)
        b.source.append(2, data=b"{")
        b.source.append(3)
        await b.buffered(3)
        assert [r.offset for r in await b.consumer.next_batch()] == [1]
        with pytest.raises(DecodeError, match=r"\[0\]@2"):
            await b.consumer.next_batch()
        assert [r.offset for r in await b.consumer.next_batch()] == [3]


async def test_an_undecodable_record_goes_to_the_dead_letters_and_counts_as_done() -> None:
    async with bench(codec=Json(int), on_decode_error="orders.dead") as b:
        b.source.append(1)
        b.source.append(2, data=b"{")
        b.source.append(3, data=b"")
        await b.buffered(3)
        first = await b.consumer.next_record()
        assert first is not None
        waiting = asyncio.create_task(b.consumer.next_record())
        await b.until(lambda: len(b.of(DeadLettered)) == 2)
        waiting.cancel()
        letters = b.backend.targets["orders.dead"].messages
        assert [letter.data for letter in letters] == [b"{", b""]
        letter = letters[0]
        assert letter.key == b"k"
        assert letter.attributes["n"] == "2"
        assert letter.attributes["dead-letter-topic"] == "orders"
        assert letter.attributes["dead-letter-subscription"] == "audit"
        assert letter.attributes["dead-letter-reason"].startswith("cannot be decoded: ")
        assert "@2 cannot be decoded" in letter.attributes["dead-letter-error"]
        assert letter.attributes["dead-letter-id"] == "id-2"
        assert letter.publish_time is not None
        await first.commit()
        assert b.source.stored == {P0: 4}, "what was skipped behind it is done as well"


async def test_an_invalid_dead_letter_topic_raises_before_the_first_record() -> None:
    backend: Any = FakeBackend()
    backend.missing.add("orders.dead")
    subscription = RecordSubscription(topics=["orders"], group="g")
    consumer = RecordConsumer(backend, subscription, hooks=Hooks(), codec=Json(int), on_decode_error="orders.dead")
    with pytest.raises(TopicNotFound):
        await consumer.__aenter__()
    with pytest.raises(ConfigurationError, match="one of the consumed"):
        RecordConsumer(backend, subscription, hooks=Hooks(), on_decode_error="orders")


async def test_skipped_records_alone_are_committed_with_the_next_commit() -> None:
    async with bench(0, 1, codec=Json(int), on_decode_error="orders.dead") as b:
        b.source.append(1, data=b"{")
        b.source.append(1, partition=1)
        await b.buffered(2)
        batch = await b.consumer.next_batch(timeout=60)
        assert [r.partition for r in batch] == [1]
        await batch.commit()
        assert b.source.stored == {P0: 2, P1: 2}


async def test_a_failed_dead_letter_write_is_retried_and_nothing_overtakes_it() -> None:
    async with bench(codec=Json(int), on_decode_error="orders.dead") as b:
        target = b.backend.publish_target("orders.dead")
        target.errors.append(ConnectionFailed("cut"))
        b.source.append(1, data=b"{")
        b.source.append(2)
        await b.buffered(2)
        call = asyncio.create_task(b.consumer.next_record())
        await asyncio.wait_for(target.tried.wait(), 60)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await b.consumer.next_record(timeout=0) is None, "the letter is not written yet"
        record = await b.consumer.next_record(timeout=60)
        assert record is not None
        assert record.offset == 2
        assert len(target.messages) == 1
        assert len(b.of(DeadLetterFailed)) == 1


async def test_losing_the_partition_ends_its_dead_letter_write() -> None:
    async with bench(codec=Json(int), on_decode_error="orders.dead") as b:
        target = b.backend.publish_target("orders.dead")
        target.errors += [ConnectionFailed("cut")] * 100
        b.source.append(1, data=b"{")
        call = asyncio.create_task(b.consumer.next_record())
        await asyncio.wait_for(target.tried.wait(), 60)
        await b.source.revoke(0)
        b.source.stored[P0] = 2
        b.source.append(2)
        b.source.assign(0)
        record = await asyncio.wait_for(call, 60)
        assert record is not None
        assert record.offset == 2
        assert target.messages == []


async def test_close_does_not_wait_for_a_dead_letter_that_cannot_be_written() -> None:
    async with bench(codec=Json(int), on_decode_error="orders.dead", close_timeout=60) as b:
        target = b.backend.publish_target("orders.dead")
        target.errors += [ConnectionFailed("cut")] * 100
        b.source.append(1, data=b"{")
        call = asyncio.create_task(b.consumer.next_record())
        await asyncio.wait_for(target.tried.wait(), 60)
        began = time.monotonic()
        await b.consumer.close()
        assert time.monotonic() - began < 30, "it waited for close_timeout"
        with pytest.raises(Closed):
            await call
        assert b.source.commits == []
