"""The conformance kit on the Pulsar backend and a real standalone."""

from __future__ import annotations

import pytest

from broker.testing.conformance import Conformance
from tests.conformance.pulsar_harness import PulsarHarness

# In one worker, which starts one broker.
pytestmark = pytest.mark.xdist_group("pulsar-conformance")


class TestPulsar(Conformance):
    harness_class = PulsarHarness
