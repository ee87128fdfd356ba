"""`Turn`: one run of a callback for one key. It is the `Scope` through which a `Context` reads and writes. Pure.

A turn collects what its callback does. `commit` makes that part of the next checkpoint; `undo` forgets it, so that a
callback that fails leaves nothing behind. One object serves all turns of a partition, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce
from typing import Any, Final, Protocol

from broker import (
    BrokerError,
    Codec,
    ConfigurationError,
    InvalidMessage,
    Json,
    Limits,
    MessageTooLarge,
    OutboundMessage,
)
from broker_streams import keys
from broker_streams.agenda import PARTS, WALL, Agenda, OpenWindow
from broker_streams.changes import UNREAD, Changes
from broker_streams.checkpoint import Checkpoint
from broker_streams.context import Done, Incoming, Window, used_late
from broker_streams.deferrals import Deferral, Deferrals
from broker_streams.edges import Session, Windowed
from broker_streams.effects import SENDER
from broker_streams.graph import Group
from broker_streams.handles import Clock, Join, Lookup, Output, TimerHandle, WindowHandle
from broker_streams.windows import assigner, is_closed, overlapping

__all__ = ["NEVER", "Reader", "Turn"]

_FARTHEST: Final = 1 << 62
"""The latest time of a timer, in milliseconds; later ones do not fit their rows."""
_YEAR_10000: Final = 253_402_300_800_000
"""No datetime has it."""

NEVER: Final = float("inf")
"""The time of what is not due at all."""


class Reader(Protocol):
    """A copy of another table: the row of a key, by its bytes."""

    def get(self, key: bytes, /) -> bytes | None: ...


class Turn:
    """See the module. The attributes are those of `Scope`.

    :ivar outputs: what was published since the last checkpoint.
    :ivar late: closed windows of the message, for `on_late`.
    :ivar next_due: no timer and no window is due before, in event time.
    :ivar closed: by edge the end of the last window that closed because the partition was idle.
    :ivar fired: the place of what timers and windows published last: event time, and a number within it.
    :ivar firing: the clock of the timers that are called.
    :ivar detached: a callback has deferred its message, and may still have its context.
    :ivar broken: the error of a store or of a copy of a table that could not be read: no policy of an edge applies.
    """

    def __init__(
        self,
        group: Group,
        partition: int,
        changes: Changes,
        deferrals: Deferrals,
        *,
        joins: Mapping[str, Reader],
        lookups: Mapping[str, Reader],
        attributes: Mapping[str, str],
        limits: Limits,
        now: Callable[[], float],
    ) -> None:
        self._largest = min((each for each in (limits.body, limits.message) if each is not None), default=NEVER)
        """Bytes of a row or an output with its key."""
        self._longest = NEVER if limits.key is None else limits.key
        self._group = group
        self._changes = changes
        self._deferrals = deferrals
        self._joins = joins
        self._lookups = lookups
        self._attributes = dict(attributes)
        self._now = now
        persist = group.persist
        self._write_row = None if persist is None else _writer(persist.codec)
        self._decode_row = None if persist is None else persist.codec.decode
        self._write_loop = None if group.loop is None else _writer(group.loop.codec)
        self._encoders = {output.topic: _encoder(output.codec) for output in group.outputs}
        self._ttl = None if persist is None else persist.ttl_ms
        self._windows = {edge.name: (assigner(edge), edge.grace_ms, _writer(edge.codec)) for edge in group.windows}
        self.partition: int = partition
        self.key: str = ""
        self.message: Incoming | None = None
        self.payload: Any = None
        self.timestamp_ms: int = 0
        self.stream_time: int = 0
        self.turn: int = 0
        self.outputs: list[tuple[str, OutboundMessage]] = []
        self.late: list[Window[Any]] = []
        self.closed: dict[str, int] = {}
        self.next_due: float = -NEVER
        self.fired: tuple[int, int] = (-1, 0)
        self._fired_before = self.fired
        self._wire = b""
        self._prefix = ""
        self._at: int | str = 0
        self._mark = 0
        self._row: bytes | None = UNREAD
        self._row_changed = False
        self._publish_ms = 0
        self._publish_time: datetime | None = None
        self._agenda: Agenda | None = None
        self._dues = Agenda().due()
        self._agenda_changed = False
        self._late_spans: set[tuple[str, int, int]] = set()
        self._closing: tuple[Window[Any], bytes] | None = None
        self._deferred: list[Deferral] = []
        self.firing: Clock | None = None
        self.detached = False
        self.broken: Exception | None = None
        self._open = False

    # One turn

    def begin(
        self, key: bytes, message: Incoming | None, payload: Any, timestamp_ms: int, prefix: str, at: int | str
    ) -> None:
        """Begin a turn.

        :param prefix: with `at` the place of the turn, as it stands in emit ids.
        """
        self._wire = key
        try:
            self.key = key.decode()
        except UnicodeDecodeError:
            self.key = keys.decode(key)
        self.message = message
        self.payload = payload
        self.timestamp_ms = timestamp_ms
        self.turn += 1
        self._open = True
        self._prefix = prefix
        self._at = at
        self._row = UNREAD

    def commit(self) -> None:
        """Make what the callback did part of the next checkpoint.

        :raises Exception: the state could not be read, even if the callback has caught the error.
        """
        if self.broken is not None:
            raise self.broken
        self._open = False
        if self._row_changed:
            self._changes.put(self._wire, self._row)
            self._row_changed = False
        if self._agenda is not None:
            if self._agenda_changed:
                self._commit_agenda(self._agenda)
            self._forget_agenda()
        self._mark = len(self.outputs)
        self._fired_before = self.fired
        if self._deferred:
            self._deferred = []

    def undo(self) -> None:
        """Forget what the callback did."""
        self._open = False
        del self.outputs[self._mark :]
        self.fired = self._fired_before
        self._row_changed = False
        self._forget_agenda()
        if self._deferred:
            self._deferrals.drop(self._deferred)
            self._deferred = []

    def _forget_agenda(self) -> None:
        self._agenda = None
        self._agenda_changed = False
        self._closing = None
        if self._late_spans:
            self.late = []
            self._late_spans = set()

    def _commit_agenda(self, agenda: Agenda) -> None:
        for part, was, due in zip(PARTS, self._dues, agenda.due(), strict=True):
            if was == due:
                continue
            if was is not None:
                self._changes.put_due(part, keys.due_key(part, was, self._wire), None)
            if due is not None:
                self._changes.put_due(part, keys.due_key(part, due, self._wire), b"")
                if part is not WALL and due < self.next_due:
                    self.next_due = due
        self._changes.put(keys.agenda_key(self._wire), agenda.pack())

    # Between turns

    def take(self) -> list[tuple[str, OutboundMessage]]:
        """What was published since the last `take`."""
        taken, self.outputs, self._mark = self.outputs, [], 0
        return taken

    def restart(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint is, without what came since."""
        self.take()
        self.stream_time = checkpoint.stream_time
        self.closed = dict(checkpoint.closed)
        self.fired = self._fired_before = checkpoint.fired
        self.next_due = -NEVER

    def publish(self, topic: str, message: OutboundMessage) -> None:
        """Publish a message that no callback made, between turns."""
        self.outputs.append((topic, message))
        self._mark = len(self.outputs)

    # The place of the turn

    def place(self) -> str:
        return f"{self._prefix}{self._at}"

    def wall_ms(self) -> int:
        return int(self._now() * 1000)

    # Rows

    def get_row(self) -> Any:
        row = self._row
        if row is UNREAD:
            row = self._read_row()
        if row is None:
            return None
        assert self._decode_row is not None
        return self._decode_row(row)

    def set_row(self, value: Any) -> None:
        if self._write_row is None:
            raise self._no_table()
        if not self._open:
            raise used_late(self.key)
        row = self._write_row("The row", self.key, value)
        if len(row) + len(self._wire) > self._largest:
            raise self._too_large("The row", self._wire, row)
        self._row = row
        self._row_changed = True
        if self._ttl is not None:
            self._changing_agenda().expiry = self.stream_time + self._ttl

    def delete_row(self) -> None:
        if not self._open:
            raise used_late(self.key)
        if self._read_row() is None:
            return
        self._row = None
        self._row_changed = True
        if self._ttl is not None:
            self._changing_agenda().expiry = None

    def _read_row(self) -> bytes | None:
        row = self._row
        if row is UNREAD:
            if self._decode_row is None:
                raise self._no_table()
            row = self._row = self._read(self._wire)
        return row

    def _too_large(self, what: str, key: bytes, data: bytes) -> MessageTooLarge:
        return MessageTooLarge(
            f"{what} of {self.key!r} has {len(data)} bytes, and its key {len(key)}; this broker takes {self._largest}",
            advice="Keep less in it, or raise the broker's limit",
        )

    def _no_table(self) -> ConfigurationError:
        return ConfigurationError(
            f"Group {self._group.name!r} has no table", advice="Give the group a Persist(codec), and use that object"
        )

    def joined(self, join: Join[Any]) -> Any:
        return self._joined(join, self._joins, self._wire)

    def looked_up(self, lookup: Lookup[Any], key: str) -> Any:
        return self._joined(lookup, self._lookups, keys.encode(key))

    # Outputs

    def emit(self, output: Output[Any], key: str | None, value: Any, attributes: Mapping[str, str] | None) -> None:
        if self._attributes:
            attributes = {**self._attributes, **attributes} if attributes else self._attributes
        wire = self._wire if key is self.key else None if key is None else keys.encode(key)
        topic, data = output.topic, None
        if value is not None:
            try:
                data = self._encoders[topic](value)
            except BrokerError as error:
                raise _not_written(f"The message for topic {topic!r}", error, "Emit") from error
        self._publish(topic, wire, data, attributes)

    def send_loop(self, key: str, value: Any, attributes: Mapping[str, str] | None) -> None:
        assert self._write_loop is not None
        wire = keys.encode(key)
        keys.check(wire)
        data = None if value is None else self._write_loop("The loop message", key, value)
        sent = {**self._attributes, **(attributes or {})}
        if (message := self.message) is not None:
            sent[SENDER] = f"{message.topic}/{self.partition}/{message.offset}/{len(self.outputs) - self._mark}"
        elif self.firing == "event":
            time, number = self._next_fired()
            sent[SENDER] = f"~/{self.partition}/{time}/{number}"
        self._publish(self._group.loop_topic, wire, data, sent)

    def _publish(self, topic: str, key: bytes | None, data: bytes | None, attributes: Mapping[str, str] | None) -> None:
        if not self._open:
            raise used_late(self.key)
        if data is not None and len(data) + len(key or b"") > self._largest:
            raise self._too_large(f"The message for topic {topic!r}", key or b"", data)
        milliseconds = self.timestamp_ms
        if milliseconds != self._publish_ms:
            self._publish_ms = milliseconds
            in_range = 0 < milliseconds < _YEAR_10000
            self._publish_time = datetime.fromtimestamp(milliseconds / 1000, UTC) if in_range else None
        outputs = self.outputs
        if self.message is None and self.firing == "event":
            # A timer may be due at the same time again.
            self.fired = self._next_fired()
            emit_id = f"{self._prefix}{self._at}/{self.fired[0]}.{self.fired[1]}"
        else:
            emit_id = f"{self._prefix}{self._at}/{len(outputs) - self._mark}"
        outputs.append((topic, OutboundMessage(data, key, attributes, emit_id, None, None, None, self._publish_time)))

    def _next_fired(self) -> tuple[int, int]:
        time, number = self.fired
        return self.stream_time, number + 1 if time == self.stream_time else 0

    def defer(self, timeout: float) -> Done:
        if not self._open:
            raise used_late(self.key)
        self.detached = True
        deferral = self._deferrals.add(self.message, timeout)
        self._deferred.append(deferral)
        return deferral

    # Timers and windows

    def agenda(self) -> Agenda:
        """What is to come for the key, to be read."""
        agenda = self._agenda
        if agenda is None:
            agenda = self._agenda = Agenda.unpack(self._read(keys.agenda_key(self._wire)))
            self._dues = agenda.due()
        return agenda

    def _changing_agenda(self) -> Agenda:
        if not self._open:
            raise used_late(self.key)
        if (length := len(keys.agenda_key(self._wire))) > self._longest:
            raise InvalidMessage(
                f"The key {self.key[:40]!r}… has {len(self._wire)} bytes, and {length} with its timers and windows; "
                f"this broker takes {self._longest}",
                advice="Publish with shorter keys",
            )
        self._agenda_changed = True
        return self.agenda()

    def set_timer(self, timer: TimerHandle, due_ms: int) -> None:
        agenda = self._changing_agenda()
        due = max(-_FARTHEST, min(due_ms, _FARTHEST))
        now = self.stream_time if timer.clock == "event" else self.wall_ms()
        if self.firing == timer.clock:
            # A timer that sets itself to the past would be due again and again, without time passing.
            due = max(due, now + 1)
        elif timer.clock == "wall":
            # Its due time is in the ids of what it publishes, so a timer that was due before is due at another time.
            due = max(due, now)
        (agenda.timers if timer.clock == "event" else agenda.wall_timers)[timer.name] = due

    def cancel_timer(self, timer: TimerHandle) -> None:
        self.remove_timer(timer.name, timer.clock)

    def remove_timer(self, name: str, clock: Clock) -> None:
        """Forget a timer, if it is set."""
        agenda = self.agenda()
        if (agenda.timers if clock == "event" else agenda.wall_timers).pop(name, None) is not None:
            self._agenda_changed = True

    def expire_row(self) -> None:
        """Delete the row, whose time has come, unless rows no longer expire."""
        self._changing_agenda().expiry = None
        if self._ttl is not None and self._read_row() is not None:
            self._row = None
            self._row_changed = True

    def close_window(self, edge: Windowed[Any] | None, name: str, opened: OpenWindow) -> Window[Any] | None:
        """Remove an open window; return it as closed. None if the group no longer has its edge."""
        windows = self._changing_agenda().windows
        windows[name].remove(opened)
        if not windows[name]:
            del windows[name]
        if edge is None:
            return None
        window = Window(self, edge, opened.start, opened.end, closed=True)
        self._closing = window, opened.data
        return window

    def windows(self, edge: WindowHandle[Any]) -> list[Window[Any]]:
        assign, grace, _ = self._windows[edge.name]
        closed_until, stream_time = self.closed.get(edge.name), self.stream_time
        found: list[Window[Any]] = []
        for start, end in assign(self.timestamp_ms, self._opened(edge)):
            if not is_closed(end, grace, stream_time, closed_until):
                found.append(Window(self, edge, start, end))
            elif (span := (edge.name, start, end)) not in self._late_spans:
                self._late_spans.add(span)
                self.late.append(Window(self, edge, start, end, closed=True))
        return found

    def get_window(self, window: Window[Any]) -> Any:
        decode = window.edge.codec.decode
        if window.closed:
            return decode(self._closing[1]) if self._closing and self._closing[0] is window else None
        values = [decode(each.data) for each in self._of(window)]
        if len(values) < 2:
            return values[0] if values else None
        assert isinstance(window.edge, Session)
        return reduce(window.edge.merge, values)

    def set_window(self, window: Window[Any], value: Any) -> None:
        edge = window.edge
        _, grace, write = self._windows[edge.name]
        data = write(window, self.key, value)
        start, end = window.start_ms, window.end_ms
        due = end + grace
        windows = self._changing_agenda().windows
        replaced = self._of(window)
        opened = [each for each in windows.get(edge.name, ()) if each not in replaced]
        opened.append(OpenWindow(start, end, due, data))
        if len(opened) > 1:
            opened.sort(key=_start)
        windows[edge.name] = opened

    def _opened(self, edge: WindowHandle[Any]) -> Sequence[OpenWindow]:
        return (self._agenda or self.agenda()).windows.get(edge.name, ())

    def _of(self, window: Window[Any]) -> Sequence[OpenWindow]:
        """What is open of a window: for a session every session that it joins."""
        start, end = window.start_ms, window.end_ms
        if isinstance(window.edge, Session):
            return overlapping(self._opened(window.edge), start, end)
        return [each for each in self._opened(window.edge) if each.start == start and each.end == end]

    def _read(self, key: bytes) -> bytes | None:
        try:
            return self._changes.get(key)
        except Exception as error:
            self.broken = error
            raise

    def _joined(self, edge: Join[Any] | Lookup[Any], readers: Mapping[str, Reader], key: bytes) -> Any:
        try:
            data = readers[edge.topic].get(key)
        except Exception as error:
            self.broken = error
            raise
        return None if data is None else edge.codec.decode(data)


