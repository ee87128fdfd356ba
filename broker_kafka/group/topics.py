"""Which topics a group consumer reads: names, and patterns with exclusions; and the watch that keeps the subscription.

A pattern is matched here, with Python's `re`, and the client subscribes to names: the brokers' own patterns have no
exclusion, use another dialect in each group protocol, and need the right to describe topics.

`TopicWatch` adds new topics that match a pattern, and removes deleted ones. *Concurrency.* One task on the loop, asleep
between two checks. *Failure.* A check that fails is repeated: soon if the error is retriable, else at the next turn. A
missing explicit topic ends the consumer with TopicNotFound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from broker import BrokerError, ConfigurationError, TopicNotFound, TopicPartition, TopicPattern
from broker.driver import Backoff, check_name, logger, pause
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import partitions_of
from broker_kafka.cluster.requests import read_metadata
from broker_kafka.settings import KafkaSettings

__all__ = ["Subscription", "TopicWatch", "check_interval", "read_topics"]


@dataclass(frozen=True, slots=True)
class Subscription:
    """The `topics=` of a group consumer.

    :ivar names: explicit topics; exclusions do not apply to them.
    """

    names: tuple[str, ...]
    patterns: tuple[TopicPattern, ...]

    def matching(self, topics: Iterable[str]) -> list[str]:
        """The explicit topics, and those of `topics` that match a pattern, sorted."""
        found = {topic for topic in topics if any(pattern.matches(topic) for pattern in self.patterns)}
        return sorted(found | set(self.names))

    def __str__(self) -> str:
        return ", ".join([*self.names, *map(str, self.patterns)])


def read_topics(topics: str | TopicPattern | Sequence[str | TopicPattern]) -> Subscription:
    """Check the argument.

    :raises ConfigurationError: neither names nor patterns, or empty.
    :raises InvalidName: a name is not portable.
    """
    entries = topics if isinstance(topics, Sequence) and not isinstance(topics, str) else [topics]
    if not entries:
        raise ConfigurationError("topics is empty", advice="Name a topic, or give a TopicPattern")
    names: list[str] = []
    patterns: list[TopicPattern] = []
    for entry in entries:
        if isinstance(entry, TopicPattern):
            patterns.append(entry)
            continue
        if isinstance(entry, str) and entry.startswith("^"):
            raise ConfigurationError(
                f"topics has {entry!r}, which is a pattern of librdkafka",
                advice=f"Give TopicPattern(include={entry!r})",
            )
        names.append(check_name(entry, "topic"))
    return Subscription(tuple(dict.fromkeys(names)), tuple(patterns))


_RETRY_PAUSE: Final = 1.0
_LONGEST_RETRY_PAUSE: Final = 10.0


def check_interval(settings: KafkaSettings) -> float | None:
    """The interval of a `TopicWatch`: that of the client's metadata."""
    refresh = settings.topic_metadata_refresh_interval_ms
    return None if refresh < 0 else max(0.1, refresh / 1000)


class TopicWatch:
    """:param interval: seconds between two checks, which only patterns need; None is never by time.
    :param subscribe: called with the topics when they change.
    :param failed: called with the TopicNotFound of an explicit topic.
    """

    def __init__(
        self,
        connection: Connection,
        subscription: Subscription,
        *,
        interval: float | None,
        subscribe: Callable[[Sequence[str]], Awaitable[object]],
        failed: Callable[[BrokerError], None],
    ) -> None:
        self._connection = connection
        self._subscription = subscription
        self._interval = interval
        self._subscribe = subscribe
        self._failed = failed
        self._check_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.topics: list[str] = []
        """What is subscribed to."""

    async def open(self) -> list[TopicPartition]:
        """Find the topics, which `start` subscribes to; their partitions.

        :raises TopicNotFound: an explicit topic does not exist.
        :raises BrokerError: the brokers do not answer.
        """
        self.topics = await self._find()
        found: list[TopicPartition] = []
        for topic in self.topics:
            try:
                found += await partitions_of(self._connection, topic)
            except TopicNotFound:
                # Deleted since the list was made; the next check leaves it out.
                if topic in self._subscription.names:
                    raise
        return found

    async def start(self) -> None:
        """Subscribe, and watch."""
        await self._subscribe(self.topics)
        self._task = asyncio.create_task(self._run(), name="broker-kafka-topics")

    def check_soon(self) -> None:
        """Check now: a topic may be gone."""
        self._check_now.set()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        backoff = Backoff(_RETRY_PAUSE, _LONGEST_RETRY_PAUSE)
        while True:
            await pause(self._interval if self._subscription.patterns else None, self._check_now)
            self._check_now.clear()
            try:
                await self._check()
                backoff.reset()
            except TopicNotFound as error:
                self._failed(error)
            except BrokerError as error:
                logger.warning("The topics of %s could not be checked: %s", self._subscription, error)
                if error.retriable:
                    await asyncio.sleep(backoff.next())
                    self._check_now.set()

    async def _check(self) -> None:
        found = await self._find()
        for topic in self._subscription.names:
            await partitions_of(self._connection, topic)
        if found != self.topics:
            await self._subscribe(found)
            # Only now: a subscription that failed is retried at the next check.
            self.topics = found

    async def _find(self) -> list[str]:
        if not self._subscription.patterns:
            return self._subscription.matching(())
        timeout = self._connection.settings.request_timeout
        answer = await read_metadata(self._connection, "Listing topics", timeout)
        return self._subscription.matching([name for name, found in answer.topics.items() if found.error is None])
