"""What a tracker looks up before it redelivers: the readers' committed position, and whether the topics take writes.

*Position.* A worker writes the START of a message first and commits its position then. If it dies in between, the log
hands the message to another member, and a redelivery would duplicate it. *Topics.* A broker refuses a whole transaction
for one record to a topic that does not exist or that this user may not write to, and the client cannot say which.

*Forged names.* Any writer of the marker topic can invent groups and topics, and each look-up takes a request. Names
that are not known to exist get a quarter of the time; until they are looked up their messages wait, and no others.

*Concurrency.* On the loop; one request serves all partitions of a group. *Failure.* A position that the brokers do not
report counts as not committed, and a topic as writable; both are looked up again. Positions that are refused, or
missing for long, hold back their messages, with one warning until the brokers answer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final

from confluent_kafka import TopicPartition as NativePartition
from confluent_kafka.admin import AclOperation  # pyright: ignore[reportPrivateImportUsage]

from broker import BrokerError, NotAuthorized, TopicNotFound, TopicPartition
from broker.driver import logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.group_requests import committed_offsets
from broker_kafka.cluster.names import is_topic_name
from broker_kafka.cluster.requests import describe_topic
from broker_kafka.errors import translate
from broker_kafka.queue.markers.wire import MessageId

__all__ = ["ALWAYS", "GroupPositions", "TopicChecks"]

_POSITION_AGE: Final = 0.5
"""Seconds for which positions are kept. A position that has passed a message stays behind it."""
_LONG: Final = 30.0
"""Seconds without an answer after which a warning is due."""
_WARNED: Final = -1.0
ALWAYS: Final = -2
"""A time before any at which a log was read."""
_KEPT_ANSWERS: Final = 8

_SHARE: Final = 0.25
"""Of the time, for look-ups of names that may be forged; also the seconds that may be spent at once."""
_MOST_KNOWN: Final = 10_000
"""Answers that are kept, and then only those about names that exist."""
_MOST_REPORTED: Final = 100

_TOPIC_AGE: Final = 5.0
"""Seconds for which the rights on a topic are kept."""
_WRITES: Final = frozenset({AclOperation.WRITE, AclOperation.ALL})


class GroupPositions:
    """:param subscription: the group of messages whose markers name no queue.
    :param warn: called with what an operator has to do.
    :param topics: that the subscription is known to read.
    :ivar unchecked: of the last call, the messages whose positions were not looked up.
    """

    def __init__(
        self,
        connection: Connection,
        subscription: str,
        warn: Callable[[str], object],
        *,
        topics: Iterable[str] = (),
    ) -> None:
        self._connection = connection
        self._subscription = subscription
        self._warn = warn
        self._failing: dict[str, float] = {}
        """Groups whose positions cannot be read, and the monotonic time since when, or `_WARNED`."""
        self._known: dict[tuple[str, TopicPartition], _KnownPositions] = {}
        self._real: set[tuple[str, str]] = {(subscription, topic) for topic in topics}
        """Groups and topics with a committed position; others may be forged."""
        self._allowance = _Allowance()
        self.unchecked: frozenset[MessageId] = frozenset()

    async def passed(self, messages: Iterable[MessageId]) -> dict[MessageId, int]:
        """Those of the messages that the readers' position has passed.

        With each the time since when that is known, in milliseconds of the local monotonic clock: the reader wrote its
        markers before it committed. V1 markers name no topic, and their messages count as passed since `ALWAYS`.
        """
        found: dict[MessageId, int] = {}
        waiting: dict[str, dict[TopicPartition, list[MessageId]]] = {}
        now = monotonic()
        for message in messages:
            group, place = self._place(message)
            known = self._known.get((group, place))
            since = ALWAYS if not message.topic else known.since(message.offset) if known is not None else None
            if since is not None:
                found[message] = since
            elif known is None or known.until < now:
                waiting.setdefault(group, {}).setdefault(place, []).append(message)
        unchecked: list[MessageId] = []
        for group, places in waiting.items():
            real = [place for place in places if (group, place.topic) in self._real]
            new = [place for place in places if (group, place.topic) not in self._real]
            if real:
                await self._look_up(group, real)
            if new and self._allowance.has_time():
                with self._allowance.spent():
                    await self._look_up(group, new)
            elif new:
                unchecked += [each for place in new for each in places.pop(place)]
            for place, requested in places.items():
                known = self._known[group, place]
                found |= {each: since for each in requested if (since := known.since(each.offset)) is not None}
        self._forget()
        self.unchecked = frozenset(unchecked)
        return found

    def _forget(self) -> None:
        if len(self._known) > _MOST_KNOWN:
            self._known = {
                (group, place): known
                for (group, place), known in self._known.items()
                if (group, place.topic) in self._real
            }

    def _place(self, message: MessageId) -> tuple[str, TopicPartition]:
        return message.queue or self._subscription, TopicPartition(message.topic, message.partition)

    async def _look_up(self, group: str, places: list[TopicPartition]) -> None:
        requested_at = monotonic()
        answer = await committed_offsets(self._connection, group, [NativePartition(*place) for place in places])
        now = monotonic()
        for place in places:
            self._known.setdefault((group, place), _KnownPositions()).until = now + _POSITION_AGE
        errors = [answer] if isinstance(answer, BrokerError) else []
        for each in () if isinstance(answer, BrokerError) else answer:
            if each.error is None:
                self._known[group, TopicPartition(each.topic, each.partition)].add(each.offset, int(1000 * now))
                if each.offset >= 0:
                    self._real.add((group, each.topic))
            else:
                errors.append(translate(each.error, f"Reading the offsets of group {group!r}", resources=[each.topic]))
        self._report(group, errors, requested_at)

    def _report(self, group: str, errors: Sequence[BrokerError], requested_at: float) -> None:
        # A topic that does not exist is reported when a message is sent to it.
        lasting = [error for error in errors if not error.retriable and not isinstance(error, TopicNotFound)]
        if not lasting and not any(error.retriable for error in errors):
            self._failing.pop(group, None)
            return
        if group not in self._failing and len(self._failing) >= _MOST_REPORTED:
            return
        since = self._failing.setdefault(group, requested_at)
        # For a group that this user may not describe the client reports no reason.
        if since != _WARNED and (lasting or monotonic() - since >= _LONG):
            self._failing[group] = _WARNED
            self._warn(
                f"Due messages of subscription {group!r} are not redelivered, since the committed positions of its "
                f"consumers cannot be read: {(lasting or errors)[0].message}. If the brokers are up, grant Read on "
                f"group {group!r} and Describe on its topics"
            )
        else:
            logger.info("The positions of group %r are looked up again: %s", group, errors[0])


class _KnownPositions:
    """The committed positions of one partition, as they were learned.

    :ivar until: the monotonic time in seconds after which they are looked up again.
    """

    __slots__ = ("_answers", "until")

    def __init__(self) -> None:
        self.until = 0.0
        self._answers: list[tuple[int, int]] = []
        """Rising positions and when each was learned; the first that is kept stands in for those before it."""

    def add(self, position: int, at: int) -> None:
        answers = self._answers
        if answers and position < answers[-1][0]:
            # The group was reset, and reads again what lies behind.
            answers.clear()
        if not answers or position > answers[-1][0]:
            answers.append((position, at))
            del answers[:-_KEPT_ANSWERS]

    def since(self, offset: int) -> int | None:
        """When it was first known that the position has passed this offset; None if it has not."""
        return next((at for position, at in self._answers if position > offset), None)


class _Allowance:
    """A share of the time."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._at = monotonic()

    def has_time(self) -> bool:
        now = monotonic()
        self._spent = max(0.0, self._spent - (now - self._at) * _SHARE)
        self._at = now
        return self._spent < _SHARE

    @contextmanager
    def spent(self) -> Generator[None]:
        """Around what takes the time."""
        begun = monotonic()
        try:
            yield
        finally:
            self._spent += monotonic() - begun


