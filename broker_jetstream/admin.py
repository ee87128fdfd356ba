"""Provisioning: topics as streams, subscriptions and groups as durable consumers.

Each call is one or a few requests. Every `ensure` and `delete` may be repeated and may run in several processes at
once. A name may belong to a message subscription, to a record group, or to both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from broker import (
    BackendError,
    InvalidSetting,
    Lag,
    SubscriptionInfo,
    SubscriptionNotFound,
    TopicInfo,
    TopicNotFound,
    UnknownSetting,
    Unsupported,
)
from broker.driver import NativeName, Start, is_whole, not_compacted, reads_answer
from broker_jetstream import release_counts, subscriptions
from broker_jetstream.connection import Connection
from broker_jetstream.errors import STREAM_IN_USE
from broker_jetstream.log_reader import JetStreamLogReader
from broker_jetstream.names import (
    PARTITIONS_KEY,
    RELEASE_COUNTS_STREAM,
    TOMBSTONE_KEY,
    consumer_name,
    group_consumer,
    group_of,
    rows_filter,
    schedule_subject,
    stream_name,
    subject_filter,
    subscription_of,
    topic_of,
)
from broker_jetstream.streams import MOST_PARTITIONS, Layout, Layouts, layout_of
from broker_jetstream.subscriptions import committed_position
from broker_jetstream.times import NANOSECONDS, nanoseconds

__all__ = ["JetStreamAdmin"]

_TOMBSTONE_SECONDS: Final = 86_400


class JetStreamAdmin:
    """Implements `AdminSpi`."""

    def __init__(self, connection: Connection, layouts: Layouts) -> None:
        self._connection = connection
        self._layouts = layouts

    # Topics.

    async def ensure_topic(
        self, name: str, *, partitions: int | None, retention: timedelta | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        """Create a topic, or update the given values.

        :raises UnknownSetting, InvalidSetting: an option is unknown or its value is invalid.
        :raises Unsupported: fewer partitions than the topic has, or a foreign stream.
        """
        return await self._ensure(name, partitions, _stream_changes(retention, options))

    async def ensure_compacted_topic(
        self, name: str, *, partitions: int | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        """As `ensure_topic`, for a stream that keeps the last message of each subject, and so of each key.

        A further option is `tombstone_retention` (a timedelta of a second or more: when a tombstone is removed).
        """
        given = dict(options)
        retention: object = given.pop("tombstone_retention", None)
        seconds = None if retention is None else _seconds("tombstone_retention", retention)
        return await self._ensure(name, partitions, _stream_changes(None, given), compacted=True, tombstones=seconds)

    async def _ensure(
        self,
        name: str,
        partitions: int | None,
        changes: dict[str, Any],
        *,
        compacted: bool = False,
        tombstones: int | None = None,
    ) -> TopicInfo:
        """:param tombstones: seconds; None is the default for a new topic, and keeps that of an existing one."""
        stream = stream_name(name)
        if compacted:
            changes["max_msgs_per_subject"] = 1
            if self._connection.server_version >= (2, 12):
                changes["allow_atomic"] = True
        try:
            found = await self._layouts.info(name)
        except TopicNotFound:
            if isinstance(name, NativeName):
                raise Unsupported(
                    f"Stream {str(name)!r} does not exist, and native streams are not created",
                    advice="Create it with NATS's own tools",
                ) from None
            try:
                seconds = (tombstones or _TOMBSTONE_SECONDS) if compacted else None
                created = await self._create(name, stream, partitions, changes, seconds)
            except BackendError as error:
                if f"err_code {STREAM_IN_USE}" not in error.message:
                    raise
                # Another process created it meanwhile.
                found = await self._layouts.info(name)
            else:
                return _topic_info(name, created)
        return await self._update(name, found, partitions, changes, compacted=compacted, tombstones=tombstones)

    async def _create(
        self, name: str, stream: str, partitions: int | None, changes: Mapping[str, Any], tombstones: int | None
    ) -> dict[str, Any]:
        """:param tombstones: of a compacted topic; None for any other."""
        settings = self._connection.settings
        number = settings.partitions if partitions is None else partitions
        # The claims of writers of a compacted topic have the subjects of its partitions.
        subjects = [subject_filter(stream)] if tombstones is None else [rows_filter(stream), subject_filter(stream)]
        metadata = {PARTITIONS_KEY: str(_checked_partitions(number))}
        if tombstones is not None:
            metadata[TOMBSTONE_KEY] = str(tombstones)
        config: dict[str, Any] = {
            "name": stream,
            "retention": "limits",
            "storage": settings.storage,
            "num_replicas": settings.replicas,
            "duplicate_window": round(settings.deduplication_window * NANOSECONDS),
            "discard": "old",
            "allow_direct": True,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_age": 0,
            "metadata": metadata,
            **changes,
        }
        if self._connection.server_version >= (2, 11):
            config["allow_msg_ttl"] = True
        # The server supports schedules only with discard="old".
        if self._connection.server_version >= (2, 12) and config["discard"] == "old" and tombstones is None:
            config["allow_msg_schedules"] = True
            subjects.append(schedule_subject(stream, "*"))
        age = config["max_age"]
        if age:
            # The server refuses a window that is longer than max_age.
            config["duplicate_window"] = min(config["duplicate_window"], age)
        config["subjects"] = subjects
        if tombstones is not None:
            _check_keeps_rows(config)
        return await self._connection.api(f"STREAM.CREATE.{stream}", config, what=f"Topic {name!r}")

    async def _update(
        self,
        name: str,
        found: dict[str, Any],
        partitions: int | None,
        changes: Mapping[str, Any],
        *,
        compacted: bool,
        tombstones: int | None,
    ) -> TopicInfo:
        with reads_answer(f"Topic {name!r}"):
            config: dict[str, Any] = dict(found["config"])
        layout = layout_of(name, config)
        if compacted and not layout.compacted:
            raise not_compacted(name)
        wanted, metadata = dict(changes), dict[str, str](config.get("metadata") or {})
        if partitions is not None and partitions != layout.partitions:
            if not layout.ours or partitions < layout.partitions:
                raise Unsupported(
                    f"Topic {name!r} has {layout.partitions} partitions and cannot have {partitions}",
                    advice="Partitions can only be added, and only to topics made by ensure_topic",
                )
            wanted["metadata"] = metadata
            metadata[PARTITIONS_KEY] = str(_checked_partitions(partitions))
        if tombstones not in (None, layout.tombstone_seconds):
            wanted["metadata"] = metadata
            metadata[TOMBSTONE_KEY] = str(tombstones)
        if all(config.get(key) == value for key, value in wanted.items()):
            return _topic_info(name, found)
        merged = {**config, **wanted}
        if layout.compacted and wanted.keys() & {_OPTIONS[option][0] for option in ("discard", *_BOUNDS)}:
            _check_keeps_rows(merged)
        if merged.get("max_age"):
            merged["duplicate_window"] = min(merged.get("duplicate_window", 0), merged["max_age"])
        updated = await self._connection.api(f"STREAM.UPDATE.{layout.stream}", merged, what=f"Topic {name!r}")
        self._layouts.forget(name)
        return _topic_info(name, updated)

    async def delete_topic(self, name: str) -> None:
        stream = stream_name(name)
        self._layouts.forget(name)
        try:
            await self._connection.api(f"STREAM.DELETE.{stream}", what=f"Topic {name!r}")
        except TopicNotFound:
            return
        await release_counts.forget(self._connection, stream)

    async def list_topics(self) -> Sequence[str]:
        return sorted(
            [
                topic_of(name)
                async for name in self._pages("STREAM.NAMES", "streams", what="Topics")
                if name != RELEASE_COUNTS_STREAM and not name.startswith(("KV_", "OBJ_", "$"))
            ]
        )

    async def describe_topic(self, name: str) -> TopicInfo:
        return _topic_info(name, await self._layouts.info(name))

    async def purge(self, topic: str) -> int | None:
        layout = await self._layouts.find(topic, fresh=True)
        # The claims of writers of a table stay, or its purge would fence them.
        only = {"filter": layout.filter} if layout.compacted else None
        answer = await self._connection.api(f"STREAM.PURGE.{layout.stream}", only, what=f"Topic {topic!r}")
        with reads_answer(f"Topic {topic!r}"):
            return int(answer.get("purged") or 0)

    # Subscriptions and groups.

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start, options: Mapping[str, Any]
    ) -> SubscriptionInfo:
        """Create the durable of a message subscription."""
        if options:
            raise UnknownSetting(
                f"A JetStream subscription has no option {min(options)!r}",
                advice="Lease and limits are settings of the connection",
            )
        layout = await self._layouts.find(topic, fresh=True)
        found = await subscriptions.ensure_message_consumer(
            self._connection, layout, name, consumer_name(name), start=start
        )
        return _subscription_info(topic, name, [found])

    async def delete_subscription(self, topic: str, name: str) -> None:
        layout = await self._layouts.find(topic, fresh=True)
        for consumer in await self._consumers_of(layout, name):
            await subscriptions.delete(
                self._connection, layout.stream, consumer, f"Subscription {name!r} of topic {topic!r}"
            )
        await release_counts.forget(self._connection, layout.stream, consumer_name(name))

    async def list_subscriptions(self, topic: str) -> Sequence[str]:
        layout = await self._layouts.find(topic, fresh=True)
        names = {
            subscription_of(name) for name in await self._consumers(layout.stream, topic) if not name.startswith("+")
        }
        return sorted(names)

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        layout = await self._layouts.find(topic, fresh=True)
        return _subscription_info(topic, name, await self._infos(layout, name))

    async def lag(self, topic: str, subscription: str) -> Lag:
        """Waiting and unsettled messages of a subscription; of a group, records behind its commits per partition."""
        layout = await self._layouts.find(topic, fresh=True)
        waiting = unsettled = 0
        partitions: dict[int, int] = {}
        for info in await self._infos(layout, subscription):
            with reads_answer(f"Subscription {subscription!r} of topic {topic!r}"):
                pending, unacked = int(info.get("num_pending") or 0), int(info.get("num_ack_pending") or 0)
                in_group = group_of(info["name"]) is not None
                partition = int(info["name"].rpartition("+")[2]) if in_group else 0
            if not in_group:
                waiting += pending
                unsettled += unacked
            else:
                behind = pending + unacked
                if layout.ours:
                    # Exact even if the durable has not been reset to its committed position.
                    reader = JetStreamLogReader(self._connection, self._layouts)
                    behind = await reader.behind(layout, partition, committed_position(info) or 1)
                partitions[partition] = behind
                waiting += behind
        return Lag(waiting=waiting, unsettled=unsettled, partitions=partitions)

    async def _infos(self, layout: Layout, name: str) -> list[dict[str, Any]]:
        what = f"Subscription {name!r} of topic {layout.topic!r}"
        names = await self._consumers_of(layout, name)
        if not names:
            raise SubscriptionNotFound(f"{what} does not exist")
        return [await subscriptions.info(self._connection, layout.stream, consumer, what) for consumer in names]

    async def _consumers_of(self, layout: Layout, name: str) -> list[str]:
        """The consumers of a subscription, or of a group's partitions."""
        plain = consumer_name(name)
        prefix = group_consumer(name, 0)[:-2]
        return [
            consumer
            for consumer in await self._consumers(layout.stream, layout.topic)
            if consumer == plain or group_of(consumer) == prefix
        ]

    async def _consumers(self, stream: str, topic: str) -> list[str]:
        return [name async for name in self._pages(f"CONSUMER.NAMES.{stream}", "consumers", what=f"Topic {topic!r}")]

    async def _pages(self, subject: str, field: str, *, what: str) -> AsyncIterator[str]:
        offset = 0
        while True:
            page = await self._connection.api(subject, {"offset": offset}, what=what)
            with reads_answer(what):
                names = [str(name) for name in page.get(field) or ()]
                total = int(page.get("total") or 0)
            for name in names:
                yield name
            offset += len(names)
            if not names or offset >= total:
                return


