"""Portable names as Pulsar's, and back. Pure functions, safe from any thread."""

from __future__ import annotations

import re
from secrets import token_hex
from typing import Final, NamedTuple
from urllib.parse import quote

from broker import InvalidName
from broker.driver import Ephemeral, NativeName

__all__ = [
    "EPHEMERAL",
    "READERS",
    "TopicPath",
    "partition_number",
    "subscription_name",
    "subscription_place",
    "topic_path",
]

EPHEMERAL: Final = "anybroker-ephemeral-"
"""Begins the names of ephemeral subscriptions."""
READERS: Final = "anybroker-log"
"""Begins the names of those of log readers, which Pulsar lists while they read."""
_PARTITION: Final = re.compile(r"^(.*)-partition-(\d+)$")


class TopicPath(NamedTuple):
    """A topic as the broker knows it."""

    domain: str
    tenant: str
    namespace: str
    local: str

    @property
    def url(self) -> str:
        """What clients take."""
        return f"{self.domain}://{self.tenant}/{self.namespace}/{self.local}"

    @property
    def path(self) -> str:
        """Its place in the HTTP API."""
        return f"/{self.domain}/{quote(self.tenant)}/{quote(self.namespace)}/{quote(self.local, safe='')}"

    def partition(self, number: int) -> TopicPath:
        return self._replace(local=f"{self.local}-partition-{number}")


def topic_path(name: str, tenant: str, namespace: str) -> TopicPath:
    """Where a topic lives; a native name may be `persistent://tenant/namespace/topic` or `tenant/namespace/topic`.

    :raises InvalidName: it is none of these, or is the name of a partition.
    """
    if not isinstance(name, NativeName):
        if _PARTITION.match(name):
            raise InvalidName(
                f"topic name {name!r} is that of a partition",
                advice="Pulsar keeps names that end in -partition-<number> for the partitions of a topic",
            )
        return TopicPath("persistent", tenant, namespace, name)
    domain, mark, rest = name.partition("://")
    parts = (rest if mark else name).split("/")
    if len(parts) == 1 and not mark:
        return TopicPath("persistent", tenant, namespace, name)
    if len(parts) != 3 or not all(parts) or (mark and domain != "persistent"):
        raise InvalidName(
            f"native topic name {str(name)!r} is not one of Pulsar",
            advice="Write persistent://tenant/namespace/topic",
        )
    return TopicPath("persistent", *parts)


def partition_number(url: str) -> int | None:
    """Which partition a full topic name is of; None for a topic without partitions."""
    found = _PARTITION.match(url)
    return int(found.group(2)) if found else None


def subscription_name(name: str | Ephemeral) -> str:
    """The subscription's name on the broker; each ephemeral one is new."""
    return f"{EPHEMERAL}{token_hex(8)}" if isinstance(name, Ephemeral) else str(name)


def subscription_place(path: TopicPath, name: str) -> str:
    """Where a subscription is in the HTTP API.

    :raises InvalidName: it would be taken for another one there.
    """
    if "%" in name or "+" in name:
        raise InvalidName(
            f"native subscription name {str(name)!r} has a '%' or '+'",
            advice="Pulsar's HTTP API decodes names twice and makes another one of it; choose one without",
        )
    return f"{path.path}/subscription/{quote(name, safe='')}"
