"""A real Apache Kafka broker as a small object: start, stop, kill, restart, pause, resume. Loopback only.

Blocking, for fixtures and threads (`asyncio.to_thread` in a coroutine); every call returns when it is done. Ports and
data stay the same over restarts, and no other program can take the ports meanwhile. The broker ends with this
process, however that ends. A machine without Java or Maven fails here: nothing is skipped.
"""

from __future__ import annotations

import base64
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self
from uuid import uuid4

from tests.servers.kafka_jars import Distribution, distribution
from tests.servers.server_process import ServerProcess
from tests.servers.shared import Shared

__all__ = ["BUSY_OPTIONS", "PLAIN", "TEST_OPTIONS", "KafkaServer", "Listener", "shared_server"]

START_SECONDS = 180.0
_STARTED = "Kafka Server started"

TEST_OPTIONS: Mapping[str, str] = {
    "auto.create.topics.enable": "false",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    # Short group timeouts, instead of Kafka's of up to a minute.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.min.session.timeout.ms": "3000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.regex.refresh.interval.ms": "10000",  # the least there is
    "group.consumer.assignment.interval.ms": "0",
    "group.share.min.heartbeat.interval.ms": "200",
    "group.share.heartbeat.interval.ms": "500",
    "group.share.min.session.timeout.ms": "3000",
    "group.share.session.timeout.ms": "6000",
    "group.share.assignment.interval.ms": "0",
    "group.share.min.record.lock.duration.ms": "1000",
    "group.share.record.lock.duration.ms": "5000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    "log.initial.task.delay.ms": "500",
    "log.retention.check.interval.ms": "500",
    "log.cleaner.backoff.ms": "500",
    "log.segment.delete.delay.ms": "1000",
    # By default 128 MB, for a cleaner that has little to do here.
    "log.cleaner.dedupe.buffer.size": "8388608",
    # A killed broker may come back when its former self's session has ended; one that is paused for 3 s, or starved of
    # CPU, must not be fenced: it would report an empty cluster to clients for a moment.
    "broker.heartbeat.interval.ms": "250",
    "broker.session.timeout.ms": "4500",
    # Otherwise an idle controller writes a no-op twice a second, a third of the cost of an idle broker.
    "metadata.max.idle.interval.ms": "10000",
    # An idle broker should cost next to nothing: three run during all tests.
    "num.io.threads": "2",
    "num.network.threads": "1",
}
"""What every broker of the tests is started with; replication factors are set to its number of brokers."""

BUSY_OPTIONS: Mapping[str, str] = {"num.io.threads": "4", "num.network.threads": "2"}
"""For a broker whose speed is measured."""


class Listener(NamedTuple):
    """A listener of the broker.

    :ivar protocol: PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.
    :ivar options: settings of this listener only, without the prefix `listener.name.<name>.`.
    """

    name: str
    protocol: str = "PLAINTEXT"
    options: Mapping[str, str] = {}


PLAIN = Listener("PLAIN")


class KafkaServer(ServerProcess):
    """One broker and controller. `options` are added to its server.properties.

    The first listener is that of `url` and `bootstrap`, and of traffic between brokers.
    """

    stop_seconds = 30.0

    def __init__(
        self,
        options: Mapping[str, str] | None = None,
        *,
        listeners: Sequence[Listener] = (PLAIN,),
        java_options: Sequence[str] = ("-XX:TieredStopAtLevel=1",),
        kafka: Distribution | None = None,
        node: int = 1,
        cluster_id: str | None = None,
    ) -> None:
        super().__init__("kafka")
        self.data = self.directory / "data"
        """Its log directory; may be set before the first start."""
        self.node = node
        self.options = dict(options or {})
        self._listeners = tuple(listeners)
        self._java_options = tuple(java_options)
        self._kafka = kafka
        self._cluster_id = cluster_id or make_id()
        self.ports = self._hold_ports(*(each.name for each in listeners), "CONTROLLER")
        self.advertised = {each.name: self.ports[each.name] for each in listeners}
        """The advertised ports; change them before the start to put a proxy in between."""
        self.voters = {node: self.ports["CONTROLLER"]}
        """Node and controller's port of every member of the quorum."""
        self._log_read = 0

    @property
    def bootstrap(self) -> str:
        """The `bootstrap.servers` of a raw client."""
        return self.address()

    @property
    def url(self) -> str:
        return f"kafka://{self.bootstrap}"

    def address(self, listener: str | None = None) -> str:
        """Host and port of a listener."""
        return f"127.0.0.1:{self.ports[listener or self._listeners[0].name]}"

    def start(self, *, wait: bool = True) -> Self:
        """Start and wait until clients are served; without `wait`, return as soon as the process runs."""
        kafka = self._kafka or distribution()
        if not self.data.exists():
            self.data.mkdir()
            (self.data / "meta.properties").write_text(
                f"version=1\ncluster.id={self._cluster_id}\nnode.id={self.node}\ndirectory.id={make_id()}\n"
            )
            shutil.copy(kafka.bootstrap, self.data / "bootstrap.checkpoint")
        config = self.directory / "server.properties"
        config.write_text("".join(f"{name}={_escape(value)}\n" for name, value in self._properties().items()))
        config.chmod(0o600)
        if not sys.platform.startswith("linux"):
            self._release_ports()
        self._log_read = len(self.log)
        command = kafka.command(*self._java_options, "kafka.Kafka", str(config))
        self._launch(command)
        return self.wait_until_started() if wait else self

    def wait_until_started(self) -> Self:
        """For a start that did not wait.

        :raises RuntimeError: the server ends or is not ready in time; the error has the end of its log.
        """
        child = self._running_child()
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if _STARTED in self.log[self._log_read :]:
                return self
            if child.return_code is not None:
                raise RuntimeError(f"Kafka ended with {child.return_code}: {self.log[-4000:]}")
            time.sleep(0.02)
        reported = self.log[-4000:]
        self.kill()
        raise RuntimeError(f"Kafka is not ready after {START_SECONDS} s: {reported}")

    def _properties(self) -> dict[str, str]:
        copies = str(min(len(self.voters), 3))
        majority = str(len(self.voters) // 2 + 1)
        found = {
            "process.roles": "broker,controller",
            "node.id": str(self.node),
            "controller.quorum.voters": ",".join(f"{node}@127.0.0.1:{port}" for node, port in self.voters.items()),
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": self._listeners[0].name,
            "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in self.ports.items()),
            "advertised.listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in self.advertised.items()),
            "listener.security.protocol.map": ",".join(
                ["CONTROLLER:PLAINTEXT", *(f"{each.name}:{each.protocol}" for each in self._listeners)]
            ),
            "log.dirs": str(self.data),
            "default.replication.factor": copies,
            "min.insync.replicas": majority,
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": majority,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": majority,
            **TEST_OPTIONS,
        }
        for each in self._listeners:
            found.update({f"listener.name.{each.name.lower()}.{name}": value for name, value in each.options.items()})
        return found | self.options


@Shared.by_all_workers
def shared_server() -> KafkaServer:
    """The plain broker of the run. No test ends it, so none waits for the end of its session."""
    return KafkaServer({"broker.heartbeat.interval.ms": "2000", "broker.session.timeout.ms": "18000"})


def make_id() -> str:
    """A random id as Kafka writes them: sixteen bytes in base64. None begins as an option of its tools does."""
    while (made := base64.urlsafe_b64encode(uuid4().bytes).rstrip(b"=").decode()).startswith("-"):
        pass
    return made


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n")
