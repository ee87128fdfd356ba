"""`MessageTopics`: whether the topics still exist to which messages are to be sent again.

A broker refuses a whole transaction for one record to a topic that is gone, and the client cannot tell which, so that
this is asked before. *Concurrency.* Used on the loop. *Failure.* A topic of which nobody tells counts as there.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Final

from broker.errors import BrokerError, TopicNotFound
from broker.hooks import logger
from broker_kafka.admin_requests import describe
from broker_kafka.connection import Connection

__all__ = ["MessageTopics"]

_AGE: Final = 5.0
"""Seconds for which an answer is not asked for again."""


class MessageTopics:
    """Made without I/O."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._known: dict[str, tuple[TopicNotFound | None, float]] = {}
        self._told: set[str] = set()

    async def missing(self, topics: Iterable[str]) -> dict[str, TopicNotFound]:
        """Those of the topics that do not exist."""
        found: dict[str, TopicNotFound] = {}
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
        """Whether nobody was told yet that it is missing; once for all marker partitions, until it is there again."""
        is_news = topic not in self._told
        self._told.add(topic)
        return is_news

    async def _ask(self, topic: str) -> TopicNotFound | None:
        try:
            await describe(self._connection, topic)
        except TopicNotFound as error:
            return error
        except BrokerError as error:
            logger.info("Whether topic %r exists is asked again: %s", topic, error)
        return None
