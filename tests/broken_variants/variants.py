"""The broken variants: what each breaks, and the promise that must not survive it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from broker.bus import Bus
from broker.errors import BackendError, BrokerError, TopicNotFound
from broker.messages import Message, Outcome
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.spi import MessageSubscription, Settlement, TopicPartition
from broker.testing.faults import Wrapped
from broker_inmem import InmemSettings
from tests.broken_variants.breaking import (
    BrokenBackend,
    BrokenBus,
    BrokenHarness,
    BrokenRecords,
    BrokenSource,
    BrokenTarget,
    BrokenView,
    CarelessBus,
)


@dataclass(frozen=True)
class Variant:
    """:ivar healthy: promises that this variant still keeps, so that what is broken is one thing."""

    name: str
    broken: str
    promise: str
    harness: type[BrokenHarness]
    healthy: tuple[str, ...] = ("publishing.receipt-names-the-message",)


VARIANTS: list[Variant] = []
HEALTHY = "publishing.receipt-names-the-message"


def breaks(promise: str, *, healthy: str = HEALTHY) -> Callable[[type[Any]], type[Any]]:
    """Make a variant of a broken target, source, record source, backend, bus or harness."""

    def register(part: type[Any]) -> type[Any]:
        backend: type[BrokenBackend] = BrokenBackend
        fields: dict[str, Any] = {}
        if issubclass(part, BrokenHarness):
            harness: type[BrokenHarness] = part
        else:
            if issubclass(part, Bus):
                fields["bus_class"] = part
            elif issubclass(part, BrokenBackend):
                backend = part
            else:
                kind = {
                    BrokenTarget: "target_class",
                    BrokenSource: "source_class",
                    BrokenRecords: "records_class",
                    Wrapped: "transaction_class",
                }
                attribute = next(name for base, name in kind.items() if issubclass(part, base))
                backend = type(f"{part.__name__}Backend", (BrokenBackend,), {attribute: part})
            harness = type(f"{part.__name__}Harness", (BrokenHarness,), {"backend_class": backend, **fields})
        VARIANTS.append(
            Variant(
                _dashed(part.__name__), (part.__doc__ or "").strip(), promise, harness, (healthy,) if healthy else ()
            )
        )
        return part

    return register


def _dashed(name: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("-")


def _copy(message: OutboundMessage, **changes: Any) -> OutboundMessage:
    names = ("data", "key", "attributes", "id", "deliver_at", "ttl", "partition", "publish_time", "native")
    return OutboundMessage(**{name: getattr(message, name) for name in names} | changes)


# -- publishing ------------------------------------------------------------------------------------------


@breaks("messages.arrive-equal")
class LosesOneAttribute(BrokenTarget):
    """The last attribute of every message is lost."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return _copy(message, attributes=dict(list(message.attributes.items())[:-1]))


@breaks("publishing.batch-keeps-order")
class ReordersAKey(BrokenTarget):
    """Every batch is published backwards."""

    async def publish(self, messages: Sequence[OutboundMessage]) -> Sequence[Receipt | BrokerError]:
        return list(reversed(await self.inner.publish(list(reversed(messages)))))


@breaks("dead-letters.carry-the-original")
class DeadLetterLosesTheKey(BrokenTarget):
    """Dead letters are written without the key of the original."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return _copy(message, key=None) if "dead-letter-reason" in message.attributes else message


@breaks("fidelity.no-key-is-not-the-empty-key")
class EmptyKeyBecomesNone(BrokenTarget):
    """A message with an empty key arrives with none."""

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


@breaks("fidelity.times-are-true")
class ForgetsTheProducersTime(BrokenTarget):
    """The time that the producer gave is replaced by the broker's."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return _copy(message, publish_time=None)


@breaks("publishing.scheduled-is-not-early")
class DeliversScheduledAtOnce(BrokenTarget):
    """`deliver_at` is ignored."""

    def change(self, message: OutboundMessage) -> OutboundMessage:
        return _copy(message, deliver_at=None)


@breaks("publishing.opening-is-lazy")
class ReceiptForAFailedPublish(BrokenTarget):
    """A publish that failed returns a receipt."""

    async def publish(self, messages: Sequence[OutboundMessage]) -> Sequence[Receipt | BrokerError]:
        try:
            outcomes = await self.inner.publish(messages)
        except BrokerError as error:
            outcomes = [error] * len(messages)
        return [Receipt("made-up") if isinstance(outcome, BrokerError) else outcome for outcome in outcomes]


@breaks("errors.missing-topic")
class CreatesMissingTopics(BrokenTarget):
    """Publishing to a topic that does not exist creates it."""

    async def publish(self, messages: Sequence[OutboundMessage]) -> Sequence[Receipt | BrokerError]:
        outcomes: Sequence[Receipt | BrokerError] = [TopicNotFound("not yet")]
        with suppress(TopicNotFound):
            outcomes = await self.inner.publish(messages)
        if any(isinstance(outcome, TopicNotFound) for outcome in outcomes):
            await self.backend.inner.admin().ensure_topic(self.topic, partitions=None, retention=None, options={})
            outcomes = await self.inner.publish(messages)
        return outcomes


