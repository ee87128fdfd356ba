"""Harnesses of a Kafka queue with other marker formats than the default, and the promises that each refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from tests.conformance.kafka_harness import MarkersHarness
from tests.servers.kafka_client import SECONDS, RawAdmin

__all__ = ["AtOnceHarness", "SingleHarness", "V1Harness"]

_TWO_TOPICS = (
    "dead-letters.are-truncated-to-fit",
    "dead-letters.foreign-messages-have-letters",
    "dead-letters.lease-is-kept-while-writing",
    "dead-letters.reject-records-the-reason",
    "dead-letters.undecodable-is-dead-lettered",
    "dead-letters.write-failure-does-not-rerun-handler",
    "fidelity.forwarding-is-lossless",
    "fidelity.last-of-repeated-names",
    "fidelity.portable-names",
    "messages.closing-one-leaves-the-other",
    "messages.several-topics",
    "order.dead-letter-releases-followers",
    "retry.attempts-are-bounded",
    "retry.never-is-not-retried",
    "retry.restarts-count-no-attempts",
    "retry.restarts-count-no-deliveries",
)
_ATTRIBUTES = ("messages.nack-redelivers", "publishing.scheduled-is-not-early")


class SingleHarness(MarkersHarness):
    """One record for each marker, in the partition of its message's key."""

    in_matrix = False
    options = f"{MarkersHarness.options}&marker_format=v2-single"


class AtOnceHarness(MarkersHarness):
    """STARTs and positions in one transaction."""

    in_matrix = False
    options = f"{MarkersHarness.options}&queue_transactions=true"


class V1Harness(MarkersHarness):
    """Markers in the format of kafka-mq-go, which lack many of our fields.

    They name no topic, so that markers of one test would apply to the next: each test deletes its marker topics.
    """

    in_matrix = False
    # Concurrent tests would use one subscription for several topics.
    shares_restarts = False
    options = f"{MarkersHarness.options}&marker_format=v1"
    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(_TWO_TOPICS, "a subscription reads one topic, as V1 markers name none"),
        **dict.fromkeys(_ATTRIBUTES, "V1 markers have no attributes, so redelivered messages have none"),
    }

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            await asyncio.to_thread(self._delete_markers)

    def _delete_markers(self) -> None:
        admin = RawAdmin(self.server.bootstrap)
        found = admin.client.list_topics(timeout=SECONDS).topics
        if names := [name for name in found if name.endswith(".markers")]:
            admin.delete_topic(*names)
