"""`Redeliverer`: writes what is due in one marker partition: redeliveries, dead letters, ENDs and renewals.

A turn is one transaction: a redelivered message and the END of its predecessor are on the brokers together or not at
all. Renewals have turns of their own, since a broker refuses all records of a partition for one.

*Concurrency.* One turn at a time, on the loop; markers may be read meanwhile. *Failure.* A message that the brokers
refuse becomes a dead letter, or waits, and holds up no others. What fails for all messages is retried after a pause.
`OutcomeUnknown` is for the caller, who has to read the partition again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from time import monotonic
from typing import Final, NamedTuple

from msgspec.structs import replace

from broker import BrokerError, ConfigurationError, MessageTooLarge, TopicNotFound, TopicPartition
from broker.driver import Backoff
from broker_kafka.errors import kafka_error
from broker_kafka.fenced_writer import FencedWriter, NotWritten, OutcomeUnknown, OutgoingRecord
from broker_kafka.queue.markers.lease import Lease, LeaseState
from broker_kafka.queue.markers.marker_topic import MARKER_HEADROOM
from broker_kafka.queue.markers.redelivery import dead_letter, is_exhausted, redelivery
from broker_kafka.queue.markers.wire import TIME_MARKER, Content, Kind, Marker, MessageId, read_content, write_marker
from broker_kafka.queue.tracker.partition_state import PartitionState
from broker_kafka.queue.tracker.redelivery_checks import ALWAYS, GroupPositions, TopicChecks
from broker_kafka.queue.tracker.tracker_state import TrackerCounts, TrackerOptions

__all__ = ["Redeliverer", "RedeliveryRate"]

_LEAST_SHARE: Final = 0.05
"""A pause lasts until so many seconds' worth of messages may be sent."""
_MAX_RENEWALS: Final = 100
_READ_BACK_MS: Final = 1_000
"""Markers that this tracker writes for itself are not repeated for so long."""
_LEAST_WAIT_MS: Final = 1_000
_READERS_WAIT_MS: Final = 5_000
"""How soon to look again whether the readers have passed a message; a lease may be hours long."""
_LONGEST_REFUSAL: Final = 3600.0
_NO_TOPIC: Final = ConfigurationError(
    "The markers of the message name no topic, as those of kafka-mq-go",
    advice="Name the topic of such messages with broker tracker --unnamed, or drop them with broker queue purge",
)


