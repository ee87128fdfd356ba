"""The harness of the Kafka backend: a real broker, which it restarts, kills and pauses.

A client that is cut off alone goes through a proxy. Kafka advertises its address to clients, so each proxy has a
listener that advertises the proxy's port. Their number is fixed, since listeners are created at the
start of the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from time import monotonic
from typing import Any, ClassVar, Self

from confluent_kafka import Producer

from broker.bus import Bus
from broker.driver.contract import Backend
from broker.driver.settings import BackendSettings
from broker.outbound import OutboundMessage
from broker.testing.harness import unique
from tests.conformance.kafka_topics import TopicPool
from tests.conformance.server_harness import ServerHarness
from tests.servers.kafka import PLAIN, KafkaServer, Listener
from tests.servers.proxy import Proxy
from tests.servers.server_process import Servers
from tests.servers.shared import Shared

FILLER = b"kit-filler"
"""The key of records that close a segment, since the open one is not compacted."""
COMPACTS_SOON = {
    "segment.ms": 100,
    "min.cleanable.dirty.ratio": 0,
    "max.compaction.lag.ms": 1,
    "delete.retention.ms": 0,
}
WIRES = 4
"""The number of clients of one test that can have their own proxy."""
GUARDED = Listener(
    "GUARDED",
    "SASL_PLAINTEXT",
    {
        "sasl.enabled.mechanisms": "PLAIN",
        "plain.sasl.jaas.config": 'org.apache.kafka.common.security.plain.PlainLoginModule required user_ann="right";',
    },
)

SAME_ON_EVERY_ENGINE = frozenset(
    {
        "admin.ensure-concurrently",
        "admin.health-reports-unreachable-server",
        "admin.lag-counts-records",
        "admin.partitions-as-requested",
        "admin.retention-is-kept",
        "admin.topic-counts-its-messages",
        "blocking.errors-are-the-same",
        "blocking.records-and-log",
        "blocking.several-threads",
        "errors.all-have-advice",
        "errors.no-server",
        "errors.wrong-credentials",
    }
)
"""Promises of topics, records, publishing and the connection itself, whichever engine serves the messages."""
IN_CHAOS = frozenset({"reconnect.kill-loses-nothing", "reconnect.restart-loses-nothing"})
"""Promises of which every engine has a test of its own, with more faults, in `tests/chaos`."""


class Wired(Servers):
    """The broker of this test process, and its proxies."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        names = [f"WIRE{number}" for number in range(WIRES)]
        self.server = KafkaServer(
            {
                "connection.failed.authentication.delay.ms": "0",
                # A broker that is starved of CPU must not be fenced. A kill, which waits for the session, is rare here.
                "broker.session.timeout.ms": "9000",
                **(options or {}),
            },
            listeners=[PLAIN, GUARDED, *(Listener(name) for name in names)],
        )
        self.proxies = [Proxy(self.server.ports[name]) for name in names]
        for name, proxy in zip(names, self.proxies, strict=True):
            proxy.__enter__()
            self.server.advertised[name] = proxy.port

    def start(self) -> Self:
        self.server.start()
        self.topics = TopicPool(self.server.bootstrap)
        return self

    def close(self) -> None:
        self.server.close()
        for proxy in self.proxies:
            proxy.__exit__()


wired = Shared.in_groups(Wired)
"""The broker of the group of tests that runs."""


class KafkaHarness(ServerHarness[KafkaServer]):
    """One broker for all tests of a process; topics have unique names."""

    name = "kafka"
    quiet = 0.4
    shares_restarts = True
    # A member that crashes is replaced soon, and a busy machine does not end the session of one that lives.
    options = "session_timeout_ms=6000&heartbeat_interval_ms=300&topic_metadata_refresh_interval_ms=1000"
    left_out: ClassVar[frozenset[str]] = frozenset()
    """Promises of which no test runs."""

    def __init__(self) -> None:
        self.wired = self.make_wired()
        super().__init__(self.wired.server)
        self._free = count()
        self._pooled: list[str] = []

    def make_wired(self) -> Wired:
        """The broker; a variant of the harness has another."""
        return wired()

    def url(self, *, short_lease: bool = False) -> str:
        return f"{self.server.url}?{self.options}{'&client_id=wired' if short_lease else ''}"

    def open_bus(self, url: str | BackendSettings, wrap: Callable[[Backend], Backend] | None) -> Bus:
        if not isinstance(url, str) or "client_id=wired" not in url:
            return super().open_bus(url, wrap)
        number = next(self._free) % WIRES
        proxy = self.wired.proxies[number]
        bus = super().open_bus(url.replace(self.server.bootstrap, f"127.0.0.1:{proxy.port}"), wrap)
        self.behind[bus] = proxy
        return bus

    async def topic(self, *, partitions: int | None = None, **options: Any) -> str:
        if options:
            return await super().topic(partitions=partitions, **options)
        take, wanted = self.wired.topics.take, partitions or 1
        name = take(wanted) if self.wired.topics.ready(wanted) else await asyncio.to_thread(take, wanted)
        self._pooled.append(name)
        return name

    async def compacted_topic(self, *, partitions: int | None = None) -> str:
        return await self.create_topic(unique("table"), partitions=partitions, compacted=True, **COMPACTS_SOON)

    async def compact(self, topic: str) -> None:
        """Close the open segments with a record each, until the cleaner has been there, twice for tombstones."""
        bus = await self.bus()
        deadline = monotonic() + self.patience
        compacted = False
        while not compacted and monotonic() < deadline:
            await asyncio.sleep(0.3)
            compacted = True
            for partition in await bus.log.partitions(topic):
                records = [r async for batch in bus.log.read(topic, partition) for r in batch if r.key != FILLER]
                keys = {record.key for record in records if record.data is not None}
                if len(keys) != len(records):
                    compacted = False
                    await bus.topic(topic).publish(OutboundMessage(b"", FILLER, partition=partition))

    async def publish_foreign(self, topic: str, data: bytes, attributes: Sequence[tuple[str, str]]) -> None:
        def publish() -> None:
            producer = Producer({"bootstrap.servers": self.server.bootstrap})
            producer.produce(topic, data, headers=[(name, value.encode()) for name, value in attributes])
            assert producer.flush(self.patience) == 0

        await asyncio.to_thread(publish)

    def unreachable_url(self) -> str:
        return "kafka://127.0.0.1:1"

    def forbidden_url(self) -> str:
        return f"kafka://ann:wrong@{self.server.address('GUARDED')}?security_protocol=SASL_PLAINTEXT"

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            self.wired.topics.give_back(self._pooled)
            for proxy in self.behind.values():
                proxy.hold(False)


class ConsumerProtocolHarness(KafkaHarness):
    """The same with KIP-848's group protocol, whose session timeout is the broker's."""

    in_matrix = False
    options = "group_protocol=consumer&topic_metadata_refresh_interval_ms=1000"


class MarkersHarness(KafkaHarness):
    """Messages settled by markers, with short leases for tests that request them."""

    name = "kafka[markers]"
    left_out = SAME_ON_EVERY_ENGINE | IN_CHAOS
    options = f"{KafkaHarness.options}&queue=markers"

    def url(self, *, short_lease: bool = False) -> str:
        return f"{super().url(short_lease=short_lease)}{f'&lease_seconds={self.lease_seconds}' if short_lease else ''}"
