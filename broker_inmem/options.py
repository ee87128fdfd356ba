"""The behaviour of one in-memory server and its capabilities. Immutable values, safe from any thread."""

from __future__ import annotations

from dataclasses import dataclass

from broker import (
    Capabilities,
    ConfirmedAck,
    LeaseMode,
    Limits,
    MessageCapabilities,
    PublishCapabilities,
    RecordCapabilities,
)

__all__ = ["BrokerOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """Options of a new server. Times are in seconds of the server's clock, sizes in bytes."""

    seed: int | None = None
    """Random seed of the order between keys; None draws one, see `Broker.seed`."""
    shuffle: int = 8
    """Messages of different keys, or without a key, are shuffled within windows of this size; 0 keeps the order."""
    partitions: int = 4
    """Partitions of a topic that is created without a number of partitions."""
    lease_seconds: float = 30.0
    """The lease of a message without renewal; a connection may have its own."""
    native_delay: float = 30 * 86400.0
    """The longest nack delay of the server; with 0 the core keeps delays in memory."""
    dedup_seconds: float = 120.0
    """A second message with the same id within this time is dropped."""
    session_seconds: float = 10.0
    """A group member that is silent for this time loses its partitions."""
    rebalance_seconds: float = 30.0
    """The time that a group member has to release revoked partitions."""
    transaction_seconds: float = 60.0
    """The server aborts a transaction that is open for longer."""
    retention_seconds: float | None = None
    """Older records are removed from the log, unless the topic has its own retention."""
    retention_messages: int | None = None
    """Maximum records in the log of a partition, unless the topic has its own bound."""
    tombstone_seconds: float = 86_400.0
    """The age from which `Broker.compact` removes tombstones of a compacted topic."""
    max_body: int = 1024 * 1024
    max_key: int = 1024
    max_id: int = 256
    max_attribute_key: int = 256
    max_attribute_value: int = 4096
    max_attributes: int = 100

    def capabilities(self) -> Capabilities:
        """The capabilities of a server with these options."""
        return Capabilities(
            backend="inmem",
            publish=PublishCapabilities(
                limits=Limits(
                    body=self.max_body,
                    key=self.max_key,
                    id=self.max_id,
                    attribute_key=self.max_attribute_key,
                    attribute_value=self.max_attribute_value,
                    attributes=self.max_attributes,
                    letter_attributes=8,
                ),
                deduplication=True,
                reports_duplicates=True,
                deliver_at=True,
                ttl=True,
                tombstones=True,
                partitions=True,
                partition_of=True,
                transactions=True,
                tables=True,
                atomic_tables=True,
            ),
            messages=MessageCapabilities(
                lease=LeaseMode.RENEW,
                lease_seconds=self.lease_seconds,
                confirmed_ack=ConfirmedAck.ALWAYS,
                native_delay=self.native_delay,
                delivery_attempt=True,
                release_keeps_attempt=True,
                key_affinity=True,
                ordered_delivery=True,
                creates_subscriptions=True,
                start_latest=True,
                start_time=True,
                ephemeral=True,
                topic_patterns=True,
            ),
            records=RecordCapabilities(
                groups=True,
                topic_patterns=True,
                rebalance=True,
                seek=True,
                start_time=True,
                log_reader=True,
                follow=True,
                position_at=True,
                read_committed=True,
                compacted_topics=True,
                copartitioned=True,
            ),
            durable=False,
            shared=False,
        )
