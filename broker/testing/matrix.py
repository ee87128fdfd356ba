"""The pages of the kit: the matrix of promises and backends, and the list of all promises.

    pytest -p broker.testing.matrix --conformance-write=docs/conformance.md tests/conformance
    python -m broker.testing.matrix docs/guarantees.md

A pytest plugin writes the matrix. Results are user properties of the reports, so that the plugin works with xdist; only
the controlling process writes the file. A matrix with an empty cell is not written, and fails the run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import getsourcefile
from pathlib import Path
from typing import Any, cast

import pytest

from broker.testing.promises import Promise

__all__ = ["Matrix", "areas", "guarantees", "pytest_addoption", "pytest_configure"]

OK = "ok"
FAILED = "FAILED"
_HEAD = """\
# Conformance

Every promise of `anybroker` is a test of the conformance kit (`broker.testing`), which every backend runs.
`make conformance` writes this page; do not edit it.

- `ok`: the test passed on this backend.
- `n/a: needs capability X`: the backend, or its test harness, lacks the capability X.
"""
_GUARANTEES = """\
# Guarantees

The promises of `anybroker`, and the test of each. A promise holds on every backend that has the capability: see
[the matrix](conformance.md). `make conformance` writes this page; do not edit it.

In short:

- **At least once.** A message with a receipt is delivered until it is settled. It is redelivered after a failure, a
  lost lease, a crash, or an ack whose answer was lost. So make handlers idempotent, or check `message.id`.
- **Nothing is dropped silently.** Not by an error, a cancellation, a close, a `break`, a payload that cannot be
  decoded, or a dead-letter topic that cannot be written. Only `DROP` and `ttl` drop messages.
- **Order.** Records are in order within a partition. With `ordered_by_key=True` messages of a key are in order within a
  process, and across processes if the broker has `key_affinity`.
- **Bounds.** Never more unsettled messages than `max_outstanding`. A close waits for handlers until its deadline, and
  then at most a second or two for a broker that does not answer.
- **Exactly once.** Only in transactions, and for messages with the same id within the broker's deduplication window.
"""
_CONFIGURED = """\
- `as kafka`: `kafka[…]` is another configuration of that backend; the test runs on `kafka` only.
- A column shows one configuration. Other settings may promise less, for instance `marker_format=v1` of Kafka's markers,
  which promises no order. See the pages of the backends.
