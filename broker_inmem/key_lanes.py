"""Keeps all messages of a key with one consumer at a time, for subscriptions that are ordered by key.

A key belongs to the consumer that has unsettled messages of it. What comes meanwhile is that consumer's,
or parked until the key is free; a message that waits for its delay after a failure holds back its key. Not
locked: the server's lock is held around every call.
"""

from __future__ import annotations

from heapq import heappop, heappush

from broker_inmem.entries import Entry

__all__ = ["Item", "KeyLanes"]

Item = tuple[int, int, int, Entry]
"""Sequence number, tie-break, deliveries so far, entry: items sort in the order of publishing."""


class _Lane:
    __slots__ = ("blocked", "held", "owner", "parked")

    def __init__(self) -> None:
        self.owner: int | None = None
        self.held = 0
        self.blocked = 0
        self.parked: list[Item] = []


class KeyLanes:
    """The keys of one subscription that have unsettled messages.

    :param returned: the subscription's heap of items to be delivered before new ones; freed keys' items go there.
    """

    __slots__ = ("_inboxes", "_lanes", "_returned")

    def __init__(self, returned: list[Item]) -> None:
        self._returned = returned
        self._lanes: dict[bytes, _Lane] = {}
        self._inboxes: dict[int, dict[bytes, None]] = {}

    def __len__(self) -> int:
        """How many items are parked."""
        return sum(len(lane.parked) for lane in self._lanes.values())

    def adopt(self, key: bytes | None, member: int) -> None:
        """A message of this key is unsettled with this member already."""
        if key is not None:
            lane = self._lanes.setdefault(key, _Lane())
            lane.owner = member
            lane.held += 1

    def claim(self, item: Item, member: int) -> bool:
        """Whether this member may have the item now; if not, it is parked."""
        key = item[3].key
        if key is None:
            return True
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane()
        elif lane.blocked or lane.owner not in (None, member):
            self._park(key, lane, item)
            return False
        lane.owner = member
        lane.held += 1
        return True

    def inbox(self, member: int) -> list[Item]:
        """Take out what is parked for this member, in the order of publishing."""
        items: list[Item] = []
        for key in self._inboxes.pop(member, ()):
            lane = self._lanes.get(key)
            if lane is not None and lane.owner == member and not lane.blocked:
                items += lane.parked
                lane.parked = []
        items.sort()
        return items

    def keep(self, item: Item) -> None:
        """Put back an item from the inbox that its consumer did not take."""
        key = item[3].key
        if key is not None:
            self._park(key, self._lanes[key], item)

    def settled(self, key: bytes | None) -> None:
        """A message of this key is done."""
        if key is not None:
            lane = self._lanes[key]
            lane.held -= 1
            self._free(key, lane)

    def give_back(self, item: Item) -> None:
        """A held message is to be delivered again at once."""
        key = item[3].key
        if key is None:
            heappush(self._returned, item)
            return
        lane = self._lanes[key]
        lane.held -= 1
        self._park(key, lane, item)
        self._free(key, lane)

    def block(self, key: bytes | None) -> None:
        """A held message is to be delivered again later; its key waits for it."""
        if key is not None:
            lane = self._lanes[key]
            lane.held -= 1
            lane.blocked += 1
            self._free(key, lane)

    def unblock(self, item: Item) -> None:
        """The delay of a message is over."""
        key = item[3].key
        lane = None if key is None else self._lanes.get(key)
        if key is None or lane is None:
            heappush(self._returned, item)
            return
        lane.blocked = max(0, lane.blocked - 1)
        self._park(key, lane, item)
        self._free(key, lane)

    def dissolve(self) -> None:
        """Let every parked item go: order by key is no longer asked for."""
        for lane in self._lanes.values():
            for item in lane.parked:
                heappush(self._returned, item)
        self._lanes.clear()
        self._inboxes.clear()

    def clear(self) -> None:
        """Forget parked items; what is held stays held."""
        for lane in self._lanes.values():
            lane.parked = []
            lane.blocked = 0
        self._inboxes.clear()
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.held}

    def _park(self, key: bytes, lane: _Lane, item: Item) -> None:
        heappush(lane.parked, item)
        if lane.owner is not None and not lane.blocked:
            self._inboxes.setdefault(lane.owner, {})[key] = None

    def _free(self, key: bytes, lane: _Lane) -> None:
        if lane.held == 0:
            lane.owner = None
            if not lane.blocked:
                while lane.parked:
                    heappush(self._returned, heappop(lane.parked))
                del self._lanes[key]
        elif lane.parked and not lane.blocked and lane.owner is not None:
            self._inboxes.setdefault(lane.owner, {})[key] = None
