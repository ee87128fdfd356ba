"""A broker is killed, restarted or frozen while clients publish, consume and commit; every record is accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

import broker
from broker.errors import BrokerError
from tests.chaos.kafka_accounts import Account
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-chaos-server")]

PARTITIONS = 3
OPTIONS = "session_timeout_ms=6000&heartbeat_interval_ms=300"


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    with KafkaServer() as server:
        yield server


async def harm(server: KafkaServer, fault: str) -> None:
    """Apply the fault, and undo it after a while."""
    if fault == "freeze":
        await asyncio.to_thread(server.pause)
        await asyncio.sleep(1.0)
        server.resume()
        return
    await asyncio.to_thread(server.kill if fault == "kill" else server.stop)
    await asyncio.to_thread(server.start)


async def read_records(bus: broker.Bus, account: Account, group: str, name: str) -> None:
    """A member that commits after each batch, and continues after a failed commit, which the next one covers."""
    async with bus.records(account.topic, group=group) as log:
        async for batch in log.batches(200):
            for record in batch:
                account.book(name, record)
            try:
                await batch.commit()
            except BrokerError as error:
                if not error.retriable and not isinstance(error, broker.LeaseLost):
                    raise


async def read_messages(bus: broker.Bus, account: Account, group: str, name: str) -> None:
    """A consumer that acks one by one, in the order of arrival."""
    async with bus.messages(account.topic, subscription=group) as inbox:
        async for message in inbox:
            account.book(name, message)
            await message.ack()


async def reached(look: Callable[[], bool], seconds: float = 40.0) -> None:
    """Until it is true.

    :raises TimeoutError: it does not become so.
    """
    async with asyncio.timeout(seconds):
        while not look():
            await asyncio.sleep(0.05)


def over(*tasks: asyncio.Task[None]) -> bool:
    """False; raises the error of a task that should run."""
    for task in tasks:
        if task.done():
            task.result()
    return False


async def still(task: asyncio.Task[None]) -> None:
    """Cancel a task that must still be running."""
    assert not task.done(), task.exception()
    task.cancel()
    await asyncio.wait((task,))


@pytest.mark.parametrize("fault", ["kill", pytest.param("restart", marks=pytest.mark.deep), "freeze"])
async def test_publishing_consuming_and_committing_continue(
    server: KafkaServer, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    admin = RawAdmin(server.bootstrap)
    account = Account(admin.make_topic(partitions=PARTITIONS), PARTITIONS)
    stopped = asyncio.Event()
    async with broker.connect(f"{server.url}?{OPTIONS}") as bus:
        readers = {"records": read_records, "messages": read_messages}
        reading = [
            asyncio.create_task(read(bus, account, f"{account.topic}-{name}", name)) for name, read in readers.items()
        ]
        publishing = asyncio.create_task(account.publish_until(bus, stopped, 10, 0.05, writers=3))
        # Opening may fail without brokers, so the faults hit running readers.
        await reached(lambda: over(*reading) or all(account.read.get(name) for name in readers))
        before = len(account.receipts)
        await reached(lambda: len(account.receipts) > before + 250)
        await harm(server, fault)
        after = len(account.receipts)
        await reached(lambda: len(account.receipts) > after + 250)
        stopped.set()
        await publishing
        written = await asyncio.to_thread(account.written, server.bootstrap)
        try:
            await reached(lambda: over(*reading) or all(account.seen_all(name, written) for name in readers))
        finally:
            account.say(capsys, fault, written)
        for task in reading:
            await still(task)
        # Exactly the read records are committed: a restart would repeat none and skip none.
        for name in readers:
            for partition in range(PARTITIONS):
                end = sum(place[0] == partition for place in written.values())
                assert admin.committed(f"{account.topic}-{name}", account.topic, partition).offset == end
    for name in readers:
        account.check(name, written)
    # No outage exceeded the delivery timeout, so no publish failed, and the log holds only confirmed messages.
    assert not account.failed
    assert written.keys() == account.receipts.keys()
