"""Copartitioned consumers: only whole numbers are reported, whatever the source does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker.driver.contract import RecordSubscription, TopicPartition
from broker.errors import ConfigurationError
from broker.hooks import Hooks, Warned
from broker.reading import membership
from broker.reading.copartitions import Copartitions
from broker.reading.record_consumer import RecordConsumer
from tests.unit.broker.reading.record_bench import turns
from tests.unit.broker.reading.record_fakes import FakeBackend, FakeSource

A0, A1, B0, B1 = (TopicPartition(topic, number) for topic in ("a.a", "b.b") for number in (0, 1))


def test_a_number_is_whole_with_the_partitions_of_all_topics() -> None:
    numbers = Copartitions(["a.a", "b.b"])
    assert numbers.add([A0, A1]) == []
    assert numbers.held == [A0, A1]
    assert numbers.add([B1]) == [A1, B1]
    assert numbers.add([B1]) == []
    assert numbers.held == [A0]
    assert numbers.remove([A0]) == []
    assert numbers.remove([A1]) == [A1, B1]
    assert numbers.held == [B1]
    assert numbers.remove([A1, B1, B1]) == []
    assert numbers.held == []


class Reader:
    def __init__(self) -> None:
        self.counts = {"a.a": 2, "b.b": 2}

    async def partitions(self, topic: str) -> Sequence[int]:
        return range(self.counts[topic])


class Source(FakeSource):
    """A source of two topics, which takes partitions of either."""

    def give(self, *partitions: TopicPartition) -> None:
        self.owned += partitions
        for partition in partitions:
            self.read[partition] = self.stored.get(partition, 0)
        self.listener.assigned(partitions)

    async def take(self, *partitions: TopicPartition) -> None:
        await self.listener.revoking(partitions, asyncio.get_running_loop().time() + 5)
        for partition in partitions:
            self.owned.remove(partition)


class Bench:
    def __init__(self, **options: Any) -> None:
        self.calls: list[tuple[str, list[TopicPartition]]] = []
        self.source = Source(())
        self.reader = Reader()
        backend = FakeBackend(self.source)
        backend.log_reader = lambda: self.reader  # type: ignore[attr-defined]
        self.hooks = Hooks()
        self.warnings: list[str] = []
        self.hooks.listen(lambda event: self.warnings.append(event.text) if isinstance(event, Warned) else None)

        def note(what: str) -> Any:
            async def call(partitions: Sequence[TopicPartition]) -> None:
                self.calls.append((what, sorted(partitions)))

            return call

        names = ("on_assigned", "on_revoking", "on_lost")
        self.consumer: RecordConsumer[Any] = RecordConsumer(
            backend,  # pyright: ignore[reportArgumentType]
            RecordSubscription(topics=["a.a", "b.b"], group="audit", copartitioned=True),
            hooks=self.hooks,
            **{name: note(name) for name in names},
            **options,
        )

    async def called(self) -> list[tuple[str, list[TopicPartition]]]:
        await turns()
        calls, self.calls = self.calls, []
        return calls


@asynccontextmanager
async def bench(**options: Any) -> AsyncGenerator[Bench]:
    made = Bench(**options)
    async with made.consumer:
        yield made


async def test_numbers_come_and_go_whole() -> None:
    async with bench() as b:
        b.source.give(A0, A1)
        assert await b.called() == []
        assert b.consumer.assignment() == []
        assert b.source.paused == {A0, A1}
        b.source.give(B0)
        assert await b.called() == [("on_assigned", [A0, B0])]
        assert sorted(b.consumer.assignment()) == [A0, B0]
        assert b.source.seeks == [], "nothing was fetched of it"
        assert b.source.paused == {A1}
        await b.source.take(B0)
        assert await b.called() == [("on_revoking", [A0, B0])]
        assert b.consumer.assignment() == []
        assert b.source.paused == {A0, A1}
        b.source.give(B0)
        assert await b.called() == [("on_assigned", [A0, B0])]
        assert [set(seek) for seek in b.source.seeks] in ([{A0}], [{A0, B0}]), "A0 was read before"
        b.source.listener.lost([A0])
        assert await b.called() == [("on_lost", [A0, B0])]
        b.source.listener.lost([B0])
        await b.source.take(A1)
        assert await b.called() == []


async def test_without_on_assigned_a_held_partition_is_read_from_the_committed_position() -> None:
    async with bench() as b:
        b.consumer._member._callbacks._on_assigned = None
        b.source.stored[A0] = 1
        b.source.log[A0] = []
        b.source.topic = "a.a"
        b.source.append(0, 1, 2)
        b.source.give(A0)
        assert await b.consumer.next_record(timeout=0.01) is None
        b.source.give(B0)
        record = await b.consumer.next_record(timeout=60)
        assert record is not None
        assert record.offset == 1


async def test_the_release_of_a_sibling_waits_for_the_callback() -> None:
    gate = asyncio.Event()

    async with bench() as b:

        async def on_revoking(_: Sequence[TopicPartition]) -> None:
            await gate.wait()

        b.consumer._member._callbacks._on_revoking = on_revoking
        b.source.give(A0, B0)
        first, second = asyncio.create_task(b.source.take(A0)), asyncio.create_task(b.source.take(B0))
        await turns()
        assert not first.done()
        assert not second.done()
        gate.set()
        await asyncio.gather(first, second)


async def test_different_counts_are_refused_at_open() -> None:
    b = Bench()
    b.reader.counts["b.b"] = 3
    with pytest.raises(ConfigurationError, match=r"'audit' is copartitioned.*'a.a' has 2, 'b.b' has 3") as raised:
        await b.consumer.__aenter__()
    assert "ensure_topic" in raised.value.advice
    assert b.consumer.closed


async def test_a_topic_that_grows_alone_ends_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_COUNT_SECONDS", 0.01)
    monkeypatch.setattr(membership, "GROWTH_SECONDS", 0.05)
    async with bench() as b:
        b.source.give(A0, B0)
        b.reader.counts["a.a"] = 3
        b.source.give(TopicPartition("a.a", 2))
        with pytest.raises(ConfigurationError, match=r"'a.a' has 3, 'b.b' has 2"):
            await b.consumer.next_record(timeout=60)
        assert any("'a.a' has 3, 'b.b' has 2" in text for text in b.warnings)


async def test_a_number_in_transit_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_COUNT_SECONDS", 0.01)
    monkeypatch.setattr(membership, "GROWTH_SECONDS", 0.01)
    async with bench() as b:
        b.source.give(A0)
        assert await b.consumer.next_record(timeout=0.1) is None
        b.source.give(B0)
        assert await b.called() == [("on_assigned", [A0, B0])]
