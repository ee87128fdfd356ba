"""In which order messages leave a publishing pipeline, and which message of a key has overtaken which.

Messages of one key leave in the order in which they came. While a batch with a key has no answer, later messages of
that key wait; others pass them. Where the backend keeps the order of its calls they leave at once: there only those
wait whose key has a message that is sent again. Pure and synchronous.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from itertools import chain
from typing import cast

from broker.driver.limits import PipelineSettings
from broker.errors import BrokerError
from broker.publishing.entries import Burst, Entry
from broker.receipts import Receipt

__all__ = ["Departures", "overtaken"]


class Departures:
    """What waits to leave, and for what.

    :param ordered_calls: the backend keeps the order of calls that run at once.
    """

    def __init__(self, settings: PipelineSettings, *, ordered_calls: bool) -> None:
        self._settings = settings
        self._later = _LaterKeys(self.hold, 4 * settings.in_flight) if ordered_calls else None
        self._ready: deque[Entry] = deque()
        """What something has set apart, and may leave now."""
        self._bursts: deque[Burst] = deque()
        """What came after that."""
        self._busy: dict[bytes, int] = {}
        """Keys that later messages wait for, each with its batch."""
        self._waiting: dict[bytes, list[Entry]] = {}
        """Later messages of such keys."""

    def __bool__(self) -> bool:
        """Whether something may be able to leave."""
        return bool(self._ready or self._bursts)

    def append(self, burst: Burst) -> None:
        """These come last."""
        self._bursts.append(burst)

    def everything(self) -> list[Entry | Burst]:
        """What has not left."""
        return [*self._set_apart(), *self._bursts]

    def clear(self) -> list[Entry]:
        """Nothing of this leaves any more."""
        queued = self._set_apart()
        for burst in self._bursts:
            queued += burst.apart()
        self._waiting.clear()
        self._ready.clear()
        self._bursts.clear()
        return queued

    def _set_apart(self) -> list[Entry]:
        return [*self._ready, *chain.from_iterable(self._waiting.values())]

    # -- leaving -------------------------------------------------------------------------------------------

    def next_batch(self, number: int) -> Burst | None:
        """What leaves next, as the batch of this number; None if nothing may."""
        while self:
            if not self._ready:
                burst = self._bursts.popleft()
                if self._goes_whole(number, burst):
                    return burst
                self._ready.extend(burst.apart())
            if entries := self._gather(number):
                return Burst.of(entries)
        return None

    def left(self, number: int, batch: Burst, unanswered: Container[int]) -> None:
        """The batch is sent; its number is above all before.

        :param unanswered: numbers of batches that have no answer yet.
        """
        if self._later is not None:
            self._later.note(number, batch, unanswered)

    def _goes_whole(self, number: int, burst: Burst) -> bool:
        """Whether none of its messages has to wait for its key; then later ones wait for this batch."""
        busy, notes = self._busy, self._later is None
        # With ordered calls a key is only noted while something of it is sent again.
        if not busy and not notes:
            return True
        keys = {message.key for message in burst.messages}
        if not busy.keys().isdisjoint(keys):
            return False
        if notes:
            keys.discard(None)
            busy.update(dict.fromkeys(cast("set[bytes]", keys), number))
        return True

    def _gather(self, number: int) -> list[Entry]:
        """A batch of what was set apart."""
        batch: list[Entry] = []
        ready, busy, max_batch = self._ready, self._busy, self._settings.max_batch
        notes = self._later is None
        looks = notes or bool(busy)
        space = self._settings.max_batch_bytes
        while ready and space > 0 and len(batch) < max_batch:
            entry = ready.popleft()
            if looks and (key := entry.message.key) is not None:
                holder = busy.setdefault(key, number) if notes else busy.get(key, number)
                if holder != number:
                    self._waiting.setdefault(key, []).append(entry)
                    continue
            space -= entry.size
            batch.append(entry)
        return batch

    # -- answers -------------------------------------------------------------------------------------------

    def hold(self, number: int, entries: Iterable[Entry]) -> None:
        """Have later messages wait for the keys of these."""
        for entry in entries:
            if entry.message.key is not None and not entry.done:
                self._busy.setdefault(entry.message.key, number)

    def send_again(self, number: int, entries: Sequence[Entry]) -> None:
        """These of a batch are sent again."""
        if self._later is not None:
            self.hold(number, entries)

    def sent_after(self, number: int) -> Collection[bytes | None]:
        """The keys of messages that were sent after this batch and may have arrived."""
        return () if self._later is None else self._later.after(number)

    def free_whole(self, number: int, batch: Burst) -> None:
        """All of a batch are published."""
        if self._busy:
            self._free(number, {message.key for message in batch.messages})

    def free(self, number: int, finished: Sequence[Entry], again: Sequence[Entry]) -> None:
        """These of a batch have their outcomes, and those are sent again."""
        if self._busy:
            held = {entry.message.key for entry in again}
            keys = dict.fromkeys(entry.message.key for entry in finished)
            self._free(number, (key for key in keys if key not in held))

    def forget(self, number: int) -> None:
        """This batch is over."""
        if self._later is not None:
            self._later.forget(number)

    def _free(self, number: int, keys: Iterable[bytes | None]) -> None:
        busy = self._busy
        released: list[Entry] = []
        for key in keys:
            if key is not None and busy.get(key) == number:
                del busy[key]
                released += self._waiting.pop(key, ())
        self._ready.extendleft(reversed(released))


class _LaterKeys:
    """Which keys were sent after a batch that has no answer yet, where messages of a key do not wait.

    A batch that gets no answer for long has later messages of its keys wait, so that what is kept here is bounded.

    :param hold: has later messages wait for the keys of a batch.
    :param most: so many batches may be sent after one that has no answer.
    """

    def __init__(self, hold: Callable[[int, Iterable[Entry]], None], most: int) -> None:
        self._hold = hold
        self._most = most
        self._recent: deque[tuple[int, Burst]] = deque()
        """From the first that has no answer on."""
        self._held: dict[int, set[bytes | None]] = {}

    def note(self, number: int, batch: Burst, unanswered: Container[int]) -> None:
        """A batch is sent; its number is above all before."""
        recent = self._recent
        recent.append((number, batch))
        while recent[0][0] not in unanswered:
            recent.popleft()
        if len(recent) > self._most:
            earliest, slow = recent.popleft()
            self._held[earliest] = self.after(earliest)
            self._hold(earliest, slow.apart())

    def after(self, number: int) -> set[bytes | None]:
        """The keys of messages that were sent after this batch and may have arrived."""
        if number in self._held:
            return self._held[number]
        return {message.key for later, batch in self._recent if later > number for message in batch.messages}

    def forget(self, number: int) -> None:
        """This batch is over."""
        self._held.pop(number, None)


def overtaken(
    batch: Sequence[Entry], outcomes: Sequence[Receipt | BrokerError], later: Collection[bytes | None]
) -> set[int]:
    """The entries, by identity, that a later message of their key has overtaken.

    :param later: keys of messages that were sent after the batch.
    """
    passed: set[int] = set()
    published = set(later)
    for entry, outcome in zip(reversed(batch), reversed(outcomes), strict=True):
        key = entry.message.key
        if key is None:
            continue
        if not isinstance(outcome, BrokerError):
            published.add(key)
        elif key in published:
            passed.add(id(entry))
    return passed
