"""The text that a consumer with markers stores beside the positions of its group: which member committed them. Pure.

`abq1 <writer> <member mark> <topic mark> [<key mark>]`: the transactional id of the commit or `-`, a hash of the member
id (brokers admit few characters), a hash of the marker topic or `-`, and a hash of the setting `queue_id` if there is
one. Readers of positions ignore the text; other consumers of the group learn from it that a live member settles the
topic by markers, in which marker topic, and for which keys.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

__all__ = [
    "commit_text",
    "key_mark",
    "key_mark_in",
    "member_mark",
    "member_mark_in",
    "topic_mark",
    "topic_mark_in",
    "writer_in",
]

_MAGIC: Final = "abq1"
_NONE: Final = "-"
_LENGTH: Final = 12


def commit_text(member: str, writer: str = _NONE, *, topic_mark: str = "", key_mark: str = "") -> str:
    """:param member: its id in the group.
    :param writer: the transactional id of the commit; it contains no space.
    :param topic_mark: of the marker topic.
    :param key_mark: of the key of the member's records; empty if it takes all records of a topic.
    """
    return f"{_MAGIC} {writer} {member_mark(member)} {topic_mark or _NONE} {key_mark}".rstrip()


def member_mark(member: str) -> str:
    """A hash of a member id."""
    return sha256(member.encode()).hexdigest()[:_LENGTH]


def key_mark(key: bytes) -> str:
    """A hash of a key."""
    return sha256(key).hexdigest()[:_LENGTH]


def topic_mark(topic: str) -> str:
    """A hash of the name of a marker topic."""
    return sha256(topic.encode()).hexdigest()[:_LENGTH]


def member_mark_in(text: str) -> str | None:
    """The mark of the member that committed; None for a text of another kind."""
    return _parts(text)[1]


def key_mark_in(text: str) -> str | None:
    """The mark of the member's key, empty for all keys; None for a text of another kind."""
    return _parts(text)[3]


def topic_mark_in(text: str) -> str | None:
    """The mark of the member's marker topic; None for a text of another kind."""
    return _parts(text)[2]


def writer_in(text: str) -> str | None:
    """The transactional id of the commit, if any."""
    return _parts(text)[0]


def _parts(text: str) -> tuple[str | None, str | None, str | None, str | None]:
    match text.split(" "):
        case [magic, writer, member, topic, *keys] if magic == _MAGIC:
            return (None if writer == _NONE else writer), member, topic, " ".join(keys)
        case _:
            return None, None, None, None
