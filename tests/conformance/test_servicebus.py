"""The conformance kit on the Service Bus backend and the double, or on the namespace of `ANYBROKER_SERVICEBUS`."""

from __future__ import annotations

from broker.testing.conformance import Conformance
from tests.conformance.servicebus_harness import NAMESPACE, AzureHarness, DoubleHarness


class TestServiceBus(Conformance):
    harness_class = AzureHarness if NAMESPACE else DoubleHarness
