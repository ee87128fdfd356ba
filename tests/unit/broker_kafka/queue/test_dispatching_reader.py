"""What a consumer is handed of what a reader of many queues has waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from broker.driver.leases import lease_time
from broker.messages import Message
from broker_kafka.queue.consumer.queue_lane import QueueLane
from broker_kafka.queue.consumer.starting import QUEUE_VIEW
from broker_kafka.queue.dispatch.dispatch_table import NOBODYS, DispatchTable
from broker_kafka.queue.dispatch.dispatching_reader import DispatchingReader
from broker_kafka.queue.markers.held_message import Hold
from broker_kafka.queue.markers.wire import MessageId


class Ears:
    def __init__(self) -> None:
        self.passed_over_data: list[bytes | None] = []

    def lost(self, messages: object) -> None: ...

    def passed_over(self, messages: Sequence[Message[Any]]) -> None:
        self.passed_over_data += [message.data for message in messages]

    def event(self, event: object) -> None: ...


async def test_what_is_not_ours_any_more_is_told_and_not_handed_out() -> None:
    now = asyncio.get_running_loop().time()
    table: DispatchTable[Message[Any]] = DispatchTable(most=9, most_bytes=99, total_bytes=99, now=now)
    reader = DispatchingReader(table, declared=None, group="workers", lease_seconds=1.0)
    ears = Ears()
    lane = QueueLane(b"mail", ears, reader, reader.detach)
    table.open(b"mail", NOBODYS, now)
    # The process stood still, and the leases of the first ended.
    for number, until in enumerate((now - 1, now - 1, now - 1, now + 60, now + 60)):
        hold = Hold(MessageId("jobs", 0, number, "workers"), 0, 1)
        hold.until = lease_time() + until - now
        table.plan(b"mail", 1, now)
        assert table.offer(b"mail", Message("jobs", b"%d" % number, None, QUEUE_VIEW, hold, 1), 1, now)
    assert [message.data for message in await lane.fetch(2, 99, 0.0)] == [b"3"]
    assert [message.data for message in await lane.fetch(2, 99, 0.0)] == [b"4"]
    assert await lane.fetch(2, 99, 0.0) == []
    assert ears.passed_over_data == [b"0", b"1", b"2"]
