"""The conformance kit on the Service Bus backend and the double, or on the namespace of `ANYBROKER_SERVICEBUS`."""

from __future__ import annotations

import pytest

from broker.testing.conformance import Conformance
from tests.conformance.servicebus_harness import NAMESPACE, AzureHarness, DoubleHarness

# In one process, which then starts one server.
pytestmark = pytest.mark.xdist_group("servicebus-conformance")


class TestServiceBus(Conformance):
    harness_class = AzureHarness if NAMESPACE else DoubleHarness
