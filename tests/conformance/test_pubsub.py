"""The conformance kit on the Pub/Sub backend and Google's emulator."""

from __future__ import annotations

from broker.testing.conformance import Conformance
from tests.conformance.pubsub_harness import PubSubHarness


class TestPubSub(Conformance):
    harness_class = PubSubHarness
