"""What holds for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

from tests.fault_matrix import pytest_terminal_summary
from tests.last_words import pytest_testnodedown, pytest_testnodeready
from tests.server_logs import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport", "pytest_terminal_summary", "pytest_testnodedown", "pytest_testnodeready"]

# How long an example takes says more of what else the machine does than of the code; speed is measured in benchmarks/.
settings.register_profile("anybroker", deadline=None)
settings.load_profile("anybroker")

# gRPC runs its own threads in a forked child until that child is another program, and some die of it: the PostgreSQL of
# the tests is started by such a fork, as it takes another user. No test calls gRPC on both sides of a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
