"""Provisioning: topics, subscriptions, snapshots, schemas. Every `ensure` and `delete` may be repeated, in several
processes at once.

The service deletes a topic without its subscriptions, and purges subscriptions only. Here `delete_topic` deletes the
subscriptions too, and `purge` stores a snapshot at which later subscriptions start.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Final, Literal, cast

import grpc
from google.protobuf.json_format import MessageToDict

from broker import (
    BrokerError,
    InvalidSetting,
    Lag,
    NotFound,
    SubscriptionInfo,
    TopicInfo,
    TopicNotFound,
    UnknownSetting,
)
from broker.driver import Start, check_choice, check_text
from broker_pubsub import subscriptions
from broker_pubsub.connection import Connection
from broker_pubsub.errors import is_status
from broker_pubsub.lag import measure
from broker_pubsub.protocol import Encoding, Method, Methods, Schema, Topic, request_of

__all__ = ["PubSubAdmin"]

_TOPIC_OPTIONS: Final = ("encoding", "kms_key", "labels", "schema")
_LEAST_RETENTION: Final = timedelta(minutes=10)
_MOST_RETENTION: Final = timedelta(days=31)
_MOST_LABELS: Final = 64
_LONGEST_LABEL: Final = 63
"""Characters of a label's name or value."""
_ENCODINGS: Final = {"json": Encoding.JSON, "binary": Encoding.BINARY}
_SCHEMA_TYPES: Final = {"avro": Schema.Type.AVRO, "protobuf": Schema.Type.PROTOCOL_BUFFER}


