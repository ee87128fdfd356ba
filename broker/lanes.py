"""Key-ordered hand-over: keys run in parallel, the messages of one key strictly one after the other.

A key's lane is open while its head is handed over and unsettled; a failed head blocks its own lane only.
No lane holds more than its share of what may be outstanding, so that a hot key starves nobody: what
comes for a full lane is given back, and later messages of that key with it, until those come again in
their order. Messages without a key are unordered. Pure but for the clock it is given; used on one event loop.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from broker.messages import Message

__all__ = ["Lanes"]

_GONE_AFTER: Final = 60.0


class _Lane:
    __slots__ = ("head", "spilled", "waiting")

    def __init__(self) -> None:
        self.head: Message[Any] | None = None
        self.waiting: deque[Message[Any]] = deque()
        self.spilled: OrderedDict[str, float] = OrderedDict()

    @property
    def held(self) -> int:
        return len(self.waiting) + (self.head is not None)


class Lanes:
    """Implements `Ready` per key.

    :param share: the most messages that one key may hold; None where the broker cannot take messages back
        with a delay, which leaves a hot key unbounded.
    :param clock: seconds, monotonic; a message given back that has not come again for a minute is taken to
        have gone to another consumer.
    """

    def __init__(self, share: int | None, clock: Callable[[], float]) -> None:
        self._share = share
        self._clock = clock
        self._lanes: dict[tuple[str, bytes], _Lane] = {}
        self._ready: deque[_Lane | Message[Any]] = deque()

    def put_all(self, messages: Sequence[Message[Any]]) -> Sequence[Message[Any]]:
        return [message for message in messages if not self._put(message)]

    def _put(self, message: Message[Any]) -> bool:
        key = message.key
        if key is None:
            self._ready.append(message)
            return True
        lane = self._lanes.get((message.topic, key))
        if lane is None:
            lane = self._lanes[(message.topic, key)] = _Lane()
        if lane.spilled:
            if not self._next_of_spilled(lane, message.id):
                return False
        elif self._share is not None and lane.held >= self._share:
            lane.spilled[message.id] = self._clock()
            return False
        lane.waiting.append(message)
        if lane.head is None and len(lane.waiting) == 1:
            self._ready.append(lane)
        return True

    def put_again(self, message: Message[Any]) -> None:
        lane = self._lane(message)
        if lane is None or lane.head is None:
            self._ready.append(message)
            return
        lane.head = None
        lane.waiting.appendleft(message)
        self._ready.append(lane)

    def replace(self, message: Message[Any], copy: Message[Any]) -> None:
        lane = self._lane(message)
        if lane is not None and lane.head is message:
            lane.head = copy

    def take(self) -> Message[Any] | None:
        while self._ready:
            entry = self._ready.popleft()
            if not isinstance(entry, _Lane):
                return entry
            if entry.head is None and entry.waiting:
                entry.head = entry.waiting.popleft()
                return entry.head
        return None

    def done(self, message: Message[Any]) -> None:
        lane = self._lane(message)
        if lane is None or lane.head is not message:
            return
        lane.head = None
        if lane.waiting:
            self._ready.append(lane)
        else:
            self._forget_if_idle(message, lane)

    def abandon(self, message: Message[Any]) -> list[Message[Any]]:
        lane = self._lane(message)
        if lane is None:
            return []
        if lane.head is not message:
            if message not in lane.waiting:
                return []
            lane.waiting.remove(message)
        else:
            lane.head = None
        followers = list(lane.waiting)
        lane.waiting.clear()
        now = self._clock()
        # The broker delivers the whole lane again: it is let in only from its first message on.
        again = OrderedDict.fromkeys([message.id, *(follower.id for follower in followers)], now)
        again.update(lane.spilled)
        lane.spilled = again
        return followers

    def drain(self) -> list[Message[Any]]:
        messages = [entry for entry in self._ready if not isinstance(entry, _Lane)]
        for lane in self._lanes.values():
            messages.extend(lane.waiting)
            lane.waiting.clear()
        self._ready.clear()
        return messages

    def __len__(self) -> int:
        return len(self._ready)

    def _lane(self, message: Message[Any]) -> _Lane | None:
        key = message.key
        return None if key is None else self._lanes.get((message.topic, key))

    def _next_of_spilled(self, lane: _Lane, message_id: str) -> bool:
        """Whether this is the message that must follow now; notes it as spilled otherwise."""
        now = self._clock()
        while lane.spilled:
            first, seen = next(iter(lane.spilled.items()))
            if first == message_id:
                if self._share is not None and lane.held >= self._share:
                    break
                del lane.spilled[first]
                return True
            if now - seen < _GONE_AFTER:
                break
            del lane.spilled[first]
        if not lane.spilled:
            return True
        lane.spilled[message_id] = now
        return False

    def _forget_if_idle(self, message: Message[Any], lane: _Lane) -> None:
        if not lane.spilled and message.key is not None:
            self._lanes.pop((message.topic, message.key), None)
