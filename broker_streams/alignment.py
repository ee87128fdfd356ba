"""`Alignment`: merges the topics of a partition by the time of their messages. Pure.

Messages of a topic keep their order; among topics the one whose next message is the oldest comes first, and of equal
times the topic that was named first. So a repetition from the same positions gives the same order, and a join meets the
rows of its time.

The order is right only if the next message of every topic is known. So a topic without a buffered message is waited
for, until it has reached the end that its log had when the caller asked: `ends` says where that is. From then on it is
live and is not waited for, since the time of its next message is unknown. Two bounds keep a topic that does not
deliver from holding up the others: how many messages are buffered, and for how long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from broker_streams.context import Incoming

__all__ = ["Alignment"]

_FIRST: Final = -(1 << 63)


class _Lane:
    """The buffered messages of a topic.

    :ivar times: of these messages; one without a time has that of the message before.
    :ivar next: the offset after the last message that was added.
    :ivar end: where the log ended; None if it is unknown.
    """

    __slots__ = ("end", "messages", "next", "time", "times")

    def __init__(self) -> None:
        self.messages: deque[Incoming] = deque()
        self.times: deque[int] = deque()
        self.time = _FIRST
        self.next = 0
        self.end: int | None = None

    @property
    def live(self) -> bool:
        return self.end is not None and self.next >= self.end


class Alignment:
    """See the module.

    :param topics: in the order of their rank for messages of the same time.
    :param limit: the number of messages that are buffered at most while a topic is waited for.
    :param patience: seconds after which a topic is no longer waited for.
    """

    def __init__(self, topics: Iterable[str], *, limit: int = 10_000, patience: float = 5.0) -> None:
        self._names: Final = tuple(topics)
        self._lanes: Final = [_Lane() for _ in self._names]
        self._by_name: Final = dict(zip(self._names, self._lanes, strict=True))
        self._limit: Final = limit
        self._patience: Final = patience
        self._buffered = 0
        self._since: float | None = None

    def __len__(self) -> int:
        """The number of buffered messages."""
        return self._buffered

    @property
    def waiting(self) -> list[str]:
        """Topics that are waited for: nothing of them is buffered, and they are not known to be at their ends."""
        return [name for name, lane in self._by_name.items() if not lane.messages and not lane.live]

    @property
    def deadline(self) -> float | None:
        """When the wait ends, by the clock of `ready`; None if nothing is held back."""
        return None if self._since is None else self._since + self._patience

    def add(self, messages: Iterable[Incoming]) -> None:
        """Buffer messages, in the order of each topic.

        :raises KeyError: a topic is none of the partition's.
        """
        lanes = self._by_name
        for message in messages:
            lane = lanes[message[0]]
            if (time := message[4]) is not None:
                lane.time = time
            lane.messages.append(message)
            lane.times.append(lane.time)
            lane.next = message[1] + 1
            self._buffered += 1

    def ends(self, ends: Mapping[str, int]) -> None:
        """Say where logs end: the offset after the last message, as of now. Other topics stay as they are."""
        for name, end in ends.items():
            self._by_name[name].end = end

    def reached(self, positions: Mapping[str, int]) -> None:
        """Say that all messages below these offsets were added. The last offsets of a log may have no message: those
        of transactions, or of messages that were compacted away."""
        for name, position in positions.items():
            lane = self._by_name[name]
            lane.next = max(lane.next, position)

    def ready(self, now: float) -> list[Incoming]:
        """Remove and return the messages that may be handled now, in order.

        :param now: seconds of any clock that runs on.
        """
        if len(self._lanes) == 1:
            return self._all_of(self._lanes[0])
        expired = self._since is not None and now >= self._since + self._patience
        found = self._merge(expired)
        if not self._buffered:
            self._since = None
        elif found or self._since is None:
            self._since = now
        return found

    def clear(self) -> None:
        """Drop what is buffered, as after a seek. What `ends` said still holds."""
        for lane in self._lanes:
            lane.messages.clear()
            lane.times.clear()
            lane.time, lane.next = _FIRST, 0
        self._buffered = 0
        self._since = None

    def _all_of(self, lane: _Lane) -> list[Incoming]:
        found = list(lane.messages)
        lane.messages.clear()
        lane.times.clear()
        self._buffered = 0
        return found

    def _merge(self, expired: bool) -> list[Incoming]:
        lanes = self._lanes
        waits = any(not lane.messages and not lane.live for lane in lanes)
        heap = [(lane.times[0], rank) for rank, lane in enumerate(lanes) if lane.messages]
        heapify(heap)
        found: list[Incoming] = []
        while heap and (expired or not waits or self._buffered - len(found) > self._limit):
            _, rank = heappop(heap)
            lane = lanes[rank]
            messages, times = lane.messages, lane.times
            # Most messages come in runs of a topic.
            while True:
                found.append(messages.popleft())
                times.popleft()
                if not times:
                    waits = waits or not lane.live
                    break
                if waits or (heap and heap[0] < (times[0], rank)):
                    heappush(heap, (times[0], rank))
                    break
        self._buffered -= len(found)
        return found
