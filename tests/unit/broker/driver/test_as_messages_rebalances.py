"""Records served as messages during rebalances: no unfinished record is committed."""

from __future__ import annotations

import asyncio

from broker.errors import LeaseLost
from broker.hooks import PartitionsAssigned, PartitionsLost, PartitionsRevoked
from tests.unit.broker.driver.as_messages_bench import ACK, NACK, P0, P1, bench, offsets, turns


async def test_a_revocation_waits_for_delivered_messages_and_commits_them() -> None:
    b = await bench(0, 1)
    b.records.append(1, 2)
    b.records.append(8, partition=1)
    messages = await b.hand_over()
    revoking = asyncio.create_task(b.records.revoke(0))
    await turns()
    assert not revoking.done()
    assert len(b.listener.of(PartitionsRevoked)) == 1
    await b.settle(ACK, messages[0])
    await turns()
    assert not revoking.done()
    await b.settle(ACK, messages[1])
    await revoking
    assert b.records.stored == {P0: 3}
    assert b.listener.gone == []
    b.records.append(3)
    await b.settle(ACK, messages[2])
    await b.stored(9, P1)


async def test_undelivered_records_do_not_delay_a_revocation() -> None:
    b = await bench()
    b.records.append(1, 2, 3)
    one, two, three = await b.fetch()
    one.lease_ends = 1e9
    await b.settle(ACK, one)
    await b.records.revoke(0)
    assert b.listener.gone == [two, three]
    assert b.records.stored == {P0: 2}


async def test_unfinished_records_at_the_deadline_are_lost_and_not_committed() -> None:
    b = await bench()
    b.records.append(1, 2, 3)
    one, two, three = await b.hand_over()
    await b.settle(ACK, one, three)
    await b.records.revoke(0, within=0.04)
    assert b.listener.gone == [two]
    assert b.records.stored == {P0: 2}
    (error,) = await b.settle(ACK, two)
    assert isinstance(error, LeaseLost)


async def test_a_partition_being_revoked_redelivers_nothing() -> None:
    b = await bench()
    b.records.append(1, 2)
    one, two = await b.hand_over()
    await b.settle(NACK, one)
    revoking = asyncio.create_task(b.records.revoke(0))
    await turns()
    await b.settle(NACK, two)
    await revoking
    assert await b.fetch(wait=0.01) == []
    assert b.records.stored == {}
    b.records.assign(0)
    assert offsets(await b.fetch()) == [1, 2]


async def test_messages_of_a_lost_partition_are_lost() -> None:
    b = await bench(0, 1)
    b.records.append(1)
    b.records.append(1, partition=1)
    zero, one = await b.fetch()
    b.records.lose(0)
    assert b.listener.gone == [zero]
    assert len(b.listener.of(PartitionsLost)) == 1
    results = await b.settle(ACK, zero, one)
    assert isinstance(results[0], LeaseLost)
    assert results[1] is None


async def test_a_message_of_an_earlier_assignment_settles_nothing_in_a_later_one() -> None:
    b = await bench()
    b.records.append(1)
    (old,) = await b.fetch()
    b.records.lose(0)
    b.records.assign(0)
    (new,) = await b.fetch()
    (error,) = await b.settle(ACK, old)
    assert isinstance(error, LeaseLost)
    await turns()
    assert b.records.commits == []
    await b.settle(ACK, new)
    await b.stored(2)
    assert len(b.listener.of(PartitionsAssigned)) == 2
