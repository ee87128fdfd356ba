"""A spool: its metadata, and its segments from being written to being acked, committed by Spark and deleted.

A segment that is written and not yet recorded as acked is in doubt: the broker may redeliver its messages. They are
recognized by their identities, which are kept for `DOUBT_SECONDS`. A killed broker may also redeliver messages whose
acks it had confirmed; so the identities of the last rows are remembered.

*Concurrency.* One thread adds, another one plans and trims; `changed` is notified of both. *Failure.* The process may
end between any two writes: `open` continues from each state on disk.
"""

from __future__ import annotations

import json
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from threading import Condition, Lock
from typing import Any, Final, cast

import pyarrow

from broker.errors import ConfigurationError, OffsetOutOfRange
from broker_spark.common.files import Files
from broker_spark.common.json_state import parse_object
from broker_spark.spool import segments
from broker_spark.spool.columns import place_of
from broker_spark.spool.lease import OWNERS, Lease
from broker_spark.spool.segments import IDENTITY, Segment

__all__ = ["Spool", "read_metadata"]

DOUBT_SECONDS: Final = 24 * 3600.0
"""Seconds for which the identity of a message that may be redelivered is kept."""
REMEMBERED_ROWS: Final = 1_000_000
"""Rows whose identities are kept in memory, about 40 bytes each."""
_METADATA: Final = "spool.json"
_VERSION: Final = 1
_ADVICE: Final = (
    "Restore the file from a copy. A new spool would not have the messages that this one still holds: they are acked"
)
_DOUBTS: Final = "doubts"
_ENTRIES: Final = frozenset({_METADATA, _DOUBTS, OWNERS, segments.DIRECTORY})
_IDENTITIES: Final = "identities"


