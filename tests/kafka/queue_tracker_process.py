"""A process that runs a tracker and prints its state, a line of JSON at each change; paused or killed by its test.

Its third argument says where it freezes itself, once: `before` it writes what is due, or `within` the transaction, when
the records are on the brokers and not committed.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from threading import get_ident

from confluent_kafka import Producer

from broker.hooks import Hooks
from broker_kafka.cluster.connection import Connection
from broker_kafka.fenced_writer import FencedWriter, OutgoingRecord, Positions
from broker_kafka.queue.tracker import partition_claim
from broker_kafka.queue.tracker.tracker import Tracker
from broker_kafka.queue.tracker.tracker_state import TrackerOptions
from broker_kafka.settings import KafkaSettings


class Freezing(FencedWriter):
    """Pauses its process, which then goes on as if nothing had happened."""

    where = ""
    messages = False
    """Whether there are any in the batch; a tracker that has just begun asks for the time first."""

    async def write(self, records: Sequence[OutgoingRecord], positions: Positions | None = None) -> None:
        self.messages = len(records) > 1
        self.freeze("before")
        await super().write(records, positions)

    def _flush(self, producer: Producer) -> None:
        super()._flush(producer)
        self.freeze("within")

    def freeze(self, where: str) -> None:
        if self.messages and Freezing.where == where:
            Freezing.where = ""
            # To this thread: one to the process might stop it a moment later.
            signal.pthread_kill(get_ident(), signal.SIGSTOP)


async def run(bootstrap: str, subscription: str, where: str) -> None:
    Freezing.where = where
    partition_claim.FencedWriter = Freezing
    settings = KafkaSettings(servers=(bootstrap,), session_timeout_ms=6000, heartbeat_interval_ms=300)
    connection = Connection(settings, Hooks())
    await connection.open()
    tracker = Tracker(connection, subscription, Hooks(), options=TrackerOptions(commit_after=0.1))
    await tracker.open()
    printed = ""
    while True:
        state = tracker.state()
        now = json.dumps({"partitions": [*state.partitions], "open": state.open, **asdict(tracker.counts)})
        if now != printed:
            print(now, flush=True)
            printed = now
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