class TopicChecks:
    """Which topics take writes of this user. Creating one does no I/O.

    :param topics: that are known to exist.
    :ivar unchecked: of the last call, the topics that it did not look up.
    """

    def __init__(self, connection: Connection, *, topics: Iterable[str] = ()) -> None:
        self._connection = connection
        self._known: dict[str, tuple[BrokerError | None, float]] = dict.fromkeys(topics, (None, 0.0))
        self._reported: set[str] = set()
        self._allowance = _Allowance()
        self.unchecked: frozenset[str] = frozenset()

    async def unwritable(self, topics: Iterable[str]) -> dict[str, BrokerError]:
        """Those of the topics that take no writes, and why; `TopicNotFound` if one does not exist."""
        found: dict[str, BrokerError] = {}
        unchecked: set[str] = set()
        for topic in topics:
            known = self._known.get(topic)
            error, until = known or (None, 0.0)
            if until < monotonic():
                if known is not None and not isinstance(error, TopicNotFound):
                    error = await self._look_up(topic)
                elif self._allowance.has_time():
                    with self._allowance.spent():
                        error = await self._look_up(topic)
                else:
                    unchecked.add(topic)
                    continue
                self._known[topic] = error, monotonic() + _TOPIC_AGE
            if error is None:
                self._reported.discard(topic)
            else:
                found[topic] = error
        if len(self._known) > _MOST_KNOWN:
            self._known = {
                topic: answer for topic, answer in self._known.items() if not isinstance(answer[0], TopicNotFound)
            }
        self.unchecked = frozenset(unchecked)
        return found

    def is_news(self, topic: str) -> bool:
        """Whether this topic was not reported yet: once for all marker partitions, until it takes writes again."""
        if topic in self._reported or len(self._reported) >= _MOST_REPORTED:
            return False
        self._reported.add(topic)
        return True

    async def _look_up(self, topic: str) -> BrokerError | None:
        if not is_topic_name(topic):
            # Brokers may never answer a request for such a name.
            return TopicNotFound(f"{topic[:60]!r} is no valid topic name on Kafka")
        try:
            return _refusal(topic, await describe_topic(self._connection, topic, rights=True))
        except (TopicNotFound, NotAuthorized) as error:
            return error
        except BrokerError as error:
            logger.info("Whether topic %r can be written to is looked up again: %s", topic, error)
        return None


def _refusal(topic: str, described: Any) -> BrokerError | None:
    """Why an existing topic takes no writes of this user; None if it does."""
    if described.is_internal:
        return NotAuthorized(f"Topic {topic!r} is one of Kafka's own", advice="Applications cannot write to it")
    rights = described.authorized_operations
    if not rights or not _WRITES.isdisjoint(rights):
        # Not every broker reports rights.
        return None
    return NotAuthorized(f"This user may not write to topic {topic!r}", advice="Grant Write on it")
