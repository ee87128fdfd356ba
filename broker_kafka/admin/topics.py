"""Topics: create, change, describe, list, purge and delete; and the options of `ensure_topic`.

An option is any topic configuration, by Kafka's name or with `_` for `.`, or `replication_factor`. Times may be
timedeltas, lists are joined, None restores the cluster's default.

*Concurrency.* Any number of calls, also from several processes: a topic that another process creates meanwhile gets the
requested options. *Cancellation.* A cancelled call may have taken effect. *Failure.* Errors name the option, its value
and what to do. A creation returns when every partition has a leader, a deletion when the topic is gone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from difflib import get_close_matches
from time import monotonic
from typing import Any, Final, cast

from confluent_kafka import OFFSET_END, KafkaError
from confluent_kafka import TopicPartition as NativePartition
from confluent_kafka.admin import (
    AlterConfigOpType,  # pyright: ignore[reportPrivateImportUsage]
    ConfigEntry,  # pyright: ignore[reportPrivateImportUsage]
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)
from confluent_kafka.cimpl import NewPartitions, NewTopic

from broker import (
    BrokerError,
    InvalidSetting,
    OperationTimeout,
    TopicInfo,
    TopicNotFound,
    TopicPartition,
    UnknownSetting,
    Unsupported,
)
from broker.driver import is_finite, is_whole, not_compacted, refused
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, partitions_of
from broker_kafka.cluster.names import is_internal
from broker_kafka.cluster.requests import (
    describe_topic,
    plain_str,
    read_metadata,
    request_any_broker,
    request_with_retries,
    retry_while,
)
from broker_kafka.errors import kafka_error

__all__ = ["KafkaTopics", "TopicOptions", "explain"]

_POLICY: Final = "cleanup.policy"
_MILLISECOND: Final = timedelta(milliseconds=1)
_UNKNOWN: Final = re.compile(r"Unknown topic config name: (\S+)")
_INVALID: Final = re.compile(r"Invalid value (.*?) for configuration (\S+?)(?:: (.*))?$", re.DOTALL)
_BROKERS: Final = re.compile(r"only (\d+) broker|available brokers: (\d+)")

_SUGGESTIONS: Final = (
    "cleanup.policy",
    "compression.type",
    "delete.retention.ms",
    "flush.messages",
    "flush.ms",
    "max.compaction.lag.ms",
    "max.message.bytes",
    "message.timestamp.after.max.ms",
    "message.timestamp.before.max.ms",
    "message.timestamp.type",
    "min.cleanable.dirty.ratio",
    "min.compaction.lag.ms",
    "min.insync.replicas",
    "remote.storage.enable",
    "replication_factor",
    "retention.bytes",
    "retention.ms",
    "segment.bytes",
    "segment.ms",
    "unclean.leader.election.enable",
)
"""Names to suggest in an error."""

_MOST_PARTITIONS: Final = 100_000
"""The limit of the client."""


@dataclass(frozen=True, slots=True)
class TopicOptions:
    """:ivar config: values by Kafka's names; None is the cluster's default."""

    config: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    replication_factor: int | None = None


class KafkaTopics:
    """Administration of topics."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._settings = connection.settings
        self._timeout = connection.settings.request_timeout

    async def ensure_topic(
        self, name: str, *, partitions: int | None, retention: timedelta | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        """Options: any topic configuration, by Kafka's name with dots or `_`, and `replication_factor`."""
        return await self._ensure(name, partitions, retention, options)

    async def ensure_compacted_topic(
        self, name: str, *, partitions: int | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        """Options as of `ensure_topic`, without `cleanup.policy`."""
        for option, value in options.items():
            if option.replace("_", ".") == _POLICY:
                raise InvalidSetting(f"Option {option!r} is {value!r} beside compacted=True", advice="Leave it out")
        return await self._ensure(name, partitions, None, options, compacted=True)

    async def _ensure(
        self,
        name: str,
        partitions: int | None,
        retention: timedelta | None,
        options: Mapping[str, Any],
        *,
        compacted: bool = False,
    ) -> TopicInfo:
        if partitions is not None and partitions < 1:
            raise InvalidSetting(f"partitions is {partitions}", advice="Give a whole number of 1 or more")
        if partitions is not None and partitions > _MOST_PARTITIONS:
            raise refused("partitions", partitions, f"1 to {_MOST_PARTITIONS} on Kafka, or None")
        if retention is not None and retention <= timedelta(0):
            raise InvalidSetting(f"retention is {retention}", advice="Give a time above 0")
        wanted = _read_options(retention, options)

        async def attempt() -> TopicInfo | TopicNotFound:
            try:
                return await self._create_or_change(name, partitions, wanted, compacted=compacted)
            except TopicNotFound as error:
                return error

        # Requests go to any broker, and one may not know a topic yet that another has reported.
        result = await retry_while(self._timeout, attempt, lambda found: isinstance(found, TopicNotFound))
        if isinstance(result, TopicNotFound):
            raise result
        self._connection.changed[name] = monotonic()
        return result

    async def _create_or_change(
        self, name: str, partitions: int | None, options: TopicOptions, *, compacted: bool
    ) -> TopicInfo:
        try:
            found = await describe_topic(self._connection, name)
        except TopicNotFound:
            new = replace(options, config={**options.config, _POLICY: "compact"}) if compacted else options
            if await self.create(name, partitions or self._settings.partitions, new):
                return await self.describe_topic(name)
            found = await describe_topic(self._connection, name)
        if compacted and not _is_compacted(config := await self._config(name)):
            if "compact" in (policy := config.get(_POLICY) or ""):
                raise Unsupported(
                    f"Topic {name!r} has cleanup.policy={policy}: its rows are deleted after a while, too",
                    advice="Set it to compact, or create another topic with ensure_topic(compacted=True)",
                )
            raise not_compacted(name)
        await self._change(name, found, partitions, options)
        return await self.describe_topic(name)

    async def create(self, name: str, partitions: int, options: TopicOptions) -> bool:
        """Create a topic and wait for its leaders; False if another process has created it first."""
        replicas = options.replication_factor or self._settings.replication_factor
        config = {key: value for key, value in options.config.items() if value is not None}
        new = NewTopic(plain_str(name), partitions, replicas, config=config)
        try:
            await request_any_broker(
                self._connection,
                lambda client, patience: client.create_topics(
                    [new], request_timeout=patience, operation_timeout=patience
                ),
                f"Creating topic {name!r}",
            )
        except BrokerError as error:
            if _code(error) == KafkaError.TOPIC_ALREADY_EXISTS:
                await self._until(f"Creating topic {name!r}", name)
                return False
            raise _explain_replicas(explain(error, options), name, replicas) from error
        await self._until(f"Creating topic {name!r}", name, partitions)
        return True

    async def describe_topic(self, name: str, *, known: bool = False) -> TopicInfo:
        """:param known: the topic was just created: TopicNotFound is retried."""
        found = await describe_topic(self._connection, name, known=known)
        places = [TopicPartition(name, each.id) for each in found.partitions]
        config, bounds = await asyncio.gather(self._config(name), bounds_of(self._connection, places, committed=False))
        return TopicInfo(
            name=name,
            partitions=len(found.partitions),
            # Includes compacted records and transaction markers, which brokers do not report.
            messages=sum(following - first for first, following in bounds.values()),
            identity=str(found.topic_id),
            compacted=_is_compacted(config),
            native={
                "id": str(found.topic_id),
                "config": config,
                "partitions": {
                    each.id: {
                        "leader": None if each.leader is None else each.leader.id,
                        "replicas": [node.id for node in each.replicas],
                        "isr": [node.id for node in each.isr],
                        **bounds[TopicPartition(name, each.id)]._asdict(),
                    }
                    for each in found.partitions
                },
            },
        )

    async def topic_identity(self, name: str) -> str:
        """In one request, where a description takes four."""
        return str((await describe_topic(self._connection, name)).topic_id)

    async def retention(self, name: str) -> timedelta | None:
        """For how long the topic keeps a record by the timestamp of its publisher; None if not by that."""
        config = await self._config(name)
        milliseconds = int(config.get("retention.ms") or -1)
        by_time = "delete" in (config.get("cleanup.policy") or "")
        by_publisher = config.get("message.timestamp.type") == "CreateTime"
        return timedelta(milliseconds=milliseconds) if milliseconds >= 0 and by_time and by_publisher else None

    async def list_topics(self) -> Sequence[str]:
        found = await read_metadata(self._connection, "Listing topics", self._timeout)
        return sorted(name for name, topic in found.topics.items() if not is_internal(name) and topic.error is None)

    async def delete_topic(self, name: str) -> None:
        what = f"Deleting topic {name!r}"

        def start(client: Any) -> Any:
            return client.delete_topics(
                [plain_str(name)], request_timeout=self._timeout, operation_timeout=self._timeout
            )

        # Not retried on another broker: a frozen one would delete the topic when it resumes, perhaps one that was
        # created since. Describing the topic first makes the client use a broker that answers.
        with suppress(TopicNotFound):
            await describe_topic(self._connection, name)
        try:
            await request_with_retries(self._connection, start, what)
        except TopicNotFound:
            return
        await self._until(what, name, gone=True)

    async def purge(self, topic: str) -> int | None:
        places = await partitions_of(self._connection, topic)
        bounds = await bounds_of(self._connection, places, committed=False)
        ends = [NativePartition(*place, OFFSET_END) for place in places]

        def start(client: Any) -> Any:
            return client.delete_records(ends, request_timeout=self._timeout, operation_timeout=self._timeout)

        results = await self._connection.outcomes(start, f"Purging topic {topic!r}")
        removed = 0
        for place, result in results.items():
            if isinstance(result, BrokerError):
                if _code(result) == KafkaError.POLICY_VIOLATION:
                    raise Unsupported(
                        f"Topic {topic!r} is compacted, so Kafka deletes its records by key only",
                        native=result.native,
                        advice="Publish tombstones, add `delete` to its cleanup.policy, or delete and create it",
                    )
                raise result
            first = bounds[TopicPartition(topic, place.partition)].first
            removed += max(0, result.low_watermark - first)
        return removed

    async def _change(self, name: str, found: Any, partitions: int | None, options: TopicOptions) -> None:
        has = len(found.partitions)
        replicas = len(found.partitions[0].replicas)
        if options.replication_factor not in (None, replicas):
            raise Unsupported(
                f"Topic {name!r} has {replicas} replicas of each partition, and replication_factor is "
                f"{options.replication_factor}",
                advice="Change the number of replicas with kafka-reassign-partitions",
            )
        if partitions is not None and partitions < has:
            raise Unsupported(
                f"Topic {name!r} has {has} partitions, and {partitions} were requested",
                advice="Kafka can add partitions, but not remove them: publish to a new topic",
            )
        await self._alter(name, options)
        if partitions is not None and partitions > has:
            new = NewPartitions(plain_str(name), partitions)
            try:
                await request_any_broker(
                    self._connection,
                    lambda client, patience: client.create_partitions(
                        [new], request_timeout=patience, operation_timeout=patience
                    ),
                    f"Adding partitions to topic {name!r}",
                )
            except BrokerError:
                # Another process may have added them.
                if len(await partitions_of(self._connection, name)) < partitions:
                    raise
            await self._until(f"Adding partitions to topic {name!r}", name, partitions)

    async def _alter(self, name: str, options: TopicOptions) -> None:
        if not options.config:
            return
        present = await self._config(name)
        entries = [
            ConfigEntry(
                key,
                value or "",
                incremental_operation=AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET,
            )
            for key, value in options.config.items()
            if value is None or present.get(key) != value
        ]
        if not entries:
            return
        resource = ConfigResource(ResourceType.TOPIC, plain_str(name), incremental_configs=entries)
        try:
            await request_any_broker(
                self._connection,
                lambda client, patience: client.incremental_alter_configs([resource], request_timeout=patience),
                f"Changing topic {name!r}",
            )
        except BrokerError as error:
            raise explain(error, options) from error
        # Brokers learn of the change a moment later. Another process may undo the change, so the wait ends in any case.
        replaced = {entry.name: present.get(entry.name) for entry in entries if options.config[entry.name] is not None}
        await retry_while(
            self._timeout,
            lambda: self._config(name),
            lambda config: any(config.get(key) == value for key, value in replaced.items()),
        )

    async def _config(self, name: str) -> dict[str, str | None]:
        resource = ConfigResource(ResourceType.TOPIC, plain_str(name))
        found = await request_any_broker(
            self._connection,
            lambda client, patience: client.describe_configs([resource], request_timeout=patience),
            f"Describing topic {name!r}",
            known=True,
        )
        return {key: entry.value for key, entry in sorted(found.items())}

    async def _until(self, what: str, name: str, partitions: int = 1, *, gone: bool = False) -> None:
        """Wait until the topic is gone, or has at least `partitions`, each with a leader."""

        async def reached() -> bool:
            try:
                found = await describe_topic(self._connection, name)
            except TopicNotFound:
                return gone
            led = [each for each in found.partitions if each.leader is not None and each.leader.id >= 0]
            return not gone and len(led) == len(found.partitions) >= partitions

        if not await retry_while(self._timeout, reached, lambda done: not done):
            raise OperationTimeout(
                f"{what}: the brokers accepted the request, but it is not complete after {self._timeout:g} s",
                advice="It completes in the background; raise request_timeout to wait longer",
            )


def explain(error: BrokerError, options: TopicOptions) -> BrokerError:
    """Translate a broker's error for an option into one that names the option, its value and what to do."""
    native = kafka_error(error.native) if error.native is not None else None
    text = native.str() if native is not None else error.message
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        name = unknown[1]
        near = get_close_matches(name, _SUGGESTIONS, 1, 0.6)
        advice = f"Did you mean {near[0]!r}?" if near else "Kafka's documentation lists them under topic configs"
        return UnknownSetting(f"A Kafka topic has no option {name!r}", native=error.native, advice=advice)
    invalid = _INVALID.search(text)
    if invalid is not None:
        value, name, reason = invalid[1], invalid[2], (invalid[3] or "").strip()
        return InvalidSetting(
            f"Option {name!r} is {options.config.get(name, value)!r}",
            native=error.native,
            advice=f"Kafka says: {reason or text}",
        )
    return error


def _read_options(retention: timedelta | None, options: Mapping[str, Any]) -> TopicOptions:
    """Read the options of `ensure_topic`.

    :raises InvalidSetting: a value has a type that no configuration takes, or an option is given twice.
    """
    config: dict[str, str | None] = {}
    replicas: int | None = None
    if retention is not None:
        config["retention.ms"] = str(max(1, retention // _MILLISECOND))
    for option, value in options.items():
        if option in ("replication_factor", "replication.factor"):
            if not is_whole(value) or not 1 <= value <= 32_767:
                raise InvalidSetting(f"Option {option!r} is {value!r}", advice="Give a whole number from 1 to 32767")
            replicas = value
            continue
        name = option.replace("_", ".")
        if name in config:
            advice = "Give either retention or retention.ms" if name == "retention.ms" else "Give it once"
            raise InvalidSetting(f"Option {name!r} is given twice", advice=advice)
        config[name] = None if value is None else _text(option, value)
    return TopicOptions(config, replicas)


def _explain_replicas(error: BrokerError, topic: str, replicas: int) -> BrokerError:
    """Translate INVALID_REPLICATION_FACTOR into an error that names the setting and what to do.

    :param replicas: the requested replication factor; -1 is the cluster's default.
    """
    native = kafka_error(error.native) if error.native is not None else None
    if native is None or native.code() != KafkaError.INVALID_REPLICATION_FACTOR:
        return error
    brokers = _BROKERS.search(native.str())
    most = f"at most {brokers[1] or brokers[2]}, the number of brokers" if brokers else "at most the number of brokers"
    value = "-1, which is the brokers' default.replication.factor" if replicas == -1 else str(replicas)
    return InvalidSetting(
        f"replication_factor is {value}, and topic {topic!r} cannot have so many replicas: {native.str()}".rstrip("."),
        native=error.native,
        advice=f"Set replication_factor to {most}, as an option of the topic or for the bus; or start more brokers",
    )


def _text(option: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, timedelta):
        return str(value // _MILLISECOND)
    if isinstance(value, str) or is_finite(value):
        return str(value)
    if isinstance(value, (list, tuple)):
        items = cast("list[object]", value)
        if all(isinstance(item, str) for item in items):
            return ",".join(cast("list[str]", items))
    raise InvalidSetting(
        f"Option {option!r} is {value!r}",
        advice="Give a str, number, bool, timedelta, list of str, or None for the default",
    )


def _is_compacted(config: Mapping[str, str | None]) -> bool:
    """Whether the last value of each key stays; with `compact,delete` it goes when it is old."""
    return (config.get(_POLICY) or "").strip() == "compact"


def _code(error: BrokerError) -> int | None:
    found = kafka_error(error.native) if error.native is not None else None
    return None if found is None else found.code()
