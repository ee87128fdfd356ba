"""Copies the positions of a group from one offset store to another.

*Concurrency.* The group must not run: later commits to the source are not copied. *Failure.* Each partition has its own
outcome. A migration can be repeated: a copy of the same position changes nothing. *Cancellation.* Positions that were
written stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from broker import BrokerError, ConfigurationError, TopicPartition
from broker.driver import check_flag
from broker_kafka.offsets.arguments import check_group, check_store
from broker_kafka.offsets.protocol import CommitResults, OffsetStore, StoredOffset

__all__ = ["Action", "Existing", "Move", "migrate_offsets"]

Existing = Literal["keep", "overwrite"]
"""What to do with a different position that the target has."""

Action = Literal["copy", "same", "keep", "overwrite", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The plan, or the outcome, for one partition.

    :ivar source: its position in the source; None if that cannot be read.
    :ivar target: the position that the target had before.
    :ivar action: `copy`: the target had none. `same`: it had this one. `keep`, `overwrite`: it had another one.
        `fail`: see `error`.
    """

    partition: TopicPartition
    source: StoredOffset | None
    target: StoredOffset | None
    action: Action
    error: BrokerError | None = None


async def migrate_offsets(
    source: OffsetStore,
    target: OffsetStore,
    group: str,
    *,
    existing: Existing = "keep",
    dry_run: bool = False,
) -> Sequence[Move]:
    """Copy all positions that the source has of a group; one entry per partition, by topic and partition.

    :param existing: what to do with a different position that the target has.
    :param dry_run: return the plan, and write nothing.
    :raises BrokerError: the source cannot be read at all.
    :raises ConfigurationError: an argument cannot be used, or both stores are one.
    """
    check_store("source", source)
    check_store("target", target)
    check_group(group)
    check_flag("dry_run", dry_run)
    if existing not in ("keep", "overwrite"):
        raise ConfigurationError(f"existing is {existing!r}", advice='It takes "keep" or "overwrite"')
    if source is target:
        raise ConfigurationError("Source and target are the same store", advice="Give two")
    found = await source.stored(group)
    there = await target.fetch(group, list(found))
    moves = [_plan(partition, found[partition], there.get(partition), existing) for partition in sorted(found)]
    writes = {
        move.partition: move.source
        for move in moves
        if move.action in ("copy", "overwrite") and move.source is not None
    }
    if dry_run or not writes:
        return moves
    results = await target.reset(group, writes)
    return [_outcome(move, results) for move in moves]


def _plan(
    partition: TopicPartition,
    source: StoredOffset | BrokerError | None,
    target: StoredOffset | BrokerError | None,
    existing: Existing,
) -> Move:
    for side in (source, target):
        if isinstance(side, BrokerError):
            kept = source if isinstance(source, StoredOffset) else None
            return Move(partition=partition, source=kept, target=None, action="fail", error=side)
    assert not isinstance(source, BrokerError)
    assert not isinstance(target, BrokerError)
    action: Action = "copy" if target is None else "same" if _alike(target, source) else existing
    return Move(partition=partition, source=source, target=target, action=action)


def _alike(target: StoredOffset, source: StoredOffset | None) -> bool:
    if source is None or target[:2] != source[:2]:
        return False
    # Some stores keep no id.
    return target.topic_id == source.topic_id or not (target.topic_id and source.topic_id)


def _outcome(move: Move, results: CommitResults) -> Move:
    error = results.get(move.partition)
    return move if error is None else replace(move, action="fail", error=error)
