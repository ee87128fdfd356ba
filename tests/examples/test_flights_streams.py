"""The flights through stream processors: the graphs by a `Tester`, processors in memory, and runs of the whole demo."""

from __future__ import annotations

import asyncio
import copy
import io
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import broker
from broker_streams import Change, Memory, Processor, Tester
from examples.flights.data import Flight, read_airlines, read_flights
from examples.flights.known import Known
from examples.flights_streams import app, groups
from examples.flights_streams.board import Board
from examples.flights_streams.expected import Expected, compare_all, expect
from examples.flights_streams.groups import GROUPS, IDLE_SECONDS, MANY, by_aircraft, by_carrier
from examples.flights_streams.member import Reporter
from examples.flights_streams.publishing import cut, publish_flights, publish_tables, read_planes
from examples.flights_streams.results import Results
from examples.flights_streams.story import Outcome
from examples.flights_streams.topics import (
    AIRCRAFT_TABLE,
    AIRLINES,
    ALERTS,
    DEPARTURES,
    FLIGHTS,
    HOURS,
    PLANES,
    Aircraft,
    Alert,
    Hour,
    make_topics,
)
from examples.flights_streams.viewer import LATEST, Watcher
from tests.servers import kafka, pulsar

one_worker = pytest.mark.xdist_group("flights")
"""Reads the data once."""

FEW = 600
"""Flights of the graphs."""
SLICE = 4000
"""Flights of a whole run."""


@pytest.fixture(scope="module")
def few() -> list[Flight]:
    return read_flights(FEW)


@pytest.fixture(scope="module")
def expected() -> Expected:
    return expect(FEW, read_airlines())


def publish(test: Tester, flights: Sequence[Flight]) -> None:
    for flight in flights:
        time = datetime.fromisoformat(flight.scheduled)
        if flight.aircraft is not None:
            test.publish(FLIGHTS, key=flight.aircraft, value=flight, timestamp=time)
        test.publish(DEPARTURES, key=flight.carrier, value=flight, timestamp=time)


def tables(test: Tester) -> None:
    for aircraft, plane in read_planes().items():
        test.publish(PLANES, key=aircraft, value=plane)
    for code, name in read_airlines().items():
        test.publish(AIRLINES, key=code, value=name)


def output(test: Tester) -> Results:
    hours: list[Hour] = [each.value for each in test.published(HOURS)]
    alerts: list[Alert] = [each.value for each in test.published(ALERTS)]
    return Results(
        dict(test[AIRCRAFT_TABLE]),
        {(hour.figures.carrier, hour.figures.hour): hour for hour in hours},
        {(alert.aircraft, alert.number): alert for alert in alerts},
        copies=len(hours) - len({(hour.figures.carrier, hour.figures.hour) for hour in hours}),
    )


def differences(expected: Expected, found: Results) -> list[str]:
    return [line for each in compare_all(expected, found) for line in each.differences]


# --- the graphs -------------------------------------------------------------------------------------------------------


@one_worker
def test_the_graphs_match_a_plain_computation_over_crashes(few: list[Flight], expected: Expected) -> None:
    with Tester(*GROUPS, partitions=3) as test:
        tables(test)
        for part in cut(few, 0.3, 0.6):
            with test.hold_checkpoints():
                publish(test, part[:100])
                test.crash()
            publish(test, part[100:])
        test.clock.advance(IDLE_SECONDS)
        found = output(test)
    assert differences(expected, found) == []
    assert (found.again, found.copies) == (0, 0)


def flight(number: int, leg: int, delay: int | None, hour: int = 10) -> Flight:
    return Flight(
        number=number,
        carrier="UA",
        flight=f"UA{number}",
        aircraft="N14228",
        leg=leg,
        scheduled=f"2013-01-01T{hour}:15:00Z",
        hour=hour,
        origin="EWR",
        destination="IAH",
        departure_delay=delay,
        arrival_delay=delay,
    )


