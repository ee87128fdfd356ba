"""Variants that publish wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from broker.errors import BrokerError, InvalidMessage, TopicNotFound
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from tests.broken_variants.breaking import (
    BrokenBackend,
    BrokenTarget,
)
from tests.broken_variants.registry import breaks


def _copy(message: OutboundMessage, **changes: Any) -> OutboundMessage:
    names = ("data", "key", "attributes", "id", "deliver_at", "ttl", "partition", "publish_time", "native")
    return OutboundMessage(**{name: getattr(message, name) for name in names} | changes)


@breaks("messages.arrive-unchanged")
class LosesOneAttribute(BrokenTarget):
    """The last attribute of every message is lost."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return _copy(message, attributes=dict(list(message.attributes.items())[:-1]))


@breaks("publishing.batch-keeps-order")
class ReordersAKey(BrokenTarget):
    """Every batch is published in reverse."""

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        return list(reversed(await self.inner.publish(list(reversed(messages)), receipts=receipts)))


@breaks("publishing.partition-of-tells-where")
class TellsAnotherPartition(BrokenBackend):
    """`partition_of` takes the first three bytes of a key for the key."""

    def partition_of(self, topic: str, key: bytes, partitions: int) -> int:
        return self.inner.partition_of(topic, key[:3], partitions)


@breaks("publishing.partitioner-places-keys")
class KeyOutweighsThePartition(BrokenTarget):
    """The partition of a message counts only if there is no key."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return message if message.key is None else _copy(message, partition=None)


@breaks("publishing.partitioner-failure-is-the-messages")
class FailsKeysWithPartitions(BrokenTarget):
    """A message that has both a key and a partition fails."""

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        outcomes = await self.inner.publish(messages, receipts=receipts)
        return [
            outcome if message.key is None or message.partition is None else InvalidMessage("Refused")
            for message, outcome in zip(messages, outcomes, strict=True)
        ]


@breaks("dead-letters.carry-the-original")
class DeadLetterLosesTheKey(BrokenTarget):
    """Dead letters are written without the key of the original."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return _copy(message, key=None) if "dead-letter-reason" in message.attributes else message


@breaks("fidelity.no-key-is-not-the-empty-key")
class EmptyKeyBecomesNone(BrokenTarget):
    """A message with an empty key arrives without a key."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return _copy(message, key=message.key or None)


@breaks("fidelity.tombstone-is-not-empty")
class TombstoneBecomesEmpty(BrokenTarget):
    """A tombstone arrives as an empty body."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return _copy(message, data=message.data or b"")


@breaks("limits.largest-body")
class TruncatesTheBody(BrokenTarget):
    """Bodies are cut at 64 KiB."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return _copy(message, data=message.data[:65536] if message.data is not None else None)


@breaks("fidelity.times-are-correct")
class ReplacesPublishTime(BrokenTarget):
    """The producer's time is replaced by the broker's."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return _copy(message, publish_time=None)


@breaks("publishing.scheduled-is-not-early")
class IgnoresDeliverAt(BrokenTarget):
    """`deliver_at` is ignored."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return _copy(message, deliver_at=None)


@breaks("publishing.opening-is-lazy")
class ReceiptForAFailedPublish(BrokenTarget):
    """A publish that failed returns a receipt."""

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        try:
            outcomes = await self.inner.publish(messages, receipts=receipts)
        except BrokerError as error:
            outcomes = [error] * len(messages)
        return [Receipt("made-up") if isinstance(outcome, BrokerError) else outcome for outcome in outcomes]


@breaks("errors.missing-topic")
class CreatesMissingTopics(BrokenTarget):
    """Publishing to a topic that does not exist creates it."""

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        outcomes: Sequence[Receipt | BrokerError] = [TopicNotFound("not yet")]
        with suppress(TopicNotFound):
            outcomes = await self.inner.publish(messages, receipts=receipts)
        if any(isinstance(outcome, TopicNotFound) for outcome in outcomes):
            await self.backend.inner.admin().ensure_topic(self.topic, partitions=None, retention=None, options={})
            outcomes = await self.inner.publish(messages, receipts=receipts)
        return outcomes


@breaks("publishing.topics-are-isolated")
class MixesTopics(BrokenBackend):
    """Two topic names are mapped to the same name on the broker."""

    def topic_name(self, topic: str) -> str:
        return topic.replace("_", ".")


@breaks("publishing.confirmed-messages-arrive")
class LosesAMessageWithAReceipt(BrokenTarget):
    """One message in forty has a receipt but is not stored."""

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        lost = [index for index, message in enumerate(messages) if (message.data or b"").endswith(b"13")]
        outcomes = iter(
            await self.inner.publish([m for index, m in enumerate(messages) if index not in lost], receipts=receipts)
        )
        return [Receipt("lost") if index in lost else next(outcomes) for index in range(len(messages))]


@breaks("publishing.confirmed-messages-arrive")
class PublishesTwice(BrokenTarget):
    """Messages that end in 7 are published twice."""

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        twice = [message for message in messages if (message.data or b"").endswith(b"7")]
        outcomes = await self.inner.publish(messages, receipts=receipts)
        if twice:
            await self.inner.publish(twice, receipts=receipts)
        return outcomes


@breaks("retry-topics.delay-in-turn")
class RetryTopicIgnoresDelay(BrokenTarget):
    """A message on a retry topic is due at once."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        if "retry-letter-due" not in message.attributes:
            return message
        return _copy(message, attributes={**message.attributes, "retry-letter-due": "2020-01-01T00:00:00+00:00"})


@breaks("retry-topics.restore-the-original")
class RetryLosesTheKey(BrokenTarget):
    """A message on a retry topic has no key."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return _copy(message, key=None) if "retry-letter-due" in message.attributes else message


@breaks("retry-topics.last-is-dead-lettered")
class RetryForgetsFailureCount(BrokenTarget):
    """A message on a retry topic has no failure count, so it never reaches the last attempt."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        if "retry-letter-step" not in message.attributes:
            return message
        return _copy(message, attributes={**message.attributes, "retry-letter-step": "0"})


@breaks("retry-topics.original-waits-for-its-copy")
class LosesRetriesWithAReceipt(BrokenTarget):
    """A message published to a retry topic has a receipt but is not stored."""

    async def publish(
        self, messages: Sequence[OutboundMessage], *, receipts: bool = True
    ) -> Sequence[Receipt | BrokerError]:
        if ".retry." not in self.topic:
            return await self.inner.publish(messages, receipts=receipts)
        return [Receipt(id=message.id or "", partition=0, offset=0) for message in messages]
