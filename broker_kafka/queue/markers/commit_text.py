"""The text that a queue with markers stores beside its group's positions: which member stored them. Pure.

It is `abq1 <writer> <mark>`, with a mark of the member's id that fits where brokers admit few characters, and with a
mark of its records' keys behind it if not all of a topic are its own. Who reads positions only passes over it; who
consumes the topic in another way, or for other keys, sees by it that a present member does so.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Final

__all__ = ["commit_text", "keys_in", "mark_in", "mark_of", "mark_of_keys", "writer_in"]

_MAGIC: Final = "abq1"
_NOBODY: Final = "-"
_LENGTH: Final = 12


def commit_text(member: str, writer: str = _NOBODY, *, keys: str = "") -> str:
    """:param member: its id in the group.
    :param writer: the transactional id with which the position is stored; it has no space in it.
    :param keys: what stands for those of its records; empty if all of a topic are its own.
    """
    return f"{_MAGIC} {writer} {mark_of(member)} {keys}".rstrip()


def mark_of(member: str) -> str:
    """What stands for the id of a member."""
    return sha256(member.encode()).hexdigest()[:_LENGTH]


def mark_of_keys(keys: Iterable[bytes]) -> str:
    """What stands for keys, in whichever order they are."""
    return sha256(b"\0".join(sorted(keys))).hexdigest()[:_LENGTH]


def mark_in(text: str) -> str | None:
    """The mark of the member that stored it; None if no queue with markers did."""
    return _parts(text)[1]


def keys_in(text: str) -> str | None:
    """What stands for the keys of who stored it; None if no queue with markers did."""
    return _parts(text)[2]


def writer_in(text: str) -> str | None:
    """The transactional id with which it was stored, if any."""
    return _parts(text)[0]


def _parts(text: str) -> tuple[str | None, str | None, str | None]:
    match text.split(" "):
        case [magic, writer, mark, *keys] if magic == _MAGIC:
            return (None if writer == _NOBODY else writer), mark, " ".join(keys)
        case _:
            return None, None, None
