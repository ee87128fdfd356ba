"""The brokers, a Spark session, and filled topics.

Every message has a key, every second one an attribute, and its body is a JSON object of about the requested size.
There is one server of each broker, on loopback, and one JVM of Spark.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from itertools import count as counting
from pathlib import Path
from typing import Any

import broker
import broker.blocking
import broker_spark
from benchmarks.kafka_stage import KEYS, KafkaStage
from broker.outbound import OutboundMessage
from broker.threads.portal import Portal
from broker_jetstream.server import EmbeddedServer
from broker_spark.testing import QUICK
from tests.servers.kafka import BUSY_OPTIONS, KafkaServer
from tests.servers.kafka_jars import jars_of

__all__ = [
    "CARRIERS",
    "Flight",
    "JetStreamSide",
    "KafkaSide",
    "Side",
    "SparkStage",
    "body_of",
    "fill",
    "open_stage",
    "sizes",
]

_SIZES = {"100 B": 100, "1 KiB": 1024}
CARRIERS = 16
_ROOT = Path(__file__).parents[2]
_CONNECTOR = _ROOT / "tests" / "spark" / "connector.xml"
_numbers = counting()


@dataclass
class Flight:
    """The body of a message."""

    id: int
    carrier: str
    delay: float
    pad: str | None = None


def sizes(scale: float) -> list[tuple[str, int]]:
    """The message sizes to measure, by name; a quick run has only the first."""
    return list(_SIZES.items())[: 1 if scale < 1 else None]


def body_of(size: int) -> Callable[[int], bytes]:
    """Bodies of about `size` bytes, by number; they repeat."""
    made: list[bytes] = []
    for number in range(1000):
        fields: dict[str, Any] = {
            "id": 1_000_000 + number,
            "carrier": f"C{number % CARRIERS:02d}",
            "delay": number % 90 - 20.5,
            "pad": "",
        }
        fields["pad"] = "x" * max(0, size - len(json.dumps(fields)))
        made.append(json.dumps(fields).encode())
    return lambda number: made[number % 1000]


def fill(bus: broker.blocking.Bus, topic: str, count: int, size: int) -> str:
    """Publish `count` messages. Returns the topic's name."""
    body = body_of(size)
    for start in range(0, count, 5000):
        bus.topic(topic).publish_batch(
            [
                OutboundMessage(body(number), KEYS[number % 1000], {"type": "created"} if number % 2 else None)
                for number in range(start, min(count, start + 5000))
            ]
        )
    return topic


class Side(ABC):
    """One broker.

    :ivar url: the same for all processes.
    :ivar quick: how many times as many rows it reads in the same time as the other broker.
    :ivar all_share: share of the rows to read where all columns are read, which takes longer.
    :ivar row_share: share of the rows to read where they are read one by one.
    """

    name: str
    quick: float
    all_share: float
    row_share: float

    def __init__(self, url: str) -> None:
        self.url = url
        self.bus = broker.blocking.connect(url)
        self.bus.open()

    @abstractmethod
    def filled(self, count: int, size: int) -> str:
        """A new topic of one partition with `count` messages."""

    def target(self, partitions: int = 1) -> str:
        """A new empty topic."""
        name = f"bench-{next(_numbers)}"
        self.bus.admin.ensure_topic(name, partitions=partitions)
        return name

    def drop(self, topic: str) -> None:
        """Delete a topic, to free its disk space."""
        self.bus.admin.delete_topic(topic)

    @abstractmethod
    def rowwise(self, topic: str) -> Mapping[str, str]:
        """The options that the row-wise source and sink take."""

    def close(self) -> None:
        self.bus.close()


class JetStreamSide(Side):
    """The embedded server. `portal` runs the raw asynchronous client."""

    name = "jetstream"
    quick, all_share, row_share = 1.0, 0.5, 0.15

    def __init__(self) -> None:
        self.portal = Portal()
        self._server = EmbeddedServer("")
        self.place = self.portal.call(self._server.ensure)
        super().__init__(self.place.url.replace("://", f"://{self.place.token}@"))

    def filled(self, count: int, size: int) -> str:
        return fill(self.bus, self.target(), count, size)

    def rowwise(self, topic: str) -> Mapping[str, str]:
        return {"url": self.place.url, "token": self.place.token, "stream": topic, "subject": f"{topic}.0"}

    def close(self) -> None:
        super().close()
        self.portal.call(self._server.stop)
        self.portal.stop()


