"""`ConsumerFactory`: makes the message consumers of a bus. Options are checked before any I/O.

Used on the loop of the bus. Making a consumer does no I/O; a cancelled opening leaves nothing open.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Protocol

from broker.capabilities import ConfirmedAck, MessageCapabilities
from broker.checks import check_flag, refused
from broker.consuming.consumer import Closable, MessageConsumer
from broker.consuming.dead_letters import DeadLetterWriter, LetterTopic
from broker.consuming.engine import Engine, OpenSource
from broker.consuming.options import ConsumerOptions, check_options, check_policies, fitting_retry
from broker.consuming.retry.policy import Drop, Retry
from broker.consuming.retry.topics import RetryRoutes, RetryTopics, one_try_each, routes_of
from broker.consuming.retry.writer import RetryWriter
from broker.driver.contract import Backend, MessageSubscription, Start, check_start
from broker.errors import ConfigurationError, NotFound, TopicNotFound, Unsupported
from broker.hooks import Hooks
from broker.names import Ephemeral, check_name
from broker.outbound import OutboundMessage
from broker.protocols import Codec, Topic

__all__ = ["ConsumerFactory", "check_topics", "unsupported"]


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
        topics: Sequence[str],
        *,
        subscription: str | Ephemeral,
        codec: Codec[Any] | None,
        retry: Retry | None,
        retry_topics: RetryTopics | None,
        dead_letter: str | Drop | None,
        start: Start,
        create: bool,
        options: ConsumerOptions,
    ) -> MessageConsumer[Any]:
        """A consumer of the subscription of each topic.

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
            routes = routes_of(retry_topics, topics, subscription)

        def opener(topic: str) -> OpenSource:
            # The options are checked before this is called.
            return lambda listener: self._backend.subscribe(
                MessageSubscription(
                    topic=topic,
                    subscription=subscription,
                    start=start,
                    create=create,
                    ordered_by_key=options.ordered_by_key,
                    confirm_acks=bool(options.confirm_acks),
                    max_outstanding=max(1, options.max_outstanding // len(topics)),
                    max_deliveries=retry.delivery_bound,
                    dead_letter=dead_letter if isinstance(dead_letter, str) else None,
                    retry_topics=() if routes is None else routes.of(topic),
                ),
                listener,
            )

        return self.make_over(
            [(topic, opener(topic)) for topic in topics],
            family,
            options,
            retry=retry,
            retry_routes=routes,
            dead_letter=dead_letter,
            codec=codec,
            subscription=repr(subscription) if isinstance(subscription, Ephemeral) else subscription,
        )

    def make_over(
        self,
        sources: Sequence[tuple[str, OpenSource]],
        family: MessageCapabilities,
        options: ConsumerOptions,
        *,
        retry: Retry,
        dead_letter: str | Drop | None,
        codec: Codec[Any] | None,
        subscription: str,
        retry_routes: RetryRoutes | None = None,
    ) -> MessageConsumer[Any]:
        """A consumer of any sources, given with the topic of each.

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
                hooks=self._bus.hooks,
                retry_writer=None if retry_routes is None else await self._retry_writer(retry_routes, subscription),
            )
            await engine.open()
            return engine

        return MessageConsumer(
            open_engine,
            name=", ".join(topic for topic, _ in sources),
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

        def publish(topic: str, letter: OutboundMessage) -> Awaitable[object]:
            return self._bus.topic(topic).publish(letter)

        return RetryWriter(routes, publish, self._bus.hooks, subscription)

    def _family(self, subscription: str | Ephemeral, start: Start, confirm_acks: bool | None) -> MessageCapabilities:
        name = self._backend.capabilities.backend
        family = self._backend.capabilities.messages
        if family is None:
            raise unsupported(name, "the Message family", "messages")
        if isinstance(subscription, Ephemeral):
            if not family.ephemeral:
                raise unsupported(name, "ephemeral subscriptions", "messages.ephemeral")
        else:
            check_name(subscription, "subscription")
        if not isinstance(start, str) and not family.start_time:
            raise unsupported(name, "a start time for messages", "messages.start_time")
        if start == "latest" and not family.start_latest:
            raise unsupported(name, 'start="latest"', "messages.start_latest")
        if confirm_acks is True and family.confirmed_ack is ConfirmedAck.NEVER:
            raise unsupported(name, "confirmed acks", "messages.confirmed_ack")
        return family


def unsupported(backend: str, what: str, capability: str) -> Unsupported:
    """The error for a feature that the backend does not have."""
    return Unsupported(
        f"{backend} does not support {what}",
        advice=f"Check bus.capabilities.{capability} first, or use another backend",
    )


def check_topics(topics: str | Sequence[str]) -> list[str]:
    """The topics as a list.

    :raises ConfigurationError: there is none, one is named twice, or a name is not portable.
    """
    names = [check_name(name, "topic") for name in _several(topics)]
    if not names:
        raise ConfigurationError("No topic is named", advice="Name at least one topic")
    if len(set(names)) != len(names):
        raise ConfigurationError(f"A topic is named twice in {names!r}", advice="Name each topic once")
    return names


def _several(topics: object) -> list[Any]:
    if isinstance(topics, str):
        return [topics]
    if not isinstance(topics, Iterable) or isinstance(topics, bytes | bytearray):
        raise refused("topics", topics, "a topic's name, or a list of names")
    return list(topics)  # pyright: ignore[reportUnknownArgumentType]
