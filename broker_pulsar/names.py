"""Portable names as names of Pulsar, and back. Pure functions, safe from any thread."""

from __future__ import annotations

import re
from secrets import token_hex
from typing import Final, NamedTuple
from urllib.parse import quote

from broker import InvalidName
from broker.driver import Ephemeral, NativeName

__all__ = [
    "COMPACTED",
    "EPHEMERAL",
    "READERS",
    "TopicPath",
    "subscription_name",
    "subscription_path",
    "topic_path",
]

COMPACTED: Final = "anybroker-compacted"
"""The property of a compacted topic."""
EPHEMERAL: Final = "anybroker-ephemeral-"
"""Prefix of ephemeral subscriptions."""
READERS: Final = "anybroker-log"
"""Prefix of the subscriptions of log readers, which Pulsar lists while they read."""
_DOTS: Final = frozenset({".", ".."})
_PARTITION: Final = re.compile(r"^.*-partition-\d+$")


class TopicPath(NamedTuple):
    """A topic's full name."""

    domain: str
    tenant: str
    namespace: str
    local: str

    @property
    def url(self) -> str:
        """The full name for the client."""
        return f"{self.domain}://{self.tenant}/{self.namespace}/{self.local}"

    @property
    def path(self) -> str:
        """The path in the HTTP API."""
        return f"/{self.domain}/{quote(self.tenant)}/{quote(self.namespace)}/{quote(self.local, safe='')}"

    def partition(self, number: int) -> TopicPath:
        return self._replace(local=f"{self.local}-partition-{number}")


def topic_path(name: str, tenant: str, namespace: str) -> TopicPath:
    """The full name of a topic; a native name may be `persistent://tenant/namespace/topic` or `tenant/namespace/topic`.

    :raises InvalidName: neither form, the name of a partition, or another path in the HTTP API.
    """
    if not isinstance(name, NativeName):
        if _PARTITION.match(name):
            raise InvalidName(
                f"topic name {name!r} is the name of a partition",
                advice="Pulsar reserves names ending in -partition-<number>; choose another",
            )
        return TopicPath("persistent", tenant, namespace, name)
    domain, mark, rest = name.partition("://")
    parts = (rest if mark else name).split("/")
    if not _DOTS.isdisjoint(parts):
        raise InvalidName(
            f"native topic name {str(name)!r} has a part that is '.' or '..'",
            advice="Pulsar's HTTP API would take it for another path; choose another name",
        )
    if len(parts) == 1 and not mark:
        return TopicPath("persistent", tenant, namespace, name)
    if len(parts) != 3 or not all(parts) or (mark and domain != "persistent"):
        raise InvalidName(
            f"native topic name {str(name)!r} is not a Pulsar topic",
            advice="Write persistent://tenant/namespace/topic",
        )
    return TopicPath("persistent", *parts)


def subscription_name(name: str | Ephemeral) -> str:
    """The subscription's name on the broker; a new one for each ephemeral subscription."""
    return f"{EPHEMERAL}{token_hex(8)}" if isinstance(name, Ephemeral) else str(name)


def subscription_path(path: TopicPath, name: str) -> str:
    """The path of a subscription in the HTTP API.

    :raises InvalidName: the HTTP API would change the name.
    """
    if name in _DOTS:
        raise InvalidName(
            f"native subscription name is {str(name)!r}",
            advice="Pulsar's HTTP API would take it for another path; choose another name",
        )
    if "%" in name or "+" in name:
        raise InvalidName(
            f"native subscription name {str(name)!r} contains '%' or '+'",
            advice="Pulsar's HTTP API decodes names twice; choose a name without these characters",
        )
    return f"{path.path}/subscription/{quote(name, safe='')}"