@breaks("publishing.topics-never-mix")
class OtherTopicsMessagesMix(BrokenBackend):
    """Names are mapped onto the broker's with two of them falling together."""

    def topic_name(self, topic: str) -> str:
        return topic.replace("_", ".")


# -- settling --------------------------------------------------------------------------------------------


@breaks("messages.nack-redelivers")
class AcksOnError(BrokenSource):
    """A nacked message is acked."""

    def change(self, settlement: Settlement) -> Settlement:
        if settlement.outcome is Outcome.NACK:
            return replace(settlement, outcome=Outcome.ACK, delay=None)
        return settlement


@breaks("messages.nack-delay-is-kept")
class ForgetsTheDelay(BrokenSource):
    """A nacked message comes again at once, whatever the delay."""

    def change(self, settlement: Settlement) -> Settlement:
        return replace(settlement, delay=0.0) if settlement.outcome is Outcome.NACK else settlement


@breaks("messages.ack-is-final")
class DeliversTwiceAfterAnAck(BrokenSource):
    """The first delivery of a message that is acked comes again."""

    def change(self, settlement: Settlement) -> Settlement:
        if settlement.outcome is Outcome.ACK and settlement.message.delivery_attempt == 1:
            return replace(settlement, outcome=Outcome.NACK, delay=0.0)
        return settlement


@breaks("close.gives-back-the-buffer")
class CloseLosesTheBuffer(BrokenSource):
    """What is given back unhandled is acked."""

    def change(self, settlement: Settlement) -> Settlement:
        if settlement.outcome is Outcome.RELEASE:
            return replace(settlement, outcome=Outcome.ACK, delay=None)
        return settlement


@breaks("cancel.receive-gives-back")
class DropsOnCancel(BrokenSource):
    """What a cancelled handler held is dropped."""

    def change(self, settlement: Settlement) -> Settlement:
        if settlement.outcome is Outcome.RELEASE and settlement.message.lease_ends is not None:
            return replace(settlement, outcome=Outcome.ACK, delay=None)
        return settlement


@breaks("retry.give-back-is-no-attempt")
class RestartsBurnAttempts(BrokenSource):
    """Giving a message back unhandled counts as a failed delivery."""

    def change(self, settlement: Settlement) -> Settlement:
        if settlement.outcome is Outcome.RELEASE:
            return replace(settlement, outcome=Outcome.NACK, delay=0.0)
        return settlement


@breaks("leases.refused-ack-raises")
class SwallowsRefusedAcks(BrokenBackend):
    """Refused acks are reported as done, and lost leases are not told."""

    async def subscribe(self, subscription: MessageSubscription, listener: Any) -> Any:
        return _Swallowing(await self.inner.subscribe(subscription, _Deaf(listener)), self, subscription)


class _Swallowing(BrokenSource):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        await self.inner.settle(settlements)
        return [None] * len(settlements)


class _Deaf(Wrapped):
    def lost(self, messages: Sequence[Message[Any]]) -> None:
        """Keep it from the core."""


@breaks("close.deletes-nothing")
class CloseDeletesTheSubscription(BrokenSource):
    """Closing a consumer deletes its subscription."""

    async def close(self) -> None:
        await self.inner.close()
        admin = self.backend.inner.admin()
        await admin.delete_subscription(self.subscription.topic, self.subscription.subscription)


# -- delivery --------------------------------------------------------------------------------------------


@breaks("flow.never-more-than-n-unsettled")
class ExceedsTheBound(BrokenSource):
    """Four times as many messages are fetched as were asked for."""

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        return await self.inner.fetch(4 * max_messages, max_bytes, wait)


@breaks("flow.bytes-are-bounded")
class IgnoresBytes(BrokenSource):
    """The bound on bytes is ignored: messages say that they have no size."""

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        messages = await self.inner.fetch(max_messages, 1 << 40, wait)
        for message in messages:
            message.size = 0
        return messages


class _StuckAttempt(BrokenView):
    def delivery_attempt(self, raw: Any) -> int | None:
        return 1


@breaks("messages.attempts-are-counted")
class AttemptStuckAtOne(BrokenSource):
    """Every delivery says that it is the first."""

    def show(self, message: Message[Any]) -> Message[Any]:
        message.view = _StuckAttempt(message.view)  # pyright: ignore[reportAttributeAccessIssue]
        return message


class _ChangingId(BrokenView):
    def id(self, raw: Any) -> str:
        return f"{self.inner.id(raw)}-{self.inner.delivery_attempt(raw)}"


@breaks("messages.nack-redelivers", healthy="messages.shape-next-message")
class ChangesTheIdOnRedelivery(BrokenSource):
    """Each delivery of a message has an id of its own."""

    def show(self, message: Message[Any]) -> Message[Any]:
        message.view = _ChangingId(message.view)  # pyright: ignore[reportAttributeAccessIssue]
        return message


