"""Queries over a queue that are killed with all of Spark: the owner of the spool, the driver, its JVM and the workers.

All of them run in one process, each halted at its step; it is killed once, and each test resumes one in the session of
the tests. `test_spool_kills` has more steps and brokers, without Spark.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from pyspark.sql import SparkSession

from broker.blocking import Bus, connect
from tests.fault_matrix import Books
from tests.servers import kafka, nats
from tests.spark.halted_process import BATCH
from tests.spark.halted_spools import SPOOL, HaltedSpool
from tests.spark.spool_query import segments, settled
from tests.spark.support import log, numbered, publish
from tests.spark.test_kills import kill_when_halted

pytestmark = pytest.mark.deep

ROWS = 5 * BATCH
"""More than a batch and everything ahead of it, so that each is killed while messages wait at the broker."""
LEASE = 2
"""Seconds after which unacked messages are redelivered."""
STEPS = [
    (f"{SPOOL}received", 2, "jetstream"),
    (f"{SPOOL}half", 2, "jetstream"),
    (f"{SPOOL}written", 2, "jetstream"),
    (f"{SPOOL}acked", 2, "jetstream"),
    (f"{SPOOL}planned", 2, "jetstream"),
    ("half", 1, "kafka"),
    ("written", 1, "kafka"),
    (f"{SPOOL}committed", 1, "jetstream"),
]
"""The step, the number of its call or batch, and the target: Kafka shows repeated writes."""


@dataclass(frozen=True)
class Found:
    """The state at the kill.

    :ivar copied: rows in the target.
    :ivar unacked: messages that the broker still has.
    :ivar segments: rows of each complete segment, by number.
    :ivar half: files of incomplete segments.
    :ivar planned: segments of planned batches.
    :ivar committed: segments of committed batches.
    """

    copied: int
    unacked: int
    segments: dict[int, int]
    half: int
    planned: range
    committed: range

    @classmethod
    def look(cls, case: HaltedSpool, queue: Bus, target: Bus) -> Self:
        lag = queue.admin.lag(case.source, "spark")
        names = segments(case.spool)
        parts = [name.split("-") for name in names if name.endswith(".arrow")]
        offsets = _numbered(Path(case.checkpoint, "offsets"))
        commits = _numbered(Path(case.checkpoint, "commits"))
        ends = [json.loads(path.read_text().splitlines()[-1])["next"] for path in offsets]
        return cls(
            copied=len(log(target, case.target)),
            unacked=lag.waiting + (lag.unsettled or 0),
            segments={int(number): int(rows) for number, _, rows, _ in parts},
            half=len(names) - len(parts),
            planned=range([0, *ends][len(offsets)]),
            committed=range([0, *ends][len(commits)]),
        )

    @property
    def cut_off(self) -> int:
        """Rows of the running batch; Spark's first one may be empty."""
        return sum(self.segments[number] for number in self.planned if number not in self.committed)

    def is_at(self, step: str) -> bool:
        """Whether it was killed there."""
        acked = ROWS - self.unacked
        last = max(self.segments)
        match step:
            case "spool-received":
                return (last, acked, self.half) == (0, self.segments[0], 0)
            case "spool-half":
                return (last, acked, self.half) == (0, self.segments[0], 1)
            case "spool-written":
                return last == 1 and 0 < acked <= BATCH
            case "spool-acked":
                return last == 1 and acked > self.segments[1]
            case "spool-planned" | "half":
                return self.cut_off > 0
            case "spool-committed":
                return self.cut_off > 0 and 0 in self.segments
            case _:
                return self.copied >= self.cut_off > 0


def _numbered(directory: Path) -> list[Path]:
    return sorted(directory.glob("[0-9]*"), key=lambda path: int(path.name))


class Killed:
    """All queries, killed.

    :ivar found: what each left behind.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open = ExitStack()
        self._urls = {
            "jetstream": f"{nats.shared_server().url}?lease_seconds={LEASE}",
            "kafka": kafka.shared_server().url,
        }
        self.buses = {name: self._open.enter_context(connect(url)) for name, url in self._urls.items()}
        self.cases: dict[str, HaltedSpool] = {}
        self.found: dict[str, Found] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def kill(self) -> None:
        """Let each reach its step, and kill all of them at once."""
        for step, number, backend in STEPS:
            self._add(step, number, backend)
        kill_when_halted("tests.spark.halted_spools", list(self.cases.values()), self._directory)
        for step, case in self.cases.items():
            self.found[step] = Found.look(case, self.buses["jetstream"], self.buses[case.backend])

    def _add(self, step: str, number: int, backend: str) -> None:
        directory = self._directory / step
        directory.mkdir()
        self.cases[step] = HaltedSpool(
            kind="queue",
            backend=backend,
            url=self._urls["jetstream"],
            source=self._queue(),
            target=self._topic(backend),
            target_url=self._urls[backend],
            directory=str(directory),
            step=step,
            batch=number,
        )

    def _queue(self) -> str:
        name = self._topic("jetstream")
        bus = self.buses["jetstream"]
        bus.admin.ensure_subscription(name, "spark")
        publish(bus, name, numbered(ROWS))
        return name

    def _topic(self, backend: str) -> str:
        name = f"spark.{uuid.uuid4().hex[:12]}"
        # A slow machine may need longer than two minutes from the kill to the end.
        options: dict[str, Any] = {"deduplication_window": 1200} if backend == "jetstream" else {}
        self.buses[backend].admin.ensure_topic(name, partitions=2, **options)
        return name


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    with Killed(tmp_path_factory.mktemp("killed")) as found:
        found.kill()
        yield found


@pytest.mark.parametrize("step", [step for step, _, _ in STEPS])
def test_a_copy_of_a_queue(spark: SparkSession, killed: Killed, books: Books, step: str) -> None:
    case, found = killed.cases[step], killed.found[step]
    assert found.unacked > 0
    assert found.is_at(step), found
    case.writer(spark).trigger(availableNow=True).start().awaitTermination()
    ids, rows = zip(*log(killed.buses[case.backend], case.target), strict=True)
    # The spool never reads a message twice; a broker without deduplication has duplicates of the interrupted batch.
    twice, why = (found.cut_off, "the batch is run again") if case.backend == "kafka" else (0, "")
    fault = f"SIGKILL of Spark and a spool: {step}"
    books.balance(fault, case.backend, numbered(ROWS), rows, ids=ids, twice=twice, why=why)
    assert settled(killed.buses["jetstream"], case.source)
