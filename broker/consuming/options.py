"""The options of a message consumer, and which of them go together. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict

from broker.capabilities import LeaseMode, MessageCapabilities
from broker.checks import check_codec, check_count, check_flag, check_rate, check_seconds, refused
from broker.consuming.retry.policy import Drop, Retry
from broker.consuming.retry.topics import RetryTopics
from broker.driver.contract import Start
from broker.errors import ConfigurationError, Unsupported
from broker.topic_patterns import TopicPattern

__all__ = [
    "ConsumerOptions",
    "MessageOptions",
    "check_options",
    "check_pattern",
    "check_policies",
    "fitting_retry",
    "longest_delay",
]

_MEBIBYTE = 1024 * 1024


class MessageOptions(TypedDict, total=False):
    """The keyword options of `bus.messages`, which documents each."""

    retry: Retry | None
    retry_topics: RetryTopics | None
    dead_letter: str | Drop | None
    ordered_by_key: bool
    start: Start
    create: bool
    max_outstanding: int
    max_outstanding_bytes: int
    prefetch: int | None
    max_rate: float | None
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
    max_rate: float | None = None
    max_lease: float = 3600.0
    ordered_by_key: bool = False
    confirm_acks: bool | None = None
    stop_when_idle: float | None = None
    close_timeout: float = 30.0
    blocked_after: float = 30.0


def check_options(options: ConsumerOptions, sources: int, retry: Retry, capabilities: MessageCapabilities) -> None:
    """Compare the options with each other and with what the backend can do.

    :raises ConfigurationError: one has the wrong type, or they contradict each other or the backend.
    """
    check_count("max_outstanding", options.max_outstanding)
    check_count("max_outstanding_bytes", options.max_outstanding_bytes)
    check_count("prefetch", options.prefetch, optional=True)
    check_rate("max_rate", options.max_rate)
    check_flag("ordered_by_key", options.ordered_by_key)
    check_flag("confirm_acks", options.confirm_acks, optional=True)
    check_seconds("max_lease", options.max_lease)
    check_seconds("close_timeout", options.close_timeout)
    check_seconds("blocked_after", options.blocked_after)
    check_seconds("stop_when_idle", options.stop_when_idle, optional=True)
    if options.max_outstanding < sources:
        raise ConfigurationError(
            f"max_outstanding is {options.max_outstanding} for {sources} topics", advice="Allow one message per topic"
        )
    if options.max_outstanding_bytes < sources:
        raise ConfigurationError(
            f"max_outstanding_bytes is {options.max_outstanding_bytes}", advice="Allow at least one byte per topic"
        )
    kept = longest_delay(options, capabilities)
    if capabilities.lease is not LeaseMode.NONE and retry.longest > kept:
        raise ConfigurationError(
            f"The retry policy has delays of up to {retry.longest:g} s, above the longest supported delay, {kept:g} s",
            advice="Lower Retry.maximum"
            if capabilities.lease is LeaseMode.FIXED
            else "Lower Retry.maximum or raise max_lease",
        )


def longest_delay(options: ConsumerOptions, capabilities: MessageCapabilities) -> float:
    """The seconds for which a message can be kept from handlers, by the broker or in this process under its lease."""
    lease = options.max_lease
    if capabilities.lease is LeaseMode.FIXED and capabilities.lease_seconds is not None:
        lease = min(lease, capabilities.lease_seconds)
    return max(capabilities.native_delay, lease)


def fitting_retry(retry: Retry | None, capabilities: MessageCapabilities) -> Retry:
    """The policy of a consumer. Where leases are not renewed, the default `maximum` becomes half a lease at most."""
    default = Retry()
    retry = retry or default
    if capabilities.lease is not LeaseMode.FIXED or capabilities.lease_seconds is None:
        return retry
    if retry.maximum != default.maximum:
        return retry
    longest = min(retry.maximum, capabilities.lease_seconds / 2)
    return replace(retry, maximum=longest, initial=min(retry.initial, longest))


def check_policies(retry: object, retry_topics: object, dead_letter: object, codec: object) -> None:
    """:raises ConfigurationError: one is of the wrong type."""
    if retry is not None and not isinstance(retry, Retry):
        raise refused("retry", retry, "a Retry(...), or None")
    if retry_topics is not None and not isinstance(retry_topics, RetryTopics):
        raise refused("retry_topics", retry_topics, "a RetryTopics(...), or None")
    if dead_letter is not None and not isinstance(dead_letter, str | Drop):
        raise refused("dead_letter", dead_letter, "a topic's name, DROP or None")
    check_codec(codec)


def check_pattern(
    pattern: TopicPattern | None, retry_topics: RetryTopics | None, dead_letter: str | Drop | None
) -> None:
    """Compare a pattern of the consumed topics with the policies; None is no pattern.

    :raises ConfigurationError: the pattern matches the dead-letter topic.
    :raises Unsupported: retry topics, whose names are made of those of the consumed topics.
    """
    if pattern is None:
        return
    if retry_topics is not None:
        raise Unsupported(
            "Retry topics have no place beside a pattern of topics", advice="Name the topics, or retry in place"
        )
    if isinstance(dead_letter, str) and pattern.matches(dead_letter):
        raise ConfigurationError(
            f"dead_letter {dead_letter!r} matches the pattern of the consumed topics",
            advice="Leave it out with exclude= of the TopicPattern",
        )
