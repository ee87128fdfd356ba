"""A copy job from a queue to a topic whose workers are killed within the transactions that ack what they copy."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

import broker
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually
from tests.chaos import kafka_queue_copy_process
from tests.chaos.kafka_copying import CopyWorker
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, read_all

pytestmark = pytest.mark.deep

_PARTITIONS: Final = 3
_WORKERS: Final = 2
_KILLS: Final = 4
_PATIENCE: Final = 90.0
_OPTIONS: Final = (
    "session_timeout_ms=2000&heartbeat_interval_ms=300&transaction_timeout_ms=20000&queue=markers&lease_seconds=3"
)


def _bodies(kafka: KafkaServer, topic: str, isolation: str) -> Counter[bytes | None]:
    return Counter(
        record.value()
        for partition in range(_PARTITIONS)
        for record in read_all(kafka.bootstrap, topic, partition, isolation=isolation)
    )


async def _feed(bus: broker.Bus, topic: str, stopped: asyncio.Event) -> list[bytes]:
    """Publish numbers until stopped; returns all of them."""
    sent: list[bytes] = []
    while not stopped.is_set():
        more = [b"%d" % number for number in range(len(sent), len(sent) + 30)]
        await bus.topic(topic).publish_batch([OutboundMessage(body, body) for body in more], receipts=False)
        sent += more
        try:
            await asyncio.wait_for(stopped.wait(), 0.05)
        except TimeoutError:
            continue
    return sent


async def test_each_message_has_its_output_once_whichever_worker_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(20261123)
    with KafkaServer() as kafka:
        admin = RawAdmin(kafka.bootstrap)
        topic, sink = (admin.make_topic(partitions=_PARTITIONS) for _ in range(2))
        url, group = f"{kafka.url}?{_OPTIONS}", "copier"
        module = kafka_queue_copy_process.__name__
        stopped = asyncio.Event()
        async with broker.connect(url) as bus:
            await bus.admin.ensure_subscription(topic, group)
            feeding = asyncio.create_task(_feed(bus, topic, stopped))
            workers = [
                CopyWorker(number, module, [url, f"{group}-{number}", topic, group, sink], tmp_path)
                for number in range(_WORKERS)
            ]
            try:
                for kill in range(_KILLS):
                    victim = dice.choice(workers)
                    # In the middle of its work, not before its first transaction.
                    done = victim.words()["committed"]
                    await eventually(lambda v=victim, d=done: v.words()["committed"] >= d + 3, _PATIENCE, "it copies")
                    if kill % 2:
                        await victim.hold_in_transaction()
                    else:
                        await asyncio.sleep(dice.uniform(0, 0.05))
                    victim.kill()
                    victim.start()
                stopped.set()
                wanted = await feeding

                async def all_is_done() -> bool:
                    lag = await bus.admin.lag(topic, group)
                    return (lag.waiting, lag.unsettled) == (0, 0)

                await eventually(all_is_done, _PATIENCE, "all is copied")
            finally:
                feeding.cancel()
                for worker in workers:
                    worker.kill()
        for partition in range(_PARTITIONS):
            await asyncio.to_thread(admin.wait_for_markers, sink, partition)
        copied = await asyncio.to_thread(_bodies, kafka, sink, "read_committed")
        undone = (await asyncio.to_thread(_bodies, kafka, sink, "read_uncommitted")).total() - copied.total()
        said = sum((worker.words() for worker in workers), Counter[str]())
        accounting = (
            f"{len(wanted)} messages, {_KILLS} kills; {said['committed']} transactions committed, {said['aborted']} "
            f"aborted, {said['reopened']} connections opened again; {undone} outputs undone; in the sink "
            f"{copied.total()}, missing {len(set(wanted) - set(copied))}, twice {copied.total() - len(copied)}"
        )
        with capsys.disabled():
            sys.stdout.write(f"\n{accounting}\n")
        assert copied == Counter(wanted), "\n".join([accounting, *(w.errors.read_text()[-4000:] for w in workers)])
        # Every second kill hit a transaction with writes.
        assert undone > 0, accounting
