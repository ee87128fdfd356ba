"""Adds the last log lines of a test's servers, and their disk usage, to the report of its failure.

A hook for the process that runs the test. The servers are those that its fixtures are, or have as `server` or
`brokers`. One that is closed by then said nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, cast

import pytest

from tests.servers.server_process import ServerProcess

__all__ = ["excerpt", "pytest_runtest_makereport"]

_LINES: Final = 60
_LONGEST: Final = 300
_FRAME: Final = "\tat "


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of each log to the report of a failure."""
    report = yield
    if report.failed:
        fixtures = cast("dict[str, Any]", getattr(item, "funcargs", {}))
        for server in dict.fromkeys(_servers(fixtures.values())):
            if said := excerpt(server.log):
                disk = shutil.disk_usage(server.directory)
                free = f"{disk.free // 2**20:,} MB of {disk.total // 2**20:,} MB of its disk are free"
                report.sections.append(
                    (f"The end of what {server.kind} {server.directory.name} said", f"{said}\n{free}")
                )
    return report


def excerpt(log: str) -> str:
    """The last lines; of Java's traces only what was raised, and of a long line its beginning."""
    lines = [line for line in log.splitlines() if not line.startswith(_FRAME)]
    return "\n".join(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..." for line in lines[-_LINES:])


def _servers(found: Iterable[Any]) -> Iterator[ServerProcess]:
    for each in found:
        brokers = _part(each, "brokers")
        among = cast("list[object]", brokers) if isinstance(brokers, list) else []
        for server in (each, _part(each, "server"), *among):
            if isinstance(server, ServerProcess):
                yield server


def _part(found: object, name: str) -> object:
    # A property of a closed fixture may raise anything.
    with suppress(Exception):
        return getattr(found, name)
    return None
