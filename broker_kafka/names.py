"""Names on Kafka: portable names are legal topics and groups as they are. Pure functions, safe from any thread."""

from __future__ import annotations

import re
import uuid
from typing import Final

from broker.names import Ephemeral

__all__ = ["EPHEMERAL_PREFIX", "INTERNAL_PREFIX", "group_id", "is_internal", "is_topic_name"]

EPHEMERAL_PREFIX: Final = "anybroker.ephemeral."
"""Groups of one consumer, deleted when it closes; what a crash leaves behind expires with the broker's retention."""
INTERNAL_PREFIX: Final = "__"
"""Topics of the brokers themselves."""
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")


def group_id(group: str | Ephemeral) -> str:
    """The group's id on the broker; each ephemeral one is new."""
    return f"{EPHEMERAL_PREFIX}{uuid.uuid4().hex}" if isinstance(group, Ephemeral) else group


def is_internal(topic: str) -> bool:
    """Whether the topic is the brokers' own."""
    return topic.startswith(INTERNAL_PREFIX)


def is_topic_name(name: str) -> bool:
    """Whether a topic can have this name; that of a group may be any."""
    return _TOPIC.fullmatch(name) is not None and name not in (".", "..")
