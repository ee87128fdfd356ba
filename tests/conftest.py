"""Hooks for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import settings

from tests.fault_matrix import pytest_terminal_summary
from tests.last_words import pytest_testnodedown, pytest_testnodeready
from tests.server_logs import pytest_runtest_makereport
from tests.servers.shared import end_those_of_groups

__all__ = ["pytest_runtest_makereport", "pytest_terminal_summary", "pytest_testnodedown", "pytest_testnodeready"]

# How long an example takes says more of what else the machine does than of the code; speed is measured in benchmarks/.
settings.register_profile("random", deadline=None, max_examples=200)
# `make test` draws the same examples each time; `make test-all` looks for new ones.
settings.register_profile("same", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("same")

# gRPC runs its own threads in a forked child until that child is another program, and some die of it: the PostgreSQL of
# the tests is started by such a fork, as it takes another user. No test calls gRPC on both sides of a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Of long values, their length: an id of megabytes goes from each worker to the main process."""
    return f"{argname}-of-{len(val)}" if isinstance(val, str | bytes) and len(val) > 200 else None


def pytest_collection_finish() -> None:
    """The collector leaves out the thousands of tests, which no test frees: many tests collect to look for leaks."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """The servers of a group of tests end with it: a dozen idle brokers take a tenth of the machine."""
    try:
        return (yield)
    finally:
        group = item.get_closest_marker("xdist_group")
        if group is not None and (nextitem is None or nextitem.get_closest_marker("xdist_group") != group):
            end_those_of_groups()
