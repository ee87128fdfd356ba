"""Keeps tests that share a restart of the server in one process."""

from __future__ import annotations

from typing import cast

import pytest

from broker.testing.case import ConformanceCase


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and item.cls is not None and issubclass(item.cls, ConformanceCase):
            together = cast("str | None", getattr(item.function, "__together__", None))
            harness_class = item.cls.harness_class
            here = item.get_closest_marker("xdist_group") is not None
            if together is not None and not here and harness_class is not None and harness_class.shares_restarts:
                item.add_marker(pytest.mark.xdist_group(f"{item.cls.__name__}-{together}"))