def _start(opened: OpenWindow) -> int:
    return opened.start


def _writer(codec: Codec[Any]) -> Callable[[object, str, Any], bytes]:
    """A function that returns the bytes of a value, given what it is, of which key, and the value.

    It raises InvalidMessage if the codec cannot encode the value, encodes it as a tombstone, or cannot read it back.
    """
    encode, decode = _encoder(codec), codec.decode
    reads_back = type(codec) is Json

    def write(what: object, key: str, value: Any) -> bytes:
        try:
            data = encode(value)
            if data is not None:
                if not reads_back:
                    decode(data)
                return data
        except BrokerError as error:
            raise _not_written(f"{what} of {key!r}", error, "Set") from error
        raise InvalidMessage(f"{what} of {key!r} is encoded as a tombstone", advice="Delete it, or set another value")

    return write


def _encoder(codec: Codec[Any]) -> Callable[[Any], bytes | None]:
    """The codec's `encode`; that of `Json` refuses what `Json` could not read back, at no cost for a valid value."""
    return Json(codec.type, validate=True).encode if type(codec) is Json else codec.encode


def _not_written(what: str, error: BrokerError, verb: str) -> InvalidMessage:
    return InvalidMessage(
        f"{what} cannot be written: {error.message}", native=error, advice=f"{verb} a value of the codec's type"
    )
