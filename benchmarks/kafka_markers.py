"""The cost of the markers engine without I/O: reading markers, a replay, and the memory of an open lease.

Uses no broker and no client, and one core.
"""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Sequence

from benchmarks.measure import Spread
from benchmarks.report import Finding, Section
from broker_kafka.queue.markers.start_writer import StartWriter
from broker_kafka.queue.markers.wire import Content, Kind, Marker, MessageId, write_marker
from broker_kafka.queue.tracker.partition_state import PartitionState

__all__ = ["measure_markers"]

_PAYLOAD = b"x" * 100
_OPEN = 1000
"""How many messages are open at a time, as if workers held them."""
_HIGH, _NOW = 10_000_000, 1_767_000_000_000
"""A realistic offset, and a realistic time in milliseconds: small numbers would take less memory."""
_TOGETHER = 200
"""Messages that a worker starts, and ends, at once."""


async def measure_markers(scale: float, rounds: int) -> Section:
    """Markers per second, seconds for a million, and bytes per open lease."""
    section = Section(
        "Kafka, the markers engine",
        f"The protocol's rules without a broker: a START of {len(_PAYLOAD)} B for each message and its END {_OPEN} "
        "messages later, decoded and applied; seconds are the processor's. A tracker that takes a partition over "
        f"reads its log at this speed. Of messages that were taken by {_TOGETHER} one marker tells.",
    )
    pairs = max(1_000, int(100_000 * scale))
    log = await asyncio.to_thread(_log, pairs)
    rates = [len(log) / _replay(log) for _ in range(rounds)]
    section.findings.append(Finding("markers read", Spread.of(rates), "/s", at_least=100_000))
    million = [1e6 / rate for rate in rates]
    section.findings.append(Finding("replay of a million markers", Spread.of(million), "s", at_most=30))
    together = await asyncio.to_thread(_log_together, pairs // _TOGETHER)
    rates = [2 * (pairs // _TOGETHER) * _TOGETHER / _replay(together) for _ in range(rounds)]
    section.findings.append(
        Finding(f"the same of messages taken by {_TOGETHER}, each START and END", Spread.of(rates), "/s")
    )
    # As a queue client writes them, with key, holder and origin.
    writer = _writer()
    starts = [writer.plain(_HIGH + number, 1, b"customer-100", _PAYLOAD, _NOW) for number in range(pairs)]
    section.findings.append(Finding("memory of an open lease", Spread.of([_lease_bytes(starts)]), "B"))
    starts = [_starts(number) for number in range(pairs // _TOGETHER)]
    section.findings.append(
        Finding(f"memory of one of {_TOGETHER} taken at once", Spread.of([_lease_bytes(starts)]), "B")
    )
    section.findings.append(Finding("10,000 leases due at once, taken", Spread.of(_storms(rounds)), "ms"))
    return section


def _log(pairs: int) -> Sequence[bytes]:
    content = Content(key=b"key", value=_PAYLOAD, holder="worker")
    log: list[bytes] = []
    for number in range(pairs + _OPEN):
        if number < pairs:
            log.append(write_marker(_start(number), content))
        if number >= _OPEN:
            log.append(write_marker(Marker(kind=Kind.END, id=_id(number - _OPEN))))
    return log


def _log_together(batches: int) -> Sequence[bytes]:
    behind = _OPEN // _TOGETHER
    log: list[bytes] = []
    for batch in range(batches + behind):
        if batch < batches:
            log.append(_starts(batch))
        if batch >= behind:
            first, *more = _offsets(batch - behind)
            log.append(write_marker(Marker(kind=Kind.END, id=_id(first), more=tuple(more))))
    return log


def _start(number: int) -> Marker:
    return Marker(kind=Kind.START, id=_id(number), after_ms=60_000, attempt=1)


def _starts(batch: int) -> bytes:
    """The record of a START of several messages."""
    return _writer().together(_offsets(batch), [b"key"] * _TOGETHER, [_PAYLOAD] * _TOGETHER, [0] * _TOGETHER, [])


def _writer() -> StartWriter:
    return StartWriter(
        "orders",
        0,
        "billing",
        lease_ms=60_000,
        holder="worker-7d9f4c5b6d-x2x8z:4711",
        max_attempts=20,
        dead_letter="dead",
    )


def _offsets(batch: int) -> Sequence[int]:
    return range(batch * _TOGETHER, (batch + 1) * _TOGETHER)


def _id(number: int) -> MessageId:
    return MessageId("orders", 0, number, "billing")


def _replay(log: Sequence[bytes]) -> float:
    partition = PartitionState(0, len(log), 0)
    began = time.process_time()
    for offset, data in enumerate(log):
        partition.read(offset, 1_000_000 + offset, data, 1)
    took = time.process_time() - began
    assert partition.is_open
    assert not len(partition.markers)
    return took


def _lease_bytes(starts: Sequence[bytes]) -> float:
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    partition = PartitionState(0, 0, 0)
    for offset, data in enumerate(starts):
        partition.read(_HIGH + offset, _NOW + offset, bytes(bytearray(data)), 1)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown / len(partition.markers)


def _storms(rounds: int) -> Sequence[float]:
    took: list[float] = []
    for _ in range(rounds):
        partition = PartitionState(0, 0, 0)
        for number in range(10_000):
            start = Marker(kind=Kind.START, id=_id(number), after_ms=1_000)
            partition.read(number, 1_000_000, write_marker(start), 1)
        partition.log_end_known(10_000, 1_001)
        began = time.process_time()
        due = 0
        while taken := partition.due(500):
            due += len(taken)
        took.append(1e3 * (time.process_time() - began))
        assert due == 10_000
    return took
