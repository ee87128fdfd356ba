"""`DispatchStarting`: STARTs of many queues, each as the consumer of its queue has it. No I/O.

What a lane has room for is leased. The START of what it has none for, or of what nobody consumes here, says that nobody
holds it and when it is due, as that of a message which is for later: a tracker sends it again then, it counts as no
delivery, and it keeps nothing else back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import ceil
from typing import Any, Final

from broker_kafka.queue.consumer.starting import Started, Starting, Taken
from broker_kafka.queue.dispatch.dispatch_table import DispatchTable, Policy
from broker_kafka.queue.markers.queue_filter import OwnRecords
from broker_kafka.queue.markers.wire import MarkerFormat

__all__ = ["DispatchStarting", "queue_of"]


def queue_of(raw: Any) -> bytes:
    """The queue of a record, by its key."""
    key = raw.key()
    return key.encode() if isinstance(key, str) else key or b""


class DispatchStarting(Starting):
    """:param table: which lanes have room.
    :param clock: of the table, in seconds.
    :param forsaken: told of the queue of each message that is deferred since nobody consumes it here.
    """

    def __init__(
        self,
        table: DispatchTable[Any],
        clock: Callable[[], float],
        forsaken: Callable[[bytes], None],
        own: OwnRecords,
        partitions: int,
        *,
        lease_ms: int,
        holder: str,
        format: MarkerFormat,
        max_deliveries: int | None,
        dead_letter: str | None,
    ) -> None:
        self._as_told: Final = partial(Starting, own, partitions, lease_ms=lease_ms, holder=holder, format=format)
        super().__init__(
            own,
            partitions,
            lease_ms=lease_ms,
            holder=holder,
            format=format,
            max_deliveries=max_deliveries,
            dead_letter=dead_letter,
        )
        self._table: Final = table
        self._clock: Final = clock
        self._forsaken: Final = forsaken
        self._by_policy: dict[Policy, Starting] = {}

    def starts(self, taken: Iterable[Taken], now: int) -> list[Started]:
        table, moment = self._table, self._clock()
        table.begin()
        parts: dict[Policy, list[Taken]] = {}
        due: list[tuple[Taken, int]] = []
        for each in taken:
            if each.hold is None:
                continue
            queue = queue_of(each.raw)
            parts.setdefault(table.policy(queue), []).append(each)
            if each.due <= now and (wait := table.plan(queue, len(each.raw), moment)) > 0:
                due.append((each, each.due))
                each.due = now + ceil(1000 * wait)
                if queue not in table:
                    self._forsaken(queue)
        started = [start for policy, part in parts.items() for start in self._of(policy).starts(part, now)]
        for each, when in due:
            # Tried again, if these cannot be written, it may find room.
            each.due = when
        return started

    def _of(self, policy: Policy) -> Starting:
        found = self._by_policy.get(policy)
        if found is None:
            found = self._by_policy[policy] = self._as_told(
                max_deliveries=policy.max_deliveries, dead_letter=policy.dead_letter
            )
        return found
