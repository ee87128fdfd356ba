"""Keeps tests that share a restart of the server in one process, leaves out what a configuration need not run, and has
the tests of what it refuses fail. Tests that disturb a server or a client are `deep` where recovery takes seconds, and
so are tests that wait for several looks for new topics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pytest

from broker.testing.case import ConformanceCase
from broker.testing.promises import Promise

_QUICK_TO_RECOVER = frozenset({"inmem", "jetstream"})
_DISTURBANCES = frozenset(
    f"harness.{operation}" for operation in ("restart", "kill", "pause", "cut", "crash", "isolate", "worker")
)

_WAITS_FOR_LOOKS = frozenset({"messages.pattern-survives-a-deletion", "records.pattern-survives-a-deletion"})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if _is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if isinstance(item, pytest.Function) and item.cls is not None and issubclass(item.cls, ConformanceCase):
            refused = cast("Mapping[str, str]", getattr(item.cls.harness_class, "refused", {}))
            name = _promised(item)
            if name in refused:
                # Strict: a promise that is kept after all must lose its entry.
                item.add_marker(pytest.mark.xfail(reason=f"{name} is refused: {refused[name]}", strict=True))
            harness_class = item.cls.harness_class
            slow = harness_class is not None and harness_class.name not in _QUICK_TO_RECOVER
            if name in _WAITS_FOR_LOOKS or (slow and _DISTURBANCES & _required(item)):
                item.add_marker(pytest.mark.deep)
            together = cast("str | None", getattr(item.function, "__together__", None))
            here = item.get_closest_marker("xdist_group") is not None
            if together is not None and not here and harness_class is not None and harness_class.shares_restarts:
                item.add_marker(pytest.mark.xdist_group(f"{item.cls.__name__}-{together}"))


def _is_left_out(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or item.cls is None or not issubclass(item.cls, ConformanceCase):
        return False
    left_out = cast("frozenset[str]", getattr(item.cls.harness_class, "left_out", frozenset()))
    return _promised(item) in left_out


def _promised(item: pytest.Function) -> str:
    """The name of the test's promise; empty if it has none."""
    declared = getattr(item.function, "__promise__", None)
    return declared.name if isinstance(declared, Promise) else ""


def _required(item: pytest.Function) -> frozenset[str]:
    """The capabilities and harness operations that the test needs."""
    return frozenset(cast("tuple[str, ...]", getattr(item.function, "__requires__", ())))
