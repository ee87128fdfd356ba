"""Spark over Pulsar and Pub/Sub, next to our log reader and the brokers' own clients in their fastest form.

Each server runs only for its part. The double of Service Bus is not measured: it says nothing about Azure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count as counting
from typing import Any

import broker.blocking
from benchmarks.raw_pubsub import RawPubSub
from benchmarks.raw_pulsar import RawPulsar
from benchmarks.report import Finding, Section
from benchmarks.spark.micro_batches import spooled
from benchmarks.spark.raw_clients import outbound
from benchmarks.spark.reading import read_log
from benchmarks.spark.rowwise import PLAIN
from benchmarks.spark.stage import SparkStage, fill, sizes
from benchmarks.spark.timing import Work, in_turn
from benchmarks.spark.writing import to_write
from broker.blocking import Bus
from broker.outbound import OutboundMessage
from broker.threads.portal import Portal
from tests.servers.pubsub import PROJECT, PubSubServer
from tests.servers.pulsar import PulsarServer

__all__ = ["measure_other_brokers"]

_TARGET = "bench-target"
_FIVE: Mapping[str, str] = {"columns": ",".join(PLAIN)}
_numbers = counting()


@dataclass(frozen=True, slots=True)
class _Broker:
    """A broker and its client.

    :ivar publish: publishes messages to the target, each confirmed.
    :ivar consume: receives a number of messages of a topic's subscription and acks each.
    :ivar read: reads a number of messages of a log into columns; None without a log.
    """

    name: str
    url: str
    bus: Bus
    count: int
    publish: Callable[[Sequence[OutboundMessage]], object]
    consume: Callable[[str, str, int], object]
    read: Callable[[str, int], object] | None = None


def measure_other_brokers(stage: SparkStage, scale: float, rounds: int) -> list[Section]:
    """Measure batch reads, writes, and queues through the spool."""
    section = Section(
        "Pulsar and Pub/Sub",
        "Rows per second of one task, as ratios, on a standalone of Pulsar and on Google's emulator of Pub/Sub, which "
        "answers a pull with 100 messages; what is written has no keys. `read` and `write` are "
        '`format("broker")`; `spool` is a subscription that is received, synced, acked and read into the `noop` sink. '
        "`LogReader` is ours without Spark; `client` is pulsar-client, and raw protobuf over grpc.aio. Service Bus has "
        "no figures: its server here is a double.",
        "times as fast",
    )
    for opened in (_pulsar, _pubsub):
        with opened(scale) as found:
            for label, size in sizes(scale):
                _measure(section, stage, found, f"{found.name}, {label}", size, rounds)
    return [section]


def _measure(section: Section, stage: SparkStage, found: _Broker, where: str, size: int, rounds: int) -> None:
    comparisons: list[tuple[dict[str, Work], list[tuple[str, str]]]] = [
        (_writes(stage, found, size), [("write", "client, write")]),
        (_spools(stage, found, size), [("spool", "client, consume")]),
    ]
    if found.read is not None:
        pairs = [("read", "LogReader"), ("read", "client, read")]
        comparisons.insert(0, (_reads(stage, found, found.read, size), pairs))
    for works, pairs in comparisons:
        series = in_turn(works, rounds, stage.roots, uncounted=stage.uncounted)
        section.runs.update({f"{where}: {name}": runs for name, runs in series.items()})
        for ours, theirs in pairs:
            ratio = series[ours].times_rate_of(series[theirs])
            bar = 0.7 if theirs == "LogReader" else None
            section.findings.append(Finding(f"{where}: {ours} / {theirs}", ratio, "x", at_least=bar))


def _reads(stage: SparkStage, found: _Broker, client: Callable[[str, int], object], size: int) -> dict[str, Work]:
    topic = fill(found.bus, _new_topic(found.bus), found.count, size)
    frame = partial(stage.spark.read.format("broker").options(url=found.url, topic=topic, **_FIVE).load)
    return {
        "read": Work(found.count, lambda _: frame().write.format("noop").mode("overwrite").save()),
        "LogReader": Work(found.count, lambda _: read_log(found.bus, topic, PLAIN)),
        "client, read": Work(found.count, lambda _: client(topic, found.count)),
    }


def _writes(stage: SparkStage, found: _Broker, size: int) -> dict[str, Work]:
    # A Pub/Sub request takes one key only; the client's loops use no keys.
    rows = to_write(stage.spark, found.count, size).drop("key")
    writer = rows.write.format("broker").options(url=found.url, topic=_TARGET)
    return {
        "write": Work(found.count, lambda _: writer.mode("append").save()),
        "client, write": Work(found.count, found.publish, lambda: outbound(found.count, size)),
    }


def _spools(stage: SparkStage, found: _Broker, size: int) -> dict[str, Work]:
    topic = _new_topic(found.bus)

    def subscribed() -> str:
        """The only subscription of the topic; it holds all messages."""
        name = f"bench-{next(_numbers)}"
        for old in found.bus.admin.subscriptions(topic):
            found.bus.admin.delete_subscription(topic, old)
        found.bus.admin.ensure_subscription(topic, name, start="latest")
        fill(found.bus, topic, found.count, size)
        return name

    spool = spooled(stage, found.url, topic, _FIVE)
    return {
        "spool": Work(found.count, lambda name: spool(name, stage.place("spool")), subscribed),
        "client, consume": Work(found.count, lambda name: found.consume(topic, name, found.count), subscribed),
    }


def _new_topic(bus: Bus) -> str:
    name = f"bench-{next(_numbers)}"
    bus.admin.ensure_topic(name, partitions=1)
    return name


@contextlib.contextmanager
def _pulsar(scale: float) -> Generator[_Broker]:
    def path(topic: str) -> str:
        return f"persistent://public/default/{topic}-partition-0"

    with PulsarServer() as server, broker.blocking.connect(server.url) as bus:
        bus.admin.ensure_topic(_TARGET, partitions=1)
        raw = RawPulsar(server.service_url, path(_TARGET))

        def consume(topic: str, subscription: str, count: int) -> None:
            consumer = raw.subscribe(path(topic), subscription)
            raw.receive_and_acknowledge(consumer, count)
            consumer.close()

        def read(topic: str, count: int) -> None:
            raw.read(path(topic), count)

        try:
            count = max(1000, int(50_000 * scale))
            yield _Broker("pulsar", server.url, bus, count, raw.publish, consume, read)
        finally:
            raw.close()


@contextlib.contextmanager
def _pubsub(scale: float) -> Generator[_Broker]:
    async def connected(host: str) -> Any:
        return RawPubSub(host)

    portal = Portal()
    try:
        # Retained messages slow the emulator down; without them a drain waits for a lease.
        settings = "topic_retention=0&lease_seconds=5"
        with PubSubServer() as server, broker.blocking.connect(url := f"{server.url}&{settings}") as bus:
            bus.admin.ensure_topic(_TARGET)
            raw = portal.call(connected, server.host)
            target = f"projects/{PROJECT}/topics/{_TARGET}"

            def consume(topic: str, subscription: str, count: int) -> None:
                path = f"projects/{PROJECT}/subscriptions/{subscription}~{topic}"
                portal.call(raw.pull_and_acknowledge, path, count)

            try:
                count = max(1000, int(20_000 * scale))
                yield _Broker(
                    "pubsub", url, bus, count, lambda messages: portal.call(raw.publish, target, messages), consume
                )
            finally:
                portal.call(raw.close)
    finally:
        portal.stop()
