"""The options of a topic, as `ensure_topic` takes them, as Kafka's topic configuration. Pure functions.

An option is any configuration of a topic, by Kafka's name or with `_` for `.`; and `replication_factor`. Times may be
timedeltas, lists are joined, None puts back the cluster's default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Final, cast

from confluent_kafka import KafkaError

from broker.checks import is_finite, is_whole
from broker.errors import BrokerError, InvalidSetting, UnknownSetting
from broker_kafka.errors import kafka_error

__all__ = ["TopicOptions", "explain", "explain_copies", "read_options"]

_MILLISECOND: Final = timedelta(milliseconds=1)
_UNKNOWN: Final = re.compile(r"Unknown topic config name: (\S+)")
_INVALID: Final = re.compile(r"Invalid value (.*?) for configuration (\S+?)(?:: (.*))?$", re.DOTALL)

_BROKERS: Final = re.compile(r"only (\d+) broker|available brokers: (\d+)")

_COMMON: Final = (
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
"""Names to suggest; the brokers say which there are."""


@dataclass(frozen=True, slots=True)
class TopicOptions:
    """What was asked for.

    :ivar config: values by Kafka's names; None is the cluster's default.
    """

    config: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    replication_factor: int | None = None


def read_options(retention: timedelta | None, options: Mapping[str, Any]) -> TopicOptions:
    """Check the options as far as that needs no broker.

    :raises InvalidSetting: a value has a type that no configuration takes, or an option is given twice.
    """
    config: dict[str, str | None] = {}
    copies: int | None = None
    if retention is not None:
        config["retention.ms"] = str(max(1, retention // _MILLISECOND))
    for option, value in options.items():
        if option in ("replication_factor", "replication.factor"):
            if not is_whole(value) or not 1 <= value <= 32_767:
                raise InvalidSetting(
                    f"Option {option!r} is {value!r}", advice="It takes a whole number from 1 to 32767"
                )
            copies = value
            continue
        name = option.replace("_", ".")
        if name in config:
            advice = "Give either retention or retention.ms" if name == "retention.ms" else "Give it once"
            raise InvalidSetting(f"Option {name!r} is given twice", advice=advice)
        config[name] = None if value is None else _text(option, value)
    return TopicOptions(config, copies)


def explain(error: BrokerError, options: TopicOptions) -> BrokerError:
    """The error of a broker that does not take an option, naming the option, its value and the mend."""
    native = kafka_error(error.native) if error.native is not None else None
    text = native.str() if native is not None else error.message
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        name = unknown[1]
        near = get_close_matches(name, _COMMON, 1, 0.6)
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


def explain_copies(error: BrokerError, topic: str, copies: int) -> BrokerError:
    """The error of brokers that are too few for so many copies of a partition, naming the setting and the mend.

    :param copies: what was asked for; -1 is the cluster's default.
    """
    native = kafka_error(error.native) if error.native is not None else None
    if native is None or native.code() != KafkaError.INVALID_REPLICATION_FACTOR:
        return error
    there = _BROKERS.search(native.str())
    most = f"at most {there[1] or there[2]}, the number of brokers" if there else "at most the number of brokers"
    value = "-1, which is the brokers' default.replication.factor" if copies == -1 else str(copies)
    return InvalidSetting(
        f"replication_factor is {value}, and topic {topic!r} cannot have so many copies: {native.str()}".rstrip("."),
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
        advice="It takes text, a number, true or false, a timedelta, a list of texts, or None for the default",
    )