@breaks("outcomes.idle-is-an-answer", healthy="")
class IdleIsRaisedAsAnError(BrokenSource):
    """A fetch that finds nothing raises."""

    async def fetch(self, max_messages: int, max_bytes: int, wait: float) -> Sequence[Message[Any]]:
        messages = await self.inner.fetch(max_messages, max_bytes, min(wait, 0.02))
        if not messages:
            raise BackendError("nothing came in time")
        return messages


@breaks("leases.held-is-renewed")
class IgnoresLeaseExtension(BrokenSource):
    """Renewals of leases are reported as done, and are not."""

    async def extend(self, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        return [None] * len(messages)


@breaks("messages.each-subscription-gets-all")
class SecondSubscriptionSteals(BrokenBackend):
    """All subscriptions of a topic are one."""

    async def subscribe(self, subscription: MessageSubscription, listener: Any) -> Any:
        shared = MessageSubscription(topic=subscription.topic, subscription="everybody", start=subscription.start)
        return await self.inner.subscribe(shared, listener)


@breaks("messages.latest-skips-history")
class AlwaysStartsAtTheEarliest(BrokenBackend):
    """A new subscription begins at the earliest message, whatever was asked for."""

    async def subscribe(self, subscription: MessageSubscription, listener: Any) -> Any:
        early = MessageSubscription(topic=subscription.topic, subscription=subscription.subscription)
        return await self.inner.subscribe(early, listener)


@breaks("cancel.waiters-lose-nothing")
class CancelLosesAMessage(BrokenBus):
    """A consumer takes a message, and suspends once more before it hands it over."""


@breaks("cancel.ack-is-carried-out")
class AckDiesWithItsCaller(CarelessBus):
    """An ack is carried out by its caller, and not if that one is cancelled."""


# -- the server ------------------------------------------------------------------------------------------


@breaks("leases.crash-gives-back")
class NeverRedelivers(BrokenHarness):
    """What a crashed consumer held is its own for ever."""

    def url(self, *, short_lease: bool = False) -> InmemSettings:
        return InmemSettings(broker=self.broker, lease_seconds=86400.0)


@breaks("reconnect.acks-survive")
class RestartForgetsAcks(BrokenSource):
    """Acks are reported as done, and kept where a restart loses them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.acked: set[str] = set()

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[BrokerError | None]:
        kept = [settlement for settlement in settlements if settlement.outcome is not Outcome.ACK]
        results = iter(await self.inner.settle(kept) if kept else ())
        return [None if settlement.outcome is Outcome.ACK else next(results) for settlement in settlements]


# -- records and transactions ----------------------------------------------------------------------------


@breaks("records.commit-is-the-next-position")
class CommitRewinds(BrokenRecords):
    """A commit stores the last offset instead of the next position."""

    def change(self, partition: TopicPartition, position: int) -> int:
        return position - 1


@breaks("as-messages.commit-is-contiguous")
class CommitsPastAGap(BrokenRecords):
    """A commit stores the highest position that was fetched."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.highest: dict[TopicPartition, int] = {}

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Any:
        records = await self.inner.fetch(max_records, max_bytes, wait)
        for record in records:
            self.highest[TopicPartition(record.topic, record.partition)] = record.offset + 1
        return records

    def change(self, partition: TopicPartition, position: int) -> int:
        return self.highest.get(partition, position)


@breaks("records.nothing-is-committed-unasked")
class CommitsWhatWasRead(BrokenRecords):
    """Reading commits."""

    async def fetch(self, max_records: int, max_bytes: int, wait: float) -> Any:
        records = await self.inner.fetch(max_records, max_bytes, wait)
        ends: Mapping[TopicPartition, int] = {TopicPartition(r.topic, r.partition): r.offset + 1 for r in records}
        await self.inner.commit(ends)
        return records


@breaks("transactions.abort-hides-all")
class LeaksAnAbortedTransaction(Wrapped):
    """An aborted transaction is committed."""

    async def abort(self) -> None:
        await self.inner.commit()


@breaks("log.removed-start-raises")
class LogSkipsWhatWasRemoved(BrokenBackend):
    """A read whose start was removed begins at the first record that is left."""

    def log_reader(self) -> Any:
        return _Skipping(self.inner.log_reader())


class _Skipping(Wrapped):
    async def read(self, topic: str, partition: int, start: int, stop: int, max_records: int) -> Any:
        first = (await self.inner.bounds(topic))[partition].first
        async for records in self.inner.read(topic, partition, max(start, first), stop, max_records):
            yield records


@breaks("admin.lag-counts-messages")
class LagIsOffByOne(BrokenBackend):
    """The lag counts one message too few."""

    def admin(self) -> Any:
        return _Miscounting(self.inner.admin())


class _Miscounting(Wrapped):
    async def lag(self, topic: str, subscription: str) -> Any:
        lag = await self.inner.lag(topic, subscription)
        return type(lag)(waiting=max(0, lag.waiting - 1), unsettled=lag.unsettled, partitions=lag.partitions)