def test_an_alert_has_plane_and_airline_and_comes_once_in_a_run() -> None:
    delays = [16] * MANY + [None, 17, 0] + [20] * MANY
    with Tester(by_aircraft) as test:
        tables(test)
        publish_to = [flight(number, number, delay) for number, delay in enumerate(delays, 1)]
        for each in publish_to:
            test.publish(FLIGHTS, key="N14228", value=each)
        alerts = [each.value for each in test.published(groups.alerts)]
    plane = read_planes()["N14228"]
    assert alerts == [Alert("N14228", number, "United Air Lines", plane) for number in (MANY, len(delays))]


def test_what_comes_again_counts_once() -> None:
    with Tester(*GROUPS) as test:
        publish(test, [flight(1, 1, 20), flight(2, 2, 30)])
        test.duplicate_last(FLIGHTS)
        test.duplicate_last(DEPARTURES)
        test.clock.advance(IDLE_SECONDS)
        found = output(test)
    assert found.aircraft["N14228"].known == Known(2, 2, 2, 2, 1, 2, True)
    [hour] = found.hours.values()
    assert (hour.figures.flights, hour.figures.departure) == (2, 50)
    assert found.again == 2


def test_the_last_hours_close_when_their_partition_is_idle() -> None:
    with Tester(by_carrier) as test:
        for each in (flight(1, 1, 0), flight(2, 2, 0, hour=11)):
            test.publish(DEPARTURES, key="UA", value=each, timestamp=datetime.fromisoformat(each.scheduled))
        assert [each.key for each in test.published(HOURS)] == ["UA 2013-01-01T10:00:00Z"]
        test.clock.advance(IDLE_SECONDS)
        assert [each.key for each in test.published(HOURS)][1:] == ["UA 2013-01-01T11:00:00Z"]


# --- processors in one process ----------------------------------------------------------------------------------------


@one_worker
async def test_processors_match_a_plain_computation(few: list[Flight], expected: Expected) -> None:
    async with broker.connect("inmem://flights-streams") as bus, AsyncExitStack() as stack:
        await make_topics(bus)
        await publish_tables(bus)
        processors = [Processor(bus, group, store=Memory(), checkpoint_interval=0.1) for group in GROUPS]
        for processor in processors:
            await (await stack.enter_async_context(processor)).ready()
        results, news = Results(), asyncio.Event()
        following = asyncio.create_task(results.follow(bus, news.set))
        counted: list[int] = []
        await publish_flights(bus, few, counted.append)
        assert sum(counted) == FEW
        ends = {each.carrier: f"{each.scheduled[:13]}:00:00Z" for each in few}
        async with asyncio.timeout(60):
            while not all(end in results.hours for end in ends.items()):
                news.clear()
                await news.wait()
            while sum(row.known.flights for row in results.aircraft.values()) < sum(bool(each.leg) for each in few):
                await results.read_table(bus)
        following.cancel()
        report = Reporter(processors).report()
    assert differences(expected, results) == []
    assert (results.again, results.copies, report.late) == (0, 0, 0)
    assert report.ready
    assert report.guarantee == "exactly_once"
    assert (report.departures, report.flights) == (FEW, sum(bool(each.leg) for each in few))
    assert {recovery.group for recovery in report.recoveries} == {group.name for group in GROUPS}


# --- parts ------------------------------------------------------------------------------------------------------------


def what_is_right(expected: Expected) -> Results:
    return Results(
        {
            key: Aircraft(Known(figures.flights, *msgspec.structs.astuple(figures)[2:]), plane)
            for key, (figures, plane) in expected.aircraft.items()
        },
        {key: Hour(figures, airline) for key, (figures, airline) in expected.hours.items()},
        dict(expected.alerts),
    )


def change_an_aircraft(found: Results) -> None:
    row = next(iter(found.aircraft.values()))
    row.known = row.known._replace(late=99)


def change_a_plane(found: Results) -> None:
    next(row for row in found.aircraft.values() if row.plane is not None).plane = None


