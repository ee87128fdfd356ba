"""The members of a group, and the partitions that each of them should own.

Members announce their claims by core NATS messages, every quarter of `owner_timeout` and on any change. A member that
is silent for `owner_timeout` counts as gone; silence while this process was suspended does not. There is no leader:
each member computes its share from the announcements, releases its surplus and claims what is free. If two members
claim the same partition for a moment, the server's pin decides which one reads. Without permission for the subject
every member claims everything, and the pins decide. Copartitioned members agree first: see `number_claims`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from secrets import token_hex
from typing import Final, NamedTuple
from zlib import crc32

import msgspec

from broker import BrokerError, OperationTimeout
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
    terms: list[int] = []
    """Of a copartitioned group: the term of each claim."""
    mark: int = 0
    """Tells the member itself which of its announcements has come back."""


_HIGHEST_TERM: Final = 2**60
_MARK_SECONDS: Final = 5.0
_MOST_PEERS: Final = 2048
"""More members than a group has partitions. Any client of the account may announce others."""
_LONGEST_ID: Final = 64
_decode = msgspec.json.Decoder(_Announcement).decode


class _Peer:
    __slots__ = ("claims", "last_heard", "pinned", "terms")

    def __init__(self) -> None:
        self.claims: frozenset[int] = frozenset()
        self.pinned: frozenset[int] = frozenset()
        self.terms: Mapping[int, int] = {}
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
    :param changed: called when another member announces something new.
    :param greeted: called when a new member asks for announcements.
    :ivar stale: announcements that others rely on may not have been received yet: call `catch_up`.
    :ivar listening_since: when this member began to receive all announcements.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        group: str,
        changed: Callable[[], None],
        greeted: Callable[[], None],
    ) -> None:
        self.id = token_hex(8)
        self.stale = self._missed = self._unheard = False
        self.listening_since = self._alive_at = self._echoed_at = time.monotonic()
        self._connection = connection
        self._subject = f"anybroker.group.{stream}.{group}"
        self._changed = changed
        self._call_greeted = greeted
        self._terms: Mapping[int, int] = {}
        self._mark = 0
        self._marks: dict[int, asyncio.Future[None]] = {}
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
        try:
            await self._send(hello=hello, bye=bye)
        except BrokerError as error:
            logger.debug("Group heartbeat: %s", error)

    async def _send(self, *, hello: bool = False, bye: bool = False, mark: int = 0) -> None:
        claims = sorted(self._claims)
        terms = [self._terms[number] for number in claims] if self._terms else []
        announcement = _Announcement(self.id, claims, sorted(self._pinned), hello, bye, terms, mark)
        await self._connection.send((Outgoing(self._subject.encode(), b"", b"", msgspec.json.encode(announcement)),))

    async def update(self, claims: Collection[int], pinned: Collection[int]) -> None:
        """Set our claims, and announce them if they changed."""
        changed = set(claims) != set(self._claims) or set(pinned) != set(self._pinned)
        self._claims, self._pinned = tuple(claims), tuple(pinned)
        if changed:
            await self.announce()

    async def update_terms(self, terms: Mapping[int, int]) -> None:
        """Set our claims of a copartitioned group, and announce them if they changed."""
        changed = terms != self._terms
        self._claims, self._terms = tuple(terms), dict(terms)
        if changed:
            await self.announce()

    async def receive_all(self) -> None:
        """Return when all that was announced before this call was received: this call's announcement has come back.

        :raises BrokerError: it did not come back: the connection broke, or the subject is not permitted.
        """
        self._mark += 1
        mark = self._mark
        back = self._marks[mark] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_MARK_SECONDS):
                await self._send(mark=mark)
                await back
        except TimeoutError:
            raise OperationTimeout(
                f"An announcement on {self._subject!r} did not come back within {_MARK_SECONDS:g} s",
                retriable=True,
                advice="Members of a copartitioned group need permission to publish and subscribe to anybroker.group.>",
            ) from None
        finally:
            del self._marks[mark]

    async def catch_up(self, seconds: float) -> None:
        """Receive what came while this process was suspended; after a reconnect, ask for what was missed.

        :param seconds: how long members may take to answer.
        :raises BrokerError: see `receive_all`.
        """
        self.stale = False
        try:
            if self._missed:
                self._missed = False
                self.listening_since = time.monotonic()
                await self.announce(hello=True)
                await asyncio.sleep(seconds)
            await self.receive_all()
        except BaseException:
            self.stale = self._missed = True
            raise

    def _on_announcement(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        try:
            announcement = _decode(data)
        except (ValueError, RecursionError):
            return  # any client of the account may publish here
        if announcement.id == self.id:
            self._note_echo()
            if (back := self._marks.get(announcement.mark)) is not None and not back.done():
                back.set_result(None)
            return
        if announcement.bye:
            if self._peers.pop(announcement.id, None) is not None:
                self._changed()
            return
        known = self._peers.get(announcement.id)
        if (
            max(len(announcement.claims), len(announcement.pinned)) > MOST_PARTITIONS
            or len(announcement.id) > _LONGEST_ID
            or len(announcement.terms) not in {0, len(announcement.claims)}
            or any(not 0 <= term <= _HIGHEST_TERM for term in announcement.terms)
        ):
            return
        if known is None and len(self._peers) >= _MOST_PEERS and len(self.others()) >= _MOST_PEERS:
            return
        peer = known or self._peers.setdefault(announcement.id, _Peer())
        claims, pinned = frozenset(announcement.claims), frozenset(announcement.pinned)
        terms = dict(zip(announcement.claims, announcement.terms, strict=True)) if announcement.terms else {}
        changed = (
            known is None or claims != peer.claims or pinned != peer.pinned or terms != peer.terms or announcement.hello
        )
        peer.claims, peer.pinned, peer.terms, peer.last_heard = claims, pinned, terms, time.monotonic()
        if changed:
            self._changed()
        if announcement.hello:
            self._greeted = True
            self._call_greeted()

    def _note_echo(self) -> None:
        now = time.monotonic()
        if now - self._echoed_at > self._connection.settings.owner_timeout / 2:
            self._unheard = True
            self._changed()
        self._echoed_at = now

    def take_unheard(self) -> bool:
        """Whether the other members may have counted this one as gone since the last call."""
        unheard, self._unheard = self._unheard, False
        return unheard

    def take_greeting(self) -> bool:
        """Whether a new member said hello since the last call."""
        greeted, self._greeted = self._greeted, False
        return greeted

    def note_running(self) -> None:
        """This process runs; call it more than twice within `owner_timeout`.

        While it was suspended it received no announcements, and the others may have dropped it.
        """
        now = time.monotonic()
        if now - self._alive_at > self._connection.settings.owner_timeout / 2:
            self._restart_silence()
        self._alive_at = now

    def reconnected(self) -> None:
        """Announcements were lost with the old connection."""
        self._missed = True
        self._restart_silence()

    def _restart_silence(self) -> None:
        now = time.monotonic()
        for peer in self._peers.values():
            peer.last_heard = now
        self.stale = True

    def others(self) -> dict[str, frozenset[int]]:
        """The claims of every other member; drops members that were silent for too long."""
        self._drop_silent()
        return {name: peer.claims for name, peer in self._peers.items()}

    def terms_of_others(self) -> dict[str, Mapping[int, int]]:
        """The claims of every other member of a copartitioned group, with their terms."""
        self._drop_silent()
        return {name: peer.terms for name, peer in self._peers.items()}

    def _drop_silent(self) -> None:
        self.note_running()
        limit = time.monotonic() - self._connection.settings.owner_timeout
        for name in [name for name, peer in self._peers.items() if peer.last_heard < limit]:
            del self._peers[name]

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
