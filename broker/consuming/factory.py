"""`ConsumerFactory`: makes the message consumers of a bus. Options are checked before any I/O.

Used on the loop of the bus. Making a consumer does no I/O; a cancelled opening leaves nothing open.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Final, Protocol

from broker.capabilities import ConfirmedAck, MessageCapabilities, unsupported
from broker.checks import check_flag, refused
from broker.consuming.consumer import Closable, MessageConsumer
from broker.consuming.dead_letters import DeadLetterWriter, LetterTopic
from broker.consuming.engine import Engine, FollowedTopics, OpenSource
from broker.consuming.options import ConsumerOptions, check_options, check_pattern, check_policies, fitting_retry
from broker.consuming.retry.policy import Drop, Retry
from broker.consuming.retry.topics import RetryRoutes, RetryTopics, one_try_each, routes_of
from broker.consuming.retry.writer import RetryWriter
from broker.driver.contract import Backend, MessageSource, MessageSubscription, SourceListener, Start, check_start
from broker.driver.optional import SubscribesToPatterns
from broker.errors import ConfigurationError, InvalidName, NotFound, TopicNotFound, Unsupported
from broker.hooks import Hooks, publishing_as
from broker.names import Ephemeral, check_name
from broker.outbound import OutboundMessage
from broker.protocols import AnyCodec, Topic
from broker.topic_patterns import TopicPattern

_LIKE_A_PATTERN: Final = re.compile(r"[*+?^$|()\[\]\\]")

__all__ = ["ConsumerFactory", "check_topics"]


class HostBus(Closable, Protocol):
    """What the factory needs of the bus."""

    @property
    def hooks(self) -> Hooks: ...
    async def open(self) -> None: ...
    def topic(self, name: str) -> Topic[bytes]: ...


class ConsumerFactory:
    """Makes the message consumers of one bus."""

    def __init__(self, bus: HostBus, backend: Backend) -> None:
        self._bus = bus
        self._backend = backend

    def make(
        self,
        topics: Sequence[str] | TopicPattern,
        *,
        subscription: str | Ephemeral,
        codec: AnyCodec[Any] | None,
        retry: Retry | None,
        retry_topics: RetryTopics | None,
        dead_letter: str | Drop | None,
        start: Start,
        create: bool,
        options: ConsumerOptions,
    ) -> MessageConsumer[Any]:
        """A consumer of the subscription of each topic, or of those that match a pattern.

        :raises ConfigurationError: a name or an option cannot be used.
        :raises Unsupported: the backend cannot honour an option.
        """
        check_flag("create", create)
        family = self._family(subscription, check_start(start), options.confirm_acks)
        check_policies(retry, retry_topics, dead_letter, codec)
        if retry_topics is None:
            retry = fitting_retry(retry, family)
            routes = None
        else:
            if not family.retry_topics:
                raise Unsupported(
                    f"{self._backend.capabilities.backend} does not support retry topics for messages",
                    advice="The broker keeps delays itself: give retry=Retry(...) alone, or use "
                    "bus.records(...).as_messages(retry_topics=...)",
                )
            retry = one_try_each(retry, retry_topics)
            routes = None if isinstance(topics, TopicPattern) else routes_of(retry_topics, topics, subscription)
        shares = 1 if isinstance(topics, TopicPattern) else len(topics)

        def wanted(topic: str, start: Start) -> MessageSubscription:
            # The options are checked before this is called.
            return MessageSubscription(
                topic=topic,
                subscription=subscription,
                start=start,
                create=create,
                ordered_by_key=options.ordered_by_key,
                confirm_acks=bool(options.confirm_acks),
                max_outstanding=max(1, options.max_outstanding // shares),
                max_deliveries=retry.delivery_bound,
                dead_letter=dead_letter if isinstance(dead_letter, str) else None,
                retry_topics=() if routes is None else routes.of(topic),
            )

        def opener(topic: str) -> OpenSource:
            return lambda listener: self._backend.subscribe(wanted(topic, start), listener)

        def open_followed(topic: str, new: bool, listener: SourceListener) -> Awaitable[MessageSource]:
            # What is published to a new topic before it is found is not to be missed.
            begin: Start = "earliest" if new and start == "latest" else start
            return self._backend.subscribe(wanted(topic, begin), listener)

        sources: list[tuple[str, OpenSource]] = []
        followed = None
        if not isinstance(topics, TopicPattern):
            sources = [(topic, opener(topic)) for topic in topics]
        elif not family.topic_patterns:
            raise unsupported(self._backend.capabilities, "patterns of topics", "messages.topic_patterns")
        elif isinstance(self._backend, SubscribesToPatterns):
            subscribe = self._backend.subscribe_to_pattern
            sources = [(str(topics), lambda listener: subscribe(topics, wanted(str(topics), start), listener))]
        else:
            followed = FollowedTopics(topics, lambda: self._backend.admin().list_topics(), open_followed)
        check_pattern(topics if isinstance(topics, TopicPattern) else None, retry_topics, dead_letter)
        return self.make_over(
            sources,
            family,
            options,
            retry=retry,
            retry_routes=routes,
            dead_letter=dead_letter,
            codec=codec,
            subscription=repr(subscription) if isinstance(subscription, Ephemeral) else subscription,
            group=None,
            followed=followed,
        )

    def make_over(
        self,
        sources: Sequence[tuple[str, OpenSource]],
        family: MessageCapabilities,
        options: ConsumerOptions,
        *,
        retry: Retry,
        dead_letter: str | Drop | None,
        codec: AnyCodec[Any] | None,
        subscription: str | None,
        group: str | None,
        retry_routes: RetryRoutes | None = None,
        followed: FollowedTopics | None = None,
    ) -> MessageConsumer[Any]:
        """A consumer of any sources, given with the topic of each, or of the topics of a pattern.

        :param subscription: its name; None for a `group`, whose records are served as messages.
        :raises ConfigurationError: the options contradict each other.
        """
        topics = [topic for topic, _ in sources]
        check_policies(retry, None, dead_letter, codec)
        check_options(options, len(topics), retry, family)
        if retry_routes is not None:
            if options.ordered_by_key:
                raise ConfigurationError(
                    "ordered_by_key=True and retry_topics= contradict each other: later messages of the key "
                    "overtake one on a retry topic",
                    advice="Leave one of them out; retry=Retry(...) alone retries in place and keeps the order",
                )
            topics += retry_routes.names
        if isinstance(dead_letter, str):
            check_name(dead_letter, "topic")
            if dead_letter in topics:
                raise ConfigurationError(
                    f"dead_letter {dead_letter!r} is one of the consumed topics", advice="Name another topic"
                )

        name = subscription or group or ""

        async def open_engine() -> Engine:
            await self._bus.open()
            engine = Engine(
                sources,
                family,
                options,
                retry=retry,
                dead_letter=await self._writer(dead_letter) if isinstance(dead_letter, str) else dead_letter,
                codec=codec,
                subscription=subscription,
                group=group,
                hooks=self._bus.hooks,
                retry_writer=None if retry_routes is None else await self._retry_writer(retry_routes, name),
                followed=followed,
            )
            await engine.open()
            return engine

        return MessageConsumer(
            open_engine,
            name=", ".join(topics) if followed is None else str(followed.pattern),
            max_outstanding=options.max_outstanding,
            bus=self._bus,
        )

    async def _writer(self, topic: str) -> DeadLetterWriter:
        letters = LetterTopic(self._backend, self._bus.topic, topic)
        await letters.open()
        return DeadLetterWriter(topic, letters.publish, self._backend.capabilities.publish.limits, self._bus.hooks)

    async def _retry_writer(self, routes: RetryRoutes, subscription: str) -> RetryWriter:
        admin = self._backend.admin()
        for name in routes.names:
            try:
                await admin.describe_topic(name)
            except NotFound as error:
                raise TopicNotFound(
                    f"Retry topic {name!r} does not exist",
                    native=error,
                    advice="Create those of RetryTopics.names(topic, subscription) with bus.admin.ensure_topic",
                ) from None

        async def publish(topic: str, letter: OutboundMessage) -> object:
            with publishing_as("retry"):
                return await self._bus.topic(topic).publish(letter)

        return RetryWriter(routes, publish, self._bus.hooks, subscription)

    def _family(self, subscription: str | Ephemeral, start: Start, confirm_acks: bool | None) -> MessageCapabilities:
        capabilities = self._backend.capabilities
        family = capabilities.messages
        if family is None:
            raise unsupported(capabilities, "the Message family", "messages")
        if isinstance(subscription, Ephemeral):
            if not family.ephemeral:
                raise unsupported(capabilities, "ephemeral subscriptions", "messages.ephemeral")
        else:
            check_name(subscription, "subscription")
        if not isinstance(start, str) and not family.start_time:
            raise unsupported(capabilities, "a start time for messages", "messages.start_time")
        if start == "latest" and not family.start_latest:
            raise unsupported(capabilities, 'start="latest"', "messages.start_latest")
        if confirm_acks is True and family.confirmed_ack is ConfirmedAck.NEVER:
            raise unsupported(capabilities, "confirmed acks", "messages.confirmed_ack")
        return family


def check_topics(topics: str | TopicPattern | Sequence[str]) -> list[str] | TopicPattern:
    """The topics as a list, or their pattern.

    :raises ConfigurationError: there is none, one is named twice, or a name is not portable.
    """
    if isinstance(topics, TopicPattern):
        return topics
    names = [_topic_name(name) for name in _several(topics)]
    if not names:
        raise ConfigurationError("No topic is named", advice="Name at least one topic")
    if len(set(names)) != len(names):
        raise ConfigurationError(f"A topic is named twice in {names!r}", advice="Name each topic once")
    return names


def _topic_name(name: Any) -> str:
    if isinstance(name, TopicPattern):
        raise refused("topics", [name], "names, or one TopicPattern, which takes several expressions")
    try:
        return check_name(name, "topic")
    except InvalidName as error:
        if isinstance(name, str) and _LIKE_A_PATTERN.search(name):
            raise InvalidName(
                error.message, advice='A pattern is a TopicPattern(r"..."), a regular expression for the whole name'
            ) from None
        raise


def _several(topics: object) -> list[Any]:
    if isinstance(topics, str):
        return [topics]
    if not isinstance(topics, Iterable) or isinstance(topics, bytes | bytearray):
        raise refused("topics", topics, "a topic's name, a list of names, or a TopicPattern")
    return list(topics)  # pyright: ignore[reportUnknownArgumentType]
