"""`MessageTopics`: whether the topics take anything to which messages are to be sent again.

A broker refuses a whole transaction for one record to a topic that is gone, or that this user may not write to, and the
client cannot tell which, so that this is asked before. *Concurrency.* Used on the loop. *Failure.* A topic of which
nobody tells counts as one that takes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Any, Final

from confluent_kafka.admin import AclOperation  # pyright: ignore[reportPrivateImportUsage]

from broker import BrokerError, NotAuthorized, TopicNotFound
from broker.driver import logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.names import is_topic_name
from broker_kafka.cluster.requests import describe_topic

__all__ = ["MessageTopics"]

_AGE: Final = 5.0
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
                self._known[topic] = error, monotonic() + _AGE
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
            return _refusal(topic, await describe_topic(self._connection, topic, rights=True))
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
