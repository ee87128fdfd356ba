"""What a reader of many queues hands out of what waits for their consumers."""

from __future__ import annotations

import asyncio
from typing import Any

from broker.messages import Message
from broker_kafka.queue.dispatch_table import NOBODYS, DispatchTable
from broker_kafka.queue.dispatching_reader import DispatchingReader
from broker_kafka.queue.hold import Hold
from broker_kafka.queue.views import QUEUE_VIEW
from broker_kafka.queue.wire import MessageId


async def test_what_is_not_ours_any_more_is_not_handed_out() -> None:
    now = asyncio.get_running_loop().time()
    table: DispatchTable[Message[Any]] = DispatchTable(most=9, most_bytes=99, total_bytes=99, now=now)
    reader = DispatchingReader(table, declared=None, group="workers", lease_seconds=1.0)
    table.open(b"mail", NOBODYS, now)
    # The process stood still, and the leases of the first ended.
    for number, until in enumerate((now - 1, now - 1, now - 1, now + 60, now + 60)):
        hold = Hold(MessageId("jobs", 0, number, "workers"), 0, 1)
        hold.until = until
        table.plan(b"mail", 1, now)
        assert table.offer(b"mail", Message("jobs", b"%d" % number, None, QUEUE_VIEW, hold, 1), 1, now)
    assert [message.data for message in reader.take(b"mail", 2, 99)] == [b"3"]
    assert [message.data for message in reader.take(b"mail", 2, 99)] == [b"4"]
    assert reader.take(b"mail", 2, 99) == []
