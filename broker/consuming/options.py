"""The options of a message consumer, and which of them go together. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypedDict

from broker.capabilities import LeaseMode, MessageCapabilities
from broker.checks import is_finite, is_whole
from broker.consuming.retry import Drop, Retry
from broker.errors import ConfigurationError
from broker.spi import Start

__all__ = ["ConsumerOptions", "MessageOptions", "check_options", "check_seconds"]

_MEBIBYTE = 1024 * 1024


class MessageOptions(TypedDict, total=False):
    """The keyword options of `bus.messages`, which documents each."""

    retry: Retry | None
    dead_letter: str | Drop | None
    ordered_by_key: bool
    start: Start
    create: bool
    max_outstanding: int
    max_outstanding_bytes: int
    prefetch: int | None
    max_lease: float
    confirm_acks: bool | None
    stop_when_idle: float | None
    close_timeout: float
    blocked_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """The limits of one message consumer; `bus.messages` documents each."""

    max_outstanding: int = 1000
    max_outstanding_bytes: int = 64 * _MEBIBYTE
    prefetch: int | None = None
    max_lease: float = 3600.0
    ordered_by_key: bool = False
    confirm_acks: bool = False
    stop_when_idle: float | None = None
    close_timeout: float = 30.0
    blocked_after: float = 30.0


def check_options(options: ConsumerOptions, sources: int, retry: Retry, capabilities: MessageCapabilities) -> None:
    """Compare the options with each other and with what the backend can do.

    :raises ConfigurationError: one has the wrong type, or they contradict each other or the backend.
    """
    for name, value in (
        ("max_outstanding", options.max_outstanding),
        ("max_outstanding_bytes", options.max_outstanding_bytes),
    ):
        if not is_whole(value):
            raise ConfigurationError(f"{name} is {value!r}", advice="It takes an int of 1 or more")
    if options.max_outstanding < sources:
        raise ConfigurationError(
            f"max_outstanding is {options.max_outstanding} for {sources} topics", advice="Allow one message per topic"
        )
    if options.max_outstanding_bytes < sources:
        raise ConfigurationError(
            f"max_outstanding_bytes is {options.max_outstanding_bytes}", advice="Allow at least one byte per topic"
        )
    if options.prefetch is not None and not (is_whole(options.prefetch) and options.prefetch >= 1):
        raise ConfigurationError(f"prefetch is {options.prefetch!r}", advice="It takes an int of 1 or more, or None")
    for name, value in (
        ("max_lease", options.max_lease),
        ("close_timeout", options.close_timeout),
        ("blocked_after", options.blocked_after),
    ):
        if not (is_finite(value) and value > 0):
            raise ConfigurationError(f"{name} is {value!r}", advice="It takes seconds above 0")
    idle = options.stop_when_idle
    if idle is not None and not (is_finite(idle) and idle > 0):
        raise ConfigurationError(f"stop_when_idle is {idle!r}", advice="It takes seconds above 0, or None")
    kept = max(capabilities.native_delay, options.max_lease)
    if capabilities.lease is not LeaseMode.NONE and retry.longest > kept:
        raise ConfigurationError(
            f"The retry policy may ask for a delay of {retry.longest:g} s, and nobody can keep more than {kept:g} s",
            advice="Lower Retry.maximum or raise max_lease",
        )


def check_seconds(name: str, value: float) -> None:
    """A time to wait, given in a call.

    :raises ConfigurationError: it is not a finite number of 0 or more.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigurationError(f"{name} is {value!r}", advice="It takes seconds, 0 or more")
