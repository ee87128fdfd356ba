"""Queries that are killed by SIGKILL at every step: what they leave behind, and the rows after they were resumed.

All of them run in one process, each halted at its step; it is killed once, and the session of the tests resumes them
all. Each test then counts the rows of one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import pytest
from pyspark.sql import SparkSession

from broker.blocking import Bus, connect
from broker_spark.pipeline import run
from broker_spark.pipeline.definition import AVAILABLE_NOW
from tests.fault_matrix import Books
from tests.servers import kafka, nats
from tests.servers.spark_python import quick_python
from tests.spark.conftest import shared_session
from tests.spark.halted_process import BATCH, LATE, WINDOW, Halted
from tests.spark.support import log, numbered, publish

pytestmark = pytest.mark.deep

ROWS = 3 * BATCH
SECONDS = 300.0
AT_ONCE = 2
"""Queries that are resumed at a time."""
KILLED = 1
"""The batch at which they are killed; earlier ones are committed."""

FAR = 100 * ROWS
"""The number of an order after all others."""

SERVERS: dict[str, Callable[[], str]] = {
    "jetstream": lambda: nats.shared_server().url,
    "kafka": lambda: kafka.shared_server().url,
}
LOGS = [
    *(
        (backend, "never", step, 0 if step == "planned" else KILLED)
        for step in ("planned", "read", "half", "written", "committed")
        for backend in SERVERS
    ),
    *(("kafka", "always", step, KILLED) for step in ("half", "written")),
]
"""Backend, whether Spark's own connector reads, step and batch: each step on each log, and those of the sink by the
connector; a spool has its own in `test_spool_killed`."""
PIPELINES = [
    ("kafka", "always", "planned", 0),
    ("jetstream", "never", "half", KILLED),
    ("jetstream", "never", "between", KILLED),
    ("kafka", "always", "written", KILLED),
    ("kafka", "never", "committed", KILLED),
]
"""Backend, whether Spark's own connector reads, step and batch: each step on one log, as a pipeline takes seconds."""
WINDOWS = ("windows", "jetstream", "written", str(KILLED), "never")
"""The query with state, killed when the state of its batch is written."""

Log = list[tuple[str, bytes]]
"""Ids and bodies."""

AGAIN = {
    "read": "the batch is run again, with tasks that had written",
    "half": "the batch is run again, with tasks that had written",
    "written": "the batch is run again",
}
"""Why rows may come twice where a broker does not deduplicate."""


def order(number: int, colour: str = "") -> bytes:
    return json.dumps({"number": number, "colour": colour or ("red" if number % 2 else "blue")}).encode()


def dead(number: int) -> bytes:
    """An order that does not decode, or one that fails an expectation."""
    return b"bad %d" % number if number % 20 else order(number, "none")


def orders() -> list[bytes]:
    """Every tenth is dead."""
    return [order(number) if number % 10 else dead(number) for number in range(ROWS)]