"""


@dataclass
class Matrix:
    """The results of a run.

    :ivar cells: results by promise and backend.
    :ivar variants: for each broken variant by name: its description, and the promise whose test caught it.
    """

    path: Path | None = None
    cells: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    variants: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "conformance":
                backend, promise = cast("tuple[str, str]", value)
                cell = _cell(report)
                if cell is not None and self.cells.get((promise, backend)) != FAILED:
                    self.cells[(promise, backend)] = cell
            elif name == "broken_variant" and report.when == "call" and report.passed:
                variant, description, promise = cast("tuple[str, str, str]", value)
                self.variants[variant] = (description, promise)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.path is None or not self.cells:
            return
        missing = self.missing()
        if missing or FAILED in self.cells.values() or session.exitstatus:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
            return
        self.path.write_text(self.render(), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.cells:
            return
        terminalreporter.section("conformance")
        for backend in self.backends():
            counts = Counter(cell.partition(":")[0] for (_, other), cell in self.cells.items() if other == backend)
            summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items(), reverse=True))
            terminalreporter.write_line(f"{backend}: {summary}")
        if self.path is not None:
            missing = self.missing()
            broken = sorted({promise for (promise, _), cell in self.cells.items() if cell == FAILED})
            if missing or broken:
                terminalreporter.write_line(
                    f"{self.path} was not written: {_first(broken, 'failed') or _first(missing, 'did not run')}"
                )
            else:
                terminalreporter.write_line(f"wrote {self.path}")

    def backends(self) -> list[str]:
        """The columns, sorted."""
        return sorted({backend for _, backend in self.cells})

    def missing(self) -> list[str]:
        """Promises without a result on some backend."""
        return [
            f"{promise.name} on {backend}"
            for _, promises in areas()
            for promise in promises
            for backend in self.backends()
            if self._result(promise.name, backend) is None
        ]

    def _result(self, promise: str, column: str) -> str | None:
        """The cell of the page; `as …` for a test that only the main configuration of the backend runs."""
        backend = column.partition("[")[0]
        if (promise, column) in self.cells or (promise, backend) not in self.cells:
            return self.cells.get((promise, column))
        return f"as {backend}"

    def render(self) -> str:
        """The whole page."""
        backends = self.backends()
        lines = [f"{_HEAD}{_CONFIGURED}" if any("[" in backend for backend in backends) else _HEAD]
        for title, promises in areas():
            lines += [f"## {title}", "", _row("promise", "in words", *backends), _row(*["---"] * (2 + len(backends)))]
            for promise in promises:
                cells = [self._result(promise.name, backend) or "" for backend in backends]
                lines.append(_row(f"`{promise.name}`", promise.text, *cells))
            lines.append("")
        lines += _origins()
        if self.variants:
            lines += [
                "## What the kit catches",
                "",
                "Each of these deliberately broken in-memory brokers fails the named promise; see",
                "`tests/broken_variants`.",
                "",
                _row("broken variant", "what is broken", "caught by"),
                _row("---", "---", "---"),
            ]
            lines += [_row(name, text, f"`{caught}`") for name, (text, caught) in sorted(self.variants.items())]
            lines.append("")
        return "\n".join(lines)


def areas() -> list[tuple[str, list[Promise]]]:
    """Title and promises of each area, in the order of `broker.testing.conformance.AREAS`."""
    from broker.testing.conformance import AREAS
    from broker.testing.promises import promises_of

    found: list[tuple[str, list[Promise]]] = []
    for area in AREAS:
        title = _summary(area).rstrip(".")
        found.append((f"{_spaced(area.__name__)}: {title[0].lower()}{title[1:]}", [p for _, p in promises_of(area)]))
    return found


def _origins() -> list[str]:
    from broker.testing.origins import ORIGINS

    lines = ["## Where the promises come from", "", _row("suite", "its test", "here"), _row("---", "---", "---")]
    for suite, tests in ORIGINS.items():
        lines += [_row(suite, test, ", ".join(f"`{name}`" for name in names)) for test, names in tests.items()]
    return [*lines, ""]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--conformance-write`."""
    parser.addoption("--conformance-write", metavar="PATH", help="write the matrix promise × backend to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Collect in the controlling process only."""
    if not hasattr(config, "workerinput"):
        path: str | None = config.getoption("--conformance-write")
        config.pluginmanager.register(Matrix(Path(path) if path else None), "broker-conformance-matrix")


def _cell(report: pytest.TestReport) -> str | None:
    if report.failed:
        return FAILED
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        # Skipped for another reason: no result.
        return f"n/a: {reason}" if reason.startswith("needs capability ") else None
    return OK if report.when == "call" else None


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _summary(area: type) -> str:
    """The first line of the area's docstring."""
    return (area.__doc__ or area.__name__).strip().partition("\n")[0]


def _spaced(name: str) -> str:
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip().capitalize()


def _first(names: list[str], what: str) -> str:
    return f"{len(names)} {what}, first {names[0]}" if names else ""


def guarantees() -> str:
    """The page of guarantees, as Markdown."""
    return "\n".join([_GUARANTEES, *_guarantees()]) + "\n"


def _guarantees() -> Iterator[str]:
    from broker.testing.conformance import AREAS
    from broker.testing.promises import promises_of

    for area in AREAS:
        source = Path(getsourcefile(area) or "").name
        yield f"## {area.__name__}\n"
        yield f"{_summary(area)} (`broker/testing/areas/{source}`)\n"
        yield "| promise | meaning | test |"
        yield "|---|---|---|"
        for test, promise in promises_of(area):
            yield f"| `{promise.name}` | {promise.text} | `{test}` |"
        yield ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(guarantees())
