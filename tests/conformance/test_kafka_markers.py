"""The Message family of the conformance kit on Kafka as a real queue: `queue=markers`."""

from __future__ import annotations

import pytest

from tests.conformance.kafka_harness import MarkersHarness
from tests.conformance.kafka_marker_variants import AtOnceHarness, SingleHarness, V1Harness
from tests.conformance.kafka_queue_areas import MarkerAreas

# In one worker, which starts one broker.
pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-markers-conformance")]


class TestKafkaMarkers(MarkerAreas):
    harness_class = MarkersHarness


class TestKafkaMarkersV1(MarkerAreas):
    harness_class = V1Harness


class TestKafkaMarkersSingle(MarkerAreas):
    harness_class = SingleHarness


class TestKafkaMarkersAtOnce(MarkerAreas):
    harness_class = AtOnceHarness
