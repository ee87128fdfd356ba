"""How a record consumer becomes a message consumer: the pieces between the two, which do not know each other.

Pure: the group is joined when the message consumer is entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from broker.capabilities import MessageCapabilities
from broker.checks import check_count, check_seconds
from broker.consuming.options import ConsumerOptions, check_policies
from broker.consuming.retry.policy import Drop, Retry
from broker.consuming.retry.topics import RetryRoutes, RetryTopics, one_try_each, routes_of
from broker.driver.as_messages.source import RecordsAsMessages, message_capabilities
from broker.driver.contract import Backend, RecordSubscription, SourceListener
from broker.hooks import Hooks
from broker.protocols import Codec

if TYPE_CHECKING:
    from broker.consuming.consumer import MessageConsumer
    from broker.consuming.engine import OpenSource

__all__ = ["Commits", "MakeMessages", "serve"]


class MakeMessages(Protocol):
    """Makes a message consumer over any sources, each given with the topic it is named after."""

    def __call__(
        self,
        sources: Sequence[tuple[str, OpenSource]],
        family: MessageCapabilities,
        options: ConsumerOptions,
        *,
        retry: Retry,
        dead_letter: str | Drop | None,
        codec: Codec[Any] | None,
        subscription: str,
        retry_routes: RetryRoutes | None,
    ) -> MessageConsumer[Any]: ...


class Commits(NamedTuple):
    """When finished records are committed, and how many may be finished above one that is not."""

    max_gap: int
    every: int
    interval: float


def serve(
    make: MakeMessages,
    backend: Backend,
    subscription: RecordSubscription,
    hooks: Hooks,
    options: ConsumerOptions,
    *,
    commits: Commits,
    retry: Retry | None,
    retry_topics: RetryTopics | None,
    dead_letter: str | Drop | None,
    codec: Codec[Any] | None,
) -> MessageConsumer[Any]:
    """A message consumer over the records of a group, which it joins when it is entered.

    :raises ConfigurationError: an option cannot be used, or contradicts another.
    :raises Unsupported: the backend has no records.
    """
    check_count("max_gap", commits.max_gap)
    check_count("commit_every", commits.every)
    check_seconds("commit_interval", commits.interval)
    check_policies(retry, retry_topics, dead_letter, codec)
    routes = None
    if retry_topics is not None:
        retry = one_try_each(retry, retry_topics)
        routes = routes_of(retry_topics, subscription.topics, subscription.group)

    async def open_source(listener: SourceListener) -> RecordsAsMessages:
        source = RecordsAsMessages(
            listener,
            hooks=hooks,
            max_gap=commits.max_gap,
            commit_every=commits.every,
            commit_interval=commits.interval,
            retry_topics=() if routes is None else routes.every(),
        )
        return await source.join(backend, subscription)

    return make(
        [(", ".join(subscription.topics), open_source)],
        message_capabilities(backend.capabilities),
        options,
        retry=Retry() if retry is None else retry,
        dead_letter=dead_letter,
        codec=codec,
        subscription=str(subscription.group),
        retry_routes=routes,
    )
