"""The arguments of a group consumer: options, callbacks, settings of its own client; and the checks of its calls.

Pure. Each check raises ConfigurationError with the argument, its value and what to give instead.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import Any, Final, Literal

from broker import AnyCodec, ConfigurationError, PreparesBatches, Record, TopicPartition, UnknownSetting
from broker.driver import (
    Start,
    check_accepts,
    check_codec,
    check_name,
    check_partitions,
    check_start,
    is_finite,
    is_whole,
    refused,
)
from broker_kafka.cluster.names import check_id
from broker_kafka.config.properties import CONSUMER_PROPERTIES
from broker_kafka.group.topics import Subscription
from broker_kafka.offsets.arguments import check_positions, check_store, is_offset, is_partition
from broker_kafka.offsets.protocol import OffsetStore, StoredOffset
from broker_kafka.settings import KafkaSettings

__all__ = [
    "GroupOptions",
    "GroupStart",
    "OnRebalance",
    "Rebalance",
    "check_kind",
    "check_record",
    "read_positions",
    "read_records",
    "with_options",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """A change of the partitions of this member.

    :ivar assigned: new partitions.
    :ivar revoked: partitions that are about to be released; their work can still be finished and committed.
    :ivar lost: partitions that went to another member, which may read them already.
    :ivar current: all partitions after the change.
    :ivar deadline: the loop time until which work on revoked partitions can be finished.
    """

    assigned: tuple[TopicPartition, ...] = ()
    revoked: tuple[TopicPartition, ...] = ()
    lost: tuple[TopicPartition, ...] = ()
    current: tuple[TopicPartition, ...] = ()
    deadline: float | None = None


OnRebalance = Callable[[Rebalance], Awaitable[object] | object]


_RECORD = "a Record that this consumer handed over"


def check_record(record: object) -> None:
    """:raises ConfigurationError: not a record."""
    if not isinstance(record, Record):
        raise refused("record", record, _RECORD)


def read_records(records: Iterable[Record[Any]]) -> Collection[Record[Any]]:
    """The records, as a collection.

    :raises ConfigurationError: one is not a record.
    """
    if not _is_iterable(records):
        raise refused("records", records, "a batch, or a list of records")
    several = records if isinstance(records, Collection) else list(records)
    for record in several:
        if type(record) is not Record:
            check_record(record)
    return several


def read_positions(
    positions: Mapping[TopicPartition, int] | Mapping[tuple[str, int], int],
) -> dict[TopicPartition, int]:
    """The next offset to read of each partition.

    :raises ConfigurationError: not positions of partitions.
    """
    if not _is_mapping(positions):
        raise refused("positions", positions, "a mapping of (topic, number) to the next offset to read")
    found = dict(zip(check_partitions(positions), positions.values(), strict=True))
    check_positions({place: StoredOffset(position) for place, position in found.items()})
    return found


def check_kind(name: str, value: object, kind: type, takes: str) -> None:
    """:raises ConfigurationError: of another type."""
    if not isinstance(value, kind):
        raise refused(name, value, takes)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_iterable(value: object) -> bool:
    return isinstance(value, Iterable)


GroupStart = Start | Mapping[TopicPartition, int] | Mapping[tuple[str, int], int]
"""Where a group without a stored position begins; partitions that a mapping leaves out begin at their first record."""

_COMMIT_SECONDS: Final = 5.0
_FLUSH_SECONDS: Final = 10.0

_OTHERS: Final = frozenset(
    {"client_id", "offset_reset", "properties", "request_timeout", "topic_metadata_refresh_interval_ms"}
)
"""Options that are not consumer properties of librdkafka."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """The options of `GroupConsumer`, which documents each.

    :raises ConfigurationError: one cannot be used.
    """

    subscription: Subscription
    group: str
    start: GroupStart
    codec: AnyCodec[Any] | None
    store: OffsetStore | None
    isolation: Literal["read_committed", "read_uncommitted"]
    on_assigned: OnRebalance | None
    on_revoking: OnRebalance | None
    on_lost: OnRebalance | None
    flush_timeout: float | None
    commit_interval: float | None
    commit_every: int | None
    max_buffered: int
    max_buffered_bytes: int
    stop_when_idle: float | None
    close_timeout: float
    settings: KafkaSettings

    def __post_init__(self) -> None:
        check_id(check_name(self.group, "group"), "group")
        self._check_topics_of(_check_start(self.start))
        check_codec(self.codec)
        if isinstance(self.codec, PreparesBatches):
            raise ConfigurationError(
                f"codec {self.codec!r} has prepare, which a GroupConsumer does not call", advice="Use bus.records"
            )
        if self.store is not None:
            check_store("store", self.store)
        if self.isolation not in ("read_committed", "read_uncommitted"):
            raise ConfigurationError(
                f"isolation is {self.isolation!r}", advice='It takes "read_committed" or "read_uncommitted"'
            )
        for name in ("on_assigned", "on_revoking", "on_lost"):
            callback = getattr(self, name)
            if callback is not None:
                check_accepts(name, callback, "a Rebalance")
        _check_seconds("close_timeout", self.close_timeout, none=False)
        for name in ("flush_timeout", "commit_interval", "stop_when_idle"):
            _check_seconds(name, getattr(self, name), none=True)
        _check_count("commit_every", self.commit_every, none=True)
        for name in ("max_buffered", "max_buffered_bytes"):
            _check_count(name, getattr(self, name), none=False)
        longest = self.settings.max_poll_interval_ms / 2000
        if self.flush_timeout is not None and self.flush_timeout > longest:
            raise ConfigurationError(
                f"flush_timeout is {self.flush_timeout:g}, but a release must finish within "
                f"max_poll_interval_ms, {self.settings.max_poll_interval_ms}",
                advice=f"Give half of that, {longest:g}, or less",
            )

    def _check_topics_of(self, start: Start | Mapping[TopicPartition, int]) -> None:
        # Topics that patterns find may come later, as partitions may.
        if isinstance(start, Mapping) and not self.subscription.patterns:
            for topic, _ in start:
                if topic not in self.subscription.names:
                    raise ConfigurationError(
                        f"start names topic {topic!r}, but this consumer reads {self.subscription}",
                        advice="Name a topic that it reads",
                    )

    @property
    def begin(self) -> Start | Mapping[TopicPartition, int]:
        """`start`, with partitions as keys.

        :raises ConfigurationError: not a start.
        """
        return _check_start(self.start)

    @property
    def flush_seconds(self) -> float:
        """How long callbacks and work in hand may delay a release."""
        if self.flush_timeout is not None:
            return self.flush_timeout
        return min(_FLUSH_SECONDS, self.settings.max_poll_interval_ms / 2000)

    @property
    def commit_seconds(self) -> float:
        """How long the commit of a release may take after that."""
        return min(_COMMIT_SECONDS, self.settings.max_poll_interval_ms / 4000)


def with_options(settings: KafkaSettings, options: Mapping[str, Any]) -> KafkaSettings:
    """The settings of the bus with some of them replaced.

    :raises UnknownSetting: one is no setting of a consumer.
    :raises InvalidSetting: a value cannot be used.
    """
    if not options:
        return settings
    fields = type(settings).model_fields
    known = {name for name in fields if name in _OTHERS or name.replace("_", ".") in CONSUMER_PROPERTIES}
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            advice = f"Did you mean {near[0]!r}?" if near else "It takes the settings of KafkaSettings for consumers"
            if name in fields:
                advice = "Give it to the bus, whose connection all its consumers share"
            raise UnknownSetting(f"A group consumer has no option {name!r}", advice=advice)
    changed = dict(options)
    if isinstance(changed.get("properties"), Mapping):
        changed["properties"] = {**settings.properties, **changed["properties"]}
    return settings.replaced(changed)


def _check_start(start: GroupStart) -> Start | Mapping[TopicPartition, int]:
    if isinstance(start, (str, datetime)) or not isinstance(start, Mapping):
        return check_start(start, also="a mapping of TopicPartition to offset")
    found: dict[TopicPartition, int] = {}
    for key, position in start.items():
        if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and is_partition(key[1])):
            raise ConfigurationError(
                f"start has the key {key!r}", advice="It takes TopicPartition(topic, partition) as keys"
            )
        if not is_offset(position):
            raise ConfigurationError(
                f"start of {key[0]!r}[{key[1]}] is {position!r}", advice="It takes the next offset to read, 0 or more"
            )
        found[TopicPartition(*key)] = position
    return found


def _check_seconds(name: str, value: object, *, none: bool) -> None:
    if not ((value is None and none) or (is_finite(value) and value > 0)):
        raise ConfigurationError(
            f"{name} is {value!r}", advice=f"It takes seconds above 0{', or None' if none else ''}"
        )


def _check_count(name: str, value: object, *, none: bool) -> None:
    if not ((value is None and none) or (is_whole(value) and value >= 1)):
        raise ConfigurationError(
            f"{name} is {value!r}", advice=f"It takes an int of 1 or more{', or None' if none else ''}"
        )
