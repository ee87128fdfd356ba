"""The Message family of the conformance kit on Kafka as a real queue: `queue=markers`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker.testing.conformance import (
    Administration,
    Blocking,
    Cancelling,
    Closing,
    DeadLetters,
    Delivery,
    Errors,
    Fidelity,
    Flow,
    Leases,
    Limits,
    Observing,
    Order,
    Outcomes,
    Publishing,
    Reconnecting,
    Retrying,
    Settling,
    Shapes,
)
from tests.conformance.kafka_harness import MarkersHarness, end_wired

# In one process, which then starts one broker, and ends it when they are over.
pytestmark = pytest.mark.xdist_group("kafka-markers-conformance")


@pytest.fixture(scope="module", autouse=True)
def broker_of_the_module() -> Iterator[None]:
    yield
    end_wired()


class TestKafkaMarkers(
    Delivery,
    Settling,
    Shapes,
    Outcomes,
    Flow,
    Leases,
    Retrying,
    DeadLetters,
    Order,
    Closing,
    Cancelling,
    Fidelity,
    Limits,
    Administration,
    Reconnecting,
    Errors,
    Observing,
    Blocking,
):
    harness_class = MarkersHarness

    # What else publishing promises does not depend on how messages are settled.
    test_scheduled_is_not_early = Publishing.test_scheduled_is_not_early
