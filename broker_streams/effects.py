"""`Effects`: what a checkpoint of a partition writes, and the ids of what it publishes. Pure.

Every message that a partition publishes has an *emit id*, which is the same when the same input is handled again, so
that a broker or a reader can drop repetitions:

| made by | id |
|---|---|
| a callback of a message | `group/topic/partition/offset/number` |
| a dead letter | `group/topic/partition/offset/letter` |
| a timer | `group/timer:name/partition/due time/hash of the key/event time.number` |
| a closing window | `group/window:name/partition/start/hash of the key/event time.number` |
| a visit | `group/visit:name/partition/a number of its own/hash of the key/number` |

A message for the loop also names its *sender* in an attribute: who sent it, and its place among all that this sender
sends. Places grow, so the receiver needs to remember the last one of each sender to drop repetitions. What wall timers,
visits and idle partitions do is not repeated in the same order after a crash, so that no place of it would grow: their
messages for the loop name no sender, and may be handled more than once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from broker import OutboundMessage
from broker_streams.changes import ChangedRows
from broker_streams.checkpoint import Checkpoint

__all__ = ["SENDER", "Effects", "SenderPlace", "sender_of"]

SENDER: Final = "streams-sender"
"""The attribute of a message for the loop that names its sender."""


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """What one checkpoint writes, all or nothing where the broker can.

    :ivar rows: rows and agendas by their keys in the table; None is a tombstone.
    :ivar due: changes of the index by time, for the store only.
    :ivar outputs: topics and messages to publish, in the order in which they were made: outputs, loop and dead letters.
        Each has its emit id, and event time as its publish time.
    :ivar counts: how many messages were handled, skipped, late and so on since the last checkpoint.
    :ivar topics: by topic the number of messages that were handled, and of their bytes.
    """

    rows: ChangedRows
    due: ChangedRows
    outputs: list[tuple[str, OutboundMessage]]
    checkpoint: Checkpoint
    counts: Mapping[str, int]
    topics: Mapping[str, tuple[int, int]]


class SenderPlace(NamedTuple):
    """The sender of a message of the loop, and its place: an offset, and a number among the messages made of it."""

    sender: str
    place: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.sender}/{self.place[0]}/{self.place[1]}"


def sender_of(attributes: Mapping[str, str]) -> SenderPlace | None:
    """The sender of a message of the loop; None if it names none, as a message of another program."""
    parts = attributes.get(SENDER, "").rsplit("/", 2)
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return SenderPlace(parts[0], (int(parts[1]), int(parts[2])))