class Spool:
    """Made by `open`.

    :ivar id: unique among all spools.
    :ivar changed: notified when a segment is added or the receiver ends.
    :ivar on_room: called after planning, when the receiver may continue.
    :ivar added: the rows that this owner has written.
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
        self._heartbeat_lock = Lock()
        self._segments = {segment.number: segment for segment in found}
        self._next = following
        self._acked = following
        self._planned = found[0].number if found else following
        self._doubts = doubts
        self._doubt_files = 0
        self._recent = RecentlyAcked()
        self._found = list(found)
        """Segments of earlier owners whose identities are not loaded yet."""
        self._unchecked = list(found)
        """Segments whose columns are not checked yet."""

    @classmethod
    def open(cls, files: Files, place: str, metadata: Mapping[str, Any]) -> Spool:
        """Claim the spool and load its state.

        :param metadata: backend, subscription and topics whose messages the spool holds.
        :raises ConfigurationError: the spool holds other messages, another query owns it, or one of its files is
            incomplete.
        :raises OffsetOutOfRange: a segment is missing or incomplete.
        """
        _check_metadata(files, place, metadata)
        files.protect(_ENTRIES)
        lease = Lease.claim(files, place)
        try:
            name = _check_metadata(files, place, metadata)
            if name is None:
                name = uuid.uuid4().hex
                text = json.dumps({"spool": name, "version": _VERSION, **metadata}).encode()
                files.write(_METADATA, lambda file: file.write(text))
            before = lease.before
            epochs = list(before.epochs or []) if before is not None else []
            acked = before.acked if before is not None else 0
            every = segments.listed(files)
            if before is None and every:
                raise OffsetOutOfRange(
                    f"The spool {place} has segments, but no file in owners/ that names their owner",
                    advice="Restore the file in owners/; if another query was started just now, start again",
                )
            found = [each for each in every if each.token == _token_of(epochs, each.number)]
            _check_whole(found, place, acked)
            following = max(found[-1].number + 1 if found else 0, acked)
            doubtful = [each for each in found if each.number >= acked]
            doubts = _read_doubts(files, place)
            again = [identity for each in doubtful for identity in segments.identities_of(files, each)]
            if again:
                _write_doubts(files, f"{lease.token}-0", again)
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
        """Check that the spool holds messages of these topics, and record their identities.

        :param identities: by topic; None where the broker provides none.
        :raises ConfigurationError: a topic was recreated, or is one of another broker.
        """
        what = read_metadata(self._files, self._place)
        kept: dict[str, str] = what.get(_IDENTITIES, {})
        known = {topic: identity for topic, identity in identities.items() if identity is not None}
        for topic, identity in known.items():
            if kept.get(topic, identity) != identity:
                raise ConfigurationError(
                    f"The spool {self._place} is of another broker, or topic {topic!r} was deleted and recreated "
                    f"({kept[topic]} then, {identity} now)",
                    advice=(
                        "Give this query a spool and a checkpointLocation of its own; or, to continue this spool "
                        f"with the recreated topic, remove {_IDENTITIES!r} from its {_METADATA}"
                    ),
                )
        if known.keys() - kept.keys():
            text = json.dumps({**what, _IDENTITIES: {**kept, **known}}).encode()
            self._files.write(_METADATA, lambda file: file.write(text))

    def check_columns(self, columns: Sequence[str], start: int) -> None:
        """Check that the segments from `start` on have these columns. Earlier ones are read already.

        :raises ConfigurationError: a column is missing.
        """
        while self._unchecked:
            segment = self._unchecked[-1]
            if segment.number >= start:
                _check_columns(self._files, self._place, segment, columns)
            self._unchecked.pop()

    # Reading.

    @property
    def first(self) -> int:
        """The number of the first segment. Hold `changed` if other threads run."""
        return next(iter(self._segments), self._next)

    @property
    def next(self) -> int:
        """The number of the next segment."""
        return self._next

    def ahead(self) -> tuple[int, int]:
        """Rows and bytes that no batch is planned for yet."""
        with self.changed:
            waiting = [self._segments[number] for number in range(self._planned, self._next)]
        return sum(each.rows for each in waiting), sum(each.bytes for each in waiting)

    def between(self, start: int, end: int) -> list[Segment]:
        """The segments of a batch.

        :raises OffsetOutOfRange: one is deleted, or never existed.
        """
        with self.changed:
            found = [self._segments.get(number) for number in range(start, end)]
            first, following = self.first, self._next
        if None in found or start > following:
            missing = start + (found.index(None) if found else 0)
            raise OffsetOutOfRange(
                f"The checkpoint needs segment {missing}, and the spool has {first} to {following - 1}",
                advice=(
                    "Restore checkpoint and spool from the same time, or give the query a new checkpointLocation: it "
                    "starts with the messages that the spool still holds"
                ),
            )
        return cast("list[Segment]", found)

    def plan(self, end: int) -> None:
        """Record how far batches are planned."""
        with self.changed:
            self._planned = max(self._planned, end)
        self.on_room()

    # Adding.

    @property
    def doubtful(self) -> bool:
        """Whether written messages may be redelivered."""
        return bool(self._doubts)

    def known(self, identities: Any, *, late: bool) -> set[str]:
        """Which of these messages are written already.

        :param identities: an array of pyarrow.
        :param late: they may be acked already, so that the remembered rows count too.
        """
        found = self._doubts.intersection(identities.to_pylist()) if self._doubts else set[str]()
        if late:
            self.load_earlier_rows()
            found |= self._recent.known(identities)
        return found

    def load_earlier_rows(self) -> dict[str, int]:
        """Remember the rows of earlier owners; the highest offset of each topic among them.

        Empty from the second call on, and for identities without offsets.
        """
        highest: dict[str, int] = {}
        found, self._found = self._found, []
        for segment in found:
            # A segment that is deleted meanwhile was committed.
            with suppress(FileNotFoundError):
                names = segments.identities_of(self._files, segment)
                self._recent.add(pyarrow.array(names, pyarrow.string()))
                for topic, place in filter(None, map(place_of, names)):
                    highest[topic] = max(place, highest.get(topic, place))
        return highest

    def add(self, table: pyarrow.Table, batch_rows: int) -> int:
        """Write a segment and return its number. Then it is durable and may be acked.

        :raises ConfigurationError: another query took over the spool: nothing may be acked.
        """
        size: Any = table
        segment = Segment(self._next, self._lease.token, size.num_rows, size.nbytes)
        try:
            segments.write(self._files, segment, table, batch_rows)
        except FileNotFoundError:
            # A new owner deletes incomplete files.
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

    def record_acks(self, number: int | None, unsure: Sequence[str]) -> None:
        """Record that everything up to this segment is acked, except `unsure`.

        :param number: None if all messages were duplicates and nothing was written.
        :param unsure: identities of messages that may be redelivered.
        """
        if unsure:
            self._doubt_files += 1
            _write_doubts(self._files, f"{self._lease.token}-{self._doubt_files}", unsure)
            self._doubts.update(unsure)
        if number is not None:
            self._acked = number + 1

    def forget_doubts(self, identities: Iterable[str]) -> None:
        """Forget redelivered messages that are acked now."""
        self._doubts.difference_update(identities)

    # Keeping.

    def beat(self) -> None:
        """Write a heartbeat with the last acked segment.

        :raises ConfigurationError: another query took over the spool.
        """
        with self._heartbeat_lock:
            with self.changed:
                first = self.first
            self._lease.beat(acked=self._acked, epochs=_since(self._lease.epochs, first))
        self._lease.check()

    def trim(self, end: int) -> None:
        """Delete the segments below `end`, which Spark has committed, except those not acked yet."""
        end = min(end, self._acked)
        with self.changed:
            gone = [number for number in self._segments if number < end]
        if not gone:
            return
        self._lease.check()
        if self._lease.acked < end:
            # Otherwise their identities would be lost although they may be redelivered.
            self.beat()
        with self.changed:
            for number in gone:
                del self._segments[number]
        for each in segments.listed(self._files):
            if each.number < end:
                self._files.delete(each.name)

    def release(self) -> None:
        """Let the next owner claim the spool at once; see `Lease.release`."""
        with self._heartbeat_lock:
            self._lease.release(acked=self._acked)


def _check_metadata(files: Files, place: str, metadata: Mapping[str, Any]) -> str | None:
    """The id of the spool; None if it is new.

    :param metadata: the metadata that the spool must have.
    :raises ConfigurationError: it differs, is of another version, or incomplete.
    """
    try:
        found = read_metadata(files, place)
    except FileNotFoundError:
        return None
    if found.get("version") != _VERSION:
        raise ConfigurationError(
            f"The spool {place} was written by another version of broker_spark: {found.get('version')!r}",
            advice="Give this query a spool of its own",
        )
    for name, value in metadata.items():
        if found.get(name) != value:
            raise ConfigurationError(
                f"The spool {place} is for {name} {_shown(found.get(name))}, and this query is for {_shown(value)}",
                advice="Give this query a spool of its own",
            )
    return str(found["spool"])


def read_metadata(files: Files, place: str) -> dict[str, Any]:
    """The metadata of a spool.

    :raises FileNotFoundError: there is no spool.
    :raises ConfigurationError: the file is incomplete.
    """
    found = parse_object(files.read(_METADATA), f"{_METADATA} of the spool {place}", _ADVICE)
    if found.get("version") == _VERSION and not isinstance(found.get("spool"), str):
        raise ConfigurationError(f"{_METADATA} of the spool {place} is incomplete: it has no 'spool'", advice=_ADVICE)
    return found


def _shown(value: Any) -> str:
    return ", ".join(cast("list[str]", value)) if isinstance(value, list) else "none" if value is None else str(value)


def _nothing() -> None:
    pass


def _token_of(epochs: Sequence[Sequence[Any]], number: int) -> str | None:
    """The owner at the time of this segment."""
    place = bisect_right(epochs, number, key=lambda each: each[0])
    return str(epochs[place - 1][1]) if place else None


def _since(epochs: list[list[Any]], number: int) -> list[list[Any]]:
    """The epochs without the owners of deleted segments."""
    return epochs[max(0, bisect_right(epochs, number, key=lambda each: each[0]) - 1) :]


def _check_whole(found: Sequence[Segment], place: str, acked: int) -> None:
    for before, after in pairwise(found):
        if after.number != before.number + 1:
            raise OffsetOutOfRange(
                f"The spool {place} has no segment {before.number + 1}, but later ones",
                advice="Restore the file: its messages are acked, and exist nowhere else",
            )
    if found and found[-1].number + 1 < acked:
        raise OffsetOutOfRange(
            f"The spool {place} ends with segment {found[-1].number}, but segment {acked - 1} was written",
            advice="Restore the files: their messages are acked, and exist nowhere else",
        )


def _check_columns(files: Files, place: str, segment: Segment, columns: Sequence[str]) -> None:
    has = segments.columns_of(files, segment)
    missing = [name for name in columns if name not in has]
    if missing:
        raise ConfigurationError(
            f"The messages in the spool {place} have no column {missing[0]!r}, only {', '.join(has)}",
            advice="Run the query with these columns until the spool is read, or remove the new column",
        )


def _write_doubts(files: Files, name: str, identities: Sequence[str]) -> None:
    made: Any = cast("Any", pyarrow).table({IDENTITY: pyarrow.array(identities, pyarrow.string())})

    def fill(file: Any) -> None:
        with cast("Any", pyarrow).ipc.new_file(file, made.schema) as writer:
            writer.write_table(made)

    files.write(f"{_DOUBTS}/{name}.arrow", fill)


def _read_doubts(files: Files, place: str) -> set[str]:
    found: set[str] = set()
    for name in files.names(_DOUBTS):
        path = f"{_DOUBTS}/{name}"
        if files.age(path) > DOUBT_SECONDS:
            files.delete(path)
            continue
        try:
            with files.open(path) as file:
                found.update(cast("Any", pyarrow).ipc.open_file(file).read_all().column(IDENTITY).to_pylist())
        except pyarrow.ArrowInvalid as error:
            raise ConfigurationError(
                f"{path} of the spool {place} is incomplete: {error}",
                native=error,
                advice="Restore it from a copy; or delete it: then its messages are duplicated if redelivered",
            ) from error
    return found


class RecentlyAcked:
    """The identities of the last `REMEMBERED_ROWS` rows, at least of the last segment. One thread at a time."""

    def __init__(self) -> None:
        self._chunks: deque[Any] = deque()
        self._rows = 0

    def add(self, identities: Any) -> None:
        """Remember the identities of a segment, an array of pyarrow."""
        self._chunks.append(identities)
        self._rows += len(identities)
        while self._rows > REMEMBERED_ROWS and len(self._chunks) > 1:
            self._rows -= len(self._chunks.popleft())

    def known(self, identities: Any) -> set[str]:
        """Which of these are remembered. Takes some milliseconds per segment, so call it for suspects only."""
        from pyarrow import compute

        arrow: Any = compute
        found: set[str] = set()
        for chunk in self._chunks:
            there = arrow.is_in(identities, value_set=chunk)
            if arrow.any(there).as_py():
                found.update(arrow.filter(identities, there).to_pylist())
        return found