def windows() -> list[tuple[int, str, int, int]]:
    """The windows of these orders, with start, colour and total."""
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number in range(ROWS):
        if number % 10:
            found[number // WINDOW * WINDOW, "red" if number % 2 else "blue"].append(number)
    return [(*window, len(numbers), sum(numbers)) for window, numbers in found.items()]


class Killed:
    """All queries, killed and resumed.

    :ivar before: the rows in the target of each at the kill.
    :ivar kept: the files of its checkpoint then.
    :ivar logs: the contents of each target topic after they were resumed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open = ExitStack()
        self.buses = {name: self._open.enter_context(connect(server())) for name, server in SERVERS.items()}
        self.cases: dict[tuple[str, ...], Halted] = {}
        self.before: dict[tuple[str, ...], int] = {}
        self.kept: dict[tuple[str, ...], set[str]] = {}
        self.logs: dict[str, Log] = {}
        self._failures: dict[tuple[str, ...], Exception] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add_all(self) -> None:
        logs = {name: self._topic(name, numbered(ROWS)) for name in SERVERS}
        # Of several partitions the connector takes a row more or less.
        straight = self._topic("kafka", numbered(ROWS), partitions=1)
        for backend, connector, step, batch in LOGS:
            self._add("log", backend, straight if connector == "always" else logs[backend], step, batch, connector)
        for backend, connector, step, batch in PIPELINES:
            self._add("pipeline", backend, self._topic(backend, orders()), step, batch, connector)
        kind, backend, step, _, connector = WINDOWS
        # In order, and with one that ends all windows before it.
        source = self._topic(backend, [*orders(), order(FAR)], partitions=1)
        self._add(kind, backend, source, step, KILLED, connector)

    def kill(self) -> None:
        """Let each reach its step, and kill all of them at once."""
        kill_when_halted("tests.spark.halted_process", list(self.cases.values()), self._directory)
        logs = self._read()
        for name, case in self.cases.items():
            self.before[name] = len(logs[case.target])
            kept = Path(case.checkpoint)
            self.kept[name] = {str(path.relative_to(kept)) for path in kept.rglob("*")}

    def resume(self, spark: SparkSession) -> None:
        """Run them to the end of their topics, a few at a time."""
        runs: dict[tuple[str, ...], Future[object]] = {}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for name, case in self.cases.items():
                under_way = [ran for ran in runs.values() if not ran.done()]
                if len(under_way) >= AT_ONCE:
                    wait(under_way, return_when=FIRST_COMPLETED)
                if case.kind != "log":
                    runs[name] = pool.submit(run, case.pipeline(trigger=AVAILABLE_NOW), spark=spark)
                else:
                    # In this thread, since Spark looks up the sink in the session of the thread.
                    query = case.writer(spark).trigger(availableNow=True).start()
                    runs[name] = pool.submit(query.awaitTermination)
        for name, ran in runs.items():
            error = ran.exception()
            if error is not None:
                assert isinstance(error, Exception)
                self._failures[name] = error
        self.logs = self._read()

    def case(self, *name: str) -> Halted:
        """A resumed query. :raises Exception: it could not be resumed."""
        if name in self._failures:
            raise self._failures[name]
        return self.cases[name]

    def _read(self) -> dict[str, Log]:
        """The contents of each target topic, read at once since each read of Kafka waits."""
        topics = {topic: case for case in self.cases.values() for topic in (case.target, case.dead) if topic}
        with ThreadPoolExecutor(len(topics)) as pool:
            found = pool.map(lambda topic: log(self.buses[topics[topic].backend], topic), topics)
            return dict(zip(topics, found, strict=True))

    def _add(self, kind: str, backend: str, source: str, step: str, batch: int, connector: str = "never") -> None:
        name = (kind, backend, step, str(batch), connector)
        directory = self._directory / "-".join(name)
        directory.mkdir()
        self.cases[name] = Halted(
            kind=kind,
            backend=backend,
            url=SERVERS[backend](),
            source=source,
            target=self._topic(backend),
            dead="" if kind == "log" else self._topic(backend),
            directory=str(directory),
            step=step,
            batch=batch,
            connector=connector,
        )

    def _topic(self, backend: str, rows: list[bytes] | None = None, partitions: int = 2) -> str:
        name = f"spark.{uuid.uuid4().hex[:12]}"
        bus = self.buses[backend]
        # A slow machine may need longer than two minutes from the kill to the end.
        options: dict[str, Any] = {"deduplication_window": 1200} if bus.capabilities.publish.deduplication else {}
        bus.admin.ensure_topic(name, partitions=partitions, **options)
        if rows:
            publish(bus, name, rows)
        return name


def kill_when_halted(program: str, cases: Sequence[Halted], directory: Path) -> None:
    """Run cases in a process with a JVM of its own, and kill all of it when each has halted.

    :param program: a module that reads a file with a case in each line.
    """
    plan, output = directory / "cases", directory / "output"
    plan.write_text("".join(json.dumps(asdict(case)) + "\n" for case in cases))
    with output.open("w") as file, quick_python():
        process = subprocess.Popen(
            [sys.executable, "-m", program, str(plan)],
            cwd=Path(__file__).parents[2],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + SECONDS
        while late := [(case.kind, case.backend, case.step) for case in cases if not case.halted]:
            assert process.poll() is None, output.read_text()[-6000:]
            assert time.monotonic() < deadline, f"{late} do not get to their step: {output.read_text()[-6000:]}"
            time.sleep(0.05)
    finally:
        kill_session(process.pid)
        process.wait()


def kill_session(leader: int) -> None:
    """Kill a process that leads a session of its own, its JVM, and the JVM's Python workers."""
    alive = True
    while alive:
        alive = False
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(path.name)) == leader and "Z" not in state(path):
                    alive = True
                    os.kill(int(path.name), signal.SIGKILL)


