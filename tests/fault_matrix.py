"""The rows after each fault: counted by the tests, and printed as one table at the end of the run.

A test records its case before it asserts, so that the table also shows failures. Rows are part of the report of
the test, from any worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

import pytest

__all__ = ["Books", "pytest_terminal_summary"]

_PROPERTY: Final = "fault"
_COLUMNS: Final = ("case", "backend", "sent", "rows", "missing", "twice", "verdict")


class Books:
    """The records of one test."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    def balance(
        self,
        case: str,
        backend: str,
        sent: Sequence[bytes],
        found: Sequence[bytes],
        *,
        ids: Sequence[str] | None = None,
        lost: int = 0,
        twice: int = 0,
        why: str = "",
    ) -> None:
        """Record a case and check it.

        :param found: the rows that came out, in any order.
        :param ids: of each of them; a row that came twice has to have one id.
        :param lost: rows that have to be missing, no more and no fewer.
        :param twice: rows that may be there once more, at most.
        :param why: they may.
        :raises AssertionError: it cost more, or rows came out that were never sent.
        """
        due, there = Counter(sent), Counter(found)
        missing = (due - there).total()
        again = sum(number - due[row] for row, number in there.items() if due[row] and number > due[row])
        strange = [row for row in there if row not in due]
        named = ids is None or len(set(ids)) == len(set(zip(ids, found, strict=True))) == len(there)
        holds = missing == lost and again <= twice and not strange and named
        verdict = f"{'as promised' if holds else 'BROKEN'}{f': {why}' if why else ''}"
        self._book(
            case, backend, len(sent), len(found), missing, f"{again} of {twice}" if twice else str(again), verdict
        )
        assert not strange, f"rows that were never sent: {_some(strange)}"
        assert missing == lost, f"{missing} rows are missing: {_some((due - there).elements())}"
        assert again <= twice, f"{again} rows came twice, and {twice} may"
        assert named, "rows that are the same have different ids, or rows that are not have one"

    def refused(self, case: str, backend: str, how: str) -> None:
        """Record a case that raises before any row moves."""
        self._book(case, backend, "-", "-", "-", "-", f"refused: {how}")

    def _book(self, *values: Any) -> None:
        self._item.user_properties.append((_PROPERTY, dict(zip(_COLUMNS, map(str, values), strict=True))))


def _some(rows: Iterable[bytes]) -> list[bytes]:
    return [row[:40] for row in islice(rows, 5)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table, unless it is empty."""
    rows: list[dict[str, Any]] = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == _PROPERTY
    ]
    if not rows:
        return
    rows.sort(key=lambda row: (row["case"], row["backend"]))
    table = [_COLUMNS, *(tuple(row[name] for name in _COLUMNS) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    terminalreporter.section("faults of Spark, counted")
    for line in table:
        terminalreporter.write_line(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        )
