"""Test support: the conformance kit for authors of backends, and messages without a broker for applications.

A backend runs the kit with two subclasses:

    from broker.testing import Harness
    from broker.testing.conformance import Conformance

    class MyHarness(Harness):
        name = "mine"
        def url(self, *, short_lease: bool = False) -> str:
            return f"mine://localhost?lease={self.lease_seconds if short_lease else 30}"

    class TestMine(Conformance):
        harness_class = MyHarness

See `docs/writing-a-backend.md` and `docs/testing.md`. The package needs pytest.
"""

from __future__ import annotations

import pytest

from broker.testing.fakes import call_handler, make_message, make_record
from broker.testing.harness import Harness
from broker.testing.promises import Promise, promise, requires

__all__ = ["Harness", "Promise", "call_handler", "make_message", "make_record", "promise", "requires"]

# Failed assertions of these modules show their values. They must not be imported before this call.
pytest.register_assert_rewrite("broker.testing.areas", "broker.testing.waiting")
