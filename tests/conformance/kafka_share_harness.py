"""The harness of Kafka's share groups: a broker of its own, with locks and heartbeats that are short."""

from __future__ import annotations

import atexit
from functools import cache

from tests.conformance.kafka_harness import IN_CHAOS, SAME_ON_EVERY_ENGINE, KafkaHarness, Wired

_OPTIONS = {
    "group.share.min.heartbeat.interval.ms": "100",
    "group.share.heartbeat.interval.ms": "100",
    "group.share.min.record.lock.duration.ms": "1000",
}


@cache
def share_wired() -> Wired:
    """The broker of this test process, started at the first call and ended with the process, or before."""
    made = Wired(_OPTIONS)
    atexit.register(made.close)
    return made


def end_share_wired() -> None:
    """End the broker if it was started."""
    if share_wired.cache_info().currsize:
        made = share_wired()
        share_wired.cache_clear()
        atexit.unregister(made.close)
        made.close()


class KafkaShareHarness(KafkaHarness):
    """Messages of share groups; what is not of the Message family is as without."""

    name = "kafka[share]"
    left_out = SAME_ON_EVERY_ENGINE | IN_CHAOS
    options = "queue=share&topic_metadata_refresh_interval_ms=1000"

    def make_wired(self) -> Wired:
        return share_wired()

    def url(self, *, short_lease: bool = False) -> str:
        return f"{super().url(short_lease=short_lease)}&share_lock={self.lease_seconds if short_lease else 30}"
