"""Leaks that only many cycles show: a thousand on each backend, fewer where a cycle takes seconds."""

from __future__ import annotations

import pytest

from broker.testing.conformance import Leaks
from tests.conformance.inmem_harness import InmemHarness
from tests.conformance.jetstream_harness import JetStreamHarness
from tests.conformance.kafka_harness import KafkaHarness
from tests.conformance.pubsub_harness import PubSubHarness
from tests.conformance.pulsar_harness import PulsarHarness
from tests.conformance.servicebus_harness import DoubleHarness

pytestmark = [pytest.mark.deep, pytest.mark.timeout(4000)]


class ManyInmem(InmemHarness):
    in_matrix = False
    cycles = 1000


class TestInmem(Leaks):
    harness_class = ManyInmem


class ManyJetStream(JetStreamHarness):
    in_matrix = False
    cycles = 1000


class TestJetStream(Leaks):
    harness_class = ManyJetStream


class ManyServiceBus(DoubleHarness):
    in_matrix = False
    cycles = 300


@pytest.mark.xdist_group("servicebus-conformance")
class TestServiceBus(Leaks):
    harness_class = ManyServiceBus


class ManyPubSub(PubSubHarness):
    in_matrix = False
    cycles = 300


@pytest.mark.xdist_group("pubsub-conformance")
class TestPubSub(Leaks):
    harness_class = ManyPubSub


class ManyPulsar(PulsarHarness):
    in_matrix = False
    cycles = 100


@pytest.mark.xdist_group("pulsar-conformance")
class TestPulsar(Leaks):
    harness_class = ManyPulsar


class ManyKafka(KafkaHarness):
    in_matrix = False
    cycles = 50


@pytest.mark.xdist_group("kafka-conformance")
class TestKafka(Leaks):
    harness_class = ManyKafka
