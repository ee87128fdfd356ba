"""How many messages one tracker may send again now, so that leases which end by the thousand do not bury new messages.

Pure: seconds of a monotonic clock come in, none are looked up. *Concurrency.* On one event loop; all partitions of a
tracker share it.

`Redeliverer`: writes what one marker partition has to say: due messages again, dead letters, ENDs and renewals.

Each turn is one transaction: a message and the END of the one before it are on the brokers together or not at all.
Renewals have turns of their own, since a broker refuses all of a partition for one record.
*Concurrency.* One turn at a time, on the loop; markers may be read meanwhile. *Failure.* What single messages are
refused for is their own: they become dead letters, or wait, and hold up no others. Trouble of all is repeated after a
while. `Doubtful` is for the caller, who has to read the partition anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from time import monotonic
from typing import Final, NamedTuple

from msgspec.structs import replace

from broker import BrokerError, ConfigurationError, MessageTooLarge, TopicNotFound, TopicPartition
from broker_kafka.errors import kafka_error
from broker_kafka.queue.markers.fenced_writer import Doubtful, Entry, FencedWriter, NotWritten
from broker_kafka.queue.markers.lease import Lease, State
from broker_kafka.queue.markers.marker_topic import MARKER_HEADROOM
from broker_kafka.queue.markers.redelivery import again, dead_letter, is_exhausted
from broker_kafka.queue.markers.wire import TIME_MARKER, Content, Kind, Marker, MessageId, read_content, write_marker
from broker_kafka.queue.tracker.partition_state import AssignedPartition
from broker_kafka.queue.tracker.redelivery_checks import EVER, GroupPositions, MessageTopics
from broker_kafka.queue.tracker.tracker_state import TrackerCounts, TrackerOptions

__all__ = ["Redeliverer", "RedeliveryRate"]


_SHARE: Final = 0.05
"""Seconds whose messages are worth a transaction."""


class RedeliveryRate:
    """A bucket that fills by so many messages a second, and holds those of one second.

    :param per_second: at least 1.
    """

    def __init__(self, per_second: float) -> None:
        self._per_second: Final = per_second
        self._tokens = per_second
        self._at: float | None = None

    def room(self, now: float) -> int:
        """How many messages may be sent at this time."""
        if self._at is not None:
            self._tokens = min(self._per_second, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        return int(self._tokens)

    def spend(self, count: int) -> None:
        """So many are sent, of those that `room` told."""
        self._tokens -= count

    def pause(self, now: float) -> float:
        """Seconds until it is worth to look for room again; 0 if there is some."""
        if self.room(now) >= 1:
            return 0.0
        return (max(1.0, _SHARE * self._per_second) - self._tokens) / self._per_second


_RENEWALS: Final = 100
_READ_BACK_MS: Final = 1_000
"""What was written to be read here is not written again for so long."""
_LEAST_WAIT_MS: Final = 1_000
_LONGEST_WAIT_MS: Final = 60_000
_LONGEST_REFUSAL: Final = 3600.0
_NO_TOPIC: Final = ConfigurationError(
    "Its markers name no topic, as those of kafka-mq-go do",
    advice="Name the topic of such messages with broker tracker --unnamed, or drop them with broker queue purge",
)


class _Refused(NamedTuple):
    """A message that the brokers do not take.

    :ivar again_at: the local time in milliseconds at which it is tried again.
    :ivar letter: whether its dead letter was refused as well.
    :ivar times: how often it was refused.
    """

    reason: str
    again_at: float
    letter: bool
    times: int


class _Turn:
    """What one transaction holds."""

    __slots__ = ("bytes", "dead", "entries", "owners", "renewals", "sent")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.owners: list[Lease | None] = []
        self.sent: list[Lease] = []
        self.dead: set[MessageId] = set()
        self.renewals: list[Lease] = []
        self.bytes = 0

    def add(self, entry: Entry, owner: Lease | None = None) -> None:
        self.entries.append(entry)
        self.owners.append(owner)
        self.bytes += len(entry.value or b"")


class Redeliverer:
    """:param place: the marker partition.
    :param positions: of the groups that read the messages.
    :param topics: where the messages lie.
    :param rate: of all partitions of the tracker.
    :ivar told: what has to be told to operators, of messages that were refused.
    """

    def __init__(
        self,
        place: TopicPartition,
        positions: GroupPositions,
        topics: MessageTopics,
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
        self._renewals = _RENEWALS
        self._unrenewed: dict[MessageId, float] = {}
        """Messages whose START is not taken again, and the local time in seconds at which it is tried anew."""
        self._said_at = -_READ_BACK_MS
        self.told: list[str] = []

    async def turn(self, partition: AssignedPartition, writer: FencedWriter, at: int) -> bool:
        """Write what is due at this local time, at most one batch; whether there was any.

        :raises Doubtful: the partition is to be read anew, with another writer.
        """
        turn = _Turn()
        self._prune(partition)
        self._renews = not self._renews
        if self._renews:
            self._take_renewals(partition, turn)
        if not turn.entries:
            await self._take_due(partition, turn)
        if not turn.entries and not self._renews:
            self._take_renewals(partition, turn)
        self._take_notes(partition, turn, at)
        if not turn.entries:
            return False
        try:
            await writer.write(turn.entries)
        except NotWritten as error:
            told_apart = self._judge(turn, error.refused)
            self._give_back(partition, turn, 0 if told_apart else int(1000 * self._options.retry_after))
        except Doubtful as error:
            error.explained = self._judge(turn, error.refused)
            raise
        else:
            self._written(partition, turn)
        return True

    def pause(self) -> float:
        """Seconds until more messages may be sent; 0 if some may now."""
        return self._rate.pause(monotonic())

    def _prune(self, partition: AssignedPartition) -> None:
        """Forget refused messages that have ended by themselves, such as by a late ack.

        Only once all is read: what is not read yet may be open, and is not to be tried again at once.
        """
        if (self._refused or self._unrenewed) and partition.is_open:
            find = partition.markers.find
            self._refused = {message: told for message, told in self._refused.items() if find(message) is not None}
            self._unrenewed = {message: at for message, at in self._unrenewed.items() if find(message) is not None}

    # -- what goes into it ---------------------------------------------------------------------------------

    async def _take_due(self, partition: AssignedPartition, turn: _Turn) -> None:
        due = self._due(partition)
        if not due:
            return
        seen = {lease.id: lease.touched for lease in due}
        contents = {lease.id: read_content(lease.data) for lease in due}
        # Who gives a message back had it, and has it only once the position has passed it.
        behind = await self._positions.behind([lease.id for lease in due if _may_be_ahead(lease)])
        topics = {topic for lease in due for topic in (lease.id.topic, contents[lease.id].dead_letter) if topic}
        closed = await self._topics.closed(topics)
        now = 1000 * monotonic()
        for lease in due:
            if lease.state != State.SENDING:
                continue  # it has ended meanwhile
            refused, content = self._refused.get(lease.id), contents[lease.id]
            reason = _letter_reason(lease, content, refused, closed.get(lease.id.topic))
            topic = content.dead_letter if reason else lease.id.topic
            if lease.touched != seen[lease.id]:
                # Another reader has started it.
                partition.failed(lease, lease.after_ms)
                lease.due_since = -1
            elif _may_be_ahead(lease) and lease.id not in behind and not _is_gone(closed.get(lease.id.topic)):
                # Its worker has written START and no position: the log hands it out again, while there is one.
                self._counts.waiting_for_readers += 1
                period = 0 if lease.released else lease.after_ms
                partition.failed(lease, min(_LONGEST_WAIT_MS, max(_LEAST_WAIT_MS, period)))
            elif behind.get(lease.id, EVER) >= partition.read_at:
                # Another who took it meanwhile wrote a START before the position, which is to be read first.
                _put_back(partition, lease)
            elif refused is not None and refused.again_at > now:
                partition.failed(lease, int(refused.again_at - now) + 1)
            elif topic in closed:
                self._keep(partition, lease, closed[topic], topic)
            else:
                self._take(partition, lease, content, reason, turn)
        self._rate.spend(len(turn.sent))

    def _due(self, partition: AssignedPartition) -> list[Lease]:
        """What fits into one transaction, the longest due first; all else keeps its place."""
        due = partition.due(min(self._limit, self._rate.room(monotonic())))
        size = 0
        for count, lease in enumerate(due):
            size += len(lease.data)
            if count and size > self._options.batch_bytes:
                for later in due[count:]:
                    _put_back(partition, later)
                return due[:count]
        return due

    def _take(self, partition: AssignedPartition, lease: Lease, content: Content, reason: str, turn: _Turn) -> None:
        """:param reason: why it becomes a dead letter; empty if it is sent again."""
        topic = lease.id.topic or self._options.topic
        if not topic:
            self._refuse(lease.id, _NO_TOPIC, letter=True)
            partition.failed(lease, int(1000 * self._options.refused_after))
            return
        named = replace(lease, id=lease.id._replace(topic=topic))
        if reason:
            turn.dead.add(lease.id)
            sending = dead_letter(named, content, reason)
        else:
            sending = again(named, content)
        turn.add(Entry(*sending), lease)
        turn.add(self._marker(Marker(kind=Kind.END, id=lease.id)), lease)
        turn.sent.append(lease)

    def _keep(self, partition: AssignedPartition, lease: Lease, error: BrokerError, topic: str) -> None:
        """The topic that a message is due for takes nothing: it waits until it does."""
        if _is_gone(error):
            self._counts.refused += 1
            if self._topics.is_news(topic):
                self.told.append(f"Messages that are due wait, because their topic is gone: {error}")
            partition.failed(lease, int(1000 * self._options.refused_after))
            return
        self._refuse(lease.id, error, letter=True, told=self._topics.is_news(topic))
        partition.failed(lease, int(self._refused[lease.id].again_at - 1000 * monotonic()) + 1)

    def _take_renewals(self, partition: AssignedPartition, turn: _Turn) -> None:
        now = monotonic()
        for lease in partition.to_renew(self._renewals + len(self._unrenewed)):
            full = len(turn.renewals) == self._renewals or turn.bytes > self._options.batch_bytes
            if full or self._unrenewed.get(lease.id, now) > now:
                partition.markers.renewal_failed(lease)
                continue
            turn.add(self._marker(partition.renewal(lease), read_content(lease.data)))
            turn.renewals.append(lease)

    def _take_notes(self, partition: AssignedPartition, turn: _Turn, at: int) -> None:
        """What is said to whoever reads the markers, oneself above all."""
        if at - self._said_at < _READ_BACK_MS:
            return
        before = len(turn.entries)
        for message in partition.markers.to_end():
            turn.add(self._marker(Marker(kind=Kind.END, id=message)))
        if not turn.entries and partition.wants_time(at):
            turn.add(self._marker(TIME_MARKER))
        if len(turn.entries) > before:
            self._said_at = at

    def _marker(self, marker: Marker, content: Content | None = None) -> Entry:
        v1 = marker.kind == Kind.END and marker.id.is_v1
        return Entry(self._place.topic, None, write_marker(marker, content, v1=v1), (), self._place.partition)

    # -- what became of it ---------------------------------------------------------------------------------

    def _written(self, partition: AssignedPartition, turn: _Turn) -> None:
        now = partition.clock.estimate(int(1000 * monotonic()))
        for lease in turn.sent:
            self._counts.lateness.add(max(0, now - lease.due_since) / 1000)
            self._counts.delay.add(max(0, now - lease.started) / 1000)
        self._counts.dead_lettered += len(turn.dead)
        if turn.dead:
            self.told.append(_told_dead(turn.dead))
        self._counts.redelivered += len(turn.sent) - len(turn.dead)
        self._counts.renewed += len(turn.renewals)
        if turn.renewals:
            self._renewals = min(_RENEWALS, 2 * self._renewals)
        for lease in turn.sent:
            self._refused.pop(lease.id, None)
        self._limit = min(self._options.batch, 2 * self._limit)

    def _give_back(self, partition: AssignedPartition, turn: _Turn, delay_ms: int) -> None:
        for lease in turn.renewals:
            partition.markers.renewal_failed(lease)
        for lease in turn.sent:
            partition.failed(lease, delay_ms)

    def _judge(self, turn: _Turn, refused: Mapping[int, BrokerError]) -> bool:
        """Tell messages that are refused from those that were in a batch with them; whether there are any."""
        if turn.renewals:
            return self._judge_renewals(turn.renewals, refused)
        lasting = {
            owner.id: error
            for place, error in refused.items()
            if (owner := turn.owners[place]) is not None and not error.retriable
        }
        own = lasting
        if len(turn.sent) > 1 and any(map(_is_of_a_broker, lasting.values())):
            # A broker refuses whole batches: look at fewer together, until it is clear which message it is.
            self._limit = max(1, len(turn.sent) // 4)
            own = {message: error for message, error in lasting.items() if not _is_of_a_broker(error)}
        for message, error in own.items():
            self._refuse(message, error, letter=message in turn.dead)
        return bool(lasting)

    def _judge_renewals(self, renewals: Sequence[Lease], refused: Mapping[int, BrokerError]) -> bool:
        error = next((error for error in refused.values() if not error.retriable), None)
        if error is None:
            return False
        if len(renewals) > 1:
            self._renewals = max(1, len(renewals) // 4)
            return True
        message = renewals[0].id
        self._counts.refused += 1
        self._unrenewed[message] = monotonic() + _LONGEST_REFUSAL
        self.told.append(
            f"The START of message {message.topic}:{message.partition}:{message.offset} is not taken again, so that it "
            f"is lost if it is open for longer than {self._place.topic!r} keeps markers: {error}"
        )
        return True

    def _refuse(self, id: MessageId, error: BrokerError, *, letter: bool, told: bool = True) -> None:
        self._counts.refused += 1
        before = self._refused.get(id)
        letter = letter or (before is not None and before.letter)
        times = 1 if before is None else before.times + 1
        # The dead letter is tried at once; else ever more seldom, since a refusal may have the partition read anew.
        seconds = min(_LONGEST_REFUSAL, self._options.refused_after * 2 ** min(times, 16) / 2)
        wait = 1000 * seconds if letter or times > 1 else 0.0
        self._refused[id] = _Refused(error.message, 1000 * monotonic() + wait, letter, times)
        if told and (times == 1 or letter):
            self.told.append(
                f"Message {id.topic}:{id.partition}:{id.offset} is not taken: {error}{_mend(error, id.topic)}"
            )


def _mend(error: BrokerError, topic: str) -> str:
    """What to do about it, where its error cannot know."""
    if not isinstance(error, MessageTooLarge):
        return ""
    return (
        f". With what is added to it when it is sent again it is larger than max.message.bytes of {topic!r}, of its "
        f"dead-letter topic or of the marker topic: raise that by {MARKER_HEADROOM}, with bus.admin.ensure_topic(name, "
        "max_message_bytes=…); it stays open until then"
    )


def _letter_reason(lease: Lease, content: Content, refused: _Refused | None, closed: BrokerError | None) -> str:
    """Why a message that is due becomes a dead letter; empty if it is sent again.

    :param closed: why its topic takes nothing.
    """
    if not content.dead_letter:
        return ""
    if is_exhausted(lease, content):
        return f"delivered {'once' if lease.attempt == 1 else f'{lease.attempt} times'} without being settled"
    if refused is not None:
        return "" if refused.letter else f"it could not be sent again: {refused.reason}"
    return "" if closed is None else f"it could not be sent again: {closed.message}"


def _is_gone(closed: BrokerError | None) -> bool:
    """Whether a topic takes nothing because there is none."""
    return isinstance(closed, TopicNotFound)


def _put_back(partition: AssignedPartition, lease: Lease) -> None:
    """Have it due as before, so that it keeps its place among those that are."""
    partition.failed(lease, lease.deadline - (partition.clock.now or 0))


def _may_be_ahead(lease: Lease) -> bool:
    """Whether its readers' position may not have passed it; a release tells so, but of what waited from the first."""
    return not lease.released or not lease.attempt


def _is_of_a_broker(error: BrokerError) -> bool:
    """Whether a broker said it, and not the client, whose own codes are below 0."""
    found = kafka_error(error.native) if error.native is not None else None
    return found is not None and found.code() > 0


def _told_dead(messages: Collection[MessageId]) -> str:
    first = min(messages)
    others = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
    return f"Message {first.topic}:{first.partition}:{first.offset}{others} went to the dead letters"
