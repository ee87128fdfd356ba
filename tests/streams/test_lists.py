"""README.md has all numbers of both lists, and the tests that it names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.streams import (
    test_complaints,
    test_context,
    test_emitter,
    test_processor,
    test_tables,
    test_topics,
    test_view,
    test_visits,
)
from tests.streams.brokers import ALL

HERE = Path(__file__).parent
TESTS = HERE.parent
MODULES = (
    *(test_complaints, test_context, test_emitter, test_processor),
    *(test_tables, test_topics, test_view, test_visits),
)
GOKA = {
    "G": 5,
    "X": 14,
    "P": 15,
    "V": 7,
    "T": 8,
    "W": 5,
    "O": 1,
    "E": 3,
    "M": 1,
    "B": 1,
    "Q": 1,
    "S": 1,
    "H": 1,
    "A": 1,
}
COMPLAINTS = 25
NUMBERS = re.compile(r"test_((?:[a-z]\d+_)+)")


def rows(title: str) -> dict[str, tuple[set[str], str]]:
    """By number the tests of a table of the page, and the reason."""
    text = (HERE / "README.md").read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found: dict[str, tuple[set[str], str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] != "number":
            assert cells[0] not in found, f"{cells[0]} is there twice"
            found[cells[0]] = set(re.findall(r"`(test_\w+)`", cells[-2])), cells[-1]
    return found


def defined_in(directory: Path) -> Iterator[str]:
    for path in directory.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                yield node.name


def numbers_of(test: str) -> set[str]:
    """The numbers in the name of a test."""
    match = NUMBERS.match(test)
    return set() if match is None else {part.upper() for part in match[1].split("_") if part}


def test_every_number_of_goka_has_tests_by_its_number_or_a_reason() -> None:
    found = rows("goka")
    assert list(found) == [f"{letter}{n}" for letter, count in GOKA.items() for n in range(1, count + 1)]
    for number, (tests, reason) in found.items():
        assert tests or reason, f"{number} has neither a test nor a reason"
        assert all(number in numbers_of(test) for test in tests), f"a test of {number} is not named so"


def test_every_complaint_has_a_test_or_a_reason() -> None:
    found = rows("Complaints")
    assert list(found) == [str(n) for n in range(1, COMPLAINTS + 1)]
    for number, (tests, reason) in found.items():
        assert tests or reason, f"complaint {number} has neither a test nor a reason"


def test_the_tests_of_the_lists_exist_and_those_with_a_number_are_in_them() -> None:
    listed = {test for title in ("goka", "Complaints") for tests, _ in rows(title).values() for test in tests}
    assert listed - set(defined_in(TESTS)) == set()
    known = rows("goka").keys()
    for directory in (HERE, TESTS / "unit" / "broker_streams"):
        numbered = {test for test in defined_in(directory) if numbers_of(test) & {*known, "C1"}}
        assert numbered - listed == set()


def brokers_of(function: Any) -> set[str]:
    """Where a test of this directory runs."""
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    named: list[Any] = [mark.args[1] for mark in marks if mark.args[0] == "server"]
    parameters = named[0] if named else [pytest.param(name) for name in ALL]
    return {str(parameter.values[0]).removesuffix("-cut") for parameter in parameters}


def test_promises_that_need_a_broker_run_on_all_of_them() -> None:
    here: Mapping[str, Any] = {name: value for module in MODULES for name, value in vars(module).items()}
    for number, (tests, reason) in rows("goka").items():
        brokers = {broker for test in tests if test in here for broker in brokers_of(here[test])}
        assert brokers >= set(ALL) or reason, f"{number} runs on {sorted(brokers)} only, and there is no reason"
