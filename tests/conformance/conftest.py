"""Keeps tests that share a restart of the server in one process, and leaves out what a configuration need not run."""

from __future__ import annotations

from typing import cast

import pytest

from broker.testing.case import ConformanceCase
from broker.testing.promises import Promise


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if _is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if isinstance(item, pytest.Function) and item.cls is not None and issubclass(item.cls, ConformanceCase):
            together = cast("str | None", getattr(item.function, "__together__", None))
            harness_class = item.cls.harness_class
            here = item.get_closest_marker("xdist_group") is not None
            if together is not None and not here and harness_class is not None and harness_class.shares_restarts:
                item.add_marker(pytest.mark.xdist_group(f"{item.cls.__name__}-{together}"))


def _is_left_out(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or item.cls is None or not issubclass(item.cls, ConformanceCase):
        return False
    declared = getattr(item.function, "__promise__", None)
    left_out = cast("frozenset[str]", getattr(item.cls.harness_class, "left_out", frozenset()))
    return isinstance(declared, Promise) and declared.name in left_out