class Redeliverer:
    """:param place: the marker partition.
    :param positions: of the groups that read the messages.
    :param rate: shared by all partitions of the tracker.
    :ivar warnings: for operators, about messages that were refused; the caller clears it.
    """

    def __init__(
        self,
        place: TopicPartition,
        positions: GroupPositions,
        topics: TopicChecks,
        options: TrackerOptions,
        counts: TrackerCounts,
        rate: RedeliveryRate,
    ) -> None:
        self._place: Final = place
        self._positions: Final = positions
        self._topics: Final = topics
        self._options: Final = options
        self._counts: Final = counts
        self._rate: Final = rate
        self._limit = options.batch
        self._refused: dict[MessageId, _Refused] = {}
        self._renews = False
        """Whether this turn begins with renewals."""
        self._max_renewals = _MAX_RENEWALS
        self._unrenewed: dict[MessageId, float] = {}
        """Messages whose renewal was refused, and the local time in seconds at which it is retried."""
        self._housekept_at = -_READ_BACK_MS
        self.warnings: list[str] = []

    async def turn(self, partition: PartitionState, writer: FencedWriter, at: int) -> bool:
        """Write what is due at this local time, at most one batch; whether there was any.

        :raises OutcomeUnknown: the partition must be read again, with another writer.
        """
        turn = _Turn()
        self._prune(partition)
        self._renews = not self._renews
        if self._renews:
            self._add_renewals(partition, turn)
        if not turn.records:
            await self._add_due(partition, turn)
        if not turn.records and not self._renews:
            self._add_renewals(partition, turn)
        self._add_housekeeping(partition, turn, at)
        if not turn.records:
            return False
        try:
            await writer.write(turn.records)
        except NotWritten as error:
            handled = self._handle_refusals(turn, error.refused)
            self._return_all(partition, turn, 0 if handled else int(1000 * self._options.retry_after))
        except OutcomeUnknown as error:
            error.refusals_handled = self._handle_refusals(turn, error.refused)
            raise
        else:
            self._written(partition, turn)
        return True

    def pause(self) -> float:
        """Seconds until more messages may be sent; 0 if some may be sent now."""
        return self._rate.pause(monotonic())

    def _prune(self, partition: PartitionState) -> None:
        """Drop refused messages that have ended, by a late ack for instance.

        Only once the log is read: a message that was not read yet may be open, and must not be retried at once.
        """
        if (self._refused or self._unrenewed) and partition.is_open:
            find = partition.markers.find
            self._refused = {
                message: refusal for message, refusal in self._refused.items() if find(message) is not None
            }
            self._unrenewed = {message: at for message, at in self._unrenewed.items() if find(message) is not None}

    # -- filling a turn ------------------------------------------------------------------------------------

    async def _add_due(self, partition: PartitionState, turn: _Turn) -> None:
        due = self._due(partition)
        if not due:
            return
        seen = {lease.id: lease.touched for lease in due}
        contents = {lease.id: read_content(lease.data) for lease in due}
        # A released message was handed over before, so the position has passed it.
        passed = await self._positions.passed([lease.id for lease in due if _may_be_ahead(lease)])
        waiting = self._positions.unchecked
        unwritable = await self._topics.unwritable({lease.id.topic for lease in due if lease.id.topic})
        unchecked = self._topics.unchecked
        ready = [
            lease
            for lease in due
            if not _may_be_ahead(lease) or lease.id in passed or _is_gone(unwritable.get(lease.id.topic))
        ]
        letters = (
            {topic for lease in ready if (topic := contents[lease.id].dead_letter)} - unwritable.keys() - unchecked
        )
        unwritable |= await self._topics.unwritable(letters)
        unchecked |= self._topics.unchecked
        now = 1000 * monotonic()
        for lease in due:
            if lease.state != LeaseState.SENDING:
                continue  # it ended meanwhile
            refused, content = self._refused.get(lease.id), contents[lease.id]
            reason = _letter_reason(lease, content, refused, unwritable.get(lease.id.topic))
            topic = content.dead_letter if reason else lease.id.topic
            if lease.touched != seen[lease.id]:
                # Another consumer has started it.
                partition.failed(lease, lease.after_ms)
                lease.due_since = -1
            elif lease.id in waiting and not _is_gone(unwritable.get(lease.id.topic)):
                partition.failed(lease, _LEAST_WAIT_MS)
            elif _may_be_ahead(lease) and lease.id not in passed and not _is_gone(unwritable.get(lease.id.topic)):
                # The worker wrote the START and did not commit: the next reader of the partition gets the message.
                self._counts.waiting_for_readers += 1
                period = 0 if lease.released else lease.after_ms
                partition.failed(lease, min(_READERS_WAIT_MS, max(_LEAST_WAIT_MS, period)))
            elif passed.get(lease.id, ALWAYS) >= partition.read_at:
                # Another consumer may have written a START before it committed, which must be read first.
                _put_back(partition, lease)
            elif topic in unchecked:
                partition.failed(lease, _LEAST_WAIT_MS)
            elif refused is not None and refused.retry_at > now:
                partition.failed(lease, int(refused.retry_at - now) + 1)
            elif topic in unwritable:
                self._postpone(partition, lease, unwritable[topic], topic)
            else:
                self._add(partition, lease, content, reason, turn)
        self._rate.spend(len(turn.sent))

    def _due(self, partition: PartitionState) -> list[Lease]:
        """The leases that fit into one transaction, the longest due first; all others keep their place."""
        due = partition.due(min(self._limit, self._rate.room(monotonic())))
        size = 0
        for count, lease in enumerate(due):
            size += len(lease.data)
            if count and size > self._options.batch_bytes:
                for later in due[count:]:
                    _put_back(partition, later)
                return due[:count]
        return due

    def _add(self, partition: PartitionState, lease: Lease, content: Content, reason: str, turn: _Turn) -> None:
        """:param reason: why the message becomes a dead letter; empty if it is redelivered."""
        topic = lease.id.topic or self._options.topic
        if not topic:
            self._refuse(lease.id, _NO_TOPIC, letter=True)
            partition.failed(lease, int(1000 * self._options.refused_after))
            return
        named = replace(lease, id=lease.id._replace(topic=topic))
        if reason:
            turn.dead.add(lease.id)
            replacement = dead_letter(named, content, reason)
        else:
            replacement = redelivery(named, content)
        turn.add(OutgoingRecord(*replacement), lease)
        turn.add(self._marker(Marker(kind=Kind.END, id=lease.id)), lease)
        turn.sent.append(lease)

    def _postpone(self, partition: PartitionState, lease: Lease, error: BrokerError, topic: str) -> None:
        """The topic that a message is due for takes no writes: the message waits until it does."""
        if _is_gone(error):
            self._counts.refused += 1
            if self._topics.is_news(topic):
                self.warnings.append(f"Due messages wait, because their topic does not exist: {error}")
            partition.failed(lease, int(1000 * self._options.refused_after))
            return
        self._refuse(lease.id, error, letter=True, warn=self._topics.is_news(topic))
        partition.failed(lease, int(self._refused[lease.id].retry_at - 1000 * monotonic()) + 1)

    def _add_renewals(self, partition: PartitionState, turn: _Turn) -> None:
        now = monotonic()
        for lease in partition.to_renew(self._max_renewals + len(self._unrenewed)):
            full = len(turn.renewals) == self._max_renewals or turn.bytes > self._options.batch_bytes
            if full or self._unrenewed.get(lease.id, now) > now:
                partition.markers.renewal_failed(lease)
                continue
            turn.add(self._marker(partition.renewal(lease), read_content(lease.data)))
            turn.renewals.append(lease)

    def _add_housekeeping(self, partition: PartitionState, turn: _Turn, at: int) -> None:
        """Add markers without a message: ENDs behind late renewals, and time markers."""
        if at - self._housekept_at < _READ_BACK_MS:
            return
        before = len(turn.records)
        for message in partition.markers.to_end():
            turn.add(self._marker(Marker(kind=Kind.END, id=message)))
        if not turn.records and partition.wants_time(at):
            turn.add(self._marker(TIME_MARKER))
        if len(turn.records) > before:
            self._housekept_at = at

    def _marker(self, marker: Marker, content: Content | None = None) -> OutgoingRecord:
        v1 = marker.kind == Kind.END and marker.id.is_v1
        return OutgoingRecord(self._place.topic, None, write_marker(marker, content, v1=v1), (), self._place.partition)

    # -- outcomes ------------------------------------------------------------------------------------------

    def _written(self, partition: PartitionState, turn: _Turn) -> None:
        now = partition.clock.estimate(int(1000 * monotonic()))
        for lease in turn.sent:
            self._counts.lateness.add(max(0, now - lease.due_since) / 1000)
            self._counts.delay.add(max(0, now - lease.started) / 1000)
        self._counts.dead_lettered += len(turn.dead)
        if turn.dead:
            self.warnings.append(_dead_letter_warning(turn.dead))
        self._counts.redelivered += len(turn.sent) - len(turn.dead)
        self._counts.renewed += len(turn.renewals)
        if turn.renewals:
            self._max_renewals = min(_MAX_RENEWALS, 2 * self._max_renewals)
        for lease in turn.sent:
            self._refused.pop(lease.id, None)
        self._limit = min(self._options.batch, 2 * self._limit)

    def _return_all(self, partition: PartitionState, turn: _Turn, delay_ms: int) -> None:
        for lease in turn.renewals:
            partition.markers.renewal_failed(lease)
        for lease in turn.sent:
            partition.failed(lease, delay_ms)

    def _handle_refusals(self, turn: _Turn, refused: Mapping[int, BrokerError]) -> bool:
        """Note the messages that the brokers refuse, not others of their batch; whether any is refused."""
        if turn.renewals:
            return self._handle_refused_renewals(turn.renewals, refused)
        lasting = {
            owner.id: error
            for place, error in refused.items()
            if (owner := turn.owners[place]) is not None and not error.retriable
        }
        own = lasting
        if len(turn.sent) > 1 and any(map(_is_of_a_broker, lasting.values())):
            # A broker refuses whole batches: send fewer together, until the refused message is alone.
            self._limit = max(1, len(turn.sent) // 4)
            own = {message: error for message, error in lasting.items() if not _is_of_a_broker(error)}
        for message, error in own.items():
            self._refuse(message, error, letter=message in turn.dead)
        return bool(lasting)

    def _handle_refused_renewals(self, renewals: Sequence[Lease], refused: Mapping[int, BrokerError]) -> bool:
        error = next((error for error in refused.values() if not error.retriable), None)
        if error is None:
            return False
        if len(renewals) > 1:
            self._max_renewals = max(1, len(renewals) // 4)
            return True
        message = renewals[0].id
        self._counts.refused += 1
        self._unrenewed[message] = monotonic() + _LONGEST_REFUSAL
        self.warnings.append(
            f"The renewal of message {message.topic}:{message.partition}:{message.offset} is refused; the message is "
            f"lost if it stays open for longer than the retention of {self._place.topic!r}: {error}"
        )
        return True

    def _refuse(self, id: MessageId, error: BrokerError, *, letter: bool, warn: bool = True) -> None:
        self._counts.refused += 1
        before = self._refused.get(id)
        letter = letter or (before is not None and before.letter)
        backoff = Backoff(self._options.refused_after, _LONGEST_REFUSAL) if before is None else before.backoff
        seconds = backoff.next()
        # The dead letter is tried at once; other retries wait: a refusal may cost another read of the partition.
        wait = 1000 * seconds if letter or before is not None else 0.0
        self._refused[id] = _Refused(error.message, 1000 * monotonic() + wait, letter, backoff)
        if warn and (before is None or letter):
            self.warnings.append(
                f"Message {id.topic}:{id.partition}:{id.offset} is refused: {error}{_size_advice(error, id.topic)}"
            )


class RedeliveryRate:
    """A token bucket: leases that end by the thousand must not bury new messages. Pure.

    All partitions of a tracker share it, on one event loop. The bucket holds the messages of one second.

    :param per_second: messages, at least 1.
    """

    def __init__(self, per_second: float) -> None:
        self._per_second: Final = per_second
        self._tokens = per_second
        self._at: float | None = None

    def room(self, now: float) -> int:
        """How many messages may be sent at this monotonic time."""
        if self._at is not None:
            self._tokens = min(self._per_second, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        return int(self._tokens)

    def spend(self, count: int) -> None:
        """Count messages as sent."""
        self._tokens -= count

    def pause(self, now: float) -> float:
        """Seconds to wait for room; 0 if there is some."""
        if self.room(now) >= 1:
            return 0.0
        return (max(1.0, _LEAST_SHARE * self._per_second) - self._tokens) / self._per_second


class _Turn:
    """The content of one transaction."""

    __slots__ = ("bytes", "dead", "owners", "records", "renewals", "sent")

    def __init__(self) -> None:
        self.records: list[OutgoingRecord] = []
        self.owners: list[Lease | None] = []
        self.sent: list[Lease] = []
        self.dead: set[MessageId] = set()
        self.renewals: list[Lease] = []
        self.bytes = 0

    def add(self, record: OutgoingRecord, owner: Lease | None = None) -> None:
        self.records.append(record)
        self.owners.append(owner)
        self.bytes += len(record.value or b"")


class _Refused(NamedTuple):
    """A message that the brokers refuse.

    :ivar retry_at: the local time in milliseconds.
    :ivar letter: whether its dead letter was refused as well.
    :ivar backoff: of its retries.
    """

    reason: str
    retry_at: float
    letter: bool
    backoff: Backoff


def _size_advice(error: BrokerError, topic: str) -> str:
    if not isinstance(error, MessageTooLarge):
        return ""
    return (
        f". With the headers of a redelivery it is larger than max.message.bytes of {topic!r}, of its dead-letter "
        f"topic or of the marker topic: raise that by {MARKER_HEADROOM}; the message stays "
        "open until then"
    )


def _letter_reason(lease: Lease, content: Content, refused: _Refused | None, unwritable: BrokerError | None) -> str:
    """Why a due message becomes a dead letter; empty if it is redelivered.

    :param unwritable: why its topic takes no writes.
    """
    if not content.dead_letter:
        return ""
    if is_exhausted(lease, content):
        return f"delivered {'once' if lease.attempt == 1 else f'{lease.attempt} times'} without being settled"
    if refused is not None:
        return "" if refused.letter else f"it could not be redelivered: {refused.reason}"
    return "" if unwritable is None else f"it could not be redelivered: {unwritable.message}"


def _is_gone(unwritable: BrokerError | None) -> bool:
    """Whether a topic takes no writes because it does not exist."""
    return isinstance(unwritable, TopicNotFound)


def _put_back(partition: PartitionState, lease: Lease) -> None:
    """Make the lease due as before, so that it keeps its place."""
    partition.failed(lease, lease.deadline - (partition.clock.now or 0))


def _may_be_ahead(lease: Lease) -> bool:
    """Whether the readers' position may not have passed the message; it has if a consumer released it."""
    return not lease.released or not lease.attempt


def _is_of_a_broker(error: BrokerError) -> bool:
    """Whether a broker raised the error, and not the client, whose own codes are below 0."""
    found = kafka_error(error.native) if error.native is not None else None
    return found is not None and found.code() > 0


def _dead_letter_warning(messages: Collection[MessageId]) -> str:
    first = min(messages)
    others = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
    return f"Message {first.topic}:{first.partition}:{first.offset}{others} went to the dead-letter topic"
