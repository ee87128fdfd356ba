"""The options of a record consumer, and their checks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

from broker.checks import (
    check_accepts,
    check_choice,
    check_codec,
    check_count,
    check_flag,
    check_rate,
    check_seconds,
    refused,
)
from broker.driver.contract import RecordSubscription, Start
from broker.errors import ConfigurationError
from broker.names import check_name
from broker.reading.rebalance_callbacks import OnPartitions

__all__ = ["AnyRecordOptions", "RecordOptions", "check_record_options"]


class AnyRecordOptions(TypedDict, total=False):
    """The options that `records` of an asynchronous and of a blocking bus share."""

    start: Start
    isolation: Literal["read_committed", "read_uncommitted"]
    on_decode_error: str
    copartitioned: bool
    assign_timeout: float | None
    max_buffered: int
    max_rate: float | None
    stop_when_idle: float | None
    close_timeout: float


class RecordOptions(AnyRecordOptions, total=False):
    """The keyword options of `Bus.records`, which documents each."""

    on_assigned: OnPartitions | None
    on_revoking: OnPartitions | None
    on_lost: OnPartitions | None


def check_record_options(
    subscription: RecordSubscription,
    *,
    codec: object,
    on_decode_error: object,
    callbacks: Mapping[str, object],
    assign_timeout: object,
    max_buffered: object,
    max_buffered_bytes: object,
    max_rate: object,
    stop_when_idle: object,
    close_timeout: object,
) -> None:
    """:raises ConfigurationError: an option has the wrong type or value, or the options contradict each other."""
    check_codec(codec)
    check_choice("isolation", subscription.isolation, ("read_committed", "read_uncommitted"))
    check_flag("copartitioned", subscription.copartitioned)
    if subscription.copartitioned and subscription.pattern is not None:
        raise ConfigurationError(
            f"A copartitioned consumer cannot read the pattern {str(subscription.pattern)!r}", advice="Name its topics"
        )
    for name, callback in callbacks.items():
        if callback is not None:
            check_accepts(name, callback, "a list of partitions")
    check_seconds("assign_timeout", assign_timeout, optional=True)
    check_count("max_buffered", max_buffered)
    check_count("max_buffered_bytes", max_buffered_bytes)
    check_rate("max_rate", max_rate)
    check_seconds("stop_when_idle", stop_when_idle, optional=True)
    check_seconds("close_timeout", close_timeout)
    if not isinstance(on_decode_error, str):
        raise refused("on_decode_error", on_decode_error, '"raise", or the name of a topic')
    if on_decode_error != "raise":
        check_name(on_decode_error, "topic")
    if on_decode_error != "raise" and subscription.reads(on_decode_error):
        raise ConfigurationError(
            f"on_decode_error {on_decode_error!r} is one of the consumed topics", advice="Name another topic"
        )
