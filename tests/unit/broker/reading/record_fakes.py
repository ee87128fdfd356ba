"""A fake record source over lists, with the switches of the tests; it keeps the driver contract."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import msgspec

from broker.capabilities import Capabilities, Limits, PublishCapabilities, RecordCapabilities
from broker.driver.contract import RecordListener, RecordSubscription, TopicInfo, TopicPartition
from broker.driver.seeking import seek_each
from broker.errors import BrokerError, Closed, LeaseLost, TopicNotFound
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.records import Record

WRITTEN = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)


class RawView:
    """Shows records whose raw object is (attributes, publish time)."""

    def id(self, raw: Any, /) -> str:
        return f"id-{raw[0].get('n', '?')}"

    def key(self, raw: Any, /) -> bytes | None:
        return None

    def attributes(self, raw: Any, /) -> Mapping[str, str]:
        return raw[0]

    def publish_time(self, raw: Any, /) -> datetime | None:
        return raw[1]

    def broker_time(self, raw: Any, /) -> datetime | None:
        return WRITTEN

    def delivery_attempt(self, raw: Any, /) -> int | None:
        return None

    def native(self, raw: Any, /) -> Any:
        return raw


VIEW = RawView()


def record(offset: int, partition: int = 0, topic: str = "orders", data: bytes | None = None) -> Record[Any]:
    body = b"%d" % offset if data is None else data
    attributes = {"n": str(offset)}
    return Record(topic, partition, offset, b"k", body, (attributes, WRITTEN), VIEW, len(body) + 1)


class FakeSource:
    """One member's view of a log; `append` feeds it, and each call is recorded."""

    def __init__(self, partitions: Sequence[int] = (0,), topic: str = "orders") -> None:
        self.topic = topic
        self.listener: RecordListener
        self.log: dict[TopicPartition, list[Record[Any]]] = {}
        self.read: dict[TopicPartition, int] = {}
        self.stored: dict[TopicPartition, int] = {}
        self.commits: list[dict[TopicPartition, int]] = []
        self.commit_errors: list[BrokerError | Mapping[TopicPartition, BrokerError]] = []
        self.commit_gate: asyncio.Event | None = None
        self.commit_begun = asyncio.Event()
        self.fetch_errors: list[Exception] = []
        self.fetches: list[tuple[int, int]] = []
        self.paused: set[TopicPartition] = set()
        self.seeks: list[dict[TopicPartition, int | None]] = []
        self.seek_errors: dict[TopicPartition, BrokerError] = {}
        self.owned: list[TopicPartition] = []
        self.closed = False
        self.deaf = False
        self.fetch_cancelled = False
        self._fetching = 0
        self._wake = asyncio.Event()
        self._interrupted = False
        self.initial = [TopicPartition(topic, p) for p in partitions]

    def append(self, *offsets: int, partition: int = 0, data: bytes | None = None) -> None:
        key = TopicPartition(self.topic, partition)
        self.log.setdefault(key, []).extend(record(offset, partition, self.topic, data) for offset in offsets)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        self.fetch_errors.append(error)
        self._wake.set()

    def assign(self, *partitions: int) -> None:
        keys = [TopicPartition(self.topic, p) for p in partitions]
        for key in keys:
            self.owned.append(key)
            self.read[key] = self.stored.get(key, 0)
        self.listener.assigned(keys)
        self._wake.set()

    async def revoke(self, *partitions: int, within: float = 5.0) -> None:
        keys = [TopicPartition(self.topic, p) for p in partitions]
        self.paused |= set(keys)
        deadline = asyncio.get_running_loop().time() + within
        await self.listener.revoking(keys, deadline)
        self.drop(*partitions)

    def drop(self, *partitions: int) -> None:
        for p in partitions:
            self.owned.remove(TopicPartition(self.topic, p))
            self.paused.discard(TopicPartition(self.topic, p))

    def lose(self, *partitions: int) -> None:
        self.drop(*partitions)
        self.listener.lost([TopicPartition(self.topic, p) for p in partitions])

    # -- RecordSource --------------------------------------------------------------------------------------

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        assert self._fetching == 0, "one fetch at a time"
        assert max_records > 0
        if self.closed:
            raise Closed("closed")
        self._fetching += 1
        self.fetches.append((max_records, max_bytes))
        try:
            async with asyncio.timeout(wait):
                while True:
                    if self.fetch_errors:
                        raise self.fetch_errors.pop(0)
                    if found := self._take(max_records, max_bytes):
                        return found
                    if self._interrupted and not self.deaf:
                        return []
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return []
        except asyncio.CancelledError:
            self.fetch_cancelled = True
            raise
        finally:
            self._interrupted = False
            self._fetching -= 1

    def _take(self, max_records: int, max_bytes: int) -> list[Record[Any]]:
        records: list[Record[Any]] = []
        for key in self.owned:
            if key in self.paused:
                continue
            for entry in self.log.get(key, ()):
                if entry.offset >= self.read[key] and len(records) < max_records and max_bytes > 0:
                    records.append(msgspec.structs.replace(entry))
                    max_bytes -= entry.size
                    self.read[key] = entry.offset + 1
        return records

    def interrupt(self) -> None:
        if self._fetching:
            self._interrupted = True
            self._wake.set()

    async def commit(self, positions: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, BrokerError | None]:
        if self.closed:
            raise Closed("closed")
        self.commits.append(dict(positions))
        self.commit_begun.set()
        if self.commit_gate is not None:
            await self.commit_gate.wait()
        errors: Mapping[TopicPartition, BrokerError] = {}
        if self.commit_errors:
            error = self.commit_errors.pop(0)
            if isinstance(error, BrokerError):
                raise error
            errors = error
        results: dict[TopicPartition, BrokerError | None] = {}
        for key, position in positions.items():
            results[key] = errors.get(key) or (None if key in self.owned else LeaseLost("not ours"))
            if results[key] is None:
                self.stored[key] = position
        return results

    async def committed(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int | None]:
        return {key: self.stored.get(key) for key in partitions}

    async def seek(self, positions: Mapping[TopicPartition, int | None]) -> None:
        self.seeks.append(dict(positions))
        await asyncio.sleep(0)

        async def move(key: TopicPartition) -> None:
            if error := self.seek_errors.pop(key, None):
                raise error
            position = positions[key]
            self.read[key] = self.stored.get(key, 0) if position is None else position

        try:
            await seek_each(positions, move)
        finally:
            self._wake.set()

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self.paused |= set(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self.paused -= set(partitions)
        self._wake.set()

    def assignment(self) -> Sequence[TopicPartition]:
        return list(self.owned)

    async def close(self) -> None:
        self.closed = True
        self._wake.set()


class FakeTarget:
    """A publish target that keeps its messages."""

    def __init__(self) -> None:
        self.messages: list[OutboundMessage] = []
        self.errors: list[BrokerError] = []
        self.tried = asyncio.Event()
        self.closed = False

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        self.tried.set()
        if self.errors:
            return [self.errors.pop(0)] * len(messages)
        self.messages.extend(messages)
        return [Receipt(f"r{len(self.messages)}") for _ in messages]

    async def close(self) -> None:
        self.closed = True


class FakeRun:
    """A run whose records are copied on each access; `made` counts the copies."""

    def __init__(self, records: Sequence[Record[Any]]) -> None:
        self.topic = records[0].topic
        self.partition = records[0].partition
        self.size = sum(record.size for record in records)
        self.last = records[-1].offset
        self.made = 0
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def split(self, count: int) -> tuple[FakeRun, FakeRun]:
        assert 0 < count < len(self)
        return FakeRun(self._records[:count]), FakeRun(self._records[count:])

    def make(self, owner: Any, generation: int) -> list[Record[Any]]:
        self.made += 1
        return [msgspec.structs.replace(record, owner=owner, generation=generation) for record in self._records]

    def values(self, name: str) -> Iterable[Any] | None:
        return self.column(name)

    def column(self, name: str) -> list[Any] | None:
        return [record.offset for record in self._records] if name == "offset" else None


def runs_of(records: Iterable[Record[Any]]) -> list[FakeRun]:
    """The records as runs of adjacent records of one partition."""
    return [FakeRun(list(run)) for _, run in groupby(records, lambda record: (record.topic, record.partition))]


class RunSource(FakeSource):
    """A source that returns runs, which create records lazily."""

    async def fetch_runs(self, max_records: int, max_bytes: int, wait: float) -> Sequence[FakeRun]:
        return runs_of(await self.fetch(max_records, max_bytes, wait))


class FakeBackend:
    """The part of a backend that record consumers and transactions need."""

    def __init__(self, source: FakeSource | None = None, *, records: RecordCapabilities | None = None) -> None:
        self.source = source or FakeSource()
        self.capabilities = Capabilities(
            backend="fake",
            publish=PublishCapabilities(limits=Limits(body=1000), transactions=True, partitions=True),
            records=RecordCapabilities(rebalance=True) if records is None else records,
        )
        self.targets: dict[str, FakeTarget] = {}
        self.missing: set[str] = set()
        self.joining: Callable[[], Awaitable[None]] | None = None

    async def join(self, subscription: RecordSubscription, listener: RecordListener) -> FakeSource:
        if self.joining is not None:
            await self.joining()
        self.source.listener = listener
        for key in self.source.initial:
            self.source.assign(key.partition)
        return self.source

    def admin(self) -> FakeBackend:
        return self

    async def describe_topic(self, name: str) -> TopicInfo:
        if name in self.missing:
            raise TopicNotFound(f"Topic {name!r} does not exist")
        return TopicInfo(name=name)

    def publish_target(self, topic: str) -> FakeTarget:
        return self.targets.setdefault(topic, FakeTarget())
