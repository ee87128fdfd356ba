"""The conformance kit on the Kafka backend and a real broker, with both protocols of consumer groups."""

from __future__ import annotations

import pytest

from broker.testing.areas.as_messages import AsMessages
from broker.testing.areas.commits import Commits
from broker.testing.areas.groups import Groups
from broker.testing.areas.reconnect import Reconnecting
from broker.testing.areas.records import Records
from broker.testing.conformance import Conformance
from tests.conformance.kafka_harness import ConsumerProtocolHarness, KafkaHarness

# In one worker, which starts one broker.
pytestmark = pytest.mark.xdist_group("kafka-conformance")


class TestKafka(Conformance):
    harness_class = KafkaHarness


@pytest.mark.deep
class TestKafkaConsumerProtocol(AsMessages, Commits, Groups, Reconnecting, Records):
    harness_class = ConsumerProtocolHarness
