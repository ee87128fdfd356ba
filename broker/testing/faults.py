"""Faults and probes between the bus and a backend, for cases that a healthy server never produces.

`Faults` wraps a backend: `harness.connect(wrap=faults)`. Each call consumes one of its errors, in order. A failed call
does not reach the backend, so the fault itself loses nothing. For one event loop.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from broker.driver.contract import (
    Backend,
    MessageSource,
    MessageSubscription,
    PublishTarget,
    RecordListener,
    RecordSource,
    RecordSubscription,
    Settlement,
    SourceListener,
)
from broker.driver.optional import FetchesRuns
from broker.errors import BrokerError
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.records import Record, RecordRun

__all__ = ["Faults", "FaultySource", "FaultyTarget", "RecordProbe", "Wrapped"]

T = TypeVar("T")


class Wrapped:
    """Forwards all attributes to the wrapped object; subclasses override some."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Faults:
    """Errors to raise, and the calls that were seen.

    :ivar fetch: errors of the next fetches.
    :ivar settle: errors of the next settlements, one per message.
    :ivar publish: errors of the next messages, by topic.
    :ivar lose_extends: whether lease renewals are lost.
    :ivar fetches: number of fetches.
    :ivar settled: all settlements that reached the backend.
    """

    def __init__(self) -> None:
        self.fetch: deque[BrokerError] = deque()
        self.settle: deque[BrokerError] = deque()
        self.publish: defaultdict[str, deque[BrokerError]] = defaultdict(deque)
        self.lose_extends = False
        self.fetches = 0
        self.settled: list[Settlement] = []
        self.sources: list[FaultySource] = []

    def __call__(self, backend: Backend) -> Backend:
        return cast("Backend", _FaultyBackend(backend, self))

    def fail_fetch(self, error: BrokerError) -> None:
        """Raise the error from the next fetch, or from the one that is waiting."""
        self.fetch.append(error)
        for source in self.sources:
            source.interrupt()


class _FaultyBackend(Wrapped):
    def __init__(self, inner: Backend, faults: Faults) -> None:
        super().__init__(inner)
        self.faults = faults

    def publish_target(self, topic: str) -> PublishTarget:
        return cast("PublishTarget", FaultyTarget(self.inner.publish_target(topic), topic, self.faults))

    async def subscribe(self, subscription: MessageSubscription, listener: SourceListener) -> MessageSource:
        source = FaultySource(await self.inner.subscribe(subscription, listener), self.faults)
        self.faults.sources.append(source)
        return cast("MessageSource", source)


class FaultyTarget(Wrapped):
    """Fails single messages."""

    def __init__(self, inner: PublishTarget, topic: str, faults: Faults) -> None:
        super().__init__(inner)
        self.topic = topic
        self.faults = faults

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError | None]:
        errors = self.faults.publish[self.topic]
        failed = {index: errors.popleft() for index in range(len(messages)) if errors}
        rest = [message for index, message in enumerate(messages) if index not in failed]
        outcomes = iter(await self.inner.publish(rest, receipts=receipts) if rest else ())
        return [failed[index] if index in failed else next(outcomes) for index in range(len(messages))]


class FaultySource(Wrapped):
    """Fails fetches and single settlements."""

    def __init__(self, inner: MessageSource, faults: Faults) -> None:
        super().__init__(inner)
        self.faults = faults

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        self.faults.fetches += 1
        if self.faults.fetch:
            raise self.faults.fetch.popleft()
        messages = await self.inner.fetch(max_messages, max_bytes, wait)
        if not messages and self.faults.fetch:
            raise self.faults.fetch.popleft()
        return messages

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        errors = self.faults.settle
        failed = {index: errors.popleft() for index in range(len(settlements)) if errors}
        rest = [settlement for index, settlement in enumerate(settlements) if index not in failed]
        self.faults.settled.extend(rest)
        results = iter(await self.inner.settle(rest) if rest else ())
        return [failed[index] if index in failed else next(results) for index in range(len(settlements))]

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        return [None] * len(messages) if self.faults.lose_extends else await self.inner.extend(messages)


class RecordProbe:
    """Observes the fetches of record consumers: `harness.connect(wrap=probe)`.

    :ivar excess: descriptions of fetches that returned more than requested.
    :ivar waiting: number of running fetches.
    :ivar wait: seconds that every fetch waits; None leaves that to the core.
    :ivar max_bytes: maximum bytes of every fetch; None leaves that to the core.
    """

    def __init__(self, *, wait: float | None = None, max_bytes: int | None = None) -> None:
        self.excess: list[str] = []
        self.waiting = 0
        self.wait = wait
        self.max_bytes = max_bytes

    def __call__(self, backend: Backend) -> Backend:
        return cast("Backend", _ProbedBackend(backend, self))


class _ProbedBackend(Wrapped):
    def __init__(self, inner: Backend, probe: RecordProbe) -> None:
        super().__init__(inner)
        self.probe = probe

    async def join(self, subscription: RecordSubscription, listener: RecordListener) -> RecordSource:
        source: RecordSource = await self.inner.join(subscription, listener)
        probed = _ProbedRuns if isinstance(cast("object", source), FetchesRuns) else _ProbedSource
        return cast("RecordSource", probed(source, self.probe))


class _ProbedSource(Wrapped):
    def __init__(self, inner: RecordSource, probe: RecordProbe) -> None:
        super().__init__(inner)
        self.probe = probe

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Sequence[Record[Any]]:
        return await self.probed(self.inner.fetch, list, max_records, max_bytes, wait)

    async def probed(
        self,
        fetch: Callable[[int, int, float], Awaitable[Sequence[T]]],
        records_of: Callable[[Sequence[T]], list[Record[Any]]],
        max_records: int,
        max_bytes: int,
        wait: float,
    ) -> Sequence[T]:
        """Fetch with the probe's parameters, and check the result."""
        probe = self.probe
        wait = wait if probe.wait is None else probe.wait
        max_bytes = max_bytes if probe.max_bytes is None else min(max_bytes, probe.max_bytes)
        probe.waiting += 1
        try:
            fetched = await fetch(max_records, max_bytes, wait)
        finally:
            probe.waiting -= 1
        records = records_of(fetched)
        if len(records) > max_records:
            probe.excess.append(f"{len(records)} records instead of {max_records}")
        # One record may be larger than the bound.
        size = sum(len(record.data or b"") for record in records[:-1])
        if size > max_bytes:
            probe.excess.append(f"{size} bytes and a record instead of {max_bytes}")
        return fetched


class _ProbedRuns(_ProbedSource):
    async def fetch_runs(self, max_records: int, max_bytes: int, wait: float) -> Sequence[RecordRun]:
        return await self.probed(self.inner.fetch_runs, _records_of, max_records, max_bytes, wait)


def _records_of(runs: Sequence[RecordRun]) -> list[Record[Any]]:
    return [record for run in runs for record in run.make(None, 0)]
