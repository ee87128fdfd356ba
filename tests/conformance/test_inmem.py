"""The conformance kit on the in-memory broker, and on one that leaves delays to the core."""

from __future__ import annotations

from broker.testing.conformance import Conformance
from tests.conformance.inmem_harness import InmemHarness


class TestInmem(Conformance):
    harness_class = InmemHarness
