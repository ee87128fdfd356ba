"""The broker's disk is full: publishers fail or wait, and continue when there is room again; nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import broker
from tests.chaos.kafka_accounts import Account
from tests.chaos.test_kafka_server import OPTIONS, reached, read_records, still
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin
from tests.servers.kafka_disk import SmallDisk

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-chaos-disk")]


@pytest.fixture
def disk() -> Iterator[tuple[KafkaServer, SmallDisk]]:
    server = KafkaServer()
    try:
        with SmallDisk(server) as disk:
            server.start()
            yield server, disk
    finally:
        server.close()


async def test_a_full_disk_loses_nothing_that_was_confirmed(
    disk: tuple[KafkaServer, SmallDisk], capsys: pytest.CaptureFixture[str]
) -> None:
    server, small = disk
    account = Account(RawAdmin(server.bootstrap).make_topic(), 1)
    stopped = asyncio.Event()
    async with broker.connect(f"{server.url}?{OPTIONS}&message_timeout_ms=5000") as bus:
        reading = asyncio.create_task(read_records(bus, account, "audit", "records"))
        publishing = asyncio.create_task(account.publish_until(bus, stopped))
        await reached(lambda: len(account.receipts) > 300)
        # Kafka frees room now and then; when it cannot write to its only disk, it shuts down.
        async with asyncio.timeout(40):
            while len(account.failed) < 50 or server.running:
                if server.running:
                    await asyncio.to_thread(small.fill)
                await asyncio.sleep(0.05)
        assert not publishing.done()
        confirmed = len(account.receipts)
        assert ("No space left on device" if small.mounted else "File too large") in server.log
        await asyncio.to_thread(small.free)
        await asyncio.to_thread(server.start)
        await reached(lambda: len(account.receipts) > confirmed + 300)
        stopped.set()
        await publishing
        written = await asyncio.to_thread(account.written, server.bootstrap)
        try:
            await reached(lambda: account.seen_all("records", written))
        finally:
            account.say(capsys, "disk full", written)
        await still(reading)
    account.check("records", written, torn=True)
    assert written.keys() >= account.receipts.keys()
