"""Metrics of processors and views, as `Metrics` of their bus shows them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from broker import Bus, Json, OutboundMessage, TransactionAborted, connect
from broker.metrics import HELP, Metrics
from broker_inmem import Broker, InmemSettings
from broker_streams import metrics as streams_metrics
from broker_streams.context import Context
from broker_streams.failures import SKIP, DeadLetter, StreamFailed
from broker_streams.graph import Group, Input, Join, Lookup, Output, Persist, Timer
from broker_streams.processor import Processor
from broker_streams.stores.lmdb import Lmdb
from broker_streams.stores.memory import Memory
from broker_streams.stores.sqlite import Sqlite
from broker_streams.stores.store import StoreFactory
from broker_streams.view import View
from tests.prometheus_text import Family, read_text
from tests.unit.broker_streams.brokers import Limited

SECONDS = 60.0
PARTITIONS = 2
OPERATIONS = Path(__file__).parents[3] / "docs" / "streams-operations.md"

sums = Persist(Json(int))
users = Join("users", Json(str))
prices = Lookup("prices", Json(int))
alerts = Output("alerts", Json(int))


def remind(ctx: Context) -> None: ...


reminder = Timer("reminder", remind)


def add(ctx: Context, value: int) -> None:
    if value < 0:
        raise ValueError("negative")
    ctx[sums] = (ctx[sums] or 0) + value
    ctx.set_timer(reminder, after=3600)
    ctx.emit(alerts, key=ctx.key, value=value)


group = Group(
    "sums",
    Input("clicks", Json(int), add, on_error=SKIP, on_undecodable=DeadLetter("dead")),
    *(sums, users, prices, alerts, reminder),
)


@pytest.fixture
def server() -> Broker:
    return Broker(Limited())


@pytest.fixture
async def bus(server: Broker, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bus]:
    monkeypatch.setattr(streams_metrics, "_LOOK_SECONDS", 0.02)
    async with connect(InmemSettings(broker=server)) as bus:
        for topic in ("clicks", "alerts", "dead"):
            await bus.admin.ensure_topic(topic, partitions=PARTITIONS)
        for topic in ("users", "prices"):
            await bus.admin.ensure_topic(topic, partitions=PARTITIONS, compacted=True)
        yield bus


def processing(bus: Bus, of: Group = group, **options: Any) -> Processor:
    options = {"store": Memory(), "checkpoint_interval": 0.01, **options}
    return Processor(bus, of, **options)


def scrape(metrics: Metrics) -> dict[str, Family]:
    """What streams have, by name."""
    return {name: family for name, family in read_text(metrics.text()).items() if name not in HELP}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """The sum over all series with these labels; None if there is none."""
    wanted = labels.items()
    full = f"anybroker_{name}"
    family = scrape(metrics).get(full.removesuffix("_count"))
    found = (
        []
        if family is None
        else [each for (sample, has), each in family.samples.items() if sample == full and wanted <= dict(has).items()]
    )
    return sum(found) if found else None


async def until(metrics: Metrics, name: str, wanted: float, **labels: str) -> None:
    async with asyncio.timeout(SECONDS):
        while value(metrics, name, **labels) != wanted:
            await asyncio.sleep(0.01)


async def publish(bus: Bus, *values: int, topic: str = "clicks") -> None:
    messages = [OutboundMessage(b"%d" % value, f"key-{at}") for at, value in enumerate(values)]
    await bus.topic(topic).publish_batch(messages)


def documented() -> dict[str, set[str]]:
    """The labels of each metric in the table of the page."""
    found: dict[str, set[str]] = {}
    lines = OPERATIONS.read_text().partition("\n### Metrics\n")[2].partition("\n### ")[0].splitlines()
    for names, labels in (line.split("|")[1:3] for line in lines if line.startswith(("| `streams_", "| `view_"))):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found
            found[f"anybroker_{name}"] = set(re.findall(r"`(\w+)`", labels))
    return found


async def test_the_page_names_every_metric_with_its_labels_and_no_other(bus: Bus) -> None:
    metrics = Metrics(bus)
    await publish(bus, 1, 2, 3)
    await publish(bus, 5, topic="users")
    await publish(bus, 5, topic="prices")
    async with processing(bus) as processor, View(bus, "sums-table", Json(int)) as view:
        await processor.ready()
        await view.ready()
        async with asyncio.timeout(SECONDS):
            # Some come with what is read and written a moment later.
            while not documented().keys() <= (found := scrape(metrics)).keys():
                await asyncio.sleep(0.01)
    labels = {
        name: {label for _, has in family.samples for label in dict(has) if label != "le"}
        for name, family in found.items()
    }
    assert labels == documented()
    assert set(labels) == set(streams_metrics.HELP)
    assert all(family.help == streams_metrics.HELP[name] for name, family in found.items())
    assert scrape(metrics) == {}


async def test_a_processor_that_works(bus: Bus) -> None:
    metrics = Metrics(bus)
    await publish(bus, 1, 2, -3, 4)
    await bus.topic("clicks").publish(b"no number", key="key-1")
    async with processing(bus) as processor:
        await until(metrics, "streams_handled_messages_total", 5, topic="clicks")
        assert value(metrics, "streams_processor_state") == 1
        assert value(metrics, "streams_processor_state", state="running") == 1
        assert value(metrics, "streams_partition_state", state="running") == PARTITIONS
        assert value(metrics, "streams_partition_state") == PARTITIONS
        assert value(metrics, "streams_failures_total") == value(metrics, "streams_skipped_messages_total") == 1
        assert value(metrics, "streams_dead_lettered_messages_total") == 1
        assert value(metrics, "streams_undecodable_messages_total") == 1
        assert value(metrics, "streams_published_messages_total") == 3 + 1
        # Rows and timers.
        assert value(metrics, "streams_written_rows_total") == 2 * 3
        checkpoints = value(metrics, "streams_checkpoint_seconds_count")
        assert checkpoints is not None
        assert 1 <= checkpoints <= (value(metrics, "streams_checkpoints_total") or 0)
        assert value(metrics, "streams_rollbacks_total") == value(metrics, "streams_waiting_messages") == 0
        await until(metrics, "streams_scheduled_keys", 3)
        await until(metrics, "streams_rows", 2 * 3)
        await until(metrics, "streams_lag_messages", 0)
        assert (value(metrics, "streams_event_time_seconds") or 0) > 1.7e9
        assert await processor.get("key-3") == 4


async def test_lag_grows_while_a_processor_is_paused(bus: Bus) -> None:
    metrics = Metrics(bus)
    async with processing(bus) as processor:
        await processor.ready()
        await until(metrics, "streams_lag_messages", 0)
        processor.pause()
        await publish(bus, *range(7))
        await until(metrics, "streams_lag_messages", 7, topic="clicks")
        processor.resume()
        await until(metrics, "streams_lag_messages", 0)


async def test_markers_of_transactions_are_no_lag(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(bus)
    await publish(bus, 1)
    bounds = bus.log.bounds

    async def with_markers(topic: str) -> Any:
        """The ends as they are on Kafka, where each transaction has a last offset without a record."""
        found = await bounds(topic)
        return {at: each._replace(next=each.next + (topic == "clicks")) for at, each in found.items()}

    read = bus.log.read

    def before_markers(topic: str, partition: int, start: int, stop: int, **options: Any) -> Any:
        return read(topic, partition, start, stop - (topic == "clicks"), **options)

    monkeypatch.setattr(bus.log, "bounds", with_markers)
    monkeypatch.setattr(bus.log, "read", before_markers)
    async with processing(bus) as processor:
        await processor.ready()
        await until(metrics, "streams_handled_messages_total", 1)
        await until(metrics, "streams_lag_messages", 0)


async def test_what_is_away_has_no_lag(server: Broker, bus: Bus) -> None:
    metrics = Metrics(bus)
    async with processing(bus) as processor:
        await processor.ready()
        await until(metrics, "streams_lag_messages", 0)
        await bus.admin.delete_topic("prices")
        async with asyncio.timeout(SECONDS):
            while value(metrics, "streams_table_lag_messages", table="prices") is not None:
                await asyncio.sleep(0.01)
        assert value(metrics, "streams_lag_messages", topic="clicks") == 0


async def test_recovery_shows_how_much_is_left(server: Broker, bus: Bus) -> None:
    metrics = Metrics(bus)
    async with processing(bus) as processor:
        await publish(bus, *range(10))
        await until(metrics, "streams_handled_messages_total", 10)
    table = sum(each.next for each in (await bus.log.bounds("sums-table")).values())
    async with processing(bus) as processor:
        await processor.ready()
        # Those that compaction has left.
        assert 10 < (value(metrics, "streams_read_rows_total", table="sums-table") or 0) <= table


async def test_standby_is_a_state_of_partitions_of_others(server: Broker, bus: Bus) -> None:
    metrics = Metrics(bus)
    async with connect(InmemSettings(broker=server)) as other, processing(other) as second:
        await second.ready()
        async with processing(bus, standby="all") as first:
            await until(metrics, "streams_partition_state", 1, state="running")
            await until(metrics, "streams_partition_state", 1, state="standby")
            assert first.stats().standby == tuple({0, 1} - set(first.partitions))
            await publish(bus, *range(10))
            await until(metrics, "streams_table_lag_messages", 0, table="sums-table")


async def test_a_partition_that_was_given_away_is_not_on_standby(server: Broker, bus: Bus) -> None:
    metrics = Metrics(bus)
    async with processing(bus) as first:
        await first.ready()
        await publish(bus, *range(10))
        await until(metrics, "streams_handled_messages_total", 10)
        async with connect(InmemSettings(broker=server)) as other, processing(other) as second:
            await second.ready()
            (gone,) = {0, 1} - set(first.partitions)
            assert first.stats().standby == ()
            assert value(metrics, "streams_partition_state", partition=str(gone)) is None
            # Its counters stay.
            assert value(metrics, "streams_handled_messages_total") == 10


async def test_counters_only_grow_over_rollbacks_and_rebalances(server: Broker, bus: Bus) -> None:
    metrics = Metrics(bus)
    seen: list[dict[str, Family]] = []

    async def look() -> None:
        while True:
            seen.append(scrape(metrics))
            await asyncio.sleep(0.005)

    looking = asyncio.create_task(look())
    async with processing(bus) as first:
        await first.ready()
        await publish(bus, *range(20))
        await until(metrics, "streams_handled_messages_total", 20)
        server.faults.fail("transaction", TransactionAborted("a fault"), times=4)
        await publish(bus, *range(20))
        await until(metrics, "streams_rollbacks_total", 1)
        for _ in range(2):
            async with connect(InmemSettings(broker=server)) as other, processing(other) as second:
                await second.ready()
        await until(metrics, "streams_partition_state", PARTITIONS, state="running")
        for number in range(PARTITIONS):
            async with bus.table_writer("sums-table", number):
                pass
        await publish(bus, *range(20))
        await until(metrics, "streams_lag_messages", 0)
    looking.cancel()
    rising = Counter[str]()
    for before, after in pairwise(seen):
        for name in before.keys() & after.keys():
            for series, number in before[name].samples.items():
                if before[name].type != "gauge":
                    assert after[name].samples[series] >= number, series
                    rising[name] += after[name].samples[series] > number
    for name in ("handled_messages_total", "checkpoint_seconds"):
        assert rising[f"anybroker_streams_{name}"]


async def test_a_processor_that_has_failed_is_stopped(bus: Bus) -> None:
    metrics = Metrics(bus)
    failing = Group("failing", Input("clicks", Json(int), add), sums, alerts, reminder)
    await publish(bus, 1, -1)
    with pytest.raises(StreamFailed):
        async with processing(bus, failing) as processor:
            async for _ in processor.states():
                pass
            assert value(metrics, "streams_processor_state", state="stopped") == 1
            assert value(metrics, "streams_failures_total") == 1
            assert value(metrics, "streams_partition_state") is None
    assert scrape(metrics) == {}


@pytest.mark.parametrize(("store", "counted"), [(Lmdb(), True), (Sqlite(), False)])
async def test_stores_that_keep_no_count_are_not_counted(
    bus: Bus, tmp_path: Path, store: StoreFactory, counted: bool
) -> None:
    metrics = Metrics(bus)
    async with processing(bus, store=store, state_dir=tmp_path) as processor:
        await processor.ready()
        async with asyncio.timeout(SECONDS):
            while not value(metrics, "streams_store_bytes"):
                await asyncio.sleep(0.01)
        assert (value(metrics, "streams_rows") is not None) is counted


async def test_nothing_is_looked_up_without_a_listener(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    bounds = bus.log.bounds

    async def ask(topic: str) -> Any:
        asked.append(topic)
        return await bounds(topic)

    async with processing(bus) as processor:
        await processor.ready()
        monkeypatch.setattr(bus.log, "bounds", ask)
        await asyncio.sleep(0.2)
        assert asked == []
        metrics = Metrics(bus)
        await until(metrics, "streams_lag_messages", 0)
        assert "clicks" in asked


async def test_a_view(bus: Bus) -> None:
    metrics = Metrics(bus)
    await publish(bus, *range(10), topic="prices")
    async with View(bus, "prices", Json(int)) as view, View(bus, "prices", Json(int)) as another:
        await view.ready()
        await another.ready()
        await until(metrics, "view_rows", 10, table="prices")
        await until(metrics, "view_lag_messages", 0)
        assert value(metrics, "view_state", table="prices", state="running") == 1
        assert value(metrics, "view_staleness_seconds") == 0
        # Counters of both are added up, and of gauges the largest counts.
        assert value(metrics, "view_read_rows_total") == 20
    assert scrape(metrics) == {}


async def test_a_source_that_fails_hides_no_other(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        @property
        def help(self) -> dict[str, str]:
            return {}

        def read(self) -> Any:
            raise ValueError("broken")

    metrics = Metrics(bus)
    remove = bus.hooks.show_metrics(Broken())
    async with View(bus, "prices", Json(int)):
        assert value(metrics, "view_state") == 1
    assert "Reading metrics of Broken failed" in caplog.text
    remove()
    assert bus.hooks.metrics_sources == ()
