"""The conformance kit on the JetStream backend and a real nats-server."""

from __future__ import annotations

from broker.testing.conformance import Conformance
from tests.conformance.jetstream_harness import JetStreamHarness


class TestJetStream(Conformance):
    harness_class = JetStreamHarness
