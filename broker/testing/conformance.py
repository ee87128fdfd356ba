"""`Conformance`, the class of all conformance tests, the classes of the areas, and `check`, which runs single promises.

`check` needs no pytest run. It runs the tests one after the other on the caller's event loop, each with its own
harness. Cancelling stops the harness of the running test. An error of a test is its outcome; an error of a harness is
raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import pytest

from broker.testing.areas.admin import Administration
from broker.testing.areas.as_messages import AsMessages
from broker.testing.areas.assigning import Assigning
from broker.testing.areas.blocking import Blocking
from broker.testing.areas.cancelling import Cancelling
from broker.testing.areas.closing import Closing
from broker.testing.areas.commits import Commits
from broker.testing.areas.compaction import Compaction
from broker.testing.areas.copartitions import Copartitions
from broker.testing.areas.dead_letters import DeadLetters
from broker.testing.areas.delivery import Delivery
from broker.testing.areas.errors import Errors
from broker.testing.areas.fidelity import Codecs, Fidelity
from broker.testing.areas.flow import Flow
from broker.testing.areas.groups import Groups
from broker.testing.areas.leaks import Leaks
from broker.testing.areas.leases import Leases
from broker.testing.areas.limits import Limits
from broker.testing.areas.log_follower import LogFollowing
from broker.testing.areas.log_reader import LogReading
from broker.testing.areas.observing import Observing
from broker.testing.areas.order import Order
from broker.testing.areas.outcomes import Outcomes
from broker.testing.areas.publishing import Publishing
from broker.testing.areas.reconnect import Reconnecting
from broker.testing.areas.records import Records
from broker.testing.areas.retry import Retrying
from broker.testing.areas.retry_topics import RetryingOnTopics
from broker.testing.areas.settling import Settling
from broker.testing.areas.shapes import Shapes
from broker.testing.areas.tables import Tables
from broker.testing.areas.transactions import Transactions
from broker.testing.harness import Harness
from broker.testing.promises import missing_capability, promises_of

__all__ = [
    "AREAS",
    "Administration",
    "AsMessages",
    "Assigning",
    "Blocking",
    "Cancelling",
    "Closing",
    "Codecs",
    "Commits",
    "Compaction",
    "Conformance",
    "Copartitions",
    "DeadLetters",
    "Delivery",
    "Errors",
    "Fidelity",
    "Flow",
    "Groups",
    "Leaks",
    "Leases",
    "Limits",
    "LogFollowing",
    "LogReading",
    "Observing",
    "Order",
    "Outcome",
    "Outcomes",
    "Publishing",
    "Reconnecting",
    "Records",
    "Retrying",
    "RetryingOnTopics",
    "Settling",
    "Shapes",
    "Tables",
    "Transactions",
    "check",
]


class Conformance(
    Publishing,
    Delivery,
    Settling,
    Shapes,
    Outcomes,
    Flow,
    Leases,
    Retrying,
    DeadLetters,
    Order,
    Closing,
    Leaks,
    Cancelling,
    Fidelity,
    Limits,
    Codecs,
    Records,
    Commits,
    Groups,
    Assigning,
    Copartitions,
    LogReading,
    LogFollowing,
    Compaction,
    Tables,
    Transactions,
    AsMessages,
    RetryingOnTopics,
    Administration,
    Reconnecting,
    Errors,
    Observing,
    Blocking,
):
    """All conformance tests; the test module of a backend subclasses this class."""


AREAS = Conformance.__bases__
"""The classes of the areas, in the order of the matrix."""


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
