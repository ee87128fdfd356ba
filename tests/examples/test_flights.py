"""The demo on a slice of its flights, on two backends: its checks pass, and its table is correct."""

from __future__ import annotations

import io
import logging
import os
import uuid
from pathlib import Path

import pytest
from rich.console import Console

import broker
from examples.flights import app, reading
from examples.flights.data import FLIGHTS_IN_ALL, Flight, read_airlines, read_flights
from examples.flights.fold import Delay, DelayFold
from examples.flights.lives import new_life
from examples.flights.reading import read_all, subscribe
from examples.flights.screen import Screen, carrier_rows
from examples.flights.story import Balance
from examples.flights.topics import FOLD, make_topics
from tests.servers.pubsub import shared_server as pubsub
from tests.servers.servicebus import missing, shared_double

SLICE = 5000
pytestmark = pytest.mark.xdist_group("flights")  # one worker reads the data


@pytest.fixture(scope="module")
def year() -> list[Flight]:
    return read_flights()


@pytest.fixture(autouse=True)
def read_once(year: list[Flight], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the data once; each demo would spend most of its time on that."""

    def first(count: int) -> list[Flight]:
        return year[:count]

    monkeypatch.setattr(app, "read_flights", first)


@pytest.fixture(scope="module")
def flights(year: list[Flight]) -> list[Flight]:
    return year[:SLICE]


@pytest.fixture(scope="module")
def expected(flights: list[Flight]) -> list[tuple[str, ...]]:
    """The expected table, computed without a broker."""
    fold, cancelled = DelayFold(), dict[str, int]()
    for flight in flights:
        delay = Delay.of(flight)
        if delay is None:
            cancelled[flight.carrier] = cancelled.get(flight.carrier, 0) + 1
        else:
            fold.add(delay)
    return carrier_rows(fold.carriers, cancelled, read_airlines())


def run(url: str, picture: Path) -> tuple[Balance, list[tuple[str, ...]], str]:
    console = Console(file=io.StringIO(), width=120)
    balance, rows = app.run(url, SLICE, picture, Screen(console))
    assert isinstance(console.file, io.StringIO)
    return balance, rows, console.file.getvalue()


@pytest.mark.deep
@pytest.mark.parametrize("url", ["inmem://flights", "embedded:"])
def test_the_checks_pass_and_the_table_matches_the_data(
    url: str, tmp_path: Path, expected: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    balance, rows, shown = run(url, tmp_path / "delays.png")
    assert balance.failures == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert balance.published == SLICE
    assert len(balance.auditor.delays) + len(balance.auditor.cancelled) == SLICE
    assert balance.report.redelivered > 0, "the killed consumer held nothing, so that nothing was put to the test"
    assert rows == expected
    assert (tmp_path / "delays.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "delays.png") in shown.replace("\n", "")
    assert "Every promise holds" in shown


@pytest.mark.deep
def test_a_broker_without_a_log_gives_the_same_balance(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    console = Console(file=io.StringIO(), width=120)
    # Few, since each aircraft is a session.
    url = f"{shared_double().url}&lease_seconds=1"
    balance, _ = app.run(url, 100, tmp_path / "delays.png", Screen(console))
    assert balance.failures == []
    assert len(balance.auditor.delays) + len(balance.auditor.cancelled) == 100
    assert isinstance(console.file, io.StringIO)
    assert "servicebus keeps no log" in console.file.getvalue()


@pytest.mark.deep
async def test_an_idle_consumer_stops_at_once() -> None:
    url = f"{pubsub().url}&ordering=on"
    async with broker.connect(url) as bus:
        await make_topics(bus)
        life = new_life(url, bus)
        await life.start()
        await life.stop()


@pytest.mark.deep
async def test_read_all_reads_ordered_subscriptions_without_acks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_QUIET_SECONDS", 5.0)
    topic = f"reading.{uuid.uuid4().hex[:12]}"
    async with broker.connect(f"{pubsub().url}&ordering=on") as bus:
        await bus.admin.ensure_topic(topic)
        await subscribe(bus, {topic: [FOLD]}, whole=[FOLD])
        for number in range(3):
            batch = [broker.OutboundMessage(b"%d" % number, key=f"aircraft-{key}") for key in range(150)]
            await bus.topic(topic).publish_batch(batch)
        for _ in range(2):
            assert len([entry async for batch in read_all(bus, topic, FOLD) for entry in batch]) == 450


@pytest.mark.deep
def test_a_repeated_commit_does_not_end_the_demo(
    tmp_path: Path, expected: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, failed = broker.RecordBatch[bytes].commit, list[bool]()

    async def once(self: broker.RecordBatch[bytes]) -> None:
        if not failed:
            failed.append(True)
            raise broker.SettleError("Not coordinator", retriable=True)
        await commit(self)

    monkeypatch.setattr(broker.RecordBatch, "commit", once)
    balance, rows, _ = run("inmem://flights-again", tmp_path / "delays.png")
    assert failed
    assert balance.failures == []
    assert rows == expected


@pytest.mark.deep
def test_the_data_matches_the_package(year: list[Flight]) -> None:
    assert [flight.number for flight in year] == list(range(1, FLIGHTS_IN_ALL + 1))
    assert len({flight.id for flight in year}) == FLIGHTS_IN_ALL
    assert [flight.scheduled for flight in year] == sorted(flight.scheduled for flight in year)
    assert read_flights(SLICE) == year[:SLICE]


def test_flights_without_an_aircraft_never_departed(year: list[Flight]) -> None:
    assert all(flight.departure_delay is None for flight in year if flight.aircraft is None)


@pytest.mark.deep
def test_a_failed_check_is_shown_and_sets_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Balance, "fold_survived", property(lambda _: False))
    arguments = ["--url", "inmem://flights-failing", "--flights", "1000", "--picture", str(tmp_path / "delays.png")]
    assert app.main(arguments) == 1
    assert "Does not hold: the fold survived the kill" in capsys.readouterr().out


def test_an_unreachable_broker_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--url", "nats://secret@127.0.0.1:9", "--flights", "100", "--picture", str(tmp_path / "delays.png")]
    assert app.main(arguments) == 1
    shown = capsys.readouterr().out
    assert "The demo failed" in shown
    assert "secret" not in shown


class _Failing(Screen):
    """Fails as soon as the consumer's process is known."""

    said = ""

    def say(self, line: str) -> None:
        if "consumer is process" in line:
            self.said = line
            raise broker.BrokerError("the demo is over")


def test_a_failed_demo_leaves_no_consumer_running(tmp_path: Path) -> None:
    screen = _Failing(Console(file=io.StringIO()))
    with pytest.raises(BaseExceptionGroup) as failed:
        app.run("embedded:", 1000, tmp_path / "delays.png", screen)
    assert failed.value.subgroup(broker.BrokerError) is not None
    with pytest.raises(ProcessLookupError):
        os.kill(int(screen.said.split()[-1]), 0)
