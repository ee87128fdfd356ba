"""The conformance kit on the Pub/Sub backend and Google's emulator."""

from __future__ import annotations

import pytest

from broker.testing.conformance import Conformance
from tests.conformance.pubsub_harness import PubSubHarness

# In one process, which then starts one server.
pytestmark = pytest.mark.xdist_group("pubsub-conformance")


class TestPubSub(Conformance):
    harness_class = PubSubHarness
