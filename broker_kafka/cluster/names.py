"""Names on Kafka: portable names are legal topics and groups as they are. Pure functions, safe from any thread."""

from __future__ import annotations

import re
import uuid
from typing import Final

from broker import InvalidName
from broker.driver import Ephemeral

__all__ = ["EPHEMERAL_PREFIX", "INTERNAL_PREFIX", "check_id", "group_id", "is_id", "is_internal", "is_topic_name"]

EPHEMERAL_PREFIX: Final = "anybroker.ephemeral."
"""Groups of one consumer, deleted when it closes; what a crash leaves behind expires with the broker's retention."""
INTERNAL_PREFIX: Final = "__"
"""Topics of the brokers themselves."""
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_LONGEST_ID: Final = 32_000
"""Bytes. The protocol has room for 32,767, and a broker's answers that repeat the name need some of it."""
_STRIPPED: Final = " \t\n\v\f\r"
"""What librdkafka takes from the beginning of a setting."""


def group_id(group: str | Ephemeral) -> str:
    """The group's id on the broker; each ephemeral one is new.

    :raises InvalidName: as `check_id`.
    """
    return f"{EPHEMERAL_PREFIX}{uuid.uuid4().hex}" if isinstance(group, Ephemeral) else check_id(group, "group")


def check_id(name: str, what: str) -> str:
    """Return the id of a group or a transactional publisher if the client and the brokers take it as it is.

    :param what: what the id is of, for the error.
    :raises InvalidName: it is empty, begins with white space, or is too long: the client would end the process, join
        another group, or wait for an answer that never comes.
    """
    if not name or name[0] in _STRIPPED:
        raise InvalidName(
            f"{what} is {name!r}, and Kafka's client cuts white space off its beginning",
            advice="Give a name that begins with another character",
        )
    if not is_id(name):
        size = len(name.encode())
        raise InvalidName(
            f"{what} is {name[:40]!r}… of {size} bytes", advice=f"Kafka takes {_LONGEST_ID} at most: shorten it"
        )
    return name


def is_id(name: str) -> bool:
    """Whether the client and the brokers take this as the id of a group."""
    return name != "" and name[0] not in _STRIPPED and len(name.encode()) <= _LONGEST_ID


def is_internal(topic: str) -> bool:
    """Whether the topic is the brokers' own."""
    return topic.startswith(INTERNAL_PREFIX)


def is_topic_name(name: str) -> bool:
    """Whether a topic can have this name; that of a group may be any."""
    return _TOPIC.fullmatch(name) is not None and name not in (".", "..")
