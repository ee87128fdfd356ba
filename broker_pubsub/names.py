"""Portable names as topics, subscriptions and snapshots of a project, one to one. Pure functions, safe from any thread.

A topic `orders.eu` is `projects/<project>/topics/orders.eu`. Subscriptions belong to the project and not to their
topic, so `billing` of `orders.eu` is `…/subscriptions/billing~orders.eu`; if that is too long, the topic is cut and
hashed. No portable name has a `~`. A name that begins with `goog`, which Google reserves, is escaped with `x~`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from broker import InvalidName
from broker.driver import NativeName, check_name

__all__ = ["Names"]

LONGEST: Final = 255
_HASH: Final = 16
_ID: Final = re.compile(r"(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}")
_GOOGLE: Final = "goog"
_ESCAPE: Final = "x~"
_TEMPORARY: Final = "x~~"


class Names:
    """The names of one project."""

    __slots__ = ("_project", "_topics")

    def __init__(self, project: str) -> None:
        self._project = f"projects/{project}"
        self._topics = f"{self._project}/topics/"

    @property
    def project(self) -> str:
        """projects/<project>"""
        return self._project

    def topic(self, name: str) -> str:
        """The path of a topic.

        :raises InvalidName: the name is neither portable nor a topic's.
        """
        return self._path(name, "topic", "topics")

    def topic_of(self, path: str) -> str:
        """The topic of a path; a NativeName if no portable name maps to it."""
        name = path.removeprefix(self._topics)
        plain = name.removeprefix(_ESCAPE)
        return _portable(plain) or NativeName(name)

    def subscription(self, topic: str, name: str) -> str:
        """The path of a topic's subscription.

        :raises InvalidName: the name is neither portable nor a subscription's.
        """
        if isinstance(name, NativeName):
            return self._path(name, "subscription", "subscriptions")
        check_name(name, "subscription")
        topic = str(topic).rpartition("/")[2]
        whole = f"{_escaped(name)}~{topic}"
        if len(whole) > LONGEST:
            digest = hashlib.sha256(topic.encode()).hexdigest()[:_HASH]
            whole = f"{whole[: LONGEST - _HASH - 1]}~{digest}"
        return f"{self._project}/subscriptions/{whole}"

    def subscription_of(self, topic: str, path: str) -> str:
        """The subscription of a path; a NativeName if it is not one of this topic."""
        own = f"{self._project}/subscriptions/"
        whole = path.removeprefix(own)
        name = whole.removeprefix(_ESCAPE).partition("~")[0]
        if _portable(name) and self.subscription(topic, name) == path:
            return name
        return NativeName(whole if path.startswith(own) else path)

    def purge_mark(self, topic: str) -> str:
        """The snapshot at which new subscriptions start after a purge."""
        last = self.topic(topic).rpartition("/")[2]
        if len(last) > LONGEST - 8:
            last = f"{last[:200]}~{hashlib.sha256(last.encode()).hexdigest()[:_HASH]}"
        return f"{self._project}/snapshots/purged~{last}"

    def temporary(self, token: str) -> str:
        """The path of a temporary subscription."""
        return f"{self._project}/subscriptions/{_TEMPORARY}{token}"

    def temporary_topic(self, token: str) -> str:
        """The path of a temporary topic."""
        return f"{self._topics}{_TEMPORARY}{token}"

    def is_temporary(self, path: str) -> bool:
        """Whether a path is temporary."""
        return path.startswith((f"{self._project}/subscriptions/{_TEMPORARY}", f"{self._topics}{_TEMPORARY}"))

    def snapshot(self, name: str) -> str:
        """The path of a snapshot; portable and native names as for topics."""
        return self._path(name, "snapshot", "snapshots")

    def schema(self, name: str) -> str:
        """The path of a schema."""
        return self._path(name, "schema", "schemas")

    def _path(self, name: str, what: str, collection: str) -> str:
        if not isinstance(name, NativeName):
            return f"{self._project}/{collection}/{_escaped(check_name(name, what))}"
        if "/" in name:
            if re.fullmatch(rf"projects/[^/]+/{collection}/[^/]+", name):
                return str(name)
        elif _ID.fullmatch(name):
            return f"{self._project}/{collection}/{name}"
        raise InvalidName(
            f"{what} name {str(name)!r} is not valid",
            advice=f"Pub/Sub takes projects/…/{collection}/…, or a letter and 2 to 254 of letters, digits and ._~+%-, "
            "not beginning with goog",
        )


def _escaped(name: str) -> str:
    return f"{_ESCAPE}{name}" if name.startswith(_GOOGLE) else str(name)


def _portable(name: str) -> str | None:
    try:
        return check_name(name, "topic")
    except InvalidName:
        return None
