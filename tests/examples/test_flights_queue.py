"""The queue of flights: a small run with two killed workers, and the checks of its accounts."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

import broker
from examples.flights.data import Flight
from examples.flights_queue import app
from examples.flights_queue.accounts import Accounts, Deaths, Letter
from examples.flights_queue.auditor import Auditor
from examples.flights_queue.board import Board
from examples.flights_queue.fates import TRIES, Fate, unreadable
from examples.flights_queue.story import Outcome
from examples.flights_queue.topics import DEAD, DONE, DONE_JSON, Done
from examples.flights_queue.watching import Snapshot
from tests.servers.kafka import shared_server

SLICE = 600
WORKERS = 3
WORK_SECONDS = 1.0
"""Seconds of a job. Sixty run at a time, so all take ten seconds: time for each kill, even if the machine stalls."""
QUICK = "session_timeout_ms=2000&heartbeat_interval_ms=300"
NOON = datetime(2013, 1, 1, 12, tzinfo=UTC)
EXPECTED = {"on time": Fate.ON_TIME, "late": Fate.LATE, "cancelled": Fate.CANCELLED, "unreadable": Fate.UNREADABLE}


@pytest.mark.deep
@pytest.mark.xdist_group("flights")
def test_the_accounts_balance_after_kills() -> None:
    console = Console(file=io.StringIO(), width=160)
    url = f"{shared_server().url}?{QUICK}"
    outcome = app.run(url, SLICE, WORKERS, Board(console), work_seconds=WORK_SECONDS)
    assert outcome.failures == []
    assert set(outcome.accounts.expected.values()) == set(Fate), "a fate was not put to the test"
    assert outcome.republished > 0
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert shown.count("was killed with SIGKILL") == 2
    assert "The accounts hold" in shown


async def test_a_record_read_again_is_not_a_second_result() -> None:
    """As after the end of the reader's session, which happens on a machine that freezes for two seconds."""
    accounts = Accounts(EXPECTED)
    async with broker.connect("inmem:") as bus:
        for topic in (DONE, DEAD):
            await bus.admin.ensure_topic(topic)
        await bus.topic(DONE).publish(broker.OutboundMessage(DONE_JSON.encode(Done("on time", "worker 1", 1))))
        async with bus.records([DONE], group=broker.ephemeral(), start="earliest") as log:
            (record,) = await log.next_batch(1, timeout=5.0)
        auditor = Auditor(accounts)
        auditor.take(record)
        auditor.take(record)
    assert accounts.done_twice(Deaths()).count == 0
    assert accounts.settled == 1


def all_is_well() -> Accounts:
    accounts = Accounts(EXPECTED)
    accounts.take_done(Done("on time", "worker 1", 1))
    accounts.take_done(Done("late", "worker 2", 2))
    accounts.take_letter(Letter("cancelled", "failed 3 times", TRIES, NOON))
    accounts.take_letter(Letter("unreadable", "cannot be decoded: no JSON", 1, NOON))
    return accounts


def do_again(accounts: Accounts) -> None:
    accounts.take_done(Done("on time", "worker 2", 2))


def write_again(accounts: Accounts) -> None:
    accounts.take_letter(Letter("cancelled", "failed 3 times", TRIES, NOON + timedelta(seconds=4)))


def give_up(accounts: Accounts) -> None:
    accounts.take_letter(Letter("late", "failed 3 times", TRIES, NOON))


def do_what_is_dead(accounts: Accounts) -> None:
    accounts.take_done(Done("unreadable", "worker 1", 1))


def do_what_is_nobodys(accounts: Accounts) -> None:
    accounts.take_done(Done("another", "worker 1", 1))


@pytest.mark.parametrize(
    ("tamper", "reported"),
    [
        (do_again, "what is there twice is explained by a death or a lost lease: 1 are, such as on time"),
        (write_again, "what is there twice is explained by a death or a lost lease: 1 are, such as cancelled"),
        (give_up, "no job is both done and dead: 1 are, such as late"),
        (do_what_is_dead, "no job is both done and dead: 1 are, such as unreadable"),
        (do_what_is_nobodys, "1 results are of no job"),
    ],
)
def test_failed_checks_are_reported(tamper: Callable[[Accounts], None], reported: str) -> None:
    accounts = all_is_well()
    assert accounts.failures(Deaths()) == []
    tamper(accounts)
    assert reported in accounts.failures(Deaths())


def test_lost_jobs_are_reported() -> None:
    accounts = Accounts(EXPECTED)
    accounts.take_done(Done("on time", "worker 1", 1))
    assert not accounts.is_complete
    assert "no job is lost: 3 are, such as cancelled" in accounts.failures(Deaths())


def test_lost_attempt_counts_are_reported() -> None:
    accounts = Accounts({"late": Fate.LATE})
    accounts.take_done(Done("late", "worker 1", 1))
    [failure] = accounts.failures(Deaths())
    assert failure.startswith("what was delayed or failed was delivered as often as it had to be")


def test_an_extra_result_needs_a_cause() -> None:
    accounts = all_is_well()
    do_again(accounts)
    write_again(accounts)
    killed = Deaths({"worker 1": NOON + timedelta(seconds=1)})
    assert accounts.failures(killed) == []
    assert (accounts.done_twice(killed).killed, accounts.dead_twice(killed).killed) == (1, 1)
    # It was slow, and wrote its result after the worker that took over its job.
    lost = Deaths(lost={"worker 2": {"on time"}, "worker 3": {"cancelled"}})
    assert accounts.failures(lost) == []
    assert (accounts.done_twice(lost).lost, accounts.dead_twice(lost).lost) == (1, 1)
    # Another worker was killed, which is not a cause here.
    other = Deaths({"worker 3": NOON + timedelta(seconds=9)})
    assert accounts.done_twice(other).unexplained == ["on time"]
    assert accounts.dead_twice(other).unexplained == ["cancelled"]


def test_undecodable_jobs_match_those_that_the_codec_refuses() -> None:
    flight = Flight(1, "UA", "UA1545", "N14228", 1, "2013-01-01T05:15:00Z", 5, "EWR", "IAH", 2, 11)
    kinds = Counter(each.kind for each in unreadable([flight] * 48))
    assert {"truncated", "missing field", "no value"} <= set(kinds)
    assert "no time" not in kinds, "a flight's time is text to the codec"


def test_a_failed_check_sets_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accounts = all_is_well()
    do_again(accounts)
    held = {"worker 3": 7, "worker 4": 9}

    async def run_demo(*_: object) -> Outcome:
        return Outcome(accounts, 4, Deaths(), held, Counter(), 17, Snapshot(), 1.0)

    def nothing(_: int | None) -> list[Flight]:
        return []

    monkeypatch.setattr(app, "run_demo", run_demo)
    monkeypatch.setattr(app, "read_flights", nothing)
    assert app.main(["--url", "kafka://127.0.0.1:9"]) == 1
    assert "Does not hold: what is there twice" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(("url", "reported"), [("", "the URL is missing"), ("inmem:", "inmem:")])
def test_only_kafka_has_this_queue(
    url: str, reported: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BROKER_URL", raising=False)
    assert app.main(["--url", url]) == 1
    shown = capsys.readouterr().out.replace("\n", " ")
    assert reported in shown
    assert "make demo-queue" in shown


def test_settings_of_the_url_are_kept() -> None:
    url = app.queue_url("kafka://localhost:9092?lease_seconds=5&queue=offsets")
    assert "lease_seconds=5" in url
    assert "queue=markers" in url
    assert "session_timeout_ms=6000" in url
