"""Testing against `broker`: the conformance kit for backend authors, messages without a broker for applications.

A backend passes the kit by subclassing two classes:

    from broker.testing import Harness
    from broker.testing.conformance import Conformance

    class MyHarness(Harness):
        name = "mine"
        def url(self, *, short_lease: bool = False) -> str:
            return f"mine://localhost?lease={self.lease_seconds if short_lease else 30}"

    class TestMine(Conformance):
        harness_class = MyHarness

See `docs/writing-a-backend.md`, and `docs/testing.md` for the rest. Importing this
package opens nothing and needs pytest only.
"""

from __future__ import annotations

from broker.testing.asserting import REWRITTEN
from broker.testing.fakes import make_message, make_record
from broker.testing.harness import Harness
from broker.testing.promises import Promise, promise, requires

__all__ = ["REWRITTEN", "Harness", "Promise", "make_message", "make_record", "promise", "requires"]