def state(path: Path) -> str:
    with suppress(OSError):
        return (path / "stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    with Killed(tmp_path_factory.mktemp("killed")) as found:
        found.add_all()
        found.kill()
        # Requested here, so that this module alone runs one JVM of Spark at a time.
        found.resume(shared_session())
        yield found


def allowed(bus: Bus, step: str) -> dict[str, Any]:
    """Rows that may be there twice."""
    if bus.capabilities.publish.deduplication or step not in AGAIN:
        return {}
    return {"twice": BATCH, "why": AGAIN[step]}


def _via(backend: str, connector: str) -> str:
    return f"{backend}, connector" if connector == "always" else backend


@pytest.mark.parametrize(("backend", "connector", "step", "batch"), LOGS)
def test_a_copy_of_a_log(killed: Killed, books: Books, backend: str, connector: str, step: str, batch: int) -> None:
    name = ("log", backend, step, str(batch), connector)
    case, before, bus = killed.case(*name), killed.before[name] - batch * BATCH, killed.buses[backend]
    assert {"planned": before == 0, "read": 0 <= before < BATCH, "half": 0 < before < BATCH}.get(step, before == BATCH)
    ids, rows = zip(*killed.logs[case.target], strict=True)
    books.balance(
        f"SIGKILL of a query: {step}", _via(backend, connector), numbered(ROWS), rows, ids=ids, **allowed(bus, step)
    )


@pytest.mark.parametrize(("backend", "connector", "step", "batch"), PIPELINES)
def test_a_pipeline(
    killed: Killed, books: Books, spark: SparkSession, backend: str, connector: str, step: str, batch: int
) -> None:
    name = ("pipeline", backend, step, str(batch), connector)
    case, bus, kept = killed.case(*name), killed.buses[backend], killed.kept[name]
    assert f"offsets/{batch}" in kept
    assert (f"commits/{batch}" in kept) == (step == "committed")
    assert f"offsets/{batch + 1}" not in kept
    files = spark.read.parquet(f"{case.directory}/files").groupBy("batch").count().collect()
    counts = {row["batch"]: row["count"] for row in files}
    before = killed.before[name] - sum(count for number, count in counts.items() if number < batch)
    assert {"planned": before == 0, "half": 0 < before < counts[batch]}.get(step, before == counts[batch])
    good = [b"%d" % number for number in range(ROWS) if number % 10]
    fault = f"SIGKILL of a pipeline: {step}"
    via = _via(backend, connector)
    for sink in ("files", "more"):
        rows = spark.read.parquet(f"{case.directory}/{sink}").select("number").collect()
        books.balance(f"{fault}; {sink}", via, good, [b"%d" % row.number for row in rows])
    ids, bodies = zip(*killed.logs[case.target], strict=True)
    again = allowed(bus, step)
    # The connector may give its tasks other numbers when a batch runs again, and the ids have these numbers.
    same = {} if connector == "always" else {"ids": ids}
    books.balance(
        f"{fault}; topic", via, good, [b"%d" % json.loads(each)["number"] for each in bodies], **same, **again
    )
    ids, bodies = zip(*killed.logs[case.dead], strict=True)
    bad = [dead(number) for number in range(0, ROWS, 10)]
    # These are written last.
    again = again if step == "written" else {}
    books.balance(f"{fault}; dead letters", via, bad, bodies, ids=ids, **again)


def test_a_pipeline_that_keeps_state(killed: Killed, books: Books, spark: SparkSession) -> None:
    case, kept = killed.case(*WINDOWS), killed.kept[WINDOWS]
    # The state of both batches, of which one is committed, in each task of the aggregate.
    assert {f"state/0/{task}/{version}.changelog" for task in (0, 1) for version in (1, 2)} <= kept
    assert ("commits/0" in kept, "commits/1" in kept) == (True, False)
    counts = windows()
    # It wrote the windows that the first batch had closed.
    over = [window for window in counts if window[0] + WINDOW <= BATCH * KILLED - 1 - LATE]
    assert killed.before[WINDOWS] == len(over) > 0
    fault, due = f"SIGKILL of a pipeline with state: {case.step}", [json.dumps(window).encode() for window in counts]
    again = allowed(killed.buses[case.backend], case.step)
    columns = ("start", "colour", "orders", "total")
    for sink in ("files", "more"):
        rows = spark.read.parquet(f"{case.directory}/{sink}").select(*columns).collect()
        books.balance(f"{fault}; {sink}", case.backend, due, [json.dumps(row).encode() for row in rows])
    ids, bodies = zip(*killed.logs[case.target], strict=True)
    rows = [json.dumps([json.loads(each)[column] for column in columns]).encode() for each in bodies]
    books.balance(f"{fault}; topic", case.backend, due, rows, ids=ids, **again)
    ids, bodies = zip(*killed.logs[case.dead], strict=True)
    bad = [dead(number) for number in range(0, ROWS, 10)]
    books.balance(f"{fault}; dead letters", case.backend, bad, bodies, ids=ids, **again)
