"""`KafkaAdmin`: provisioning of topics and groups. Stateless; `KafkaBackend.admin` makes one for each use.

*Concurrency.* Any number of calls, also from several processes. *Cancellation.* A cancelled call may have taken effect,
and can be repeated. *Failure.* Errors name the option or the group and what to do.
"""

from __future__ import annotations

from broker_kafka.admin.groups import KafkaGroups
from broker_kafka.admin.topics import KafkaTopics
from broker_kafka.cluster.connection import Connection

__all__ = ["KafkaAdmin"]


class KafkaAdmin(KafkaTopics, KafkaGroups):
    """Implements `AdminSpi` and `GroupAdminSpi`; a subscription is a consumer group."""

    def __init__(self, connection: Connection) -> None:
        KafkaTopics.__init__(self, connection)
        KafkaGroups.__init__(self, connection)

    async def purge(self, topic: str) -> int | None:
        """Delete all records, and move groups behind them to the end, except groups with members."""
        removed = await super().purge(topic)
        await self.skip_purged(topic)
        return removed
