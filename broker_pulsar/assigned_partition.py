"""One partition of a record group as its member sees it: its consumer, its buffer, its committed position.

Used from the loop only. The client's message id is stored for each record that was returned and is not committed,
because only such an id can ack part of a batch; at most `_MAX_IDS` of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from broker import Bounds, OffsetOutOfRange, Record, TopicPartition
from broker.driver import reads_answer
from broker_pulsar.client import Message as NativeMessage
from broker_pulsar.log_reader import make_record
from broker_pulsar.log_stats import subscription_stats
from broker_pulsar.message_ids import PER_ENTRY, is_beyond, make_id, next_position, offset_of, pack, unpack
from broker_pulsar.receiving import Receiver
from broker_pulsar.subscriptions import OWNER, RELEASED

__all__ = [
    "AssignedPartition",
    "Change",
    "PartitionState",
    "partition_state",
    "take_records",
]

_MAX_IDS: Final = 100_000
"""A commit below these ids acks whole batches only, so part of a batch may be redelivered after a crash."""


class PartitionState(NamedTuple):
    """The broker's view of one partition of the group.

    :ivar active: name of the consumer that receives; empty if none does.
    :ivar connection: the broker's name of our connection; empty if we are not connected.
    :ivar others: names of the other connected consumers.
    :ivar sent: messages that the broker sent us over that connection.
    :ivar properties: the properties of the subscription.
    """

    active: str
    connection: str
    others: frozenset[str]
    sent: int
    properties: Mapping[str, str]

    @property
    def owner(self) -> str:
        """The mark of the last assignment to one of our members; empty if there was none."""
        return self.properties.get(OWNER, "")

    @property
    def released(self) -> bool:
        """Whether no other member still owns the partition: the last owner released it, or is not connected."""
        owner = self.owner
        return self.properties.get(RELEASED) == owner or owner.partition("/")[0] not in self.others


@reads_answer("The statistics of a log")
def partition_state(stats: Mapping[str, Any], group: str, consumer_name: str) -> PartitionState:
    """The state of our consumer in the statistics of one partition."""
    found = subscription_stats(stats, group) or {}
    consumers: Sequence[Mapping[str, Any]] = found.get("consumers") or ()
    ours = [each for each in consumers if each.get("consumerName") == consumer_name]
    connection = f"{ours[0].get('address')} {ours[0].get('connectedSince')}" if ours else ""
    sent = int(ours[0].get("msgOutCounter") or 0) if ours else 0
    active, properties = str(found.get("activeConsumerName") or ""), dict(found.get("subscriptionProperties") or {})
    names = frozenset(str(each.get("consumerName")) for each in consumers)
    return PartitionState(active, connection, names - {consumer_name}, sent, properties)


class Change(Enum):
    """A change of the assignment of one partition."""

    NONE = auto()
    ASSIGNED = auto()
    """We are the active consumer now."""
    REVOKED = auto()
    """Another member became active while we were connected."""
    LOST = auto()
    """Another member became active while we were disconnected, or has owned the partition since its assignment."""


class AssignedPartition:
    """State of one partition.

    :param start: position of the subscription when the member joined.
    """

    def __init__(
        self, topic_partition: TopicPartition, consumer_name: str, receiver: Receiver, start: int | None
    ) -> None:
        self.topic_partition: Final = topic_partition
        self.consumer_name: Final = consumer_name
        self.receiver: Final = receiver
        self.owned = self.paused = self.changing = False
        """`changing`: during an assignment, revocation or seek, arriving records are dropped."""
        self.connection = ""
        """The broker's name of the connection over which we own the partition."""
        self.mark = ""
        """The owner's mark when the partition was assigned to us."""
        self.has_received = False
        """Whether a record arrived since the last restart."""
        self.start: Final = start
        self.committed = start
        self.cursor = start
        """The broker's cursor, as far as known: the committed position, or that of a later seek."""
        self.acked = 0
        """The client drops records below this position as acked, until its consumer seeks."""
        self.buffer: deque[Record[Any]] = deque()
        self._next = 0
        self._received = -1
        """The highest position that the client delivered, owned or not."""
        self._expected: int | None = None
        """The position at which the delivery must start, until it has."""
        self._last_seen = -1
        """The last position that arrived before that; -1 if none did."""
        self._sent = 0
        """The broker's count of sent messages at the last check."""
        self._idle_checks = 0
        """Checks since the last restart at which the redelivery had not started and the broker sent nothing."""
        self._ids: deque[tuple[int, Any]] = deque()

    def arrived(self, messages: Sequence[NativeMessage]) -> bool:
        """Buffer records; returns False if none is new."""
        if not self.owned or self.changing:
            self._received = max((self._received, *(offset_of(raw.message_id()) for raw in messages)))
            return False
        topic, number = self.topic_partition
        before = len(self.buffer)
        for raw in messages:
            message_id = raw.message_id()
            record = make_record(topic, number, raw, message_id)
            if not self._delivery_started(record.offset) or record.offset < self._next:
                continue  # After a reconnect the broker restarts at the committed position.
            self._next = record.offset + 1
            self.has_received = True
            self.buffer.append(record)
            self._ids.append((record.offset, message_id))
        self._received = max(self._received, self._next - 1)
        while len(self._ids) > _MAX_IDS:
            self._ids.popleft()
        return len(self.buffer) > before

    @property
    def awaits_redelivery(self) -> bool:
        """Whether the client delivered uncommitted records before the last restart that have not come again.

        All others come without a request. If one makes the broker send the first chunk of a message twice, the client
        drops both copies of the message.
        """
        return self._expected is not None

    @property
    def misaligned(self) -> bool:
        """Whether records arrived that do not start the expected delivery."""
        return self._expected is not None and self._last_seen >= 0

    def needs_redelivery_request(self, sent: int) -> bool:
        """Whether the redelivery must be requested again; called at each check of the assignment.

        True at each check while the delivery is misaligned. While nothing arrives, at the second, fourth, eighth check
        at which the broker sent nothing more: it may drop a request that coincides with a read of its own.

        :param sent: the broker's count of sent messages, as in `PartitionState`.
        """
        if self.misaligned:
            return True
        if not self.awaits_redelivery or sent != self._sent:
            self._sent = sent
            return False
        self._idle_checks += 1
        return self._idle_checks > 1 and self._idle_checks.bit_count() == 1

    def restart(self, position: int = 0, *, expected: int | None = None) -> None:
        """Drop buffered records, and ignore records below `position`.

        :param expected: position of the first entry to arrive; 0 if unknown. The client delivers queued records of an
            earlier delivery before that. None if it has none.
        """
        self.buffer.clear()
        self._ids.clear()
        self._next = position
        # Without earlier receives the queued records are complete.
        self._expected = expected if expected is not None and self._received >= expected else None
        self._last_seen = -1
        self.has_received = False
        self._idle_checks = 0

    async def request_redelivery(self) -> None:
        """Request redelivery of uncommitted records, unless it started, or the partition was lost or moved meanwhile.

        :raises BrokerError: the client's error.
        """
        if self.owned and not self.changing and self.awaits_redelivery:
            await self.receiver.call(self.receiver.consumer.redeliver_unacknowledged_messages)

    def detect_change(self, state: PartitionState) -> Change:
        """Compare our state with the broker's."""
        if self.owned and state.owner not in {"", self.mark}:
            return Change.LOST
        if state.active == self.consumer_name:
            return Change.NONE if self.owned else Change.ASSIGNED
        if not self.owned or not state.active:
            return Change.NONE
        return Change.REVOKED if state.connection == self.connection else Change.LOST

    def is_unreleased(self, state: PartitionState) -> bool:
        """Whether another member waits for our release of a partition that we no longer own."""
        waits = not self.owned and state.active != self.consumer_name
        return waits and self.mark != "" and self.mark == state.owner != state.properties.get(RELEASED)

    def release(self) -> None:
        """The partition is no longer ours."""
        self.owned = self.changing = False
        self.restart()

    def _delivery_started(self, offset: int) -> bool:
        """Whether the expected delivery has started, at or before this position."""
        expected, last_seen = self._expected, self._last_seen
        if expected is None:
            return True
        # A requested redelivery starts at or below all earlier arrivals.
        if offset <= last_seen or expected <= offset <= expected + 1:
            self._expected = None
            return True
        self._last_seen = offset
        self._received = max(self._received, offset)
        return False

    def was_rewound(self, cursor: int) -> bool:
        """Whether another member moved the group's cursor below our acks; undetectable within a partly acked batch."""
        return cursor < self.acked - self.acked % PER_ENTRY

    def target(self, position: int | None, bounds: Bounds) -> int:
        """The target of a seek; None means the committed position or the start, at least the first of the log.

        :raises OffsetOutOfRange: the log does not hold the position.
        """
        if position is None:
            position = self.committed if self.committed is not None else self.start
            position = bounds.first if position is None else max(position, bounds.first)
        if position < bounds.first or is_beyond(position, bounds.next):
            raise OffsetOutOfRange(
                f"Position {position} of {self.topic_partition.topic}[{self.topic_partition.partition}] "
                f"is not in the log, which holds {bounds.first} to {bounds.next}"
            )
        return position

    def commit_id(self, position: int) -> Any:
        """The message id to ack cumulatively so that `position` is next; None if there is nothing to ack."""
        found: Any = None
        while self._ids and self._ids[0][0] < position:
            found = self._ids.popleft()[1]
        if found is not None:
            self.acked = next_position(found)
            return found
        ledger, entry, _ = unpack(position)
        self.acked = pack(ledger, entry, 0)
        # A constructed id can ack whole entries, but not part of a batch.
        return make_id(self.topic_partition.partition, pack(ledger, entry - 1, 0))._msg_id if entry else None


def take_records(
    partitions: list[AssignedPartition], max_records: int, max_bytes: int
) -> tuple[list[Record[Any]], list[AssignedPartition]]:
    """Take buffered records, and the partitions they came from, which move to the end of `partitions`.

    At most `max_records` and, except for the first record, `max_bytes`; grouped by partition.
    """
    records: list[Record[Any]] = []
    served: list[AssignedPartition] = []
    size = 0
    for partition in tuple(partitions):
        if len(records) >= max_records or size > max_bytes:
            break
        if not partition.buffer or partition.paused or partition.changing or not partition.owned:
            continue
        before = len(records)
        while partition.buffer and len(records) < max_records:
            size += partition.buffer[0].size
            if records and size > max_bytes:
                break
            records.append(partition.buffer.popleft())
        if len(records) > before:
            served.append(partition)
    for partition in served:
        partitions.remove(partition)
        partitions.append(partition)
    return records, served
