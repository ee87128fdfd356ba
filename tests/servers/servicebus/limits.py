"""The service's limits for properties of entities, as documented by Microsoft. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from tests.servers.servicebus.entities import Refused

__all__ = ["SHORTEST_LOCK", "check_properties", "check_subscription_name", "whole"]

SHORTEST_LOCK: Final = 5.0
"""Seconds; tests that wait for the end of a lock allow shorter ones."""
_SECONDS: Final[Mapping[str, tuple[float, float]]] = {
    "lock_duration": (SHORTEST_LOCK, 300.0),
    "duplicate_detection_history_time_window": (20.0, 7 * 86_400.0),
    "auto_delete_on_idle": (300.0, float("inf")),
    "default_message_time_to_live": (1.0, float("inf")),
}
_NUMBERS: Final[Mapping[str, tuple[int, int]]] = {
    "max_delivery_count": (1, 2000),
    "max_message_size_in_kilobytes": (1024, 102_400),
}
_SIZES: Final = frozenset(1024 * gigabytes for gigabytes in (1, 2, 3, 4, 5, 10, 20, 40, 80))
_LONGEST_METADATA: Final = 1024


def check_properties(properties: Mapping[str, Any], shortest_lock: float = SHORTEST_LOCK) -> None:
    """:raises Refused: a property is invalid."""
    for name, (least, most) in {**_SECONDS, **_NUMBERS}.items():
        value = properties.get(name)
        if name == "lock_duration":
            least = shortest_lock
        if value is not None and not least <= float(value) <= most:
            raise _out_of_range(name, value, f"between {least:g} and {most:g}")
    size = properties.get("max_size_in_megabytes")
    if size is not None and size not in _SIZES:
        raise _out_of_range("max_size_in_megabytes", size, f"one of {', '.join(map(str, sorted(_SIZES)))}")
    if len(properties.get("user_metadata") or "") > _LONGEST_METADATA:
        raise _out_of_range("user_metadata", "too long", f"at most {_LONGEST_METADATA} characters")


def check_subscription_name(name: str) -> None:
    """:raises Refused: the name is invalid."""
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,48}[A-Za-z0-9])?", name) is None:
        raise Refused("bad-request", f"The subscription name {name!r} is invalid.", 400)


def whole(name: str, text: str | None) -> int | None:
    """:raises Refused: it is not a whole number."""
    if not text:
        return None
    if not re.fullmatch(r"-?\d{1,9}", text):
        raise Refused("bad-request", f"{name} is {text}, and no whole number")
    return int(text)


def _out_of_range(name: str, value: object, takes: str) -> Refused:
    element = "".join(part.title() for part in name.split("_"))
    return Refused("bad-request", f"The value {value} of {element} is out of range; it has to be {takes}.", 400)
