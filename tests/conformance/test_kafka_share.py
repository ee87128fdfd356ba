"""The Message family of the conformance kit on share groups of a real broker."""

from __future__ import annotations

import pytest

from tests.conformance.kafka_queue_areas import ShareAreas
from tests.conformance.kafka_share_harness import KafkaShareHarness

# In one worker, which starts one broker.
pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-share-conformance")]


class TestKafkaShare(ShareAreas):
    harness_class = KafkaShareHarness
