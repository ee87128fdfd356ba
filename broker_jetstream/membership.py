"""The members of a group, and the partitions that each of them should own.

Members announce their claims by core NATS messages, every quarter of `owner_timeout` and on any change. A member that
is silent for `owner_timeout` counts as gone. There is no leader: each member computes its share from the announcements,
releases its surplus and claims what is free. If two members claim the same partition for a moment, the server's pin
decides which one reads. Without permission for the subject every member claims everything, and the pins decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from secrets import token_hex
from typing import Final, NamedTuple
from zlib import crc32

import msgspec

from broker import BrokerError
from broker.driver import logger
from broker_jetstream.connection import Connection, Listener
from broker_jetstream.streams import MOST_PARTITIONS
from broker_jetstream.transport import Outgoing

__all__ = ["Membership", "Plan", "plan"]


class _Announcement(msgspec.Struct):
    """What a member announces to the others. The field names are the wire format."""

    id: str
    claims: list[int] = []
    pinned: list[int] = []
    """Claims that the server has pinned to this member."""
    hello: bool = False
    bye: bool = False


_MOST_PEERS: Final = 2048
"""More members than a group has partitions. Any client of the account may announce others."""
_LONGEST_ID: Final = 64
_decode = msgspec.json.Decoder(_Announcement).decode


class _Peer:
    __slots__ = ("claims", "last_heard", "pinned")

    def __init__(self) -> None:
        self.claims: frozenset[int] = frozenset()
        self.pinned: frozenset[int] = frozenset()
        self.last_heard = 0.0


class Plan(NamedTuple):
    """The next step of a member."""

    claim: Sequence[int]
    release: Sequence[int]


def plan(me: str, mine: Collection[int], others: Mapping[str, Collection[int]], partitions: int, salt: str) -> Plan:
    """The share of one member; members with equal knowledge compute consistent shares. Pure.

    :param mine: the partitions that `me` claims.
    :param others: what each other member claims.
    :param salt: decides ties, so that the odd partitions of several topics do not all go to the same member.
    """
    claimed = {me: frozenset(mine), **{name: frozenset(claims) for name, claims in others.items()}}
    # Members with most claims keep most, so a balanced group stays unchanged.
    members = sorted(claimed, key=lambda name: (-len(claimed[name]), crc32(f"{salt}{name}".encode()), name))
    low, odd = divmod(partitions, len(members))
    quota = {name: low + (1 if index < odd else 0) for index, name in enumerate(members)}
    surplus = sorted(claimed[me], reverse=True)[: max(0, len(claimed[me]) - quota[me])]
    free = [number for number in range(partitions) if not any(number in claims for claims in claimed.values())]
    claim: list[int] = []
    for name in members:
        need = max(0, quota[name] - len(claimed[name]))
        if name == me:
            claim = free[:need]
        free = free[need:]
    return Plan(claim, sorted(surplus))


class Membership:
    """This member among the others of one group on one topic, or on several topics that are copartitioned.

    :param stream: the stream of the topic, or of the first one.
    :param group: the last part of the subject of the announcements.
    """

    def __init__(self, connection: Connection, stream: str, group: str, changed: Callable[[], None]) -> None:
        self.id = token_hex(8)
        self._connection = connection
        self._subject = f"anybroker.group.{stream}.{group}"
        self._changed = changed
        self._claims: Collection[int] = ()
        self._pinned: Collection[int] = ()
        self._peers: dict[str, _Peer] = {}
        self._listening: Listener | None = None
        self._greeted = False

    async def join(self) -> None:
        """Subscribe to announcements and ask the other members for theirs."""
        self._listening = await self._connection.listen(self._subject, self._on_announcement)
        await self.announce(hello=True)

    async def announce(self, *, hello: bool = False, bye: bool = False) -> None:
        """Announce our claims; does nothing while the connection is down."""
        announcement = _Announcement(self.id, sorted(self._claims), sorted(self._pinned), hello, bye)
        try:
            await self._connection.send(
                (Outgoing(self._subject.encode(), b"", b"", msgspec.json.encode(announcement)),)
            )
        except BrokerError as error:
            logger.debug("Group heartbeat: %s", error)

    async def update(self, claims: Collection[int], pinned: Collection[int]) -> None:
        """Set our claims, and announce them if they changed."""
        changed = set(claims) != set(self._claims) or set(pinned) != set(self._pinned)
        self._claims, self._pinned = tuple(claims), tuple(pinned)
        if changed:
            await self.announce()

    def _on_announcement(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        try:
            announcement = _decode(data)
        except (ValueError, RecursionError):
            return  # any client of the account may publish here
        if announcement.id == self.id:
            return
        if announcement.bye:
            if self._peers.pop(announcement.id, None) is not None:
                self._changed()
            return
        known = self._peers.get(announcement.id)
        if (
            max(len(announcement.claims), len(announcement.pinned)) > MOST_PARTITIONS
            or len(announcement.id) > _LONGEST_ID
        ):
            return
        if known is None and len(self._peers) >= _MOST_PEERS and len(self.others()) >= _MOST_PEERS:
            return
        peer = known or self._peers.setdefault(announcement.id, _Peer())
        claims, pinned = frozenset(announcement.claims), frozenset(announcement.pinned)
        changed = known is None or claims != peer.claims or pinned != peer.pinned or announcement.hello
        peer.claims, peer.pinned, peer.last_heard = claims, pinned, time.monotonic()
        if changed:
            self._changed()
        if announcement.hello:
            self._greeted = True

    def take_greeting(self) -> bool:
        """Whether a new member said hello since the last call."""
        greeted, self._greeted = self._greeted, False
        return greeted

    def reset_silence(self) -> None:
        """After a reconnect: restart the silence of every member, because announcements were lost."""
        now = time.monotonic()
        for peer in self._peers.values():
            peer.last_heard = now

    def others(self) -> dict[str, frozenset[int]]:
        """The claims of every other member; drops members that were silent for too long."""
        limit = time.monotonic() - self._connection.settings.owner_timeout
        for name in [name for name, peer in self._peers.items() if peer.last_heard < limit]:
            del self._peers[name]
        return {name: peer.claims for name, peer in self._peers.items()}

    def contested(self, mine: Collection[int], pinned: Collection[int]) -> list[int]:
        """Claims that we lose to another member: pinned to that member, or unpinned and that member's id is lower."""
        self.others()
        return sorted(
            number
            for number in mine
            if number not in pinned
            and any(
                number in peer.pinned or (number in peer.claims and name < self.id)
                for name, peer in self._peers.items()
            )
        )

    def pinned_elsewhere(self, mine: Collection[int]) -> list[int]:
        """Claims of ours that another member announced as pinned."""
        return sorted(number for number in mine if any(number in peer.pinned for peer in self._peers.values()))

    async def leave(self) -> None:
        """Announce the departure and unsubscribe."""
        await self.announce(bye=True)
        if self._listening is not None:
            await self._connection.unlisten(self._listening)