class PubSubAdmin:
    """Implements `AdminSpi`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._names = connection.names

    # Topics.

    async def ensure_topic(
        self, name: str, *, partitions: int | None, retention: timedelta | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        """Create a topic, or update its retention. `partitions` is ignored: Pub/Sub has none.

        :raises UnknownSetting, InvalidSetting: an option is unknown or its value is invalid.
        :raises NotFound: the schema does not exist.
        """
        path = self._names.topic(name)
        wanted = self._topic(path, retention, options)
        what = f"Topic {name!r}"
        try:
            return _topic_info(name, await self._call(Methods.CREATE_TOPIC, wanted, what))
        except BrokerError as error:
            if wanted.schema_settings.schema and _has_status(error, grpc.StatusCode.NOT_FOUND):
                raise NotFound(
                    f"{what}: schema {options['schema']!r} does not exist",
                    native=error.native,
                    advice="Create it with `await bus.backend.admin().ensure_schema(name, definition)`",
                ) from None
            if not _has_status(error, grpc.StatusCode.ALREADY_EXISTS):
                raise
        found = await self._get_topic(name)
        if retention is not None and found.message_retention_duration != wanted.message_retention_duration:
            request = request_of(Methods.UPDATE_TOPIC, update_mask=["message_retention_duration"])
            request.topic.name = path
            request.topic.message_retention_duration.CopyFrom(wanted.message_retention_duration)
            found = await self._call(Methods.UPDATE_TOPIC, request, what)
        return _topic_info(name, found)

    def _topic(self, path: str, retention: timedelta | None, options: Mapping[str, Any]) -> Any:
        for option in options:
            if option not in _TOPIC_OPTIONS:
                raise UnknownSetting(
                    f"A Pub/Sub topic has no option {option!r}", advice=f"It has {', '.join(_TOPIC_OPTIONS)}"
                )
        if retention is not None and not _LEAST_RETENTION <= retention <= _MOST_RETENTION:
            raise InvalidSetting(f"retention is {retention}", advice="Use 10 minutes to 31 days")
        made = Topic(name=path, kms_key_name=subscriptions.text_of(options, "kms_key"), labels=_labels(options))
        keeps = timedelta(seconds=self._connection.settings.topic_retention) if retention is None else retention
        if keeps:
            made.message_retention_duration.FromTimedelta(keeps)
        if schema := subscriptions.text_of(options, "schema"):
            encoding = options.get("encoding", "json")
            check_choice("encoding", encoding, tuple(_ENCODINGS))
            made.schema_settings.schema = self._names.schema(schema)
            made.schema_settings.encoding = _ENCODINGS[encoding]
        elif "encoding" in options:
            raise InvalidSetting("encoding needs schema", advice="Give both or neither")
        return made

    async def delete_topic(self, name: str) -> None:
        """Delete a topic and its subscriptions, which would otherwise remain without a topic."""
        path = self._names.topic(name)
        with suppress(TopicNotFound):
            for subscription in await self._paths(name):
                await subscriptions.delete(self._connection, subscription, f"Topic {name!r}")
        with suppress(NotFound):
            await self._call(
                Methods.DELETE_TOPIC, request_of(Methods.DELETE_TOPIC, topic=path), f"Topic {name!r}", "topic"
            )
        await self._delete_snapshot(self._names.purge_mark(name))

    async def list_topics(self) -> Sequence[str]:
        pages = self._pages(Methods.LIST_TOPICS, "topics", "Topics", project=self._names.project)
        return sorted(
            [self._names.topic_of(each.name) async for each in pages if not self._names.is_temporary(each.name)]
        )

    async def describe_topic(self, name: str) -> TopicInfo:
        return _topic_info(name, await self._get_topic(name))

    async def purge(self, topic: str) -> int | None:
        """Move every subscription to the end, and store a snapshot at which later subscriptions start."""
        what = f"Purging topic {topic!r}"
        mark = self._names.purge_mark(topic)
        fresh = subscriptions.temporary(self._connection, topic)
        await subscriptions.create(self._connection, topic, fresh, "latest")
        try:
            await self._delete_snapshot(mark)
            await self._call(
                Methods.CREATE_SNAPSHOT,
                request_of(Methods.CREATE_SNAPSHOT, name=mark, subscription=fresh.name),
                what,
            )
            for path in await self._paths(topic):
                if path != fresh.name:
                    await subscriptions.seek(self._connection, path, mark, what)
        finally:
            await subscriptions.delete(self._connection, fresh.name, what)
        return None

    # Subscriptions.

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start, options: Mapping[str, Any]
    ) -> SubscriptionInfo:
        """Create a subscription if it is missing; an existing one stays unchanged.

        :raises UnknownSetting, InvalidSetting: an option is unknown or its value is invalid.
        """
        return _subscription_info(
            topic, name, await subscriptions.ensure(self._connection, topic, name, start, options)
        )

    async def delete_subscription(self, topic: str, name: str) -> None:
        await subscriptions.delete(
            self._connection, self._names.subscription(topic, name), f"Subscription {name!r} of topic {topic!r}"
        )

    async def list_subscriptions(self, topic: str) -> Sequence[str]:
        # The emulator lists no subscriptions for an unknown topic.
        await subscriptions.check_topic(self._connection, topic)
        paths = [path for path in await self._paths(topic) if not self._names.is_temporary(path)]
        return sorted(self._names.subscription_of(topic, path) for path in paths)

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        return _subscription_info(topic, name, await subscriptions.find(self._connection, topic, name))

    async def lag(self, topic: str, subscription: str) -> Lag:
        return await measure(self._connection, topic, await subscriptions.find(self._connection, topic, subscription))

    async def seek(self, topic: str, subscription: str, to: datetime | str) -> None:
        """Move a subscription to a time, or to a snapshot of `snapshot`: later messages are redelivered.

        Acked messages are redelivered only if the subscription or the topic retains them.

        :raises InvalidSetting: not a time with a timezone, nor a name.
        """
        aware = isinstance(to, datetime) and to.tzinfo is not None
        if not aware and not isinstance(to, str):
            raise InvalidSetting(f"to is {to!r}", advice="Use a datetime with a timezone, or the name of a snapshot")
        target = self._names.snapshot(to) if isinstance(to, str) else to
        path = self._names.subscription(topic, subscription)
        await subscriptions.seek(self._connection, path, target, f"Subscription {subscription!r} of topic {topic!r}")

    async def snapshot(self, topic: str, subscription: str, name: str) -> None:
        """Save the position of a subscription under a name, for at most seven days.

        :raises InvalidName: the name is neither portable nor a snapshot's.
        :raises SubscriptionNotFound: the subscription does not exist.
        """
        await self._call(
            Methods.CREATE_SNAPSHOT,
            request_of(
                Methods.CREATE_SNAPSHOT,
                name=self._names.snapshot(name),
                subscription=self._names.subscription(topic, subscription),
            ),
            f"Snapshot {name!r}",
            "subscription",
        )

    async def delete_snapshot(self, name: str) -> None:
        await self._delete_snapshot(self._names.snapshot(name))

    # Schemas.

    async def ensure_schema(self, name: str, definition: str, kind: Literal["avro", "protobuf"] = "avro") -> None:
        """Create a schema if it is missing; a topic created with `schema=name` refuses messages that do not match.

        :raises InvalidName: the name is neither portable nor a schema's.
        :raises ConfigurationError: the kind is unknown, or the definition is not text.
        """
        check_choice("kind", kind, tuple(_SCHEMA_TYPES))
        check_text("definition", definition)
        parent, _, own = self._names.schema(name).rpartition("/schemas/")
        request = request_of(Methods.CREATE_SCHEMA, parent=parent, schema_id=own)
        request.schema.type_ = _SCHEMA_TYPES[kind]
        request.schema.definition = definition
        try:
            await self._call(Methods.CREATE_SCHEMA, request, f"Schema {name!r}")
        except BrokerError as error:
            if not _has_status(error, grpc.StatusCode.ALREADY_EXISTS):
                raise

    async def delete_schema(self, name: str) -> None:
        request = request_of(Methods.DELETE_SCHEMA, name=self._names.schema(name))
        await self._delete(Methods.DELETE_SCHEMA, request, f"Schema {name!r}")

    # Requests.

    async def _get_topic(self, name: str) -> Any:
        request = request_of(Methods.GET_TOPIC, topic=self._names.topic(name))
        return await self._call(Methods.GET_TOPIC, request, f"Topic {name!r}", "topic")

    async def _paths(self, topic: str) -> list[str]:
        path = self._names.topic(topic)
        pages = self._pages(
            Methods.LIST_TOPIC_SUBSCRIPTIONS, "subscriptions", f"Topic {topic!r}", kind="topic", topic=path
        )
        return [each async for each in pages]

    async def _pages(
        self, method: Method, field: str, what: str, kind: Literal["topic", "other"] = "other", **fields: Any
    ) -> AsyncIterator[Any]:
        request = request_of(method, page_size=1000, **fields)
        while True:
            page = await self._call(method, request, what, kind)
            for item in getattr(page, field):
                yield item
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def _delete_snapshot(self, path: str) -> None:
        request = request_of(Methods.DELETE_SNAPSHOT, snapshot=path)
        # An emulator without snapshots does not have this one either.
        await self._delete(Methods.DELETE_SNAPSHOT, request, "Snapshot", grpc.StatusCode.UNIMPLEMENTED)

    async def _delete(self, method: Method, request: Any, what: str, *gone: grpc.StatusCode) -> None:
        try:
            await self._call(method, request, what)
        except BrokerError as error:
            if not _has_status(error, grpc.StatusCode.NOT_FOUND, *gone):
                raise

    async def _call(
        self, method: Method, request: Any, what: str, kind: Literal["topic", "subscription", "other"] = "other"
    ) -> Any:
        return await self._connection.call(
            method, request, what, kind, repeat=self._connection.settings.request_timeout
        )


def _labels(options: Mapping[str, Any]) -> Mapping[str, str]:
    """Check labels by the service's rules, which emulators ignore.

    :raises InvalidSetting: a label is invalid.
    """
    labels: Any = options.get("labels", {})
    if not isinstance(labels, Mapping):
        raise InvalidSetting(f"labels is {labels!r}", advice="Use a mapping of str to str")
    given = cast("Mapping[Any, Any]", labels)
    if len(given) > _MOST_LABELS:
        raise InvalidSetting(f"labels has {len(given)} entries", advice=f"Use at most {_MOST_LABELS}")
    for name, value in given.items():
        if not (_is_label(name) and name[:1].isalpha() and _is_label(value)):
            raise InvalidSetting(
                f"labels has {name!r}: {value!r}",
                advice="Names and values are up to 63 lower-case letters, digits, '_' and '-', and a name begins with "
                "a letter",
            )
    return given


def _is_label(text: object) -> bool:
    return (
        isinstance(text, str)
        and len(text) <= _LONGEST_LABEL
        and text == text.lower()
        and all(each.isalnum() or each in "_-" for each in text)
    )


def _has_status(error: BrokerError, *codes: grpc.StatusCode) -> bool:
    return error.native is not None and is_status(error.native, *codes)


def _topic_info(name: str, found: Any) -> TopicInfo:
    return TopicInfo(name=name, native=MessageToDict(found, preserving_proto_field_name=True))


def _subscription_info(topic: str, name: str, found: Any) -> SubscriptionInfo:
    return SubscriptionInfo(topic=topic, name=name, native=MessageToDict(found, preserving_proto_field_name=True))
