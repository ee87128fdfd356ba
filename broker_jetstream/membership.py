"""Who is in a group, and which partitions each member should have.

Members tell each other by core NATS messages what they claim, every quarter of `owner_timeout` and on any change;
who is silent for `owner_timeout` counts as gone. Every member works its own share out of what it hears, so nobody
leads: who has too much lets go, who has too little claims what is free. Two that claim the same partition for a moment
are told apart by the server's pin, which alone decides who reads. `plan` is a pure function. A server that forbids the
subject leaves every member with all claims, and the pins to sort it out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from secrets import token_hex
from typing import NamedTuple
from zlib import crc32

import msgspec

from broker import BrokerError
from broker_jetstream.connection import Connection, Listening
from broker_jetstream.transport import Outgoing

__all__ = ["Membership", "Plan", "plan"]

logger = logging.getLogger("broker")


class _Word(msgspec.Struct):
    """What a member says."""

    id: str
    claims: list[int] = []
    pinned: list[int] = []
    """Those of its claims that the server has pinned to it."""
    hello: bool = False
    bye: bool = False


_decode = msgspec.json.Decoder(_Word).decode


class _Peer:
    __slots__ = ("claims", "pinned", "seen")

    def __init__(self) -> None:
        self.claims: frozenset[int] = frozenset()
        self.pinned: frozenset[int] = frozenset()
        self.seen = 0.0


class Plan(NamedTuple):
    """What a member is to do."""

    claim: Sequence[int]
    release: Sequence[int]


def plan(me: str, mine: Collection[int], others: Mapping[str, Collection[int]], partitions: int, salt: str) -> Plan:
    """The share of one member, so that all who see the same come to the same.

    :param mine: the partitions that `me` claims.
    :param others: what each other member claims.
    :param salt: decides ties, so that the odd partitions of several topics do not all go to the same member.
    """
    held = {me: frozenset(mine), **{name: frozenset(claims) for name, claims in others.items()}}
    # Those who have most keep most: a share that is already right does not move.
    members = sorted(held, key=lambda name: (-len(held[name]), crc32(f"{salt}{name}".encode()), name))
    low, odd = divmod(partitions, len(members))
    quota = {name: low + (1 if index < odd else 0) for index, name in enumerate(members)}
    surplus = sorted(held[me], reverse=True)[: max(0, len(held[me]) - quota[me])]
    free = [number for number in range(partitions) if not any(number in claims for claims in held.values())]
    claim: list[int] = []
    for name in members:
        need = max(0, quota[name] - len(held[name]))
        if name == me:
            claim = free[:need]
        free = free[need:]
    return Plan(claim, sorted(surplus))


class Membership:
    """This member among the others of one group on one topic."""

    def __init__(self, connection: Connection, stream: str, group: str, changed: Callable[[], None]) -> None:
        self.id = token_hex(8)
        self._connection = connection
        self._subject = f"anybroker.group.{stream}.{group}"
        self._changed = changed
        self._claims: Collection[int] = ()
        self._pinned: Collection[int] = ()
        self._peers: dict[str, _Peer] = {}
        self._listening: Listening | None = None
        self._asked = False

    async def join(self) -> None:
        """Begin to listen, and ask who is there."""
        self._listening = await self._connection.listen(self._subject, self._heard)
        await self.tell(hello=True)

    async def tell(self, *, hello: bool = False, bye: bool = False) -> None:
        """Say what we claim. Nothing is said while the connection is down."""
        word = _Word(self.id, sorted(self._claims), sorted(self._pinned), hello, bye)
        try:
            await self._connection.send((Outgoing(self._subject.encode(), b"", b"", msgspec.json.encode(word)),))
        except BrokerError as error:
            logger.debug("Group heartbeat: %s", error)

    async def update(self, claims: Collection[int], pinned: Collection[int]) -> None:
        """Say it at once if our claims have changed."""
        changed = set(claims) != set(self._claims) or set(pinned) != set(self._pinned)
        self._claims, self._pinned = tuple(claims), tuple(pinned)
        if changed:
            await self.tell()

    def _heard(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        try:
            word = _decode(data)
        except msgspec.DecodeError:
            return
        if word.id == self.id:
            return
        if word.bye:
            if self._peers.pop(word.id, None) is not None:
                self._changed()
            return
        known = self._peers.get(word.id)
        peer = known or self._peers.setdefault(word.id, _Peer())
        claims, pinned = frozenset(word.claims), frozenset(word.pinned)
        news = known is None or claims != peer.claims or pinned != peer.pinned or word.hello
        peer.claims, peer.pinned, peer.seen = claims, pinned, time.monotonic()
        if news:
            self._changed()
        if word.hello:
            self._asked = True

    def take_question(self) -> bool:
        """Whether somebody asked who is there, since the last call."""
        asked, self._asked = self._asked, False
        return asked

    def forgive(self) -> None:
        """The connection was down: nobody is called gone for a silence that was ours."""
        now = time.monotonic()
        for peer in self._peers.values():
            peer.seen = now

    def others(self) -> dict[str, frozenset[int]]:
        """What every other member claims; those who have been silent too long are forgotten."""
        limit = time.monotonic() - self._connection.settings.owner_timeout
        for name in [name for name, peer in self._peers.items() if peer.seen < limit]:
            del self._peers[name]
        return {name: peer.claims for name, peer in self._peers.items()}

    def contested(self, mine: Collection[int], pinned: Collection[int]) -> list[int]:
        """Claims of ours that somebody has the better right to: it is pinned there, or nowhere and its id is lower."""
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
        """Claims of ours that somebody says are pinned to it."""
        return sorted(number for number in mine if any(number in peer.pinned for peer in self._peers.values()))

    async def leave(self) -> None:
        """Say good-bye and listen no more."""
        await self.tell(bye=True)
        if self._listening is not None:
            await self._listening.close()
