"""One subscription of the Message family: ready, leased and delayed messages.

No locking: the caller holds the server's lock, and no call waits. Time is a parameter: `advance` applies what is due at
the next call, and the clock wakes sleeping consumers. A message is in exactly one place: ready, returned, delayed,
parked behind its key, or leased. It leaves by ack, reject, expiry or purge.

`KeyShuffler` shuffles messages of different keys and keeps the order within a key, so tests find code that relies on an
order that no broker guarantees. The same seed and calls give the same order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter
from typing import Any, Final

from broker import AlreadySettled, BrokerError, ConfigurationError, LeaseLost, Message, Outcome, Unsupported
from broker.driver import Settlement
from broker_inmem.entries import DELIVERY_VIEW, Delivery, Entry
from broker_inmem.key_lanes import Item, KeyLanes
from broker_inmem.waker import Waker

__all__ = ["KeyShuffler", "Member", "MessageQueue"]


_CHUNK: Final = 64
_FOREVER: Final = float("inf")


class Member:
    """One consumer of a subscription.

    :ivar leases: its leases by tag, in order of expiry: all leases of a consumer are equally long.
    :ivar gone: it closed or died; it stays known until its leases have ended.
    """

    __slots__ = ("gone", "lease_seconds", "leases", "number", "ordered")

    def __init__(self, number: int, ordered: bool, lease_seconds: float) -> None:
        self.number: Final = number
        self.ordered: Final = ordered
        self.lease_seconds: Final = lease_seconds
        self.leases: dict[int, Delivery] = {}
        self.gone = False


class MessageQueue:
    """The state of one subscription.

    :param start: the position of each partition that it began at; it has everything from there on.
    :param shuffler: draws the order between keys.
    """

    def __init__(
        self,
        topic: str,
        name: str,
        *,
        native_delay: float,
        shuffler: KeyShuffler,
        start: Mapping[int, int],
        ephemeral: bool = False,
    ) -> None:
        self.topic: Final = topic
        self.name: Final = name
        self.start: Final = dict(start)
        self.ephemeral: Final = ephemeral
        self.deleted = False
        self.used = False
        """Whether a consumer ever opened it."""
        self.members: dict[int, Member] = {}
        """Consumers by number, including dead ones that still have leases."""
        self.waiters: deque[Waker] = deque()
        self.duplicate: Callable[[MessageQueue, Sequence[Delivery]], None] | None = None
        self._native_delay = native_delay
        self._ready: deque[Entry] = deque()
        self._staged: list[Entry] = []
        self._returned: list[Item] = []
        self._delayed: list[tuple[float, int, Item, bool]] = []
        self._first_expiry = _FOREVER
        """The earliest end of a lease."""
        self._lanes: KeyLanes | None = None
        self._tags = count(1)
        self._ties = count()
        self._purged = -1
        self._shuffler = shuffler

    @property
    def waiting(self) -> int:
        """Messages that are not leased."""
        parked = len(self._lanes) if self._lanes is not None else 0
        return len(self._ready) + len(self._staged) + len(self._returned) + len(self._delayed) + parked

    @property
    def unsettled(self) -> int:
        """Leased messages."""
        return sum(len(member.leases) for member in self.members.values())

    @property
    def ordered(self) -> bool:
        return self._lanes is not None

    def push(self, entries: Iterable[Entry]) -> None:
        """Add new messages, in publishing order."""
        self._ready.extend(entries)
        if self.waiters:
            self.notify()

    def join(self, number: int, ordered: bool, lease_seconds: float) -> Member:
        """A consumer opens the subscription.

        :raises ConfigurationError: other consumers use the other `ordered_by_key`.
        """
        if any(other.ordered is not ordered for other in self.members.values() if not other.gone):
            raise ConfigurationError(
                f"Subscription {self.name!r} of {self.topic!r} is consumed {'without' if ordered else 'with'} "
                "order by key by another consumer",
                advice="Open all consumers of a subscription with the same ordered_by_key",
            )
        self.used = True
        member = self.members[number] = Member(number, ordered, lease_seconds)
        if ordered and self._lanes is None:
            self._lanes = KeyLanes(self._returned)
            for other in self.members.values():
                for delivery in other.leases.values():
                    self._lanes.adopt(delivery.entry.key, other.number)
        elif not ordered and self._lanes is not None:
            self._lanes.dissolve()
            self._lanes = None
        return member

    def leave(self, member: Member) -> None:
        """A consumer closed: redeliver its messages without counting an attempt."""
        self.drop(member, list(member.leases.values()), attempted=False)
        self.abandon(member)

    def abandon(self, member: Member) -> None:
        """A consumer died: redeliver its messages when their leases end."""
        member.gone = True
        if not member.leases:
            self.members.pop(member.number, None)

    def take(self, member: Member, max_messages: int, max_bytes: int, now: float) -> list[Message[Any]]:
        """Lease messages to a consumer, at most `max_messages` and, except for the first, `max_bytes`."""
        self.advance(now)
        lanes = self._lanes
        if lanes is None:
            messages = self._take(member, max_messages, max_bytes, now)
        else:
            messages = self._take_by_key(member, max_messages, max_bytes, now, lanes)
        if messages:
            self._first_expiry = min(self._first_expiry, now + member.lease_seconds)
            if self.duplicate is not None:
                self.duplicate(self, [message.lease for message in messages])
        if self.waiters and self.waiting:
            self.notify()
        return messages

    def settle(self, member: Member, settlements: Sequence[Settlement], now: float) -> list[BrokerError | None]:
        """Settle messages; returns an error or None for each."""
        self.advance(now)
        results: list[BrokerError | None] = [None] * len(settlements)
        leases, lanes = member.leases, self._lanes
        again = False
        for index, settlement in enumerate(settlements):
            delivery: Delivery = settlement.message.lease
            outcome, delay = settlement.outcome, settlement.delay
            if delay is not None and delay > self._native_delay:
                results[index] = Unsupported(
                    f"A delay of {delay} s exceeds the server's maximum of {self._native_delay} s"
                )
            elif leases.pop(delivery.tag, None) is None:
                results[index] = self._refusal(delivery, outcome)
            else:
                delivery.outcome = outcome
                if outcome is Outcome.ACK or outcome is Outcome.REJECT:
                    if lanes is not None:
                        lanes.settled(delivery.entry.key)
                        again = True
                else:
                    attempts = delivery.attempt - (outcome is Outcome.RELEASE)
                    self._release(delivery.entry, attempts, delay or 0.0, now)
                    again = True
        if again and self.waiters:
            self.notify()
        return results

    def extend(self, member: Member, messages: Sequence[Message[Any]], now: float) -> list[BrokerError | None]:
        """Renew leases by one period."""
        self.advance(now)
        results: list[BrokerError | None] = []
        for message in messages:
            delivery: Delivery = message.lease
            if member.leases.pop(delivery.tag, None) is None:
                results.append(None if delivery.outcome is not None else self._lost(delivery))
            else:
                delivery.expires = now + member.lease_seconds
                member.leases[delivery.tag] = delivery
                results.append(None)
        return results

    def drop(self, member: Member, deliveries: Iterable[Delivery], *, attempted: bool = True) -> int:
        """End leases now and redeliver their messages; returns their number."""
        dropped = 0
        for delivery in deliveries:
            if member.leases.pop(delivery.tag, None) is not None:
                self._release(delivery.entry, delivery.attempt - (not attempted), 0.0, 0.0)
                dropped += 1
        if dropped and self.waiters:
            self.notify()
        return dropped

    def advance(self, now: float) -> None:
        """Apply what is due: ended leases and delays."""
        if now >= self._first_expiry:
            self._expire(now)
        delayed = self._delayed
        while delayed and delayed[0][0] <= now:
            _, _, item, blocking = heappop(delayed)
            if blocking and self._lanes is not None:
                self._lanes.unblock(item)
            else:
                heappush(self._returned, item)

    def next_due(self) -> float | None:
        """When `advance` is needed next, at the latest."""
        due = self._first_expiry
        if self._delayed and self._delayed[0][0] < due:
            due = self._delayed[0][0]
        return None if due == _FOREVER else due

    def end(self) -> None:
        """The subscription was deleted: wake its sleeping consumers, whose calls then raise."""
        self.deleted = True
        self.members.clear()
        while self.waiters:
            self.waiters.popleft().wake()

    def redeliver(self, delivery: Delivery) -> None:
        """Deliver a leased entry once more: a fault."""
        heappush(self._returned, (delivery.entry.seq, next(self._ties), delivery.attempt, delivery.entry))

    def purge(self, seq: int) -> None:
        """Remove everything up to this sequence number; leased messages are not redelivered."""
        self._purged = seq
        self._ready.clear()
        self._staged.clear()
        self._returned.clear()
        self._delayed.clear()
        if self._lanes is not None:
            self._lanes.clear()

    def notify(self) -> None:
        """Wake a sleeping consumer; with order by key all of them, because the messages may be for certain ones."""
        if self._lanes is not None:
            while self.waiters:
                self.waiters.popleft().wake()
        else:
            while self.waiters and not self.waiters.popleft().wake():
                pass

    def stop_waiting(self, waker: Waker) -> None:
        """A consumer no longer sleeps here; wake another one in its place."""
        try:
            self.waiters.remove(waker)
        except ValueError:
            if self.waiters:
                self.notify()

    def _take(self, member: Member, max_messages: int, max_bytes: int, now: float) -> list[Message[Any]]:
        messages: list[Message[Any]] = []
        leases, staged, returned = member.leases, self._staged, self._returned
        topic, tags, who, expires = self.topic, self._tags, member.number, now + member.lease_seconds
        number = size = 0
        while number < max_messages and size < max_bytes:
            if returned:
                _, _, attempt, entry = heappop(returned)
            elif staged:
                attempt, entry = 0, staged.pop()
            elif self._ready:
                self._shuffle_ready()
                continue
            else:
                break
            if entry.expires <= now:
                continue
            tag = next(tags)
            leases[tag] = delivery = Delivery(entry, attempt + 1, tag, who, expires)
            messages.append(Message(topic, entry.data, delivery, DELIVERY_VIEW, delivery, entry.size))
            number += 1
            size += entry.size
        return messages

    def _take_by_key(
        self, member: Member, max_messages: int, max_bytes: int, now: float, lanes: KeyLanes
    ) -> list[Message[Any]]:
        messages: list[Message[Any]] = []
        who, expires = member.number, now + member.lease_seconds
        own = deque(lanes.inbox(who))
        size = 0
        while len(messages) < max_messages and size < max_bytes:
            item = own.popleft() if own else self._next_item()
            if item is None:
                break
            entry = item[3]
            if entry.expires > now and lanes.claim(item, who):
                tag = next(self._tags)
                member.leases[tag] = delivery = Delivery(entry, item[2] + 1, tag, who, expires)
                messages.append(Message(self.topic, entry.data, delivery, DELIVERY_VIEW, delivery, entry.size))
                size += entry.size
        for item in own:
            lanes.keep(item)
        return messages

    def _next_item(self) -> Item | None:
        if self._returned:
            return heappop(self._returned)
        if not self._staged:
            if not self._ready:
                return None
            self._shuffle_ready()
        entry = self._staged.pop()
        return (entry.seq, next(self._ties), 0, entry)

    def _expire(self, now: float) -> None:
        first = _FOREVER
        for member in list(self.members.values()):
            leases = member.leases
            while leases:
                delivery = next(iter(leases.values()))
                if delivery.expires > now:
                    first = min(first, delivery.expires)
                    break
                del leases[delivery.tag]
                self._release(delivery.entry, delivery.attempt, 0.0, now)
            if member.gone and not leases:
                del self.members[member.number]
        self._first_expiry = first

    def _release(self, entry: Entry, attempts: int, delay: float, now: float) -> None:
        lanes = self._lanes
        if entry.seq <= self._purged:
            if lanes is not None:
                lanes.settled(entry.key)
            return
        item = (entry.seq, next(self._ties), attempts, entry)
        if delay > 0:
            heappush(self._delayed, (now + delay, item[1], item, lanes is not None))
            if lanes is not None:
                lanes.block(entry.key)
        elif lanes is not None:
            lanes.release(item)
        else:
            heappush(self._returned, item)

    def _shuffle_ready(self) -> None:
        ready = self._ready
        shuffler = self._shuffler
        chunk = [ready.popleft() for _ in range(min(shuffler.window or _CHUNK, len(ready)))]
        if shuffler.window and len(chunk) > 1:
            chunk = shuffler.shuffle(chunk)
        chunk.reverse()
        self._staged.extend(chunk)

    def _refusal(self, delivery: Delivery, outcome: Outcome) -> BrokerError | None:
        if delivery.outcome is outcome:
            return None
        if delivery.outcome is None:
            return self._lost(delivery)
        return AlreadySettled(f"Message {delivery.entry.id!r} was already settled with {delivery.outcome.name.lower()}")

    def _lost(self, delivery: Delivery) -> LeaseLost:
        return LeaseLost(
            f"The lease of message {delivery.entry.id!r} of subscription {self.name!r} of {self.topic!r} has ended"
        )


_PATTERNS: Final = 32


class KeyShuffler:
    """Shuffles windows of up to `window` entries; 0 or 1 keeps the order.

    :param seed: random seed of the order; None draws one.
    """

    def __init__(self, window: int, seed: int | None) -> None:
        self.window: Final = window if window > 1 else 0
        self.seed: Final = random.SystemRandom().getrandbits(32) if seed is None else seed
        self._random = random.Random(self.seed)
        self._patterns: dict[int, list[Any]] = {}

    def shuffle(self, entries: list[Entry]) -> list[Entry]:
        """Two entries or more in another order."""
        length = len(entries)
        patterns = self._patterns.get(length)
        if patterns is None:
            # Precomputed permutations, because drawing one per window would cost more than a delivery.
            draw = self._random
            patterns = [itemgetter(*draw.sample(range(length), length)) for _ in range(_PATTERNS)]
            self._patterns[length] = patterns
        shuffled: list[Entry] = list(patterns[self._random.getrandbits(5)](entries))
        keys = [entry.key for entry in entries if entry.key is not None]
        if len(set(keys)) < len(keys):
            _restore_order(shuffled)
        return shuffled


def _restore_order(shuffled: list[Entry]) -> None:
    """Put the entries of each key into publishing order."""
    places: dict[bytes, list[int]] = {}
    for index, entry in enumerate(shuffled):
        if entry.key is not None:
            places.setdefault(entry.key, []).append(index)
    for indexes in places.values():
        if len(indexes) > 1:
            entries = sorted((shuffled[index] for index in indexes), key=_seq)
            for index, entry in zip(indexes, entries, strict=True):
                shuffled[index] = entry


def _seq(entry: Entry) -> int:
    return entry.seq