def _checked_partitions(number: int) -> int:
    if not 1 <= number <= MOST_PARTITIONS:
        raise InvalidSetting(f"partitions is {number}", advice=f"Use 1 to {MOST_PARTITIONS}")
    return number


@reads_answer("The state of a stream")
def _topic_info(name: str, info: Mapping[str, Any]) -> TopicInfo:
    layout = layout_of(name, info["config"])
    state: Mapping[str, Any] = info.get("state") or {}
    return TopicInfo(
        name=name,
        partitions=layout.partitions,
        messages=int(state.get("messages") or 0),
        bytes=int(state.get("bytes") or 0),
        identity=str(info["created"]) if info.get("created") else None,
        compacted=layout.compacted,
        native=dict(info),
    )


@reads_answer("The state of a consumer")
def _subscription_info(topic: str, name: str, infos: list[dict[str, Any]]) -> SubscriptionInfo:
    native = infos[0] if len(infos) == 1 else {"consumers": {info["name"]: info for info in infos}}
    return SubscriptionInfo(topic=topic, name=name, native=native)


def _stream_changes(retention: timedelta | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The stream configuration for retention and options.

    :raises UnknownSetting: an option is unknown.
    :raises InvalidSetting: the value of an option is invalid.
    """
    changes: dict[str, Any] = {}
    if retention is not None:
        changes["max_age"] = nanoseconds("retention", retention)
    for option, value in options.items():
        if option not in _OPTIONS:
            raise UnknownSetting(
                f"A JetStream topic has no option {option!r}", advice=f"It has {', '.join(sorted(_OPTIONS))}"
            )
        name, read = _OPTIONS[option]
        changes[name] = read(option, value)
    return changes


def _check_keeps_rows(config: Mapping[str, Any]) -> None:
    """:raises InvalidSetting: a full stream would drop rows of a table, and not refuse new ones."""
    for option in _BOUNDS:
        name = _OPTIONS[option][0]
        if config.get(name, -1) > 0 and config.get("discard") != "new":
            raise InvalidSetting(
                f"{option} is {config[name]} for a compacted topic: a full stream drops its oldest rows",
                advice='Leave it out, or add discard="new": then a full stream refuses what is published',
            )


def _seconds(option: str, value: object) -> int:
    seconds = value.total_seconds() if isinstance(value, timedelta) else 0
    if seconds < 1 or seconds % 1:
        raise InvalidSetting(f"{option} is {value!r}", advice="Use a timedelta of whole seconds, one or more")
    return int(seconds)


def _up_to(most: int, what: str) -> Callable[[str, object], int]:
    def read(option: str, value: object) -> int:
        # The server takes 0 for "unlimited", which a caller does not expect.
        if not is_whole(value) or not (value == -1 or 1 <= value <= most):
            raise InvalidSetting(f"{option} is {value!r}", advice=f"Use {what} from 1 to {most}, or -1 for unlimited")
        return value

    return read


def _replicas(option: str, value: object) -> int:
    if not is_whole(value) or not 1 <= value <= 5:
        raise InvalidSetting(f"{option} is {value!r}", advice="Use a whole number from 1 to 5")
    return value


def _one_of(*choices: str) -> Callable[[str, object], str]:
    def read(option: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise InvalidSetting(f"{option} is {value!r}", advice=f"Use one of {', '.join(choices)}")
        return value

    return read


_BOUNDS: Final = ("max_bytes", "max_messages")
"""Options that bound a stream."""
_OPTIONS: Final[Mapping[str, tuple[str, Callable[[str, Any], Any]]]] = {
    "storage": ("storage", _one_of("file", "memory")),
    "replicas": ("num_replicas", _replicas),
    "max_bytes": ("max_bytes", _up_to(2**63 - 1, "a whole number of bytes")),
    "max_messages": ("max_msgs", _up_to(2**63 - 1, "a whole number")),
    "max_message_size": ("max_msg_size", _up_to(2**31 - 1, "a whole number of bytes")),
    "deduplication_window": ("duplicate_window", nanoseconds),
    "discard": ("discard", _one_of("old", "new")),
    "compression": ("compression", _one_of("none", "s2")),
}
"""By option: the server's name for it, and the function that checks the value."""
