"""The text that a queue with markers stores beside its group's positions: which member stored them. Pure.

It is `abq1 <writer> <mark>`, with a mark of the member's id that fits where brokers admit few characters. Who reads
positions only passes over it; who consumes the topic in another way sees by it that a present member uses markers.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

__all__ = ["commit_text", "mark_in", "mark_of", "writer_in"]

_MAGIC: Final = "abq1"
_NOBODY: Final = "-"
_LENGTH: Final = 12


def commit_text(member: str, writer: str = _NOBODY) -> str:
    """:param member: its id in the group.
    :param writer: the transactional id with which the position is stored; it has no space in it.
    """
    return f"{_MAGIC} {writer} {mark_of(member)}"


def mark_of(member: str) -> str:
    """What stands for the id of a member."""
    return sha256(member.encode()).hexdigest()[:_LENGTH]


def mark_in(text: str) -> str | None:
    """The mark of the member that stored it; None if no queue with markers did."""
    return _parts(text)[1]


def writer_in(text: str) -> str | None:
    """The transactional id with which it was stored, if any."""
    return _parts(text)[0]


def _parts(text: str) -> tuple[str | None, str | None]:
    match text.split(" "):
        case [magic, writer, mark] if magic == _MAGIC:
            return (None if writer == _NOBODY else writer), mark
        case _:
            return None, None
