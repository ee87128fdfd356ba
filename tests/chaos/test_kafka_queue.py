"""Workers of a queue with markers die, freeze, leave and join, a broker restarts: each message is settled once."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.kafka_queue_accounts import NOT_HANDED_OVER, Books
from tests.chaos.kafka_queue_plans import HALF_A_MINUTE, MINUTE, long_plan
from tests.chaos.kafka_queue_running import QueueRun
from tests.servers.kafka import KafkaServer, shared_server
from tests.servers.kafka_cluster import KafkaCluster

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-chaos-queue")]


@pytest.mark.timeout(600)  # each fault waits until the workers are busy again
async def test_every_message_is_settled_once_while_workers_die(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await _run(tmp_path, capsys, HALF_A_MINUTE, seconds=30.0, least=650)


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", [None, "transactions", "ordered"])
async def test_a_minute_in_each_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str | None) -> None:
    await _run(tmp_path, capsys, MINUTE, seconds=60.0, least=1300, mode=mode)


async def _run(
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    plan: Sequence[tuple[float, str]],
    *,
    seconds: float,
    least: int,
    mode: str | None = None,
) -> None:
    modes = {} if mode is None else {mode: True}
    with KafkaCluster(3) as kafka:
        run = QueueRun(kafka, directory, seed=20261122, plan=plan, seconds=seconds, least=least, **modes)
        books = await run.run()
    with capsys.disabled():
        sys.stdout.write(f"\n{run.say(books)}\n")
    assert not books.problems, "\n".join(books.problems)
    if mode == "ordered":
        assert books.memory > 0
    else:
        assert books.again["nacked"] > 0
    # It costs an attempt, and is the exception.
    assert books.again[NOT_HANDED_OVER] < books.messages / 10
    # Else nothing was shown.
    assert books.messages >= least
    assert books.settled["rejected"] > 0
    assert books.again["its holder died"] + books.again["its holder died, before it was handed over"] > 0


@pytest.mark.parametrize("plan", [MINUTE, HALF_A_MINUTE])
def test_a_short_run_has_every_fault_of_a_long_one(plan: Sequence[tuple[float, str]]) -> None:
    assert {what for _, what in plan} == {what for _, what in long_plan(600.0, seed=1)}


async def test_a_failed_account_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueueRun, "_until_settled", _nothing)
    monkeypatch.setattr(QueueRun, "_read", _read_nothing)
    run = QueueRun(shared_server(), tmp_path, seed=1, plan=(), seconds=0.0, workers=0, trackers=0, producers=0)
    run.problems.append("w0 ended with 1")
    with pytest.raises(AssertionError, match="stays open") as raised:
        await run.run()
    assert raised.value.__notes__ == ["w0 ended with 1"]


async def test_brokers_are_away_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(QueueRun, "_until_busy", _nothing)
    monkeypatch.setattr(QueueRun, "_until_settled", _nothing)
    monkeypatch.setattr(QueueRun, "_read", _read_nothing)
    for step in ("stop", "kill", "start"):
        monkeypatch.setattr(KafkaServer, step, lambda _, step=step: steps.append(step))
    plan = ((0.0, "restart"), (0.0, "kill broker"))
    run = QueueRun(shared_server(), tmp_path, seed=1, plan=plan, seconds=0.0, workers=0, trackers=0, producers=0)
    with pytest.raises(AssertionError, match="stays open"):
        await run.run()
    assert steps == ["stop", "start", "kill", "start"]


async def test_a_failed_run_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def harm(_: QueueRun) -> None:
        raise RuntimeError("the broker does not start")

    monkeypatch.setattr(QueueRun, "_harm", harm)
    run = QueueRun(shared_server(), tmp_path, seed=1, plan=(), seconds=0.0, workers=0, trackers=0, producers=1)
    with pytest.raises(RuntimeError, match="does not start"):
        await run.run()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_failed_run_waits_for_a_starting_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that would be there when all is over."""
    begun, goes_on, steps = threading.Event(), threading.Event(), list[str]()

    def start(_: KafkaServer) -> None:
        begun.set()
        goes_on.wait(30)
        steps.append("started")

    async def fail(*_: object) -> None:
        await asyncio.to_thread(begun.wait, 30)
        asyncio.get_running_loop().call_later(0.1, goes_on.set)
        raise RuntimeError("nothing is published")

    monkeypatch.setattr(QueueRun, "_until_busy", _nothing)
    monkeypatch.setattr(QueueRun, "_publish", fail)
    monkeypatch.setattr(KafkaServer, "stop", lambda _: None)
    monkeypatch.setattr(KafkaServer, "start", start)
    run = QueueRun(
        shared_server(), tmp_path, seed=1, plan=((0.0, "restart"),), seconds=0.0, workers=0, trackers=0, producers=1
    )
    with pytest.raises(RuntimeError, match="nothing is published"):
        await run.run()
    assert steps == ["started"]


async def _nothing(_: QueueRun) -> None: ...


def _read_nothing(_: QueueRun) -> Books:
    raise AssertionError("a transaction stays open")
