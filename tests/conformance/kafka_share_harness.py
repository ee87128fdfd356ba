"""The harness of Kafka's share groups: a separate broker with short locks and heartbeats."""

from __future__ import annotations

from tests.conformance.kafka_harness import IN_CHAOS, SAME_ON_EVERY_ENGINE, KafkaHarness, Wired
from tests.servers.shared import Shared

_OPTIONS = {
    "group.share.min.heartbeat.interval.ms": "100",
    "group.share.heartbeat.interval.ms": "100",
    "group.share.min.record.lock.duration.ms": "1000",
}


@Shared.in_groups
def share_wired() -> Wired:
    """The broker of the group of tests that runs."""
    return Wired(_OPTIONS)


class KafkaShareHarness(KafkaHarness):
    """Messages of share groups; only the Message family differs."""

    name = "kafka[share]"
    left_out = SAME_ON_EVERY_ENGINE | IN_CHAOS
    options = "queue=share&topic_metadata_refresh_interval_ms=1000"

    def make_wired(self) -> Wired:
        return share_wired()

    def url(self, *, short_lease: bool = False) -> str:
        return f"{super().url(short_lease=short_lease)}&share_lock={self.lease_seconds if short_lease else 30}"
