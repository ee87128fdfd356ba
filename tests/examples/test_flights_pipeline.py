"""The pipelines of the flights: their transforms, and a small run of the whole demo."""

from __future__ import annotations

import copy
import io
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.tws_tester import TwsTester
from rich.console import Console

from broker_spark.testing import payloads
from examples.flights.data import Flight, read_flights
from examples.flights.screen import Screen
from examples.flights.topics import FLIGHT_JSON
from examples.flights_pipeline import app
from examples.flights_pipeline.aircraft import AircraftProcessor
from examples.flights_pipeline.comparison import compare_all
from examples.flights_pipeline.corruption import KINDS, corrupted
from examples.flights_pipeline.lives import SparkLife
from examples.flights_pipeline.plain import Expected, compute
from examples.flights_pipeline.results import Results
from examples.flights_pipeline.schemas import CarrierHour, ScheduledFlight
from examples.flights_pipeline.story import Outcome
from examples.flights_pipeline.tables import read_tables
from examples.flights_pipeline.transforms import JOINED, by_carrier_and_hour, with_tables
from tests.servers import kafka
from tests.servers.spark_python import quick_python
from tests.spark.conftest import shared_session

# With the other tests that start a JVM of Spark.
pytestmark = [pytest.mark.xdist_group("spark")]

SLICE = 600
"""Flights of the whole run."""
FEW = 200
"""Flights of a transform."""


@pytest.fixture(scope="module")
def few() -> list[Flight]:
    return read_flights(FEW)


@pytest.fixture(scope="module")
def expected() -> Expected:
    return compute(FEW, JOINED)


def differences(expected: Expected, few: list[Flight], found: Results) -> list[str]:
    return [line for each in compare_all(expected, corrupted(few), found) for line in each.differences]


def what_is_right(expected: Expected, few: list[Flight]) -> Results:
    letters = {each.id: (each.reason, each.data) for each in corrupted(few)}
    return Results(expected.joined, dict(expected.hours), dict(expected.aircraft), letters)


@pytest.mark.deep
def test_the_transforms_match_a_plain_computation(few: list[Flight], expected: Expected) -> None:
    spark = shared_session()
    bodies = [FLIGHT_JSON.encode(flight) or b"" for flight in few]
    joined = with_tables(payloads(spark, ScheduledFlight, bodies), read_tables(spark)).toArrow()
    messages = spark.createDataFrame(
        [(body,) for body in [*bodies, *(each.data for each in corrupted(few))]], ["value"]
    )
    hours = [row.asDict() for row in by_carrier_and_hour(messages).collect()]
    assert {row.pop("slot") for row in hours} == {" ".join(slot) for slot in expected.hours}
    found = what_is_right(expected, few)
    found.joined = joined
    found.hours = {(row["carrier"], row["hour"]): CarrierHour(**row) for row in hours}
    assert differences(expected, few, found) == []


def test_the_state_of_an_aircraft_continues_across_batches() -> None:
    tester = TwsTester(AircraftProcessor())
    legs = [(1, 20, 30), (2, 16, 0), (3, None, None), (4, 40, 15), (5, 0, 16), (6, 17, None), (7, 99, 1)]
    rows = [Row(leg=leg, departure_delay=departure, arrival_delay=arrival) for leg, departure, arrival in legs]
    # A shuffle promises no order within a batch.
    [first] = tester.test("N1", [rows[2], rows[0], rows[1]])
    assert first == Row(aircraft="N1", flights=3, departed=2, late=2, longest=2, handed_on=1)
    [second] = tester.test("N1", rows[:2:-1])
    assert second == Row(aircraft="N1", flights=7, departed=6, late=5, longest=3, handed_on=2)
    [other] = tester.test("N2", rows[4:5])
    assert other == Row(aircraft="N2", flights=1, departed=1, late=0, longest=0, handed_on=0)


def change_a_row(found: Results) -> None:
    column = found.joined.column_names.index("seats")
    seats = found.joined["seats"].to_pylist()
    seats[7] = -1
    found.joined = found.joined.set_column(column, "seats", pyarrow.array(seats, pyarrow.int64()))


def double_a_row(found: Results) -> None:
    found.joined = pyarrow.concat_tables([found.joined, found.joined.slice(3, 1)])


def lose_a_row(found: Results) -> None:
    found.joined = found.joined.slice(1)


def change_an_hour(found: Results) -> None:
    slot, hour = next(iter(found.hours.items()))
    found.hours[slot] = msgspec.structs.replace(hour, late=99)


def lose_an_aircraft(found: Results) -> None:
    found.aircraft.popitem()


def change_a_reason(found: Results) -> None:
    letter, (_, data) = next(iter(found.letters.items()))
    found.letters[letter] = ("No reason", data)


