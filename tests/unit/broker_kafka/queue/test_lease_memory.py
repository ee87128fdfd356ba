"""What an open lease keeps in memory: a tracker has one for each message that is not done."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence

import pytest

from broker_kafka.queue.markers.start_writer import StartWriter
from broker_kafka.queue.tracker.partition_state import PartitionState

COUNT = 6_000
TOGETHER = 200
OFFSET, NOW = 10_000_000, 1_767_000_000_000
BODY = b"x" * 100


def starts(together: bool) -> Sequence[bytes]:
    writer = StartWriter("invoices", 3, "billing", lease_ms=30_000, holder="worker-7d9f4c5b6d-x2x8z:4711")
    offsets = range(OFFSET, OFFSET + COUNT)
    if not together:
        return [writer.plain(offset, 1, b"customer-100", BODY, NOW) for offset in offsets]
    batches = [offsets[at : at + TOGETHER] for at in range(0, COUNT, TOGETHER)]
    return [
        writer.together(each, [b"customer-100"] * TOGETHER, [BODY] * TOGETHER, [NOW] * TOGETHER, []) for each in batches
    ]


@pytest.mark.parametrize(("together", "most"), [(False, 860), (True, 260)])
def test_a_lease_of_a_small_message_takes_less_than_a_kilobyte(together: bool, most: int) -> None:
    records = starts(together)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        partition = PartitionState(0, 0, 0)
        for number, data in enumerate(records):
            # A copy, as each record that is read has bytes of its own.
            partition.read(OFFSET + number, NOW + number, bytes(bytearray(data)), 1)
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(partition.markers) == COUNT
    assert kept / COUNT < most
