"""Every benchmark runs on few messages and reports its figures. Speed is not tested here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.measure import Sample, Series, Spread, Variant, in_pairs
from benchmarks.report import Finding, Section, update, write
from benchmarks.sections import BENCHMARKS

pytestmark = pytest.mark.deep

EXPECTED = {
    "facade": ("receive(handler), null", "async for, async with, memory", "batches, batch.ack(), jetstream", "enqueue"),
    "backends": ("receive(handler) on top of the SPI, pubsub", "an idle consumer, servicebus", "| pulsar |", "p99"),
    "jetstream": ("fetch + ack", "bare raw pulls", "gathered js.publish", "js.publish_async", "publish_batch"),
    "faststream": ("messages per second, ours / FastStream",),
    "kafka": (
        "publish_batch without receipts / raw produce",
        "enqueue",
        "attributes and times too",
        "columns",
        "in transactions of",
    ),
    "kafka-handling": (
        "on top of the SPI",
        "16 at once, by key: time / the handlers alone",
        "FastStream on confluent",
        "aiokafka, send",
    ),
    "kafka-groups": ("start to first record", "KIP-848: a joining member's first record", "pause that moves"),
    "kafka-markers": ("markers read", "memory of an open lease"),
    "kafka-queue": ("bare protocol loop, by 500", "queue=share / plain", "lateness, p99", "due at once"),
    "kafka-queue-published": ("of the key; 10,000 keys", "p95 of processing", "queue=markers"),
    "pubsub": ("raw protobuf, Pull + Acknowledge", "SubscriberClient.subscribe", "publish_batch / raw protobuf"),
    "pulsar": ("receive + batch_receive + acknowledge", "publish_batch / pulsar-client", "enqueue / pulsar-client"),
    "servicebus": ("on a test double", "complete_message in turn", "publish_batch / azure-servicebus"),
    "state": (
        "follow / log.read, kafka",
        "a follower that waits, jetstream",
        "commit_positions / commit, jetstream",
        "table_writer / the transaction by hand, kafka",
        "in batches of the default size / raw",
    ),
    "steadiness": ("idle consumer", "memory grown", "never returns", "ignores its cancellation"),
}

_QUICK = ("facade", "jetstream", "faststream", "kafka-markers", "steadiness")
"""Without a JVM."""


@pytest.mark.parametrize(
    "name",
    [name if name in _QUICK else pytest.param(name, marks=pytest.mark.deep) for name in BENCHMARKS],
)
def test_it_runs_and_writes_its_page(name: str, tmp_path: Path) -> None:
    assert main([name, "--quick", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "performance.md").read_text()
    for what in EXPECTED[name]:
        assert what in page
    plotted = tmp_path / "performance.png"
    drawn = name in ("facade", "backends", "jetstream", "kafka", "pubsub", "pulsar", "servicebus")
    assert plotted.exists() == (plotted.name in page) == drawn
    assert not plotted.exists() or plotted.read_bytes().startswith(b"\x89PNG")


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["speed-of-light"])
    assert "there is no benchmark 'speed-of-light'" in capsys.readouterr().err


def test_ratios_and_differences_are_taken_within_a_round() -> None:
    ours = Series([Sample(8, 1.0, 2.0), Sample(8, 2.0, 4.0), Sample(8, 4.0, 6.0)])
    theirs = Series([Sample(8, 2.0, 1.0), Sample(8, 4.0, 2.0), Sample(8, 8.0, 3.0)])
    assert ours.times_rate_of(theirs) == Spread(2.0, 2.0, 2.0)
    assert ours.cost_above(theirs) == Spread(250_000.0, 125_000.0, 375_000.0)


async def test_a_pair_runs_adjacently_in_an_order_that_alternates() -> None:
    ran: list[str] = []

    def variant(name: str) -> Variant:
        @asynccontextmanager
        async def prepared() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
            async def run() -> None:
                ran.append(name)

            yield run

        return prepared

    others = {"one": variant("one"), "two": variant("two")}
    pairs = await in_pairs(variant("base"), others, count=10, rounds=2)
    assert ran == ["base", "one", "base", "two", "one", "base", "two", "base"]
    assert {name: [len(series.samples) for series in pair] for name, pair in pairs.items()} == {
        "one": [2, 2],
        "two": [2, 2],
    }


def test_a_missed_bar_is_reported(tmp_path: Path) -> None:
    spread = Spread(2.0, 1.0, 3.0)
    section = Section("A section", "Its text.")
    section.findings += [
        Finding("quick enough", spread, "x", at_least=2.0),
        Finding("too slow", spread, "x", at_least=2.1),
        Finding("cheap enough", spread, "µs", at_most=2.0),
        Finding("too dear", spread, "µs", at_most=1.9),
        Finding("for comparison", spread, "s"),
    ]
    write([section], tmp_path / "page.md", tmp_path / "plot.png", rounds=3, seconds=60, load=0.5)
    rows = [line for line in (tmp_path / "page.md").read_text().splitlines() if "1 … 3" in line]
    assert rows == [
        "| quick enough | ≥ 2 x | 2 x | 1 … 3 | met |",
        "| too slow | ≥ 2.1 x | 2 x | 1 … 3 | MISSED |",
        "| cheap enough | ≤ 2 µs | 2 µs | 1 … 3 | met |",
        "| too dear | ≤ 1.9 µs | 2 µs | 1 … 3 | MISSED |",
        "| for comparison | — | 2 s | 1 … 3 | — |",
    ]


def test_prose_is_wrapped_and_tables_are_not(tmp_path: Path) -> None:
    text = " ".join(f"`a-long-name-{number}`" for number in range(60))
    section = Section("A section", text, findings=[Finding("a long row " * 20, Spread(1.0, 1.0, 1.0), "x")])
    write([section], tmp_path / "page.md", None, rounds=3, seconds=60, load=0.5)
    page = (tmp_path / "page.md").read_text()
    lines = page.splitlines()
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))
    assert text in page.replace("\n", " ")
    assert len([line for line in lines if "a long row" in line]) == 1


def test_a_section_is_replaced_or_added(tmp_path: Path) -> None:
    one = Spread(1.0, 1.0, 1.0)
    written = [Section(title, f"About {title}.", findings=[Finding(f"{title} x", one, "x")]) for title in ("A", "B")]
    page = tmp_path / "page.md"
    write(written, page, None, rounds=3, seconds=60, load=0.5)
    head = page.read_text().partition("## A")[0]
    update([Section("A", "Again.", findings=[Finding("more", one, "s")]), Section("C", "New.")], page, rounds=2, load=7)
    text = page.read_text()
    assert text.startswith(head)
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## A", "## B", "## C"]
    assert "A x" not in text
    assert "| more | — | 1 s | 1 … 1 | — |" in text
    assert "| B x | — | 1 x | 1 … 1 | — |" in text
    assert text.count("2 rounds; load average before it began: 7.0.") == 2
    assert text.endswith(".\n")
    assert "\n\n\n" not in text
