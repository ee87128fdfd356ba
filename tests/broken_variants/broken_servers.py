"""Variants whose server forgets, and whose log and transactions lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from broker.driver.contract import MessageSubscription, RecordSubscription, Settlement, TopicPartition
from broker.errors import BrokerError
from broker.messages import Outcome
from broker.testing.faults import Wrapped
from broker_inmem import InmemSettings
from tests.broken_variants.breaking import (
    BrokenBackend,
    BrokenHarness,
    BrokenRecords,
    BrokenSource,
    BrokenView,
)
from tests.broken_variants.registry import breaks


@breaks("leases.crash-releases-messages")
class NeverRedelivers(BrokenHarness):
    """The messages of a crashed consumer are never redelivered."""

    def url(self, *, short_lease: bool = False) -> InmemSettings:
        return InmemSettings(broker=self.broker, lease_seconds=86400.0)


@breaks("reconnect.acks-survive")
class RestartForgetsAcks(BrokenSource):
    """Acks are reported as successful but lost in a restart."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.acked: set[str] = set()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        kept = [settlement for settlement in settlements if settlement.outcome is not Outcome.ACK]
        results = iter(await self.inner.settle(kept) if kept else ())
        return [None if settlement.outcome is Outcome.ACK else next(results) for settlement in settlements]


@breaks("records.commit-is-the-next-position")
class CommitRewinds(BrokenRecords):
    """A commit stores the last offset instead of the next position."""

    def change(self, partition: TopicPartition, position: int) -> int:
        return position - 1


@breaks("records.by-partition-parts-a-batch")
class CommitsEveryPartition(BrokenRecords):
    """A commit stores the positions of all partitions that were fetched."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.highest: dict[TopicPartition, int] = {}

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Any:
        records = await self.inner.fetch(max_records, max_bytes, wait)
        self.highest |= {TopicPartition(r.topic, r.partition): r.offset + 1 for r in records}
        return records

    async def commit(self, positions: Mapping[TopicPartition, int]) -> Any:
        return await self.inner.commit({**self.highest, **positions})


class _ViewInMilliseconds(BrokenView):
    def publish_times(self, raws: Sequence[Any], /) -> list[int]:
        return [round(self.inner.publish_time(raw).timestamp() * 1000) for raw in raws]


@breaks("records.columns-equal-the-records")
class ColumnsInMilliseconds(BrokenRecords):
    """Columns of times are milliseconds, where the contract says microseconds."""

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Any:
        records = await self.inner.fetch(max_records, max_bytes, wait)
        for record in records:
            record.view = _ViewInMilliseconds(record.view)
        return records


@breaks("as-messages.commit-is-contiguous")
class CommitsPastAGap(BrokenRecords):
    """A commit stores the highest position that was fetched."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.highest: dict[TopicPartition, int] = {}

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Any:
        records = await self.inner.fetch(max_records, max_bytes, wait)
        for record in records:
            self.highest[TopicPartition(record.topic, record.partition)] = record.offset + 1
        return records

    def change(self, partition: TopicPartition, position: int) -> int:
        return self.highest.get(partition, position)


@breaks("records.no-automatic-commits")
class ReadingCommits(BrokenRecords):
    """Reading a record commits it."""

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Any:
        records = await self.inner.fetch(max_records, max_bytes, wait)
        ends: Mapping[TopicPartition, int] = {TopicPartition(r.topic, r.partition): r.offset + 1 for r in records}
        await self.inner.commit(ends)
        return records


@breaks("transactions.abort-hides-all")
class LeaksAnAbortedTransaction(Wrapped):
    """An aborted transaction is committed."""

    async def abort(self) -> None:
        await self.inner.commit()


@breaks("log.removed-start-raises")
class LogSkipsRemovedRecords(BrokenBackend):
    """A read whose start was removed begins at the first remaining record."""

    def log_reader(self) -> Any:
        return _Skipping(self.inner.log_reader())


class _Skipping(Wrapped):
    async def read(self, topic: str, partition: int, start: int, stop: int, max_records: int) -> Any:
        first = (await self.inner.bounds(topic))[partition].first
        async for records in self.inner.read(topic, partition, max(start, first), stop, max_records):
            yield records


@breaks("admin.lag-counts-messages")
class LagIsOffByOne(BrokenBackend):
    """The lag counts one message too few."""

    def admin(self) -> Any:
        return _Miscounting(self.inner.admin())


class _Miscounting(Wrapped):
    async def lag(self, topic: str, subscription: str) -> Any:
        lag = await self.inner.lag(topic, subscription)
        return type(lag)(waiting=max(0, lag.waiting - 1), unsettled=lag.unsettled, partitions=lag.partitions)


class _KeepsParts(BrokenBackend):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.kept: list[Any] = []


@breaks("leaks.message-consumers")
class KeepsClosedSources(_KeepsParts):
    """The backend keeps every source that it has opened, for its own close."""

    async def subscribe(self, subscription: MessageSubscription, listener: Any) -> Any:
        self.kept.append(source := await super().subscribe(subscription, listener))
        return source


@breaks("leaks.record-consumers")
class KeepsListeners(_KeepsParts):
    """The backend keeps whom it has called back about partitions."""

    async def join(self, subscription: RecordSubscription, listener: Any) -> Any:
        self.kept.append(listener)
        return await super().join(subscription, listener)


@breaks("leaks.publishers")
class KeepsClosedTargets(_KeepsParts):
    """The backend keeps every publish target that it has opened."""

    def publish_target(self, topic: str) -> Any:
        self.kept.append(target := super().publish_target(topic))
        return target
