"""Sources that store the attempts of messages in the consumer's memory: when, and what waits for the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.capabilities import ConfirmedAck
from broker.errors import BrokerError, ConnectionFailed, LeaseLost, SettleError
from broker.hooks import Event, LeasesNotRenewed
from broker.messages import Message, Outcome, SettleState
from tests.unit.broker.consuming.scripted_source import ScriptedSource, consuming, received, until


class KeepingSource(ScriptedSource):
    """Notes stored retries; answers when `answers` is set, and attempts that start when `begins` is set too.

    :ivar noted: the id, the tries from memory and the delay of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, int, float]] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.begins = asyncio.Event()
        self.begins.set()
        self.failures: list[BrokerError | Exception] = []

    async def store_attempt(self, message: Message[Any], delay: float) -> BrokerError | None:
        self.noted.append((message.id, message.retries, delay))
        await self.answers.wait()
        if not delay:
            await self.begins.wait()
        failure = self.failures.pop(0) if self.failures else None
        if failure is None or isinstance(failure, BrokerError):
            return failure
        raise failure


@pytest.mark.parametrize(("confirmed", "waits"), [(ConfirmedAck.ALWAYS, True), (ConfirmedAck.OPTIONAL, False)])
async def test_a_nack_waits_until_it_is_stored_if_acks_are_confirmed(confirmed: ConfirmedAck, waits: bool) -> None:
    source = KeepingSource()
    source.add("1", key=b"k")
    source.answers.clear()
    async with consuming(source, ordered_by_key=True, confirmed=confirmed) as consumer:
        message = await received(consumer)
        nacking = asyncio.ensure_future(message.nack(delay=60))
        await until(lambda: source.noted == [("1", 0, 60)])
        for _ in range(10):
            await asyncio.sleep(0)
        assert nacking.done() is not waits
        source.answers.set()
        await nacking


async def test_a_retry_from_memory_is_stored_before_its_delivery() -> None:
    source = KeepingSource()
    source.add("1", key=b"k")
    async with consuming(source, ordered_by_key=True) as consumer:
        for tries in range(3):
            message = await received(consumer)
            assert (message.delivery_attempt, message.retries) == (1 + tries, tries)
            source.begins.clear()
            await message.nack(delay=0.001)
            await until(lambda tries=tries: source.noted[-1] == ("1", tries + 1, 0.0))
            assert await consumer.next_message(timeout=0.01) is None
            source.begins.set()
        await (await received(consumer)).ack()
    assert source.noted == [note for tries in range(3) for note in (("1", tries, 0.001), ("1", tries + 1, 0.0))]
    assert source.outcomes(Outcome.ACK) == ["1"]


@pytest.mark.parametrize("failure", [ConnectionFailed("away"), RuntimeError("odd")], ids=repr)
async def test_a_failed_store_is_reported_and_the_retry_is_delivered(failure: BrokerError | Exception) -> None:
    source, events = KeepingSource(), list[Event]()
    source.add("1", key=b"k")
    async with consuming(source, ordered_by_key=True, events=events) as consumer:
        message = await received(consumer)
        source.failures.append(failure)
        with pytest.raises(SettleError, match=r"may not be stored: .*(away|odd)"):
            await message.nack(delay=0.001)
        again = await received(consumer)
        assert (again.id, again.delivery_attempt) == ("1", 2)
        await again.ack()
    (event,) = [event for event in events if isinstance(event, LeasesNotRenewed)]
    assert [each.id for each in event.messages] == ["1"]


async def test_a_message_lost_by_then_is_not_delivered_again() -> None:
    source = KeepingSource()
    source.add("1", key=b"k")
    async with consuming(source, ordered_by_key=True) as consumer:
        message = await received(consumer)
        source.failures.append(LeaseLost("Another consumer has it"))
        with pytest.raises(LeaseLost):
            await message.nack(delay=0.001)
        assert await consumer.next_message(timeout=0.02) is None
        # Its key is free for the redelivery by the broker.
        source.add("1", key=b"k", attempt=2)
        again = await received(consumer)
        assert again.delivery_attempt == 2
        await again.ack()
    assert source.outcomes(Outcome.RELEASE) == []


async def test_a_handler_does_not_wait_until_its_failure_is_stored() -> None:
    source = KeepingSource()
    source.add("1", key=b"k")
    source.add("2", key=b"other")
    source.answers.clear()
    seen: list[str] = []

    async def handle(message: Message[Any]) -> None:
        seen.append(message.id)
        if message.id == "1" and not message.retries:
            raise BrokerError("not now")

    async with consuming(source, ordered_by_key=True) as consumer:
        working = asyncio.ensure_future(consumer.receive(handle, concurrency=1))
        await until(lambda: seen == ["1", "2"])
        source.answers.set()
        await until(lambda: source.outcomes(Outcome.ACK) == ["2", "1"])
        await consumer.close()
        await working
    assert [note[:2] for note in source.noted] == [("1", 0), ("1", 1)]


async def test_a_close_waits_for_stores_and_releases_the_message() -> None:
    source = KeepingSource()
    source.add("1", key=b"k")
    source.answers.clear()
    async with consuming(source, ordered_by_key=True, confirmed=ConfirmedAck.OPTIONAL) as consumer:
        message = await received(consumer)
        await message.nack(delay=60)
        asyncio.get_running_loop().call_later(0.01, source.answers.set)
    (release,) = source.settled
    assert (release.outcome, release.message.retries, release.message.state) == (Outcome.RELEASE, 1, SettleState.LOST)
