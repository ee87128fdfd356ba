"""A full disk under an embedded server, and the server's own limit of storage: named, reported and healed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import broker
from broker.bus import Bus
from broker.errors import BackendError, OperationTimeout, StorageFailed
from broker.hooks import Connected, Event, WritesFailed
from broker.testing.waiting import take
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.storage import read_failure
from tests.jetstream.support import until
from tests.servers.nats import NatsServer
from tests.servers.small_mount import SmallMount

FULL = "no space left on device"
OPTIONS = "publish_timeout=3&publish_resend=0.3"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallMount]:
    made = SmallMount.make(tmp_path / "disk", 24)
    if made is None:
        pytest.skip("this kernel lets ordinary users mount nothing, so no disk can be filled")
    yield made
    made.close()


@pytest.fixture
async def bus(disk: SmallMount) -> AsyncIterator[Bus]:
    async with broker.connect(f"embedded://{disk.path}/store?{OPTIONS}") as bus:
        await bus.admin.ensure_topic("orders")
        await bus.topic("orders").publish(b"before")
        yield bus


async def test_a_full_disk_is_named_reported_and_healed(disk: SmallMount, bus: Bus) -> None:
    events: list[Event] = []
    bus.hooks.listen(events.append)
    assert (await bus.health()).ok
    disk.fill()
    with pytest.raises(StorageFailed, match=f"(?s)orders.*{disk.path}/store.*{FULL}") as caught:
        await bus.topic("orders").publish(bytes(100_000))
    assert caught.value.retriable
    assert "Make room" in caught.value.advice
    health = await bus.health()
    assert not health.ok
    assert FULL in health.detail
    (failed,) = [event for event in events if isinstance(event, WritesFailed)]
    assert FULL in str(failed.error)
    with pytest.raises(StorageFailed):
        await bus.admin.ensure_topic("another")
    disk.free()
    # The connection that started the server restarts it by itself, without any call.
    await until(lambda: any(isinstance(event, Connected) and event.again for event in events))
    assert (await bus.topic("orders").publish(bytes(100_000))).offset == 2
    assert (await bus.health()).ok
    async with bus.messages("orders", subscription="billing") as inbox:
        assert [message.data for message in await take(inbox, 2, 60)] == [b"before", bytes(100_000)]


async def test_a_publish_that_waits_is_stored_when_there_is_room(disk: SmallMount) -> None:
    async with broker.connect(f"embedded://{disk.path}/store?publish_timeout=60&publish_resend=0.3") as bus:
        await bus.admin.ensure_topic("orders")
        failed = asyncio.Event()
        bus.hooks.listen(lambda event: failed.set() if isinstance(event, WritesFailed) else None)
        disk.fill()
        publishing = asyncio.ensure_future(bus.topic("orders").publish_batch([bytes(100_000)] * 3))
        async with asyncio.timeout(60):
            await failed.wait()
            assert not publishing.done()
            disk.free()
            assert [receipt.duplicate for receipt in await publishing] == [False] * 3
        bounds = (await bus.log.bounds("orders"))[0]
        assert bounds.next - bounds.first == 3


async def test_a_disk_that_filled_while_nobody_published_is_noticed(disk: SmallMount, bus: Bus) -> None:
    disk.fill()
    health = await bus.health()
    assert not health.ok
    assert FULL in health.detail


async def test_a_connection_that_did_not_start_the_server_says_the_same(disk: SmallMount, bus: Bus) -> None:
    async with broker.connect(f"embedded://{disk.path}/store?{OPTIONS}") as other:
        assert isinstance(other.backend, JetStreamBackend)
        disk.fill()
        with pytest.raises(StorageFailed, match=FULL):
            await other.topic("orders").publish(bytes(100_000))
        assert not (await other.health()).ok
        disk.free()
        async with asyncio.timeout(60):
            while True:
                try:
                    await other.topic("orders").publish(b"again")
                    break
                except (StorageFailed, OperationTimeout):
                    pass
        assert (await other.health()).ok


async def test_a_restarted_server_counts_what_it_has_stored(disk: SmallMount) -> None:
    """Else the server, which counts three quarters of the free room, would take nothing after a restart."""
    for round_ in range(3):
        async with broker.connect(f"embedded://{disk.path}/store?{OPTIONS}") as bus:
            await bus.admin.ensure_topic("orders")
            for _ in range(5):
                await bus.topic("orders").publish(bytes(900_000))
            bounds = (await bus.log.bounds("orders"))[0]
            assert bounds.next - bounds.first == 5 * (round_ + 1)


async def test_the_limit_of_the_server_is_named() -> None:
    with NatsServer("jetstream { max_file_store: 1MB }", jetstream=False) as server:
        async with broker.connect(f"{server.url}?{OPTIONS}") as bus:
            events: list[Event] = []
            bus.hooks.listen(events.append)
            await bus.admin.ensure_topic("orders")
            with pytest.raises(StorageFailed, match="used up") as caught:
                for _ in range(30):
                    await bus.topic("orders").publish(bytes(100_000))
            assert "not ready" not in caught.value.advice
            assert "max_file_store" in caught.value.advice
            assert isinstance(caught.value, BackendError)
            assert any(isinstance(event, WritesFailed) for event in events)
            health = await bus.health()
            assert not health.ok
            assert "used up" in health.detail
            await bus.admin.delete_topic("orders")
            await bus.admin.ensure_topic("orders")
            await bus.topic("orders").publish(b"x")
            assert (await bus.health()).ok


def test_the_log_tells_since_when_the_server_cannot_write() -> None:
    failed = "[1] 2026/11/30 04:28:15 [ERR] Filestore [orders] Critical write error: write /x/1.blk: " + FULL
    started = "[1] 2026/11/30 04:29:15 [INF] Server is ready"
    assert read_failure(f"{started}\n{failed}\nother", "") == FULL
    assert read_failure(f"{failed}\n{started}", "") == ""
    assert read_failure("other", "earlier") == "earlier"
