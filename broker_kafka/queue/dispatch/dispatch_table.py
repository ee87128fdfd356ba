"""`DispatchTable`: what of the queues that share a reader is let in, waits, or is to come again later. Pure.

*Rule.* Each queue that is consumed has a lane. A message that its lane has room for is admitted and waits there until a
client takes it; one more is deferred, so that the others go on. How long for is told by how quickly the lane was
emptied lately: whoever comes again then is likely to find room. What nobody consumes here is deferred too, the longer
the longer nobody did. *Bounds.* Messages and bytes of each lane, and bytes of all of them; but a lane that is empty
takes one message of any size. *Reading on* makes sense while a lane is hungry: from half empty until it is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ["LEAST_DELAY", "LONGEST_DELAY", "NOBODYS", "DispatchTable", "Policy"]

T = TypeVar("T")

LEAST_DELAY: Final = 0.5
LONGEST_DELAY: Final = 60.0
"""Seconds for which a message is deferred."""
_SMOOTHING: Final = 0.3


class Policy(NamedTuple):
    """What the consumer of a queue says of messages that are not settled: after so many deliveries, where to."""

    max_deliveries: int | None = None
    dead_letter: str | None = None


NOBODYS: Final = Policy()


class _Lane(Generic[T]):
    """:ivar users: how many clients take from it.
    :ivar planned: messages that were admitted and not offered yet.
    :ivar since: when it was last taken from, or was empty.
    :ivar pace: seconds in which it gave a message lately.
    :ivar horizon: until when all is deferred that was.
    """

    __slots__ = ("horizon", "hungry", "pace", "planned", "planned_size", "policy", "since", "size", "users", "waiting")

    def __init__(self) -> None:
        self.users = 0
        self.policy = NOBODYS
        self.waiting: deque[tuple[T, int]] = deque()
        self.size = self.planned = self.planned_size = 0
        self.since = self.pace = self.horizon = 0.0
        self.hungry = True


class DispatchTable(Generic[T]):
    """By queue; all times are in seconds of one clock that does not fall.

    :param most: messages of each lane.
    :param most_bytes: of each lane.
    :param total_bytes: of all lanes.
    :param now: when nobody consumed anything yet.
    """

    def __init__(self, *, most: int, most_bytes: int, total_bytes: int, now: float) -> None:
        self._most: Final = most
        self._most_bytes: Final = most_bytes
        self._total_bytes: Final = total_bytes
        self._begun: Final = now
        self._lanes: dict[bytes, _Lane[T]] = {}
        self._left: dict[bytes, float] = {}
        """Queues that were consumed, and when that ended."""
        self._size = self._planned_size = 0

    # -- clients -------------------------------------------------------------------------------------------

    def open(self, queue: bytes, policy: Policy, now: float) -> None:
        """One client more takes from the queue; its policy counts from now on."""
        lane = self._lanes.get(queue)
        if lane is None:
            lane = self._lanes[queue] = _Lane()
            lane.since = now
        lane.users += 1
        lane.policy = policy
        self._left.pop(queue, None)

    def close(self, queue: bytes, now: float) -> list[T]:
        """One client less; with the last one, what waited for it, which is to be given back."""
        lane = self._lanes[queue]
        lane.users -= 1
        if lane.users:
            return []
        del self._lanes[queue]
        self._left[queue] = now
        self._size -= lane.size
        self._planned_size -= lane.planned_size
        return [item for item, _ in lane.waiting]

    def __contains__(self, queue: object) -> bool:
        """Whether somebody consumes the queue here."""
        return queue in self._lanes

    def __len__(self) -> int:
        """How many queues are consumed here."""
        return len(self._lanes)

    def policy(self, queue: bytes) -> Policy:
        """That of its messages which are started now."""
        lane = self._lanes.get(queue)
        return NOBODYS if lane is None else lane.policy

    # -- letting in ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """What was planned before and not offered is planned anew."""
        self._planned_size = 0
        for lane in self._lanes.values():
            lane.planned = lane.planned_size = 0

    def plan(self, queue: bytes, size: int, now: float) -> float:
        """0 if the message is admitted, and is to be offered; else the seconds after which it is to come again."""
        lane = self._lanes.get(queue)
        if lane is None:
            # Wherever it comes next, that may be a process that consumes it.
            return min(LONGEST_DELAY, max(2 * LEAST_DELAY, self.forsaken(queue, now) / 4))
        count = len(lane.waiting) + lane.planned
        if count == 0 or (
            count < self._most
            and lane.size + lane.planned_size + size <= self._most_bytes
            and self._size + self._planned_size + size <= self._total_bytes
        ):
            lane.planned += 1
            lane.planned_size += size
            self._planned_size += size
            return 0.0
        # A lane that is stuck is given as long again as it has been.
        begin = max(lane.horizon, now + max(LEAST_DELAY, lane.pace * len(lane.waiting), now - lane.since))
        lane.horizon = min(now + LONGEST_DELAY, begin + lane.pace)
        # What is added to a time and taken off it again is rounded.
        return min(LONGEST_DELAY, max(LEAST_DELAY, lane.horizon - now))

    def forsaken(self, queue: bytes, now: float) -> float:
        """Seconds for which nobody has consumed the queue here."""
        return 0.0 if queue in self._lanes else now - self._left.get(queue, self._begun)

    def offer(self, queue: bytes, item: T, size: int, now: float) -> bool:
        """A message that was admitted waits from now on; False if nobody consumes its queue any more."""
        lane = self._lanes.get(queue)
        if lane is None:
            return False
        if not lane.waiting:
            lane.since = now
        if lane.planned:
            lane.planned -= 1
            released = min(size, lane.planned_size)
            lane.planned_size -= released
            self._planned_size -= released
        lane.waiting.append((item, size))
        lane.size += size
        self._size += size
        return True

    # -- handing out ---------------------------------------------------------------------------------------

    def take(self, queue: bytes, max_messages: int, max_bytes: int, now: float) -> list[T]:
        """The first that wait: so many at most, and but for one message so many bytes."""
        lane = self._lanes[queue]
        waiting = lane.waiting
        found: list[T] = []
        taken = 0
        while waiting and len(found) < max_messages and (not found or taken + waiting[0][1] <= max_bytes):
            item, size = waiting.popleft()
            found.append(item)
            taken += size
        if found:
            lane.size -= taken
            self._size -= taken
            pace = (now - lane.since) / len(found)
            lane.pace = pace if lane.pace == 0 else (1 - _SMOOTHING) * lane.pace + _SMOOTHING * pace
            lane.since = now
        return found

    def discard(self, gone: Collection[T]) -> None:
        """These do not wait any more."""
        ids = set(map(id, gone))
        for lane in self._lanes.values():
            if not any(id(item) in ids for item, _ in lane.waiting):
                continue
            lane.waiting = deque([each for each in lane.waiting if id(each[0]) not in ids])
            size = sum(size for _, size in lane.waiting)
            self._size += size - lane.size
            lane.size = size

    def waiting(self) -> list[T]:
        """All that waits."""
        return [item for lane in self._lanes.values() for item, _ in lane.waiting]

    def is_quiet(self, queue: bytes, now: float) -> bool:
        """Whether nothing of the queue waits, and what was deferred should have come again."""
        lane = self._lanes.get(queue)
        return lane is None or (not lane.waiting and lane.horizon + 2 * LEAST_DELAY <= now)

    def room(self) -> int:
        """How many messages the hungry lanes have room for; nothing is to be read while it is 0."""
        room = 0
        spent = self._size >= self._total_bytes
        for lane in self._lanes.values():
            count = len(lane.waiting)
            if count == 0:
                lane.hungry = True
            elif spent or count >= self._most or lane.size >= self._most_bytes:
                lane.hungry = False
            elif 2 * count <= self._most and 2 * lane.size <= self._most_bytes:
                lane.hungry = True
            if lane.hungry:
                room += self._most - count
        return room
