"""The Message family of the conformance kit on share groups, which a real broker serves."""

from __future__ import annotations

import pytest

from tests.conformance.kafka_queue_areas import ShareAreas
from tests.conformance.kafka_share_harness import KafkaShareHarness

# In one process, which then starts one broker, and ends it when they are over.
pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-share-conformance")]


class TestKafkaShare(ShareAreas):
    harness_class = KafkaShareHarness
