"""`GroupPartition`: one partition as a member of a group sees it: its consumer, what it has brought, what is committed.

Used from the loop only. A message id of the client's own is kept for each record that was handed over and is not
committed, because only these let Pulsar ack a part of a batch; at most `KEPT_IDS` of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from broker import Bounds, LeaseLost, OffsetOutOfRange, Record, TopicPartition
from broker_pulsar.client import Consumer, pulsar
from broker_pulsar.client import Message as NativeMessage
from broker_pulsar.connection import Connection
from broker_pulsar.errors import translate
from broker_pulsar.log_reader import make_record
from broker_pulsar.message_ids import PER_ENTRY, after, built_id, offset_of, pack, unpack
from broker_pulsar.names import TopicPath
from broker_pulsar.receiving import Receiver, batch_policy

__all__ = ["KEPT_IDS", "GroupPartition", "ask_again", "not_ours", "subscribe_part", "take_from"]

KEPT_IDS: Final = 100_000
"""A commit below what is kept acks whole batches only, and so repeats a part of one after a crash."""


class GroupPartition:
    """State of one partition; `start` is where the subscription stood when we joined."""

    def __init__(self, place: TopicPartition, consumer_name: str, start: int | None) -> None:
        self.place: Final = place
        self.consumer_name: Final = consumer_name
        self.receiver: Receiver | None = None
        self.owned = self.paused = self.changing = False
        """`changing`: it is being taken over, given up or moved, and what arrives meanwhile is not ours."""
        self.connection = ""
        """The connection over which we own it, as the broker calls it and was last seen to."""
        self.brought = False
        """Whether anything came since it began, so that what is left behind is known to come."""
        self.start: Final = start
        self.committed = start
        self.cursor = start
        """Where the broker's cursor stands, as far as is known: what is committed, or where a seek put it since."""
        self.acked = 0
        """Below this the client drops what comes, as acked, until its consumer seeks."""
        self.buffer: deque[Record[Any]] = deque()
        self._next = 0
        self._received = -1
        """The highest position that the client gave us, ours or not."""
        self._expected: int | None = None
        """Where what comes has to begin, as long as it has not."""
        self._came = -1
        """The last position that came while it had not; -1 if nothing did."""
        self.asked_at: int | None = None
        """What the broker had sent us when it gave us the partition and was asked for all that is not committed; None
        if its consumer is another one since, of a seek or a reconnect, to which it sends unasked."""
        self._in_vain = 0
        """Looks since it began that saw something to come, while nothing came."""
        self._ids: deque[tuple[int, Any]] = deque()

    def arrived(self, messages: Sequence[NativeMessage]) -> bool:
        """Take what came; False if nothing of it is new."""
        if not self.owned or self.changing:
            self._received = max((self._received, *(offset_of(raw.message_id()) for raw in messages)))
            return False
        topic, number = self.place
        before = len(self.buffer)
        for raw in messages:
            message_id = raw.message_id()
            record = make_record(topic, number, raw, message_id)
            if not self._has_begun(record.offset) or record.offset < self._next:
                continue  # After a reconnect the broker begins again at what is committed.
            self._next = record.offset + 1
            self.brought = True
            self.buffer.append(record)
            self._ids.append((record.offset, message_id))
        self._received = max(self._received, self._next - 1)
        while len(self._ids) > KEPT_IDS:
            self._ids.popleft()
        return len(self.buffer) > before

    @property
    def astray(self) -> bool:
        """Whether what came is not the begin of what is to come."""
        return self._expected is not None and self._came >= 0

    def is_to_be_asked_for(self, backlog: int, sent: int) -> bool:
        """Whether the broker has to be asked anew for what is to come; called at each look at the group.

        It is if what came is astray, or if the broker was asked and sends nothing: a request that meets a read of its
        own, as at a change of consumers, may be dropped. The latter at the second, fourth, eighth such look, and not
        where it has sent anything: the client drops both copies of a large message whose first chunk comes twice.

        :param backlog: batches that the broker counts as not committed.
        :param sent: messages that it has sent us, as in `Standing`.
        """
        if self.astray:
            return True
        if self.brought or not backlog or sent != self.asked_at:
            self._in_vain = 0
            return False
        self._in_vain += 1
        return self._in_vain > 1 and self._in_vain.bit_count() == 1

    def begin(self, position: int = 0, *, expected: int | None = None) -> None:
        """Forget what came; from now on what lies below `position` is old.

        :param expected: where the first entry that is to come begins; 0 if nobody knows. The client keeps what it has
            of an earlier delivery, and hands it over before that. None if it keeps nothing.
        """
        self.buffer.clear()
        self._ids.clear()
        self._next = position
        # What was not received yet follows on what was, and lacks nothing.
        self._expected = expected if expected is not None and self._received >= expected else None
        self._came = -1
        self.brought = False
        self._in_vain = 0

    def stays(self, connection: str) -> None:
        """It is ours still, over this connection."""
        if connection != self.connection:
            self.connection, self.asked_at = connection, None

    def let_go(self) -> None:
        """It is not ours any more."""
        self.owned = self.changing = False
        self.begin()

    def _has_begun(self, offset: int) -> bool:
        """Whether the delivery that begins with the first entry to come has come to this position."""
        expected, came = self._expected, self._came
        if expected is None:
            return True
        # A delivery that was asked for begins at or below all that came of earlier ones.
        if offset <= came or expected <= offset <= expected + 1:
            self._expected = None
            return True
        self._came = offset
        self._received = max(self._received, offset)
        return False

    def is_behind(self, cursor: int) -> bool:
        """Whether the group's cursor is behind what this member acked, because another one went back; within the batch
        of which it acked a part, that cannot be told from what is left of it."""
        return cursor < self.acked - self.acked % PER_ENTRY

    def target(self, position: int | None, bounds: Bounds) -> int:
        """Where a seek goes; None is what is committed, or the start, as far as the log still has it.

        :raises OffsetOutOfRange: the log does not hold it.
        """
        if position is None:
            position = self.committed if self.committed is not None else self.start
            position = bounds.first if position is None else max(position, bounds.first)
        if not bounds.first <= position <= bounds.next:
            raise OffsetOutOfRange(
                f"Position {position} of {self.place.topic}[{self.place.partition}] is not in the log, "
                f"which holds {bounds.first} to {bounds.next}"
            )
        return position

    def commit_id(self, position: int) -> Any:
        """The id to ack up to, so that `position` is the next to read; None if there is nothing to ack."""
        found: Any = None
        while self._ids and self._ids[0][0] < position:
            found = self._ids.popleft()[1]
        if found is not None:
            self.acked = after(found)
            return found
        ledger, entry, _ = unpack(position)
        self.acked = pack(ledger, entry, 0)
        # Whole entries can be acked by an id that is made, parts of a batch cannot.
        return built_id(self.place.partition, pack(ledger, entry - 1, 0))._msg_id if entry else None


