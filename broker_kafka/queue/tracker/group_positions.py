"""`GroupPositions`: whether the group of a message's readers has committed a position behind it.

A worker writes the START of a message first and commits its position then. If it dies in between, the log hands the
message out to another, and a tracker that sent it again would double it. *Concurrency.* Used on the loop; questions
are asked for all partitions of a group at once. *Failure.* What the brokers do not tell counts as not committed, and
is asked again. If they refuse to tell, or do not for long, such messages wait: that is told, once until they tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Final

from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError, TopicNotFound, TopicPartition
from broker.driver import logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.group_requests import committed_offsets
from broker_kafka.errors import translate
from broker_kafka.queue.markers.wire import MessageId

__all__ = ["EVER", "GroupPositions"]

_AGE: Final = 0.5
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
        answer = await committed_offsets(self._connection, group, [NativePartition(*place) for place in places])
        now = monotonic()
        for place in places:
            self._known.setdefault((group, place), _Known()).until = now + _AGE
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
