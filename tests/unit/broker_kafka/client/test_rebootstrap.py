"""When the workaround of `broker_kafka.client.rebootstrap` can go."""

from __future__ import annotations

import confluent_kafka

from broker_kafka.client.rebootstrap import AFFECTED


def test_workaround_covers_the_installed_librdkafka() -> None:
    version = confluent_kafka.libversion()[0]
    assert version in AFFECTED, (
        f"librdkafka is {version}, and the workaround was checked with {sorted(AFFECTED)}. With AFFECTED empty, run "
        "tests/chaos/test_kafka_rebootstrap.py -m deep a few times. If it passes, delete "
        "broker_kafka.client.rebootstrap and its tests. If it fails, add the version to AFFECTED and run all of them"
    )
