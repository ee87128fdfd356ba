"""Assigns all messages of a key to one consumer at a time, for subscriptions ordered by key.

A key belongs to the consumer with unsettled messages of it. Later messages go to that consumer, or are parked until the
key is free; a delayed message blocks its key. No locking: the caller holds the server's lock.
"""

from __future__ import annotations

from heapq import heappop, heappush

from broker_inmem.entries import Entry

__all__ = ["Item", "KeyLanes"]

Item = tuple[int, int, int, Entry]
"""Sequence number, tie-break, deliveries, entry: items sort in publishing order."""


class _Lane:
    __slots__ = ("blocked", "leased", "owner", "parked")

    def __init__(self) -> None:
        self.owner: int | None = None
        self.leased = 0
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
        """The number of parked items."""
        return sum(len(lane.parked) for lane in self._lanes.values())

    def adopt(self, key: bytes | None, member: int) -> None:
        """Note that a member already has an unsettled message of this key."""
        if key is not None:
            lane = self._lanes.setdefault(key, _Lane())
            lane.owner = member
            lane.leased += 1

    def claim(self, item: Item, member: int) -> bool:
        """Claim an item; returns False and parks it if the member may not have it now."""
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
        lane.leased += 1
        return True

    def inbox(self, member: int) -> list[Item]:
        """Remove and return the items parked for a member, in publishing order."""
        items: list[Item] = []
        for key in self._inboxes.pop(member, ()):
            lane = self._lanes.get(key)
            if lane is not None and lane.owner == member and not lane.blocked:
                items += lane.parked
                lane.parked = []
        items.sort()
        return items

    def keep(self, item: Item) -> None:
        """Put back an inbox item that the consumer did not take."""
        key = item[3].key
        if key is not None:
            self._park(key, self._lanes[key], item)

    def settled(self, key: bytes | None) -> None:
        """A message of this key was settled."""
        if key is not None:
            lane = self._lanes[key]
            lane.leased -= 1
            self._free(key, lane)

    def release(self, item: Item) -> None:
        """Redeliver a leased message at once."""
        key = item[3].key
        if key is None:
            heappush(self._returned, item)
            return
        lane = self._lanes[key]
        lane.leased -= 1
        self._park(key, lane, item)
        self._free(key, lane)

    def block(self, key: bytes | None) -> None:
        """A leased message will be redelivered later; block its key until then."""
        if key is not None:
            lane = self._lanes[key]
            lane.leased -= 1
            lane.blocked += 1
            self._free(key, lane)

    def unblock(self, item: Item) -> None:
        """The delay of a message has ended."""
        key = item[3].key
        lane = None if key is None else self._lanes.get(key)
        if key is None or lane is None:
            heappush(self._returned, item)
            return
        lane.blocked = max(0, lane.blocked - 1)
        self._park(key, lane, item)
        self._free(key, lane)

    def dissolve(self) -> None:
        """Return every parked item: order by key has ended."""
        for lane in self._lanes.values():
            for item in lane.parked:
                heappush(self._returned, item)
        self._lanes.clear()
        self._inboxes.clear()

    def clear(self) -> None:
        """Drop parked items; leased ones are kept."""
        for lane in self._lanes.values():
            lane.parked = []
            lane.blocked = 0
        self._inboxes.clear()
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.leased}

    def _park(self, key: bytes, lane: _Lane, item: Item) -> None:
        heappush(lane.parked, item)
        if lane.owner is not None and not lane.blocked:
            self._inboxes.setdefault(lane.owner, {})[key] = None

    def _free(self, key: bytes, lane: _Lane) -> None:
        if lane.leased == 0:
            lane.owner = None
            if not lane.blocked:
                while lane.parked:
                    heappush(self._returned, heappop(lane.parked))
                del self._lanes[key]
        elif lane.parked and not lane.blocked and lane.owner is not None:
            self._inboxes.setdefault(lane.owner, {})[key] = None
