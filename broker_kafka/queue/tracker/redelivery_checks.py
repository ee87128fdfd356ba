"""`GroupPositions`: whether the group of a message's readers has committed a position behind it.

A worker writes the START of a message first and commits its position then. If it dies in between, the log hands the
message out to another, and a tracker that sent it again would double it. *Concurrency.* Used on the loop; questions
are asked for all partitions of a group at once. *Failure.* What the brokers do not tell counts as not committed, and
is asked again. If they refuse to tell, or do not for long, such messages wait: that is told, once until they tell.

MERGED broker_kafka.queue.tracker.redelivery_checks: `MessageTopics`: whether the topics take anything to which messages are to be sent again.

A broker refuses a whole transaction for one record to a topic that is gone, or that this user may not write to, and the
client cannot tell which, so that this is asked before. *Concurrency.* Used on the loop. *Failure.* A topic of which
nobody tells counts as one that takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Final

from confluent_kafka import TopicPartition as NativePartition
from confluent_kafka.admin import AclOperation  # pyright: ignore[reportPrivateImportUsage]

from broker import BrokerError, NotAuthorized, TopicNotFound, TopicPartition
from broker.driver import logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.names import is_topic_name
from broker_kafka.cluster.requests import committed, describe
from broker_kafka.errors import translate
from broker_kafka.queue.markers.wire import MessageId

__all__ = ["EVER", "GroupPositions", "MessageTopics"]


_POSITION_AGE: Final = 0.5
"""Seconds for which an answer is not asked for again. One that says that a position is behind a message stays true."""
_LONG: Final = 30.0
"""Seconds without an answer after which that is told."""
_TOLD: Final = -1.0


EVER: Final = -2
"""Before any time at which a log is read."""
_ANSWERS: Final = 8


class _Known:
    """What is known of one partition's position.

    :ivar until: the monotonic time in seconds from which it is asked for again.
    """

    __slots__ = ("_answers", "until")

    def __init__(self) -> None:
        self.until = 0.0
        self._answers: list[tuple[int, int]] = []
        """Rising positions, and when each was known. Of those that were forgotten the next one tells, with its time."""

    def tell(self, position: int, at: int) -> None:
        answers = self._answers
        if answers and position < answers[-1][0]:
            # Somebody has set it back, and its readers read again what lies behind.
            answers.clear()
        if not answers or position > answers[-1][0]:
            answers.append((position, at))
            del answers[:-_ANSWERS]

    def since(self, offset: int) -> int | None:
        """When it was known first that the position is behind this message; None if it is not."""
        return next((at for position, at in self._answers if position > offset), None)


class GroupPositions:
    """:param subscription: the group of messages whose markers name no queue.
    :param warn: told of what operators have to mend.
    """

    def __init__(self, connection: Connection, subscription: str, warn: Callable[[str], object]) -> None:
        self._connection = connection
        self._subscription = subscription
        self._warn = warn
        self._troubled: dict[str, float] = {}
        """Groups whose positions are not told, and the monotonic time since when, or `_TOLD`."""
        self._known: dict[tuple[str, TopicPartition], _Known] = {}

    async def behind(self, messages: Iterable[MessageId]) -> dict[MessageId, int]:
        """Those of the messages that the readers' position has passed.

        With each since when that is known, in milliseconds of the local monotonic time: who has committed it wrote its
        markers before. V1's, which name no topic, count as passed since `EVER`.
        """
        found: dict[MessageId, int] = {}
        waiting: dict[str, dict[TopicPartition, list[MessageId]]] = {}
        now = monotonic()
        for message in messages:
            group, place = self._place(message)
            known = self._known.get((group, place))
            since = EVER if not message.topic else known.since(message.offset) if known is not None else None
            if since is not None:
                found[message] = since
            elif known is None or known.until < now:
                waiting.setdefault(group, {}).setdefault(place, []).append(message)
        for group, places in waiting.items():
            await self._ask(group, list(places))
            for place, asked in places.items():
                known = self._known[group, place]
                found |= {each: since for each in asked if (since := known.since(each.offset)) is not None}
        return found

    def _place(self, message: MessageId) -> tuple[str, TopicPartition]:
        return message.queue or self._subscription, TopicPartition(message.topic, message.partition)

    async def _ask(self, group: str, places: list[TopicPartition]) -> None:
        asked_at = monotonic()
        answer = await committed(self._connection, group, [NativePartition(*place) for place in places])
        now = monotonic()
        for place in places:
            self._known.setdefault((group, place), _Known()).until = now + _POSITION_AGE
        errors = [answer] if isinstance(answer, BrokerError) else []
        for each in () if isinstance(answer, BrokerError) else answer:
            if each.error is None:
                self._known[group, TopicPartition(each.topic, each.partition)].tell(each.offset, int(1000 * now))
            else:
                errors.append(translate(each.error, f"Reading the offsets of group {group!r}", resources=[each.topic]))
        self._tell(group, errors, asked_at)

    def _tell(self, group: str, errors: Sequence[BrokerError], asked_at: float) -> None:
        # A topic that is gone is told by who sends to it.
        lasting = [error for error in errors if not error.retriable and not isinstance(error, TopicNotFound)]
        if not lasting and not any(error.retriable for error in errors):
            self._troubled.pop(group, None)
            return
        since = self._troubled.setdefault(group, asked_at)
        # The client tells nothing of a group that it may not ask about.
        if since != _TOLD and (lasting or monotonic() - since >= _LONG):
            self._troubled[group] = _TOLD
            self._warn(
                f"Messages of subscription {group!r} that are to come again wait, since it is not known which of them "
                f"its consumers have committed: {(lasting or errors)[0].message}. If the brokers are well, grant Read "
                f"on group {group!r} and Describe on its topics"
            )
        else:
            logger.info("The positions of group %r are asked for again: %s", group, errors[0])


_TOPIC_AGE: Final = 5.0
"""Seconds for which an answer is not asked for again."""
_WRITES: Final = frozenset({AclOperation.WRITE, AclOperation.ALL})


class MessageTopics:
    """Made without I/O."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._known: dict[str, tuple[BrokerError | None, float]] = {}
        self._told: set[str] = set()

    async def closed(self, topics: Iterable[str]) -> dict[str, BrokerError]:
        """Those of the topics that take nothing, and why: `TopicNotFound` is one that does not exist."""
        found: dict[str, BrokerError] = {}
        for topic in topics:
            error, until = self._known.get(topic, (None, 0.0))
            if until < monotonic():
                error = await self._ask(topic)
                self._known[topic] = error, monotonic() + _TOPIC_AGE
            if error is None:
                self._told.discard(topic)
            else:
                found[topic] = error
        return found

    def is_news(self, topic: str) -> bool:
        """Whether nobody was told yet that it is closed; once for all marker partitions, until it is open again."""
        is_news = topic not in self._told
        self._told.add(topic)
        return is_news

    async def _ask(self, topic: str) -> BrokerError | None:
        if not is_topic_name(topic):
            # Brokers that are asked for it may not answer.
            return TopicNotFound(f"Topic {topic[:60]!r} is none that Kafka can have")
        try:
            return _refusal(topic, await describe(self._connection, topic, rights=True))
        except (TopicNotFound, NotAuthorized) as error:
            return error
        except BrokerError as error:
            logger.info("Whether topic %r can be written to is asked again: %s", topic, error)
        return None


def _refusal(topic: str, described: Any) -> BrokerError | None:
    """Why a topic that is there takes nothing of this user, if it does not."""
    if described.is_internal:
        return NotAuthorized(f"Topic {topic!r} is one of Kafka's own", advice="Nothing else can be written to it")
    rights = described.authorized_operations
    if not rights or not _WRITES.isdisjoint(rights):
        # Not every broker tells of rights.
        return None
    return NotAuthorized(f"This user may not write to topic {topic!r}", advice="Grant Write on it")
