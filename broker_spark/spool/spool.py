"""Which segments a spool has: adds them, records what is acked, and trims what Spark has committed.

*Concurrency.* One thread adds, another plans and trims; `changed` is notified of what they wait for. *Failure.* Every
state on disk between two calls is one that `open` goes on from. What is written and not on record as acked is in doubt:
it may come again, and is known by its identity for `KEPT` seconds.
"""

from __future__ import annotations

import json
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from threading import Condition, Lock
from typing import Any, Final, cast

import pyarrow

from broker.errors import ConfigurationError, OffsetOutOfRange
from broker_spark.common.files import Files
from broker_spark.spool import segments
from broker_spark.spool.columns import place_of
from broker_spark.spool.lease import Lease
from broker_spark.spool.metadata import VERSION, WHAT, check_what, said
from broker_spark.spool.recently_acked import Recent
from broker_spark.spool.segments import IDENTITY, Segment

__all__ = ["Spool"]

KEPT: Final = 24 * 3600.0
"""Seconds for which a message that may come again is remembered."""
_DOUBTS: Final = "doubts"
_IDENTITIES: Final = "identities"


class Spool:
    """Made by `open`.

    :ivar id: tells it from all other spools.
    :ivar changed: notified when there are more segments, or more is planned.
    :ivar on_room: called when there may be room for more.
    :ivar added: how many rows this owner has written.
    """

    def __init__(
        self,
        files: Files,
        lease: Lease,
        place: str,
        name: str,
        found: Sequence[Segment],
        following: int,
        doubts: set[str],
    ) -> None:
        self.id = name
        self.changed = Condition()
        self.on_room: Callable[[], object] = _nothing
        self.added = 0
        self._files = files
        self._lease = lease
        self._place = place
        self._saying = Lock()
        self._segments = {segment.number: segment for segment in found}
        self._next = following
        self._acked = following
        self._planned = found[0].number if found else following
        self._doubts = doubts
        self._doubt_files = 0
        self._recent = Recent()
        self._found = list(found)
        """Segments of earlier owners whose identities were not looked at."""
        self._unchecked = list(found)
        """Those whose columns were not looked at."""

    @classmethod
    def open(cls, files: Files, place: str, what: Mapping[str, Any]) -> Spool:
        """Own the spool and find out what is in it.

        :param what: which messages it is for; the same each time.
        :raises ConfigurationError: it is of other messages, another query owns it, or a file beside the segments is not
            whole.
        :raises OffsetOutOfRange: a segment is missing, or not whole.
        """
        check_what(files, place, what)
        lease = Lease.claim(files, place)
        try:
            name = check_what(files, place, what)
            if name is None:
                name = uuid.uuid4().hex
                text = json.dumps({"spool": name, "version": VERSION, **what}).encode()
                files.write(WHAT, lambda file: file.write(text))
            before = lease.before
            epochs = list(before.epochs or []) if before is not None else []
            acked = before.acked if before is not None else 0
            every = segments.listed(files)
            if before is None and every:
                raise OffsetOutOfRange(
                    f"The spool {place} has segments, and nothing in owners/ tells whose they are",
                    advice="Bring the file in owners/ back; if another query was started just now, start again",
                )
            found = [each for each in every if each.token == _token_of(epochs, each.number)]
            _check_whole(found, place, acked)
            following = max(found[-1].number + 1 if found else 0, acked)
            doubtful = [each for each in found if each.number >= acked]
            doubts = _remembered(files, place)
            again = [identity for each in doubtful for identity in segments.identities_of(files, each)]
            if again:
                _remember(files, f"{lease.token}-0", again)
                doubts.update(again)
            lease.begin([*epochs, [following, lease.token]], following)
            for each in every:
                if each not in found:
                    files.delete(each.name)
            segments.sweep(files)
            files.sweep(_DOUBTS)
        except BaseException:
            lease.release()
            raise
        return cls(files, lease, place, name, found, following, doubts)

    def check_topics(self, identities: Mapping[str, str | None]) -> None:
        """Make sure that these are the topics whose messages it holds, and keep what they are.

        :param identities: by name, as the broker tells them; None if it does not.
        :raises ConfigurationError: one was made anew since, or is that of another broker.
        """
        what = said(self._files, self._place)
        kept: dict[str, str] = what.get(_IDENTITIES, {})
        told = {topic: identity for topic, identity in identities.items() if identity is not None}
        for topic, identity in told.items():
            if kept.get(topic, identity) != identity:
                raise ConfigurationError(
                    f"The spool {self._place} is of another broker, or topic {topic!r} was deleted and made anew since "
                    f"({kept[topic]} then, {identity} now)",
                    advice=(
                        "Give this query a spool and a checkpointLocation of its own; or, if the queue was made anew "
                        f"and its spool shall go on, remove {_IDENTITIES!r} from {WHAT} there"
                    ),
                )
        if told.keys() - kept.keys():
            text = json.dumps({**what, _IDENTITIES: {**kept, **told}}).encode()
            self._files.write(WHAT, lambda file: file.write(text))

    def check_columns(self, columns: Sequence[str], start: int) -> None:
        """Make sure that the rows of a segment on which are there have these columns.

        What lies before was read: it stays until the batch after it, and may have others.

        :raises ConfigurationError: one is missing.
        """
        while self._unchecked:
            segment = self._unchecked[-1]
            if segment.number >= start:
                _check_columns(self._files, self._place, segment, columns)
            self._unchecked.pop()

    # -- what there is -----------------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The number of the first segment that is there; for who holds `changed` where other threads work."""
        return next(iter(self._segments), self._next)

    @property
    def next(self) -> int:
        """The number that the next segment gets."""
        return self._next

    def ahead(self) -> tuple[int, int]:
        """Rows and bytes that no batch was planned for yet."""
        with self.changed:
            waiting = [self._segments[number] for number in range(self._planned, self._next)]
        return sum(each.rows for each in waiting), sum(each.bytes for each in waiting)

    def between(self, start: int, end: int) -> list[Segment]:
        """The segments of a batch.

        :raises OffsetOutOfRange: some are not there any more, or never were.
        """
        with self.changed:
            found = [self._segments.get(number) for number in range(start, end)]
            first, following = self.first, self._next
        if None in found or start > following:
            missing = start + (found.index(None) if found else 0)
            raise OffsetOutOfRange(
                f"The checkpoint asks for segment {missing}, and the spool has {first} to {following - 1}",
                advice=(
                    "Checkpoint and spool are not of the same time: bring the other one back, or give the query a new "
                    "checkpointLocation, which begins with what the spool still holds"
                ),
            )
        return cast("list[Segment]", found)

    def plan(self, end: int) -> None:
        """Say how far batches are planned."""
        with self.changed:
            self._planned = max(self._planned, end)
        self.on_room()

    # -- adding ------------------------------------------------------------------------------------------

    @property
    def doubtful(self) -> bool:
        """Whether messages may come that were written before."""
        return bool(self._doubts)

    def known(self, identities: Any, *, late: bool) -> set[str]:
        """Which of these messages were written before, as far as that is in doubt.

        :param identities: an array of pyarrow.
        :param late: they may have been acked, so that those which were written of late count too.
        """
        found = self._doubts.intersection(identities.to_pylist()) if self._doubts else set[str]()
        if late:
            self.inherit()
            found |= self._recent.known(identities)
        return found

    def inherit(self) -> dict[str, int]:
        """Remember what earlier owners wrote that is still there; how far it came in the log of each topic.

        Empty from the second call on, and of identities that do not tell.
        """
        highest: dict[str, int] = {}
        found, self._found = self._found, []
        for segment in found:
            # One that is trimmed by now was read long ago.
            with suppress(FileNotFoundError):
                names = segments.identities_of(self._files, segment)
                self._recent.add(pyarrow.array(names, pyarrow.string()))
                for topic, place in filter(None, map(place_of, names)):
                    highest[topic] = max(place, highest.get(topic, place))
        return highest

    def add(self, table: pyarrow.Table, batch_rows: int) -> int:
        """Write a segment; its number. When this returns it is durable, and ours to ack.

        :raises ConfigurationError: another query took the spool over, so that nothing may be acked.
        """
        size: Any = table
        segment = Segment(self._next, self._lease.token, size.num_rows, size.nbytes)
        try:
            segments.write(self._files, segment, table, batch_rows)
        except FileNotFoundError:
            # Who took over sweeps away what is half written.
            self._lease.check()
            raise
        self._lease.check()
        self._recent.add(size.column(IDENTITY))
        with self.changed:
            self.added += segment.rows
            self._segments[segment.number] = segment
            self._next = segment.number + 1
            self.changed.notify_all()
        return segment.number

    def acked(self, number: int | None, unsure: Sequence[str]) -> None:
        """All up to this segment is acked, but for what is unsure: that may come again.

        :param number: None if nothing was written, since all came again.
        :param unsure: identities.
        """
        if unsure:
            self._doubt_files += 1
            _remember(self._files, f"{self._lease.token}-{self._doubt_files}", unsure)
            self._doubts.update(unsure)
        if number is not None:
            self._acked = number + 1

    def settled(self, identities: Iterable[str]) -> None:
        """These came again and are acked now."""
        self._doubts.difference_update(identities)

    # -- keeping -----------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Give a sign of life, and put on record what is acked.

        :raises ConfigurationError: another query took the spool over.
        """
        with self._saying:
            with self.changed:
                first = self.first
            self._lease.beat(acked=self._acked, epochs=_since(self._lease.epochs, first))
        self._lease.check()

    def trim(self, end: int) -> None:
        """Delete the segments below `end`, whose rows Spark has committed; those that are not acked yet stay."""
        end = min(end, self._acked)
        with self.changed:
            gone = [number for number in self._segments if number < end]
        if not gone:
            return
        self._lease.check()
        if self._lease.acked < end:
            # Else they would be forgotten, although they may come again.
            self.beat()
        with self.changed:
            for number in gone:
                del self._segments[number]
        for each in segments.listed(self._files):
            if each.number < end:
                self._files.delete(each.name)

    def release(self) -> None:
        """Let the next owner have it at once; as `Lease.release`."""
        with self._saying:
            self._lease.release(acked=self._acked)


def _nothing() -> None:
    pass


def _token_of(epochs: Sequence[Sequence[Any]], number: int) -> str | None:
    """Who was the owner when this segment was due."""
    place = bisect_right(epochs, number, key=lambda each: each[0])
    return str(epochs[place - 1][1]) if place else None


def _since(epochs: list[list[Any]], number: int) -> list[list[Any]]:
    """Without the owners of what is gone."""
    return epochs[max(0, bisect_right(epochs, number, key=lambda each: each[0]) - 1) :]


def _check_whole(found: Sequence[Segment], place: str, acked: int) -> None:
    for before, after in pairwise(found):
        if after.number != before.number + 1:
            raise OffsetOutOfRange(
                f"The spool {place} has no segment {before.number + 1}, and has later ones",
                advice="Bring the file back: its messages are acked, and nowhere else",
            )
    if found and found[-1].number + 1 < acked:
        raise OffsetOutOfRange(
            f"The spool {place} ends with segment {found[-1].number}, and {acked - 1} was written",
            advice="Bring the files back: their messages are acked, and nowhere else",
        )


def _check_columns(files: Files, place: str, segment: Segment, columns: Sequence[str]) -> None:
    has = segments.columns_of(files, segment)
    missing = [name for name in columns if name not in has]
    if missing:
        raise ConfigurationError(
            f"What the spool {place} holds has no column {missing[0]!r}, but {', '.join(has)}",
            advice="Run the query with those columns until that is read, or leave the new one out",
        )


def _remember(files: Files, name: str, identities: Sequence[str]) -> None:
    made: Any = cast("Any", pyarrow).table({IDENTITY: pyarrow.array(identities, pyarrow.string())})

    def fill(file: Any) -> None:
        with cast("Any", pyarrow).ipc.new_file(file, made.schema) as writer:
            writer.write_table(made)

    files.write(f"{_DOUBTS}/{name}.arrow", fill)


def _remembered(files: Files, place: str) -> set[str]:
    found: set[str] = set()
    for name in files.names(_DOUBTS):
        path = f"{_DOUBTS}/{name}"
        if files.age(path) > KEPT:
            files.delete(path)
            continue
        try:
            with files.open(path) as file:
                found.update(cast("Any", pyarrow).ipc.open_file(file).read_all().column(IDENTITY).to_pylist())
        except pyarrow.ArrowInvalid as error:
            raise ConfigurationError(
                f"{path} of the spool {place} is not whole: {error}",
                native=error,
                advice="Bring it back from a copy; or remove it, and messages in it that come again are there twice",
            ) from error
    return found
