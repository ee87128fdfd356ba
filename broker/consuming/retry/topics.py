"""Retry topics, on which messages wait durably for their next attempt. Pure, without a clock or lock."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from broker.checks import is_finite
from broker.consuming.retry.policy import Retry
from broker.driver.contract import RetryTopic
from broker.errors import ConfigurationError, InvalidSetting, Unsupported
from broker.names import Ephemeral, NativeName, check_name

__all__ = ["RetryRoutes", "RetryTopics", "one_try_each", "routes_of"]


@dataclass(frozen=True, slots=True)
class RetryTopics:
    """As `retry_topics=`: a failed message waits for its next attempt on a topic, where it survives a crash.

    After the n-th round of failures the message waits on `<topic>.<subscription>.retry.<n>` for the n-th delay; after
    the last round it is dead-lettered. A round is `Retry.max_attempts` attempts in place; one without `retry`.

    :param delays: the minimum seconds that messages wait on each topic, in ascending order.
    """

    delays: tuple[float, ...]

    def __post_init__(self) -> None:
        delays = self.delays
        good = isinstance(delays, tuple) and all(is_finite(delay) and delay > 0 for delay in delays)
        if not good or not delays or list(delays) != sorted(delays):
            raise InvalidSetting(
                f"RetryTopics.delays is {delays!r}",
                advice="It takes a tuple of seconds above 0, none shorter than the one before, such as (5, 60, 600)",
            )

    def of(self, topic: str, subscription: str) -> list[RetryTopic]:
        """The retry topics of a subscription of a topic.

        :raises InvalidName: a name is too long; use a shorter topic or subscription name.
        """
        kind = NativeName if isinstance(topic, NativeName) else str
        return [
            RetryTopic(check_name(kind(f"{topic}.{subscription}.retry.{number}"), "retry topic"), topic, delay)
            for number, delay in enumerate(self.delays, 1)
        ]

    def names(self, topic: str, subscription: str) -> list[str]:
        """The names of the retry topics, for `bus.admin.ensure_topic`: consumers create no topics.

        :raises InvalidName: a name is too long.
        """
        return [each.name for each in self.of(topic, subscription)]


class RetryRoutes:
    """The retry topics of one consumer.

    :param topics: the retry topics of each consumed topic, in the order of their delays.
    """

    def __init__(self, topics: Mapping[str, Sequence[RetryTopic]]) -> None:
        self._topics = topics
        self.names: Final = [each.name for several in topics.values() for each in several]

    def of(self, topic: str) -> Sequence[RetryTopic]:
        """The retry topics of one topic."""
        return self._topics[topic]

    def every(self) -> list[RetryTopic]:
        """The retry topics of all topics."""
        return [each for several in self._topics.values() for each in several]

    def after_failure(self, topic: str, step: int) -> RetryTopic | None:
        """The retry topic of a message that failed in `step` earlier rounds; None after the last round."""
        several = self._topics[topic]
        return several[step] if step < len(several) else None

    def for_delay(self, topic: str, delay: float | None) -> RetryTopic:
        """The first retry topic with at least this delay; the first of all if `delay` is None.

        :raises Unsupported: the delays of all retry topics are shorter.
        """
        several = self._topics[topic]
        found = next((each for each in several if delay is None or each.delay >= delay), None)
        if found is None:
            raise Unsupported(
                f"A delay of {delay:g} s is longer than the longest of the retry topics, {several[-1].delay:g} s",
                advice="Use a shorter delay, or give RetryTopics a longer one",
            )
        return found

    def last(self, topic: str) -> RetryTopic:
        """The retry topic with the longest delay."""
        return self._topics[topic][-1]


def routes_of(retry_topics: RetryTopics, topics: Sequence[str], subscription: str | Ephemeral) -> RetryRoutes:
    """The retry topics of a consumer.

    :raises ConfigurationError: the subscription has no name, or a retry topic is one of the topics.
    """
    if isinstance(subscription, Ephemeral):
        raise ConfigurationError(
            f"retry_topics= needs a named subscription: the retry topics of {subscription!r} would end with it",
            advice="Name the subscription, or leave retry_topics out",
        )
    routes = RetryRoutes({topic: retry_topics.of(topic, subscription) for topic in topics})
    for name in routes.names:
        if name in topics:
            raise ConfigurationError(
                f"{name!r} is both a consumed topic and a retry topic of this consumer",
                advice="Leave it out: the consumer reads its retry topics anyway",
            )
    return routes


def one_try_each(retry: Retry | None, topics: RetryTopics) -> Retry:
    """The retry policy of a consumer with retry topics; by default one attempt per round.

    :raises ConfigurationError: `max_deliveries` is less than the attempts of all rounds together.
    """
    retry = Retry(max_attempts=1) if retry is None else retry
    tries = retry.max_attempts * (1 + len(topics.delays))
    if retry.max_deliveries is None:
        return dataclasses.replace(retry, max_deliveries=10 * tries)
    if retry.max_deliveries < tries:
        raise ConfigurationError(
            f"Retry.max_deliveries is {retry.max_deliveries}, and with {len(topics.delays)} retry topics a message is "
            f"tried {tries} times",
            advice="Raise max_deliveries or leave it out",
        )
    return retry