def lose_an_hour(found: Results) -> None:
    found.hours.popitem()


def change_an_airline(found: Results) -> None:
    key, hour = next(iter(found.hours.items()))
    found.hours[key] = msgspec.structs.replace(hour, airline="Nobody")


def add_an_alert(found: Results) -> None:
    found.alerts["N1", 1] = Alert("N1", 1, None, None)


@one_worker
@pytest.mark.parametrize(
    ("tamper", "reported"),
    [
        (change_an_aircraft, "aircraft: 1 differ"),
        (change_a_plane, "aircraft: 1 differ"),
        (lose_an_hour, "hours of carriers: 1 are missing"),
        (change_an_airline, "hours of carriers: 1 differ"),
        (add_an_alert, "alerts: 1 should not be there"),
    ],
)
def test_differences_are_reported(expected: Expected, tamper: Callable[[Results], None], reported: str) -> None:
    found = copy.deepcopy(what_is_right(expected))
    assert differences(expected, found) == []
    tamper(found)
    [line] = differences(expected, found)
    assert line.startswith(reported)


@one_worker
def test_flights_are_cut_between_hours(few: list[Flight]) -> None:
    parts = cut(few, 0.3, 0.6)
    assert [each for part in parts for each in part] == few
    assert all(parts)
    hours = [{each.scheduled[:13] for each in part} for part in parts]
    assert not hours[0] & hours[1]
    assert not hours[1] & hours[2]


def test_the_view_sums_up_changes_and_shows_the_latest() -> None:
    watcher = Watcher()
    rows = {f"N{number}": Aircraft(Known(flights=number), None, last=number) for number in range(1, 13)}
    for key, row in rows.items():
        watcher.take(Change(key, None, row))
    watcher.take(Change("N1", rows["N1"], Aircraft(Known(flights=3), None, last=13, again=1)))
    watcher.take(Change("N2", rows["N2"], None))
    report = watcher.report()
    assert (report.rows, report.flights, report.again) == (11, 3 + sum(range(3, 13)), 1)
    assert [each.aircraft for each in report.latest] == ["N1", *(f"N{number}" for number in range(12, 3, -1))][:LATEST]


def test_a_broker_of_one_process_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--url", "inmem://one", "--flights", "100", "--picture", str(tmp_path / "streams.png")]
    assert app.main(arguments) == 1
    assert "is a broker within one process" in capsys.readouterr().out.replace("\n", " ")


# --- the whole demo ---------------------------------------------------------------------------------------------------


def run(url: str, picture: Path) -> tuple[Outcome, str]:
    console = Console(file=io.StringIO(), width=160)
    outcome = app.run(url, SLICE, picture, Board(console))
    assert isinstance(console.file, io.StringIO)
    return outcome, console.file.getvalue()


@pytest.mark.deep
def test_the_output_is_correct_after_a_kill(tmp_path: Path) -> None:
    outcome, shown = run("embedded:", tmp_path / "streams.png")
    assert outcome.failures == []
    assert outcome.guarantee == "exactly_once"
    assert "was killed with SIGKILL" in shown
    assert "Equal, to the row" in shown
    assert (tmp_path / "streams.png").read_bytes().startswith(b"\x89PNG")
    assert [each.what for each in outcome.compared if each.equal] == ["aircraft", "hours of carriers"]


@pytest.mark.deep
@pytest.mark.xdist_group("flights")
def test_the_same_on_kafka(tmp_path: Path) -> None:
    outcome, _ = run(kafka.shared_server().url, tmp_path / "streams.png")
    assert outcome.failures == []
    assert outcome.how == "transactions"


@pytest.mark.deep
@pytest.mark.xdist_group("pulsar")
def test_the_same_on_pulsar(tmp_path: Path) -> None:
    outcome, _ = run(pulsar.shared_server().url, tmp_path / "streams.png")
    assert outcome.failures == []
    assert outcome.guarantee == "exactly_once"
