"""The messages that wait to be handed over: in arrival order, or ordered by key. Synchronous; used on one event loop.

`ArrivalOrder` is first come, first served. `Lanes` runs keys in parallel and hands over the messages of one key
strictly one after the other; messages without a key are unordered.

- A lane is busy while its head is unsettled, or while a handler still works on a settled or lost message. A failed head
  blocks only its own lane.
- A lane has at most its share of the outstanding messages, so that a hot key does not starve the others. A message for
  a full lane is released, and later messages of its key too, until they are redelivered in order. The delay grows while
  the lane makes no progress.
- Lanes whose next message waited for its key are served in the order of its arrival; every second hand-over goes to a
  key that did not wait.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count, islice
from typing import Any, Final, Protocol

from broker.messages import Message, Outcome, SettleState

__all__ = ["ArrivalOrder", "Lanes", "Ready"]


class Ready(Protocol):
    """Decides which message is handed over next."""

    def put_all(self, messages: Sequence[Message[Any]]) -> Sequence[tuple[Message[Any], float]]:
        """Add these; return those to release instead, each with a delay in seconds."""
        ...

    def put_again(self, message: Message[Any]) -> None:
        """Add a message whose retry delay is over."""
        ...

    def replace(self, message: Message[Any], copy: Message[Any]) -> None:
        """The copy replaces the message from now on."""
        ...

    def take(self) -> Message[Any] | None:
        """The next message that may be handed over now."""
        ...

    def take_some(self, most: int) -> list[Message[Any]]:
        """The next `most`, or as many as may be handed over now."""
        ...

    def done(self, message: Message[Any]) -> None:
        """The message was settled: the next message of its key may follow."""
        ...

    def abandon(self, message: Message[Any]) -> list[Message[Any]]:
        """The message was lost; return the later messages of its key, to release too."""
        ...

    def expired(self, messages: Sequence[Message[Any]]) -> None:
        """The leases of these expired before hand-over: later messages of their keys wait for the redelivery."""
        ...

    def forget(self, message: Message[Any]) -> None:
        """Stop waiting for released messages of this key: another consumer has them."""
        ...

    def drain(self) -> list[Message[Any]]:
        """Remove and return all waiting messages."""
        ...

    def __len__(self) -> int:
        """How many could be handed over now."""
        ...


class ArrivalOrder:
    """First come, first served."""

    __slots__ = ("_messages",)

    def __init__(self) -> None:
        self._messages: deque[Message[Any]] = deque()

    def put_all(self, messages: Sequence[Message[Any]]) -> Sequence[tuple[Message[Any], float]]:
        self._messages.extend(messages)
        return ()

    def put_again(self, message: Message[Any]) -> None:
        self._messages.append(message)

    def replace(self, message: Message[Any], copy: Message[Any]) -> None:
        return

    def take(self) -> Message[Any] | None:
        return self._messages.popleft() if self._messages else None

    def take_some(self, most: int) -> list[Message[Any]]:
        if most >= len(self._messages):
            return self.drain()
        popleft = self._messages.popleft
        return [popleft() for _ in range(most)]

    def done(self, message: Message[Any]) -> None:
        return

    def abandon(self, message: Message[Any]) -> list[Message[Any]]:
        return []

    def expired(self, messages: Sequence[Message[Any]]) -> None:
        return

    def forget(self, message: Message[Any]) -> None:
        return

    def drain(self) -> list[Message[Any]]:
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def __len__(self) -> int:
        return len(self._messages)


_GONE_AFTER: Final = 60.0
"""Seconds after which a released message that was not redelivered counts as gone; more where leases are longer."""
_SWEPT_AT_ONCE: Final = 100
_SETTLED: Final = 100
_DOUBTED: Final = frozenset({SettleState.SETTLING, SettleState.UNKNOWN})
_SHORTEST: Final = 0.02
_LONGEST: Final = 5.0


class _Spilled:
    """A message that was released and must be redelivered before the later ones of its key."""

    __slots__ = ("doubted", "number", "seen")

    def __init__(self, number: int, seen: float) -> None:
        self.number = number
        self.seen = seen
        self.doubted = False
        """Whether the message may have been settled, and then is not redelivered."""


class _Lane:
    __slots__ = (
        "arrival",
        "arrivals",
        "began",
        "head",
        "in_handler",
        "moved",
        "numbers",
        "pace",
        "settled",
        "spilled",
        "waiting",
    )

    def __init__(self, now: float) -> None:
        self.head: Message[Any] | None = None
        self.arrival = 0
        self.in_handler: Message[Any] | None = None
        """The former head, settled or lost, while its handler still works."""
        self.waiting: deque[Message[Any]] = deque()
        self.arrivals: deque[int] = deque()
        """The arrival numbers of the waiting messages; `arrival` is that of the head."""
        self.spilled: OrderedDict[str, _Spilled] = OrderedDict()
        self.settled: deque[str] | None = None
        """Ids of the latest acked or rejected messages: a copy that still arrives is not redelivered again."""
        self.numbers = count()
        self.began = 0.0
        self.pace = 0.0
        self.moved = now
        """When the lane was created, or last admitted a released message, or finished or lost a message."""

    @property
    def outstanding(self) -> int:
        return len(self.waiting) + (self.head is not None)

    @property
    def free(self) -> bool:
        return self.head is None and self.in_handler is None

    def cut(self, at: int) -> list[Message[Any]]:
        """Remove and return the waiting messages from this index on."""
        behind = list(islice(self.waiting, at, None))
        for _ in behind:
            self.waiting.pop()
            self.arrivals.pop()
        return behind

    def spill(self, message_id: str, now: float) -> float:
        """Note the message as released; return the seconds until its turn should come."""
        spilled = self.spilled.get(message_id)
        if spilled is None:
            spilled = self.spilled[message_id] = _Spilled(next(self.numbers), now)
        spilled.seen = now
        first = next(iter(self.spilled.values()))
        ahead = self.outstanding + spilled.number - first.number
        # Some brokers rewrite a message to redeliver it: wasted work while the lane makes no progress.
        return min(_LONGEST, max(_SHORTEST, ahead * self.pace, (now - self.moved) / 2))


class Lanes:
    """Implements `Ready` per key.

    :param share: the most messages that one key may hold; None where the broker cannot take messages back
        with a delay, which leaves a hot key unbounded.
    :param clock: monotonic seconds; a released message that is not redelivered within a minute counts as delivered to
        another consumer, or as settled by an ack whose answer was lost.
    :param lease: the broker's lease in seconds: a message that is still leased to us is not redelivered yet.
    """

    def __init__(self, share: int | None, clock: Callable[[], float], lease: float | None = None) -> None:
        self._share = share
        self._clock = clock
        self.in_order = False
        """Whether the broker redelivers in order: a later message then proves that the earlier ones were settled."""
        self._gone_after = max(_GONE_AFTER, (lease or 0.0) + 2 * _LONGEST)
        self._lanes: dict[tuple[str, bytes], _Lane] = {}
        self._ready: deque[_Lane | Message[Any]] = deque()
        self._following: list[tuple[int, int, _Lane]] = []
        """A heap of the lanes whose next message waited for another: its arrival, a number that breaks ties."""
        self._turn_of_following = False
        self._numbers = count()
        self._sweeps: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        """When to check each lane that waits for released messages; the soonest first."""

    def put_all(self, messages: Sequence[Message[Any]]) -> Sequence[tuple[Message[Any], float]]:
        if self._sweeps:
            self._sweep(self._clock())
        return [(message, delay) for message in messages if (delay := self._put(message)) is not None]

    def _put(self, message: Message[Any]) -> float | None:
        key = message.key
        if key is None:
            self._ready.append(message)
            return None
        lane = self._lanes.get((message.topic, key))
        if lane is None:
            lane = self._lanes[(message.topic, key)] = _Lane(self._clock())
        if lane.spilled:
            if not self._next_of_spilled(lane, message.id):
                return self._spill(lane, message.topic, key, message.id, self._clock())
        elif self._share is not None and lane.outstanding >= self._share:
            return self._spill(lane, message.topic, key, message.id, self._clock())
        lane.waiting.append(message)
        lane.arrivals.append(next(self._numbers))
        if lane.free and len(lane.waiting) == 1:
            self._ready.append(lane)
        return None

    def put_again(self, message: Message[Any]) -> None:
        lane = self._lane(message)
        if lane is None or lane.head is None:
            self._ready.append(message)
            return
        lane.head = None
        lane.waiting.appendleft(message)
        lane.arrivals.appendleft(lane.arrival)
        if lane.free:
            self._line_up(lane)

    def replace(self, message: Message[Any], copy: Message[Any]) -> None:
        lane = self._lane(message)
        if lane is not None and lane.head is message:
            lane.head = copy
            if message.in_use:
                lane.in_handler = message

    def take(self) -> Message[Any] | None:
        while self._ready or self._following:
            following = bool(self._following) and (self._turn_of_following or not self._ready)
            self._turn_of_following = not following
            entry = heappop(self._following)[-1] if following else self._ready.popleft()
            if not isinstance(entry, _Lane):
                return entry
            if entry.free and entry.waiting:
                entry.head = entry.waiting.popleft()
                entry.arrival = entry.arrivals.popleft()
                entry.began = self._clock()
                return entry.head
        return None

    def take_some(self, most: int) -> list[Message[Any]]:
        batch: list[Message[Any]] = []
        while len(batch) < most and (message := self.take()) is not None:
            batch.append(message)
        return batch

    def done(self, message: Message[Any]) -> None:
        lane = self._lane(message)
        if lane is None or lane.head is not message:
            return
        lane.head = None
        if message.outcome is not Outcome.NACK:
            # A released copy of it is never redelivered.
            lane.spilled.pop(message.id, None)
            if lane.waiting or lane.spilled:
                lane.settled = lane.settled or deque(maxlen=_SETTLED)
                lane.settled.append(message.id)
        if message.in_use:
            lane.in_handler = message
        elif lane.free:
            self._follow(message, lane)

    def returned(self, message: Message[Any]) -> bool:
        """The handler has returned; whether another message of the key may be handed over."""
        lane = self._lane(message)
        if lane is None or lane.in_handler is not message:
            return False
        lane.in_handler = None
        if lane.free:
            self._follow(message, lane)
        return lane.free and bool(lane.waiting)

    def _follow(self, message: Message[Any], lane: _Lane) -> None:
        lane.moved = self._clock()
        took = lane.moved - lane.began
        lane.pace = took if lane.pace == 0 else 0.8 * lane.pace + 0.2 * took
        if lane.waiting:
            self._line_up(lane)
        else:
            self._forget_if_idle(message, lane)

    def abandon(self, message: Message[Any]) -> list[Message[Any]]:
        lane = self._lane(message)
        if lane is None:
            return []
        if lane.head is message:
            lane.head = None
            if message.in_use:
                lane.in_handler = message
            followers = lane.cut(0)
        elif message in lane.waiting:
            # The messages that wait before it are still ours.
            _, *followers = lane.cut(lane.waiting.index(message))
        else:
            return []
        now = self._clock()
        # The broker redelivers these: the lane admits them only from the first on.
        earlier, lane.spilled = lane.spilled, OrderedDict()
        lane.numbers = count()
        lane.moved = now
        for message_id in (message.id, *(follower.id for follower in followers), *earlier):
            self._spill(lane, message.topic, message.key or b"", message_id, now)
        if message.id in lane.spilled:
            lane.spilled[message.id].doubted = message.state in _DOUBTED
        return followers

    def expired(self, messages: Sequence[Message[Any]]) -> None:
        now = self._clock()
        for message in messages:
            key = message.key
            if key is not None:
                lane = self._lanes.setdefault((message.topic, key), _Lane(now))
                self._spill(lane, message.topic, key, message.id, now)

    def forget(self, message: Message[Any]) -> None:
        lane = self._lane(message)
        if lane is not None:
            lane.spilled.clear()

    def drain(self) -> list[Message[Any]]:
        messages = [entry for entry in self._ready if not isinstance(entry, _Lane)]
        for lane in self._lanes.values():
            messages.extend(lane.waiting)
            lane.waiting.clear()
            lane.arrivals.clear()
        self._ready.clear()
        self._following.clear()
        return messages

    def __len__(self) -> int:
        return len(self._ready) + len(self._following)

    @property
    def kept(self) -> int:
        """The number of keys with a lane."""
        return len(self._lanes)

    def _line_up(self, lane: _Lane) -> None:
        heappush(self._following, (lane.arrivals[0], next(self._numbers), lane))

    def _lane(self, message: Message[Any]) -> _Lane | None:
        key = message.key
        return None if key is None else self._lanes.get((message.topic, key))

    def _spill(self, lane: _Lane, topic: str, key: bytes, message_id: str, now: float) -> float:
        if lane.settled is not None and message_id in lane.settled:
            return _LONGEST
        self._sweeps.setdefault((topic, key), now + self._gone_after)
        return lane.spill(message_id, now)

    def _sweep(self, now: float) -> None:
        """Delete idle lanes whose released messages all count as gone."""
        for _ in range(_SWEPT_AT_ONCE):
            if not self._sweeps or next(iter(self._sweeps.values())) > now:
                return
            key, _ = self._sweeps.popitem(last=False)
            lane = self._lanes.get(key)
            if lane is None:
                continue
            if (
                lane.free
                and not lane.waiting
                and all(now - one.seen >= self._gone_after for one in lane.spilled.values())
            ):
                del self._lanes[key]
            elif lane.spilled:
                self._sweeps[key] = now + self._gone_after

    def _next_of_spilled(self, lane: _Lane, message_id: str) -> bool:
        """Whether this is the message that must come next, and there is room for it."""
        now = self._clock()
        while lane.spilled:
            first, spilled = next(iter(lane.spilled.items()))
            if first == message_id:
                if self._share is not None and lane.outstanding >= self._share:
                    return False
                del lane.spilled[first]
                lane.moved = now
                return True
            skipped = self.in_order and spilled.doubted and _is_next(lane, message_id)
            if not skipped and now - spilled.seen < self._gone_after:
                return False
            del lane.spilled[first]
        return self._share is None or lane.outstanding < self._share

    def _forget_if_idle(self, message: Message[Any], lane: _Lane) -> None:
        if not lane.spilled and message.key is not None:
            self._lanes.pop((message.topic, message.key), None)
            self._sweeps.pop((message.topic, message.key), None)


def _is_next(lane: _Lane, message_id: str) -> bool:
    """Whether this is the message right after the first one that the lane waits for."""
    return message_id == next(islice(lane.spilled, 1, None), message_id)
