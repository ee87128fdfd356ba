"""What becomes of a position that a partition's log does not hold. Asks the brokers, and moves nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from broker import Bounds, OffsetOutOfRange, TopicPartition
from broker.driver import PositionReset, logger
from broker_kafka.cluster.list_offsets import out_of_range_text
from broker_kafka.cluster.requests import retry_until_answered

__all__ = ["reset_of"]


async def reset_of(
    partition: TopicPartition,
    position: int,
    *,
    group: str,
    policy: str,
    bounds: Callable[[], Awaitable[Mapping[TopicPartition, Bounds]]],
    ours: Callable[[], bool],
    reason: str = "",
) -> PositionReset | None:
    """Where reading goes on; None if the partition is not ours any more: whoever has it then is told of it too.

    :param policy: `offset_reset`.
    :param reason: why it cannot be read from, where that is not that the log does not hold it.
    :param bounds: asks for them; it is asked again while that may help and the partition is `ours`.
    :raises OffsetOutOfRange: the policy is "error".
    """
    found = await retry_until_answered(bounds, ours)
    if found is None:
        return None
    within, (topic, number) = found[partition], partition
    text = f"{topic}[{number}] of group {group!r}: position {position} {reason or out_of_range_text(within)}"
    if policy == "error":
        raise OffsetOutOfRange(text, advice="Seek, reset the group's offsets, or set offset_reset")
    to = within.first if policy == "earliest" else within.next
    logger.warning("%s; going on at %d", text, to)
    return PositionReset(partition=partition, position=position, to=to, policy=policy)
