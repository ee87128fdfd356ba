"""The matrix: what a run of the kit writes, and whether the committed page is current."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, cast

import pytest

from broker.hooks import Hooks
from broker.registry import create_backend
from broker.testing import Harness
from broker.testing.case import ConformanceCase
from broker.testing.conformance import AREAS, Conformance
from broker.testing.matrix import FAILED, OK, Matrix, areas
from broker.testing.origins import ORIGINS
from broker.testing.promises import missing_capability, promises_of
from tests.broken_variants.variants import VARIANTS
from tests.conformance import test_kafka_markers, test_kafka_share
from tests.conformance.kafka_harness import KafkaHarness

PAGE = Path(__file__).parents[4] / "docs" / "conformance.md"
COLUMNS: Final[Mapping[str, str]] = {
    "inmem": "inmem:",
    "jetstream": "nats://localhost",
    "kafka": "kafka://localhost",
    "kafka[markers]": "kafka://localhost?queue=markers",
    "kafka[share]": "kafka://localhost?queue=share",
    "pubsub": "pubsub://project?emulator_host=localhost:1",
    "pulsar": "pulsar://localhost",
    "servicebus": "servicebus://policy:key@namespace",
}
ENGINES: Final[Mapping[str, type]] = {
    "kafka[markers]": test_kafka_markers.TestKafkaMarkers,
    "kafka[share]": test_kafka_share.TestKafkaShare,
}

pytest_plugins = ["pytester"]

KIT_MODULE = """
import pytest
from broker.testing import promise, requires
from broker.testing.areas.outcomes import Outcomes
from tests.conformance.inmem_harness import InmemHarness

class Harness(InmemHarness):
    name = "{backend}"

class TestIt(Outcomes):
    harness_class = Harness
