"""`UnsentMessages`: the order in which messages leave a publishing pipeline. Pure and synchronous.

Messages of one key leave in the order of their calls. While a batch with a key has no answer, later messages of that
key wait; messages of other keys pass them. A backend that keeps the order of its calls gets all messages at once: there
a key waits only while one of its messages is retried. `overtaken` finds the failed messages that must not be retried,
because a later message of their key was sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from itertools import chain
from typing import cast

from broker.driver.limits import PipelineSettings
from broker.errors import BrokerError
from broker.publishing.outgoing import Entry, OutgoingBatch
from broker.receipts import Receipt

__all__ = ["UnsentMessages", "overtaken"]


class UnsentMessages:
    """The messages that have not been sent.

    :param ordered_calls: the backend keeps the order of calls that run at once.
    """

    def __init__(self, settings: PipelineSettings, *, ordered_calls: bool) -> None:
        self._settings = settings
        self._later = _LaterKeys(self.hold, 4 * settings.in_flight) if ordered_calls else None
        self._ready: deque[Entry] = deque()
        """Messages with entries that may leave now."""
        self._batches: deque[OutgoingBatch] = deque()
        """Later batches."""
        self._busy: dict[bytes, int] = {}
        """Keys with a message in flight, each with the number of its batch."""
        self._waiting: dict[bytes, list[Entry]] = {}
        """Later messages of those keys."""

    def __bool__(self) -> bool:
        """Whether a message may be able to leave."""
        return bool(self._ready or self._batches)

    def append(self, batch: OutgoingBatch) -> None:
        """Queue a batch behind all others."""
        self._batches.append(batch)

    def everything(self) -> list[Entry | OutgoingBatch]:
        """All messages that have not left."""
        return [*self._entries(), *self._batches]

    def clear(self) -> list[Entry]:
        """Remove and return all messages that have not left."""
        queued = self._entries()
        for batch in self._batches:
            queued += batch.apart()
        self._waiting.clear()
        self._ready.clear()
        self._batches.clear()
        return queued

    def _entries(self) -> list[Entry]:
        return [*self._ready, *chain.from_iterable(self._waiting.values())]

    # -- leaving -------------------------------------------------------------------------------------------

    def next_batch(self, number: int) -> OutgoingBatch | None:
        """The next batch, to be sent with this number; None if no message may leave."""
        while self:
            if not self._ready:
                batch = self._batches.popleft()
                if self._goes_whole(number, batch):
                    return batch
                self._ready.extend(batch.apart())
            if entries := self._gather(number):
                return OutgoingBatch.of(entries)
        return None

    def left(self, number: int, batch: OutgoingBatch, unanswered: Container[int]) -> None:
        """The batch is sent; its number is larger than all earlier ones.

        :param unanswered: numbers of batches that have no answer yet.
        """
        if self._later is not None:
            self._later.note(number, batch, unanswered)

    def _goes_whole(self, number: int, batch: OutgoingBatch) -> bool:
        """Whether no message must wait for its key. If so, later messages of the keys wait for this batch."""
        busy, marks = self._busy, self._later is None
        # With ordered calls a key is busy only while one of its messages is retried.
        if not busy and not marks:
            return True
        keys = {message.key for message in batch.messages}
        if not busy.keys().isdisjoint(keys):
            return False
        if marks:
            keys.discard(None)
            busy.update(dict.fromkeys(cast("set[bytes]", keys), number))
        return True

    def _gather(self, number: int) -> list[Entry]:
        """Remove and return the entries of the next batch; those that must wait for their key stay."""
        batch: list[Entry] = []
        ready, busy, max_batch = self._ready, self._busy, self._settings.max_batch
        marks = self._later is None
        checks_keys = marks or bool(busy)
        space = self._settings.max_batch_bytes
        while ready and space > 0 and len(batch) < max_batch:
            entry = ready.popleft()
            if checks_keys and (key := entry.message.key) is not None:
                holder = busy.setdefault(key, number) if marks else busy.get(key, number)
                if holder != number:
                    self._waiting.setdefault(key, []).append(entry)
                    continue
            space -= entry.size
            batch.append(entry)
        return batch

    # -- answers -------------------------------------------------------------------------------------------

    def hold(self, number: int, entries: Iterable[Entry]) -> None:
        """Hold back later messages of the keys of these entries."""
        for entry in entries:
            if entry.message.key is not None and not entry.done:
                self._busy.setdefault(entry.message.key, number)

    def send_again(self, number: int, entries: Sequence[Entry]) -> None:
        """These messages of a batch are retried."""
        if self._later is not None:
            self.hold(number, entries)

    def sent_after(self, number: int) -> Collection[bytes | None]:
        """The keys of messages that were sent after this batch and may have arrived."""
        return () if self._later is None else self._later.after(number)

    def free_whole(self, number: int, batch: OutgoingBatch) -> None:
        """All messages of a batch are published."""
        if self._busy:
            self._free(number, {message.key for message in batch.messages})

    def free(self, number: int, finished: Sequence[Entry], again: Sequence[Entry]) -> None:
        """`finished` messages of a batch have their outcomes; those in `again` are retried."""
        if self._busy:
            retried = {entry.message.key for entry in again}
            keys = dict.fromkeys(entry.message.key for entry in finished)
            self._free(number, (key for key in keys if key not in retried))

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
    """The keys that were sent after a batch without an answer, for backends that keep the order of calls.

    When `most` batches were sent after one without an answer, later messages of its keys wait: this bounds the memory.

    :param hold: holds back later messages of the keys of a batch.
    :param most: how many batches may be sent after one without an answer.
    """

    def __init__(self, hold: Callable[[int, Iterable[Entry]], None], most: int) -> None:
        self._hold = hold
        self._most = most
        self._recent: deque[tuple[int, OutgoingBatch]] = deque()
        """The batches from the first one without an answer on."""
        self._keys_after: dict[int, set[bytes | None]] = {}

    def note(self, number: int, batch: OutgoingBatch, unanswered: Container[int]) -> None:
        """A batch is sent; its number is larger than all earlier ones."""
        recent = self._recent
        recent.append((number, batch))
        while recent[0][0] not in unanswered:
            recent.popleft()
        if len(recent) > self._most:
            earliest, slow = recent.popleft()
            self._keys_after[earliest] = self.after(earliest)
            self._hold(earliest, slow.apart())

    def after(self, number: int) -> set[bytes | None]:
        """The keys of messages that were sent after this batch and may have arrived."""
        if number in self._keys_after:
            return self._keys_after[number]
        return {message.key for later, batch in self._recent if later > number for message in batch.messages}

    def forget(self, number: int) -> None:
        """This batch is over."""
        self._keys_after.pop(number, None)


def overtaken(
    batch: Sequence[Entry], outcomes: Sequence[Receipt | BrokerError], later: Collection[bytes | None]
) -> set[int]:
    """The entries, by `id()`, that a later message of their key has overtaken.

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