def add_a_letter(found: Results) -> None:
    found.letters["flight-1"] = ("No reason", b"{}")


@pytest.mark.parametrize(
    ("tamper", "reported"),
    [
        (change_a_row, "joined flights: 1 differ"),
        (double_a_row, "joined flights: 1 rows are there more than once"),
        (lose_a_row, "joined flights: 1 are missing"),
        (change_an_hour, "hours of carriers: 1 differ"),
        (lose_an_aircraft, "aircraft: 1 are missing"),
        (change_a_reason, "dead: truncated: 1 differ"),
        (add_a_letter, "dead: of no kind: 1 should not be there, such as flight-1"),
    ],
)
def test_differences_are_reported(
    few: list[Flight], expected: Expected, tamper: Callable[[Results], None], reported: str
) -> None:
    found = what_is_right(expected, few)
    assert differences(expected, few, found) == []
    tamper(found)
    [line] = differences(expected, few, found)
    assert line.startswith(reported)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, str, Path]:
    """One run of the whole demo: its output and picture."""
    picture = tmp_path_factory.mktemp("pipeline") / "delays.png"
    console = Console(file=io.StringIO(), width=160)
    with quick_python():
        outcome = app.run("embedded:", SLICE, picture, Screen(console))
    assert isinstance(console.file, io.StringIO)
    return outcome, console.file.getvalue(), picture


@pytest.mark.deep
def test_output_is_correct_after_a_kill(whole: tuple[Outcome, str, Path]) -> None:
    outcome, shown, picture = whole
    assert outcome.failures == []
    # The embedded server deduplicates.
    assert (outcome.results.copies, outcome.most_copies) == (0, 0)
    assert "Equal, to the row: nothing lost, nothing twice" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    kinds = Counter(each.kind for each in outcome.spoilt)
    assert set(kinds) == set(KINDS)
    counted = {each.what: (each.expected, each.found, each.equal) for each in outcome.compared}
    assert counted["joined flights"] == (SLICE, SLICE, SLICE)
    assert {what: counts for what, counts in counted.items() if what.startswith("dead")} == {
        f"dead: {kind}": (count, count, count) for kind, count in kinds.items()
    }
    assert any("java" in name for name in outcome.killed), "the JVM was not killed"
    assert len(outcome.killed) > 2, "the workers were not killed"


@pytest.mark.deep
def test_the_same_on_kafka(tmp_path: Path) -> None:
    screen = Screen(Console(file=io.StringIO()))
    with quick_python():
        outcome = app.run(kafka.shared_server().url, SLICE, tmp_path / "delays.png", screen)
    assert outcome.failures == []
    assert outcome.results.copies <= outcome.most_copies
    assert {each.what: each.equal for each in outcome.compared}["joined flights"] == SLICE
    assert any("java" in name for name in outcome.killed)


@pytest.mark.deep
def test_too_many_copies_fail_the_demo(whole: tuple[Outcome, str, Path]) -> None:
    results = replace(whole[0].results, copies=3)
    assert replace(whole[0], results=results, most_copies=3).failures == []
    assert replace(whole[0], results=results, most_copies=2).failures == ["at most 2 messages are there twice"]


@pytest.mark.deep
def test_a_wrong_result_sets_the_exit_status(
    whole: tuple[Outcome, str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = whole[0]
    results = copy.copy(outcome.results)
    results.aircraft = dict(results.aircraft)
    lose_an_aircraft(results)
    tampered = replace(outcome, results=results, compared=compare_all(compute(SLICE, JOINED), outcome.spoilt, results))

    async def run_demo(*_: object) -> Outcome:
        return tampered

    def nothing(_: int | None) -> list[Flight]:
        return []

    monkeypatch.setattr(app, "run_demo", run_demo)
    # It takes seconds, and `run_demo` does not need it.
    monkeypatch.setattr(app, "read_flights", nothing)
    arguments = ["--url", "embedded:", "--flights", str(SLICE), "--picture", str(tmp_path / "delays.png")]
    assert app.main(arguments) == 1
    assert "Does not hold: aircraft: 1 are missing" in capsys.readouterr().out


def test_an_in_memory_broker_is_refused_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--url", "inmem:", "--picture", str(tmp_path / "delays.png")]) == 1
    shown = capsys.readouterr().out
    assert "Spark runs several" in shown
    assert "make demo-sdk" in shown


def test_missing_java_is_reported_with_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    assert app.main(["--url", "embedded:"]) == 1
    assert "Java 17" in capsys.readouterr().out


async def test_a_failure_of_spark_is_reported(tmp_path: Path) -> None:
    """And no process stays behind."""
    life = SparkLife("kafka://127.0.0.1:9", tmp_path, 100, "no trigger", lambda _: None)
    async with life.alive():
        with pytest.raises(Exception, match="trigger"):
            await life.end()
