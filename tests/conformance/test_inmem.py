"""The conformance kit on the in-memory broker, and on one without native delays."""

from __future__ import annotations

import pytest

from broker.testing.conformance import (
    AsMessages,
    Cancelling,
    Closing,
    Conformance,
    DeadLetters,
    Flow,
    Leases,
    Order,
    Outcomes,
    Retrying,
    Settling,
    Shapes,
)
from broker_inmem import BrokerOptions
from tests.conformance.inmem_harness import InmemHarness


class TestInmem(Conformance):
    harness_class = InmemHarness


class UndelayedHarness(InmemHarness):
    """Without native delays; messages are delivered in the order of publishing."""

    in_matrix = False
    options = BrokerOptions(session_seconds=1.0, rebalance_seconds=2.0, native_delay=0.0, shuffle=0)


@pytest.mark.deep
class TestUndelayed(
    Settling, Shapes, Outcomes, Flow, Leases, Retrying, DeadLetters, Order, Closing, Cancelling, AsMessages
):
    harness_class = UndelayedHarness
