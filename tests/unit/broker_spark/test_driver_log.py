"""The warnings that are left out of the log of Spark's driver, without Spark."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from broker_spark.runtime.driver_log import WARNINGS, leave_out_warnings

OURS = (
    "The data source broker replaced a statically registered data source.",
    "The data source broker replaced a previously registered data source.",
    "Failed to cancel job group c7978213-4de1-4298-9f83-0bc69f11a08b. Cannot find active jobs for it.",
)
OTHERS = ("Lost task 0.0 in stage 15.0", "Failed to cancel jobs", "Asked to cancel job group c7978213")


class Machine:
    """What the function calls of a JVM: each attribute is one more object, each call is noted."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...]]], properties: dict[str, str], path: str = "") -> None:
        self._calls = calls
        self._properties = properties
        self._path = path

    def __getattr__(self, name: str) -> Machine:
        return Machine(self._calls, self._properties, f"{self._path}.{name}")

    def __call__(self, *arguments: Any) -> Any:
        name = self._path.rpartition(".")[2]
        if name == "getProperty":
            return self._properties.get(arguments[0])
        if name == "setProperty":
            self._properties[arguments[0]] = arguments[1]
        self._calls.append((name, arguments))
        return self


def test_only_these_warnings_match() -> None:
    assert [text for text in (*OURS, *OTHERS) if re.fullmatch(WARNINGS, text)] == list(OURS)


def test_one_filter_is_added_to_a_machine() -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = []
    spark: Any = SimpleNamespace(_jvm=Machine(calls, {}))
    leave_out_warnings(spark)
    leave_out_warnings(spark)
    assert [name for name, _ in calls].count("addFilter") == 1
    assert [arguments[0] for name, arguments in calls if name == "createFilter"] == [WARNINGS]


def test_a_session_of_spark_connect_has_no_machine() -> None:
    asked: list[str] = []

    class Connected:
        """A session without a JVM, where any other look-up is a call to the server."""

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    session: Any = Connected()
    leave_out_warnings(session)
    assert asked == ["_jvm"]
