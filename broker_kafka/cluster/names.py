"""Names of topics and groups on Kafka, where every portable name is legal. Pure functions, safe from any thread."""

from __future__ import annotations

import re
import uuid
from typing import Final

from broker import InvalidName
from broker.driver import Ephemeral

__all__ = ["EPHEMERAL_PREFIX", "check_id", "group_id", "is_id", "is_internal", "is_topic_name"]

EPHEMERAL_PREFIX: Final = "anybroker.ephemeral."
"""Groups of one consumer, deleted when it closes. After a crash, the broker's retention deletes them."""
_INTERNAL_PREFIX: Final = "__"
"""Topics of the brokers."""
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_LONGEST_ID: Final = 32_000
"""Bytes. The protocol takes 32,767, and answers of a broker that repeat the name need some of them."""
_STRIPPED: Final = " \t\n\v\f\r"
"""librdkafka strips these characters from the beginning of a setting."""


def group_id(group: str | Ephemeral) -> str:
    """The group's id on the broker, a new one for each ephemeral group.

    :raises InvalidName: as `check_id`.
    """
    return f"{EPHEMERAL_PREFIX}{uuid.uuid4().hex}" if isinstance(group, Ephemeral) else check_id(group, "group")


def check_id(name: str, what: str) -> str:
    """Return the id of a group or a transactional publisher unchanged.

    :param what: for the error: "group".
    :raises InvalidName: the id is empty, begins with white space, or is too long: the client would end the process, use
        another id, or never get an answer.
    """
    if not name or name[0] in _STRIPPED:
        raise InvalidName(
            f"{what} is {name!r}, and librdkafka strips leading white space",
            advice="Begin the name with another character",
        )
    if not is_id(name):
        size = len(name.encode())
        raise InvalidName(f"{what} {name[:40]!r}… has {size} bytes", advice=f"Shorten it to {_LONGEST_ID} bytes")
    return name


def is_id(name: str) -> bool:
    """Whether this can be the id of a group."""
    return name != "" and name[0] not in _STRIPPED and len(name.encode()) <= _LONGEST_ID


def is_internal(topic: str) -> bool:
    """Whether this is a topic of the brokers."""
    return topic.startswith(_INTERNAL_PREFIX)


def is_topic_name(name: str) -> bool:
    """Whether a topic can have this name."""
    return _TOPIC.fullmatch(name) is not None and name not in (".", "..")
