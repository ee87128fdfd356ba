"""Runs conformance tests without pytest, for single promises and for the tests of the kit itself.

Runs the tests one after the other on the caller's event loop, each with its own harness. Cancelling stops the harness
of the running test. An error of a test is its outcome; an error of a harness is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import pytest

from broker.testing.conformance import Conformance
from broker.testing.harness import Harness
from broker.testing.promises import missing_capability, promises_of

__all__ = ["Outcome", "check"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the test of a promise.

    :ivar detail: the first line of the failure, or the missing capability.
    """

    status: Literal["kept", "broken", "needs"]
    detail: str = ""


async def check(make_harness: Callable[[], Harness], promises: Iterable[str]) -> dict[str, Outcome]:
    """Test promises by name.

    :param make_harness: creates a harness for each test.
    :raises KeyError: a promise does not exist.
    """
    tests = {promise.name: name for name, promise in promises_of(Conformance)}
    return {promise: await _check_one(make_harness(), tests[promise]) for promise in promises}


async def _check_one(harness: Harness, name: str) -> Outcome:
    case = Conformance()
    test = getattr(case, name)
    try:
        await harness.start()
        missing = missing_capability(test, (await harness.bus()).capabilities, harness)
        if missing is not None:
            return Outcome("needs", missing)
        await test(harness)
    except (Exception, pytest.fail.Exception) as error:
        text = str(error) or repr(error)
        return Outcome("broken", f"{type(error).__name__}: {text}".splitlines()[0])
    finally:
        await harness.stop()
    return Outcome("kept")
