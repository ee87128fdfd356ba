"""Queries over a queue that are killed without notice at each step: every message is there, and there once."""

from __future__ import annotations

import json
import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest

from broker.blocking import Bus
from tests.fault_matrix import Books
from tests.servers import nats, pubsub, servicebus
from tests.spark.conftest import MakeTopic
from tests.spark.spool_process import main
from tests.spark.spool_query import segments, settled
from tests.spark.spool_steps import STEPS
from tests.spark.support import numbered, publish

ROWS = 4000
# Import once what each of nine processes would import.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([main.__module__])


@pytest.fixture(
    params=[
        "jetstream",
        pytest.param("pubsub", marks=pytest.mark.deep),
        pytest.param("servicebus", marks=pytest.mark.deep),
    ]
)
def url(request: pytest.FixtureRequest) -> str:
    """Messages of a killed process are redelivered after a second or two."""
    match request.param:
        case "jetstream":
            return f"{nats.shared_server().url}?lease_seconds=1"
        case "pubsub":
            return f"{pubsub.shared_server().url}&lease_seconds=2"
        case _:
            if (reason := servicebus.missing()) is not None:
                pytest.skip(reason)
            return f"{servicebus.shared_double().url}&lease_seconds=2"


def run(url: str, topic: str, directory: Path, step: str = "") -> int | None:
    process = FORKS.Process(target=main, args=(url, topic, str(directory), step))
    process.start()
    process.join(300)
    assert process.exitcode in {0, -signal.SIGKILL}, step
    return process.exitcode


def written(directory: Path) -> list[bytes]:
    return [row.encode() for path in (directory / "out").glob("[0-9]*") for row in json.loads(path.read_text())]


@pytest.mark.deep
def test_a_query_that_is_killed_at_each_step_loses_nothing(
    url: str, bus: Bus, make_topic: MakeTopic, tmp_path: Path, books: Books
) -> None:
    topic = make_topic()
    # A spool confirms its acks if the broker can.
    options: dict[str, Any] = {"exactly_once": True} if bus.capabilities.backend == "pubsub" else {}
    bus.admin.ensure_subscription(topic, "spark", **options)
    publish(bus, topic, numbered(ROWS))
    for step in STEPS:
        # All on one spool: each process takes over from the one before.
        assert run(url, topic, tmp_path, f"{step}:2") == -signal.SIGKILL, step
        before = len(written(tmp_path))
        assert before < ROWS, step
    assert run(url, topic, tmp_path) == 0
    books.balance(
        f"SIGKILL of a spool: {len(STEPS)} steps", bus.capabilities.backend, numbered(ROWS), written(tmp_path)
    )
    assert settled(bus, topic)
    # Only segments of the last batch, which Spark might run again.
    last = json.loads(max((tmp_path / "out").glob("[0-9]*"), key=lambda path: int(path.name)).read_text())
    kept = [int(name.split("-")[2]) for name in segments(tmp_path / "spool")]
    assert kept
    assert sum(kept[1:]) < len(last)
    assert len(list((tmp_path / "spool" / "owners").iterdir())) == 1