class KafkaSide(Side):
    """One broker of Kafka."""

    name = "kafka"
    quick, all_share, row_share = 4.0, 1.0, 1.0

    def __init__(self) -> None:
        self._server = KafkaServer(BUSY_OPTIONS).start()
        # Its own bus stays closed: nothing asynchronous is measured here.
        self.raw = KafkaStage(self._server, broker.connect(self._server.url))
        super().__init__(self._server.url)

    def filled(self, count: int, size: int) -> str:
        return self.raw.filled(count, body=body_of(size))

    def rowwise(self, topic: str) -> Mapping[str, str]:
        return {"bootstrap": self.raw.bootstrap, "topic": topic}

    def close(self) -> None:
        super().close()
        self._server.close()


class SparkStage:
    """A Spark session and the brokers.

    :ivar started: seconds of the session's start, of its first job, and of the first read through Python.
    :ivar uncounted: warm-up rounds: the JVM still compiles shared code, mostly at the expense of the first variant.
    """

    def __init__(self, jetstream: JetStreamSide, kafka: KafkaSide, directory: Path, *, quick: bool) -> None:
        self.jetstream = jetstream
        self.kafka = kafka
        self.sides: tuple[Side, ...] = (jetstream, kafka)
        self.directory = directory
        self.uncounted = 0 if quick else 2
        self._settings = QUICK if quick else {}
        began = time.perf_counter()
        self.spark = self._session("local[2]")
        self.started = [("the session", time.perf_counter() - began)]
        for name, work in (
            ("the first job", lambda: self.spark.range(1000).selectExpr("sum(id)").collect()),
            ("the first read by the Python source", self._first_read),
        ):
            began = time.perf_counter()
            work()
            self.started.append((name, time.perf_counter() - began))

    def use_cores(self, cores: int) -> None:
        """Continue in a session with this many cores, in the same JVM."""
        self.spark.stop()
        self.spark = self._session(f"local[{cores}]")

    @property
    def jvm(self) -> int:
        """The process of Spark's JVM, the parent of its Python processes."""
        return int(self.spark.sparkContext._gateway.proc.pid)

    def roots(self) -> list[int]:
        """The processes that Spark started."""
        return [self.jvm]

    def place(self, what: str = "checkpoint") -> str:
        """A new directory."""
        return str(self.directory / f"{what}-{next(_numbers)}")

    def _session(self, master: str) -> Any:
        from benchmarks.spark.rowwise import KafkaRows, NatsRows, OneRow

        made: Any = broker_spark.session(
            "bench",
            master=master,
            config={
                "spark.driver.memory": "2g",
                "spark.ui.enabled": False,
                "spark.log.level": "ERROR",
                "spark.sql.shuffle.partitions": 2,
                "spark.sql.session.timeZone": "UTC",
                "spark.sql.warehouse.dir": str(self.directory / "warehouse"),
                "spark.jars": ",".join(map(str, jars_of(_CONNECTOR, "spark-connector"))),
                **self._settings,
            },
        )
        for source in (KafkaRows, NatsRows, OneRow):
            made.dataSource.register(source)
        return made

    def _first_read(self) -> None:
        topic = self.jetstream.filled(100, 100)
        self.spark.read.format("broker").options(url=self.jetstream.url, topic=topic).load().count()


@contextlib.contextmanager
def open_stage(*, quick: bool) -> Generator[SparkStage]:
    """Start both brokers and a session. All end with the block.

    :param quick: the session starts faster, and its speed means nothing.
    """
    # Python's workers import the row-wise sources from here.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="anybroker-bench-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        jetstream, kafka = JetStreamSide(), KafkaSide()
        stack.callback(jetstream.close)
        stack.callback(kafka.close)
        stage = SparkStage(jetstream, kafka, directory, quick=quick)
        stack.callback(lambda: stage.spark.stop())
        stack.callback(gc.unfreeze)
        # Keeps Spark and its tests, which a process with only a client has not loaded, out of collections.
        gc.collect()
        gc.freeze()
        yield stage