"""


class Able(Harness):
    """A harness that supports every operation."""

    def url(self, *, short_lease: bool = False) -> str:
        return ""

    def can(self, operation: str) -> bool:
        return True


def test_test_names_and_promises_are_unique() -> None:
    names = [name for area in AREAS for name, _ in promises_of(area)]
    assert sorted(names) == sorted(name for name, _ in promises_of(Conformance)), "Two areas name a test alike"
    assert len({promise.name for _, promise in promises_of(Conformance)}) == len(names)


def test_every_test_of_the_kit_has_a_promise() -> None:
    without = [
        name
        for name in dir(Conformance)
        if name.startswith("test_") and not hasattr(getattr(Conformance, name), "__promise__")
    ]
    assert without == []


def test_promises_are_sentences() -> None:
    for _, promise in promises_of(Conformance):
        assert re.fullmatch(r"[a-z-]+\.[a-z0-9-]+", promise.name)
        assert promise.text.endswith("."), promise.name


def test_origins_name_promises_that_exist() -> None:
    known = {promise.name for _, promise in promises_of(Conformance)}
    named = {name for tests in ORIGINS.values() for names in tests.values() for name in names}
    assert named - known == set()


def test_page_is_current_and_has_no_empty_cell() -> None:
    rows = dict(_rows(PAGE.read_text(encoding="utf-8")))
    wanted = {promise.name: promise.text.replace("|", "\\|") for _, promises in areas() for promise in promises}
    assert {name: cells[0] for name, cells in rows.items() if name in wanted} == wanted, "Run `make conformance`"
    for name in wanted:
        assert len(rows[name]) == 1 + len(COLUMNS), f"{name} has {len(rows[name]) - 1} backends"
        for column, cell in zip(COLUMNS, rows[name][1:], strict=True):
            known = (
                cell == OK or cell.startswith("n/a: needs capability ") or (column in ENGINES and cell == "as kafka")
            )
            assert known, f"{name} on {column}: {cell!r}"
    assert f"| promise | in words | {' | '.join(COLUMNS)} |" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("column", COLUMNS)
def test_page_matches_current_capabilities(column: str) -> None:
    rows = dict(_rows(PAGE.read_text(encoding="utf-8")))
    capabilities = create_backend(COLUMNS[column], Hooks()).capabilities
    for test, promise in promises_of(ENGINES.get(column, Conformance)):
        cell = rows[promise.name][1 + list(COLUMNS).index(column)]
        missing = missing_capability(getattr(Conformance, test), capabilities, Able())
        if missing is not None:
            assert cell in (f"n/a: needs capability {missing}", "as kafka") or "capability harness." in cell, promise
        else:
            assert cell in (OK, "as kafka") or "capability harness." in cell, promise


@pytest.mark.parametrize("column", ENGINES)
def test_page_marks_promises_that_run_on_the_main_configuration_only(column: str) -> None:
    case = ENGINES[column]
    assert issubclass(case, ConformanceCase)
    left_out = cast("type[KafkaHarness]", case.harness_class).left_out
    reported = dict(_rows(PAGE.read_text(encoding="utf-8")))
    runs = {promise.name for _, promise in promises_of(case)} - left_out
    place = 1 + list(COLUMNS).index(column)
    assert {p.name for _, p in promises_of(Conformance) if reported[p.name][place] != "as kafka"} == runs


def test_page_lists_every_broken_variant() -> None:
    text = PAGE.read_text(encoding="utf-8")
    listed = re.findall(
        r"^\| ([a-z-]+) \| (.+) \| `([a-z.-]+)` \|$", text.partition("## What the kit catches")[2], re.MULTILINE
    )
    assert sorted(listed) == sorted((variant.name, variant.broken, variant.promise) for variant in VARIANTS)


@pytest.mark.parametrize("xdist", [(), ("-p", "xdist", "-n", "1")], ids=["without", "with"])
def test_results_are_collected_with_and_without_xdist(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, xdist: tuple[str, ...]
) -> None:
    # Loading plugins would take each process longer than the test.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]")
    pytester.makepyfile(test_one=KIT_MODULE.format(backend="one"))
    pytester.makepyfile(test_two=KIT_MODULE.format(backend="two"))
    plugins = ("-p", "pytest_asyncio.plugin", "-p", "broker.testing.matrix", *xdist)
    ended = pytester.runpytest_subprocess(*plugins, "--conformance-write=page.md", "-k", "idle_returns_none")
    ended.assert_outcomes(passed=2)
    ended.stdout.fnmatch_lines(["*page.md was not written: * did not run*", "*two: 1 ok*"][:1])
    assert not (pytester.path / "page.md").exists(), "A page with empty cells was written"


def test_render_is_deterministic() -> None:
    first, second = _full(), _full(reverse=True)
    assert first.render() == second.render()
    assert first.missing() == []
    assert "| `publishing.id-is-kept` | Consumers see the id that the publisher set. | ok | ok |" in first.render()
    assert "| loses-it | It is lost. | `messages.arrive-unchanged` |" in first.render()


def test_missing_cells_are_named() -> None:
    matrix = _full()
    del matrix.cells[("publishing.id-is-kept", "two")]
    assert matrix.missing() == ["publishing.id-is-kept on two"]


def test_another_configuration_need_not_run_all() -> None:
    matrix = _full()
    matrix.cells[("publishing.id-is-kept", "one[other]")] = OK
    assert matrix.missing() == []
    text = matrix.render()
    assert "- `as kafka`: `kafka[…]` is another" in text
    assert "| `publishing.id-is-kept` | Consumers see the id that the publisher set. | ok | ok | ok |" in text
    assert (
        "| `messages.batch-nack` | `batch.nack()` redelivers every message of the batch. | ok | as one | ok |" in text
    )
    del matrix.cells[("messages.batch-nack", "one")]
    assert matrix.missing() == ["messages.batch-nack on one", "messages.batch-nack on one[other]"]


def test_a_skip_without_a_capability_is_no_result() -> None:
    matrix = Matrix()
    matrix.pytest_runtest_logreport(_report("skipped", ("test.py", 1, "Skipped: no server")))
    assert matrix.cells == {}
    matrix.pytest_runtest_logreport(_report("skipped", ("test.py", 1, "Skipped: needs capability records")))
    assert matrix.cells == {("publishing.id-is-kept", "one"): "n/a: needs capability records"}


def test_one_failure_outweighs_a_success() -> None:
    matrix = Matrix()
    outcomes: list[Literal["passed", "failed"]] = ["passed", "failed", "passed"]
    for outcome in outcomes:
        matrix.pytest_runtest_logreport(_report(outcome))
    assert matrix.cells == {("publishing.id-is-kept", "one"): FAILED}


def _full(*, reverse: bool = False) -> Matrix:
    matrix = Matrix(variants={"loses-it": ("It is lost.", "messages.arrive-unchanged")})
    names = [promise.name for _, promises in areas() for promise in promises]
    for name in reversed(names) if reverse else names:
        for backend in ("two", "one") if reverse else ("one", "two"):
            matrix.cells[(name, backend)] = OK
    return matrix


def _report(
    outcome: Literal["passed", "failed", "skipped"], reported: tuple[str, int, str] | None = None
) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid="test",
        location=("", 0, ""),
        keywords={},
        outcome=outcome,
        longrepr=reported,
        when="call",
        user_properties=[("conformance", ("one", "publishing.id-is-kept"))],
    )


def _rows(text: str) -> Iterator[tuple[str, list[str]]]:
    for line in text.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            yield cells[0].strip("`"), cells[1:]