def not_ours(place: TopicPartition) -> LeaseLost:
    """What is asked of this partition is another member's to ask."""
    return LeaseLost(f"Partition {place.partition} of topic {place.topic!r} is not assigned to this member")


async def subscribe_part(connection: Connection, part: GroupPartition, log: TopicPath, group: str) -> Consumer:
    """The member's consumer of this partition.

    :raises BrokerError: the broker refuses it, or does not answer.
    """
    client, settings = connection.client, connection.settings
    try:
        return await connection.make(
            lambda: client.subscribe(
                log.url,
                group,
                consumer_type=pulsar.ConsumerType.Failover,
                consumer_name=part.consumer_name,
                initial_position=pulsar.InitialPosition.Earliest,
                receiver_queue_size=settings.receiver_queue,
                batch_receive_policy=batch_policy(settings.receiver_queue),
                batch_index_ack_enabled=True,
                start_message_id_inclusive=True,
            ),
            lambda consumer: consumer.close(),
        )
    except Exception as error:
        raise translate(error, f"Group {group!r} of topic {part.place.topic!r}") from error


async def ask_again(part: GroupPartition) -> None:
    """Have the broker send what is not committed once more, if the partition is ours still and was not moved since.

    :raises BrokerError: the client's error.
    """
    if part.receiver is not None and part.owned and not part.changing and (part.astray or part.asked_at is not None):
        await part.receiver.call(part.receiver.consumer.redeliver_unacknowledged_messages)


def take_from(
    parts: list[GroupPartition], max_records: int, max_bytes: int
) -> tuple[list[Record[Any]], list[GroupPartition]]:
    """Records that may be handed over, and the partitions they are of, which go to the end of `parts`.

    At most `max_records` and, but for one record, `max_bytes`; those of a partition are together.
    """
    taken: list[Record[Any]] = []
    served: list[GroupPartition] = []
    size = 0
    for part in tuple(parts):
        if len(taken) >= max_records or size > max_bytes:
            break
        if not part.buffer or part.paused or part.changing or not part.owned:
            continue
        before = len(taken)
        while part.buffer and len(taken) < max_records:
            size += part.buffer[0].size
            if taken and size > max_bytes:
                break
            taken.append(part.buffer.popleft())
        if len(taken) > before:
            served.append(part)
    for part in served:
        parts.remove(part)
        parts.append(part)
    return taken, served
