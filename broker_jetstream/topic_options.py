"""The options of `ensure_topic`, checked before the server sees them. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from broker import InvalidSetting, UnknownSetting
from broker.driver import is_whole
from broker_jetstream.times import nanoseconds

__all__ = ["stream_changes"]


def stream_changes(retention: timedelta | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a stream's configuration that retention and options ask for.

    :raises UnknownSetting: there is no such option.
    :raises InvalidSetting: an option's value cannot be used.
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


def _up_to(most: int, what: str) -> Callable[[str, object], int]:
    def read(option: str, value: object) -> int:
        # 0 would mean no bound to the server, which nobody who writes 0 means.
        if not is_whole(value) or not (value == -1 or 1 <= value <= most):
            raise InvalidSetting(
                f"{option} is {value!r}", advice=f"It takes {what} from 1 to {most}, or -1 for no bound"
            )
        return value

    return read


def _replicas(option: str, value: object) -> int:
    if not is_whole(value) or not 1 <= value <= 5:
        raise InvalidSetting(f"{option} is {value!r}", advice="It takes a whole number from 1 to 5")
    return value


def _one_of(*choices: str) -> Callable[[str, object], str]:
    def read(option: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise InvalidSetting(f"{option} is {value!r}", advice=f"It takes one of {', '.join(choices)}")
        return value

    return read


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
"""By the option's name: the server's name for it, and what reads its value."""
