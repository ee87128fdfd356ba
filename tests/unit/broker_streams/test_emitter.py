"""Emitters on the in-memory broker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from broker import Bus, Closed, InvalidMessage, Json, OperationTimeout, connect
from broker_inmem import Broker, InmemSettings
from broker_streams.emitter import Emitter


@pytest.fixture
def server() -> Broker:
    return Broker()


@pytest.fixture
async def bus(server: Broker) -> AsyncIterator[Bus]:
    async with connect(InmemSettings(broker=server)) as bus:
        await bus.admin.ensure_topic("clicks", partitions=4)
        yield bus


async def test_it_publishes_values_with_the_partitioner_of_the_group(bus: Bus) -> None:
    async with Emitter(bus, "clicks", Json(int), partitioner="fnv1a") as emitter:
        for n in range(20):
            receipt = await emitter.emit(f"key-{n}", n)
            assert receipt.partition == await bus.partition_of("clicks", f"key-{n}", partitioner="fnv1a")


async def test_values_tombstones_and_attributes_arrive(bus: Bus) -> None:
    async with Emitter(bus, "clicks", Json(int), attributes={"from": "here", "kind": "any"}) as emitter:
        await emitter.emit("a", 5, attributes={"kind": "click"}, id="one")
        await emitter.emit("a", None)
    partition = await bus.partition_of("clicks", "a")
    records = [record async for batch in bus.log.read("clicks", partition) for record in batch]
    assert [(record.key, record.data) for record in records] == [(b"a", b"5"), (b"a", None)]
    assert dict(records[0].attributes) == {"from": "here", "kind": "click"}
    assert records[0].id == "one"


async def test_e1_errors(bus: Bus, server: Broker) -> None:
    emitter = Emitter(bus, "clicks", Json(int))
    with pytest.raises(InvalidMessage):
        await emitter.emit("a", object())  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidMessage, match="key is 5"):
        await emitter.emit(5, 5)  # pyright: ignore[reportArgumentType]
    server.faults.fail_publish(OperationTimeout("a fault"))
    with pytest.raises(OperationTimeout, match="a fault"):
        await emitter.emit("a", 5)
    await emitter.close()
    await emitter.close()
    with pytest.raises(Closed, match="is closed"):
        await emitter.emit("a", 5)
