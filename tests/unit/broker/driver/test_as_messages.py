"""Records served as messages, over a scripted source: delivery, redelivery, commits and close."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from broker.capabilities import ConfirmedAck, LeaseMode
from broker.driver.as_messages.source import message_capabilities
from broker.driver.contract import MessageSource
from broker.errors import Closed, ConnectionFailed, NotAuthorized, Unsupported
from broker.hooks import Warned
from broker.messages import Message
from tests.unit.broker.consuming.warp import in_jumping_time
from tests.unit.broker.driver.as_messages_bench import ACK, NACK, P0, P1, REJECT, RELEASE, bench, offsets, turns
from tests.unit.broker.reading.record_fakes import FakeBackend


async def test_a_message_has_all_fields_of_its_record() -> None:
    b = await bench()
    _typed: MessageSource = b.messages
    b.records.append(7)
    (message,) = await b.fetch()
    assert (message.topic, message.data, message.key, message.id) == ("orders", b"7", b"k", "id-7")
    assert message.attributes == {"n": "7"}
    assert message.delivery_attempt == 1
    assert message.publish_time is not None
    assert message.broker_time is not None
    assert message.native[0] == {"n": "7"}
    assert message.size == 2


async def test_only_the_contiguous_part_is_committed() -> None:
    b = await bench()
    b.records.append(1, 5, 9, 12)
    first, second, third, fourth = await b.fetch()
    assert await b.settle(ACK, second, third) == [None, None]
    await turns()
    assert b.records.commits == [], "1 is not done"
    await b.settle(REJECT, first)
    await b.stored(10)
    await b.settle(ACK, fourth)
    await b.stored(13)


async def test_commits_are_sent_after_a_count_of_finished_records() -> None:
    b = await bench(commit_every=3, commit_interval=3600)
    b.records.append(*range(3))
    one, two, three = await b.fetch()
    await b.settle(ACK, one)
    await b.settle(ACK, two)
    await turns()
    assert b.records.commits == []
    await b.settle(ACK, three)
    await b.stored(3)
    assert len(b.records.commits) == 1


async def test_commits_are_sent_after_the_interval() -> None:
    b = await bench(commit_every=1000, commit_interval=0.02)
    b.records.append(0)
    await b.settle(ACK, *await b.fetch())
    await b.stored(1)
    assert len(b.records.commits) == 1


@in_jumping_time
async def test_nothing_more_is_fetched_while_no_commit_succeeds() -> None:
    """What is handled without a stored position is handled again after a crash."""
    b = await bench(0, 1, commit_interval=1.0)
    b.records.append(0, 1)
    one, _ = await b.fetch()
    b.records.commit_gate = asyncio.Event()
    await b.settle(ACK, one)
    await asyncio.sleep(1.9)
    assert b.records.paused == set()
    await asyncio.sleep(0.2)
    assert b.records.paused == {P0, P1}
    assert not await b.messages.is_idle(60)
    # A partition that comes meanwhile is not read either.
    b.records.assign(2)
    assert len(b.records.paused) == 3
    b.records.commit_gate.set()
    await b.stored(1)
    await turns()
    assert b.records.paused == set()
    assert await b.messages.is_idle(60)
    b.records.append(2)
    assert offsets(await b.fetch()) == [2]


@in_jumping_time
async def test_commits_that_fail_again_and_again_stop_the_fetches_too() -> None:
    b = await bench(commit_interval=1.0)
    b.records.append(0, 1)
    one, _ = await b.fetch()
    b.records.commit_errors = [ConnectionFailed("away")] * 4
    await b.settle(ACK, one)
    await asyncio.sleep(2.5)
    assert b.records.paused == {P0}
    await asyncio.sleep(2.0)
    assert b.records.stored == {P0: 1}
    assert b.records.paused == set()


async def test_a_nacked_record_is_redelivered_before_new_ones_and_counted() -> None:
    b = await bench()
    b.records.append(1, 2)
    one, two = await b.fetch()
    b.records.append(3)
    await b.settle(NACK, two, one)
    again = await b.fetch()
    assert offsets(again) == [1, 2], "in the order of the log"
    assert [message.delivery_attempt for message in again] == [2, 2]
    assert [message.id for message in again] == ["id-1", "id-2"]
    assert again[0].attributes == {"n": "1"}
    assert again[0].key == b"k"
    assert again[0].publish_time == one.publish_time
    assert again[0].broker_time == one.broker_time
    assert again[0].native == one.native
    assert offsets(await b.fetch()) == [3]
    await b.settle(ACK, *again)
    await b.stored(3)


async def test_releasing_unhandled_counts_no_attempt() -> None:
    b = await bench()
    b.records.append(1)
    (message,) = await b.fetch()
    for _ in range(5):
        await b.settle(RELEASE, message)
        (message,) = await b.fetch()
        assert message.delivery_attempt == 1


async def test_a_nack_wakes_a_waiting_fetch() -> None:
    b = await bench()
    b.records.append(1)
    (message,) = await b.fetch()
    fetching = asyncio.create_task(b.fetch(wait=30))
    await turns()
    await b.settle(NACK, message)
    assert offsets(await asyncio.wait_for(fetching, 60)) == [1]


@in_jumping_time
async def test_what_fails_again_and_again_at_once_is_slowed_down() -> None:
    b = await bench()
    b.records.append(1)
    (message,) = await b.fetch()
    loop = asyncio.get_running_loop()
    began = loop.time()
    for attempt in range(1, 6):
        assert message.delivery_attempt == attempt
        await b.settle(NACK, message)
        (message,) = await b.fetch()
    assert loop.time() - began == pytest.approx(0.35, rel=0.21), "0, 0, 50, 100, 200 ms, each ± 20 %"


@in_jumping_time
async def test_a_delayed_record_waits_and_ends_the_fetch_when_it_is_due() -> None:
    b = await bench()
    b.records.append(1, 2)
    one, two = await b.fetch()
    await b.settle(NACK, one, delay=0.05)
    await b.settle(NACK, two, delay=0.01)
    assert offsets(await b.fetch(wait=30)) == [2]
    assert offsets(await b.fetch(wait=30)) == [1]


async def test_redelivery_respects_max_messages() -> None:
    b = await bench()
    b.records.append(*range(10))
    messages = await b.fetch()
    await b.settle(NACK, *messages)
    assert offsets(await b.fetch(3)) == [0, 1, 2]
    size = messages[0].size
    assert offsets(await b.messages.fetch(100, size + 1, 1)) == [3, 4]


async def test_a_partition_behind_a_stuck_record_is_paused_and_resumed() -> None:
    b = await bench(0, 1, max_gap=10)
    b.records.append(*range(30))
    b.records.append(1, partition=1)
    stuck, *rest = [message for message in await b.fetch() if message.lease.partition == P0]
    await b.settle(ACK, *rest[:10])
    assert b.records.paused == set()
    await b.settle(ACK, rest[10])
    assert b.records.paused == {P0}, "the other partition goes on"
    (warning,) = b.listener.of(Warned)
    assert isinstance(warning, Warned)
    assert "offset 0 is not settled" in warning.text
    await b.settle(ACK, *rest[11:])
    assert len(b.listener.of(Warned)) == 1
    await b.settle(ACK, stuck)
    assert b.records.paused == set()
    await b.stored(30)


async def test_records_in_backoff_are_bounded() -> None:
    b = await bench(max_gap=5)
    b.records.append(*range(10))
    messages = await b.fetch()
    await b.settle(NACK, *messages[:6], delay=0.02)
    assert b.records.paused == {P0}
    again: list[Message[Any]] = []
    while len(again) < 6:
        again += await b.fetch()
    await b.settle(ACK, *again, *messages[6:])
    assert b.records.paused == set()
    await b.stored(10)


async def test_a_record_repeated_by_the_source_is_delivered_once() -> None:
    b = await bench()
    b.records.append(1, 2)
    messages = await b.fetch()
    b.records.read[P0] = 0
    b.records.append(3)
    assert offsets(await b.fetch()) == [3]
    await b.settle(ACK, *messages)
    await b.stored(3)


async def test_settling_twice_is_harmless() -> None:
    b = await bench()
    b.records.append(1)
    (message,) = await b.fetch()
    assert await b.settle(ACK, message, message) == [None, None]
    assert await b.settle(NACK, message) == [None]
    assert await b.fetch(wait=0.01) == []


async def test_a_failed_commit_is_retried() -> None:
    b = await bench(commit_interval=0.01)
    b.records.commit_errors.append(ConnectionFailed("cut"))
    b.records.append(1)
    await b.settle(ACK, *await b.fetch())
    await b.stored(2)
    assert len(b.records.commits) == 2
    assert len(b.listener.of(Warned)) == 1


async def test_a_fatally_refused_commit_ends_the_fetches() -> None:
    b = await bench()
    b.records.commit_errors.append(NotAuthorized("no"))
    b.records.append(1)
    messages = await b.fetch()
    fetching = asyncio.create_task(b.fetch(wait=30))
    await turns()
    await b.settle(ACK, *messages)
    assert await asyncio.wait_for(fetching, 60) == []
    with pytest.raises(NotAuthorized):
        await b.fetch()


async def test_close_commits_the_contiguous_position_and_then_leaves() -> None:
    b = await bench(commit_every=1000, commit_interval=60)
    b.records.append(1, 2, 3)
    one, _, three = await b.fetch()
    await b.settle(ACK, one, three)
    await b.messages.close()
    await b.messages.close()
    assert b.records.stored == {P0: 2}
    assert b.records.closed
    with pytest.raises(Closed):
        await b.fetch()
    with pytest.raises(Closed):
        await b.settle(ACK, three)


async def test_close_leaves_even_if_the_commit_fails() -> None:
    b = await bench(commit_every=1000, commit_interval=60)
    b.records.append(1)
    await b.settle(ACK, *await b.fetch())
    b.records.commit_errors.append(ConnectionFailed("cut"))
    await b.messages.close()
    assert b.records.closed
    assert len(b.listener.of(Warned)) == 1


async def test_an_interrupted_fetch_returns_nothing() -> None:
    b = await bench()
    fetching = asyncio.create_task(b.fetch(wait=30))
    await turns()
    b.messages.interrupt()
    assert await asyncio.wait_for(fetching, 60) == []
    assert await b.messages.extend([]) == []


def test_capabilities_have_neither_leases_nor_confirmed_acks() -> None:
    backend = FakeBackend()
    made = message_capabilities(backend.capabilities)
    assert made.lease is LeaseMode.NONE
    assert made.confirmed_ack is ConfirmedAck.NEVER
    assert made.delivery_attempt
    assert made.key_affinity
    from dataclasses import replace

    with pytest.raises(Unsupported):
        message_capabilities(replace(backend.capabilities, records=None))


async def test_thousands_of_acks_above_a_stuck_record_stay_cheap() -> None:
    b = await bench(max_gap=1_000_000, commit_every=1000)
    count = 50_000
    b.records.append(*range(count))
    messages: list[Message[Any]] = []
    began = time.thread_time()
    while len(messages) < count:
        batch = await b.fetch(1000)
        messages += batch
        await b.settle(ACK, *(message for message in batch if message.raw.offset))
    spent = (time.thread_time() - began) / count * 1e6
    assert b.records.stored == {}
    await b.settle(ACK, messages[0])
    await b.messages.close()
    assert b.records.stored == {P0: count}
    assert spent < 400, f"{spent:.1f} µs a message; quadratic work would take 1000"
