"""When a message may be handed over (`deliver_at`), as a header of its record. Pure.

The log takes the record at once. Consumers of `queue=markers` leave it to their tracker until it is due; whoever else
reads the topic sees it as any other.

The headers of records as the client tells them, and of those that it cannot read none.

A header's name is bytes in Kafka and text in confluent-kafka. Where it is not UTF-8 the client fails at the first look
and leaves a list behind that ends the process once it is used. So that nobody meets it, such a record is given no
headers, which also is what `native.headers()` tells from then on, and that is logged, once for each topic. Everything
here that wants headers of records asks these functions. *Concurrency.* From any thread; of one record from one at a
time, before it was asked for first.


Messages as Kafka records, and records as messages. Pure functions and one view, safe from any thread.

Attributes are headers as they are. Two things ride in headers of our own: `anybroker-id`, the id that a publisher gave,
and `anybroker-time`, the producer's clock in microseconds since 1970 where the record's timestamp cannot tell it. A
plain message has neither. A third tells when a message with `deliver_at` is due: see `scheduling`. Headers are read
only when somebody asks. Of several headers of one name the last is shown, as Kafka's own `lastHeader` does; they and
those that are no text stay in `native`, and are forwarded with it. Of names that are no text: see `record_headers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import methodcaller
from types import MappingProxyType
from typing import Any, Final, cast
from urllib.parse import quote, unquote

from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME
from confluent_kafka import Message as NativeRecord

from broker import InvalidMessage, OutboundMessage
from broker.driver import NO_ATTRIBUTES, RESERVED_PREFIX, Place, logger

__all__ = [
    "DUE",
    "LONGEST_DELAY",
    "RECORD_VIEW",
    "Headers",
    "NativeRecord",
    "RecordView",
    "due_of",
    "encode_due",
    "encode_headers",
    "encode_time",
    "headers_of",
    "headers_of_each",
    "record_id",
]


DUE: Final = "anybroker-deliver-at"
"""Milliseconds since 1970, in decimal."""
LONGEST_DELAY: Final = 30 * 86_400.0
"""Seconds. Trackers repeat what waits, so that the marker topic's retention does not bound it."""
_LONGEST: Final = timedelta(seconds=LONGEST_DELAY)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


def encode_due(moment: datetime, now: datetime) -> bytes:
    """The header's value, never earlier than the moment.

    :raises InvalidMessage: that is too far ahead.
    """
    if moment - now > _LONGEST:
        raise InvalidMessage(
            f"deliver_at is {moment.isoformat()}, and a queue on Kafka keeps a message for {_LONGEST.days} days",
            advice="Publish it later, or keep its time elsewhere until then",
        )
    return b"%d" % max(0, -((_EPOCH - moment) // _MILLISECOND))


def due_of(headers: tuple[tuple[str, bytes | None], ...]) -> int:
    """When a record's message is due, in milliseconds since 1970; 0 if it does not tell."""
    for name, value in headers:
        if name == DUE and value is not None and value.isdigit() and len(value) < 15:
            return int(value)
    return 0


Headers = Sequence[tuple[str, bytes | None]]

# A call that the interpreter has specialised does not look for the exception that the client leaves; one from C does.
_ask: Final = cast("Callable[[Any], Headers | None]", methodcaller("headers"))
_headers: Final = cast("Callable[[Any], Headers | None]", NativeRecord.headers)
_told: Final[set[str]] = set()
_MOST_TOLD: Final = 1000


def headers_of(raw: Any) -> Headers | None:
    """Those of one record; None if it has none."""
    try:
        return _ask(raw)
    except SystemError as error:
        return _unreadable(raw, error)


def headers_of_each(raws: Sequence[Any]) -> list[Headers | None]:
    """Those of many records."""
    found: list[Headers | None] = []
    rest = iter(raws)
    while True:
        try:
            found.extend(map(_headers, rest))
            return found
        except SystemError as error:
            # It is behind those that were found, and must not be asked a second time.
            found.append(_unreadable(raws[len(found)], error))


def _unreadable(raw: Any, error: SystemError) -> Headers:
    if not isinstance(error.__cause__, UnicodeDecodeError):
        raise error
    raw.set_headers([])
    topic = raw.topic()
    if topic not in _told and len(_told) < _MOST_TOLD:
        _told.add(topic)
        logger.warning(
            "A header of record %s[%d]@%d has a name that is not UTF-8. The client cannot read its headers, and it is "
            "handed over without any, as all such records are",
            topic,
            raw.partition(),
            raw.offset(),
        )
    return ()


_ID: Final = "anybroker-id"
_TIME: Final = "anybroker-time"
_ATTRIBUTES: Final = "anybroker-attributes"
_MICROSECOND: Final = timedelta(microseconds=1)
_FIRST: Final = _EPOCH + timedelta(milliseconds=1)
"""The earliest time that a timestamp can tell: brokers take none below 0, and to the client 0 means now."""
_LATEST: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(milliseconds=1)
_MOST_PLAIN: Final = 1000
_EXACT_AS_FLOAT: Final = 2**32 * 1000
"""Milliseconds up to which seconds as a float are right to the microsecond: until 2106."""

_timestamp: Final = cast("Callable[[Any], tuple[int, int]]", NativeRecord.timestamp)


def encode_headers(message: OutboundMessage) -> list[tuple[str, bytes | None]]:
    """The headers of a message; empty for a plain one.

    :raises InvalidMessage: it is to be delivered too far ahead.
    """
    headers: list[tuple[str, bytes | None]] = []
    native = message.native
    if type(native) is NativeRecord:
        headers += _unshown(native, message.attributes)
    if message.attributes is not NO_ATTRIBUTES:
        hostile: list[str] = []
        for name, value in message.attributes.items():
            if "\0" in name:
                # librdkafka ends a header's name there.
                hostile.append(f"{quote(name, safe='')}={quote(value, safe='')}")
            else:
                headers.append((name, value.encode()))
        if hostile:
            headers.append((_ATTRIBUTES, "&".join(hostile).encode()))
    if message.id is not None:
        headers.append((_ID, message.id.encode()))
    time = message.publish_time
    if time is not None and (native is not None or time.microsecond % 1000 or time < _FIRST):
        headers.append((_TIME, b"%d" % ((time - _EPOCH) // _MICROSECOND)))
    if message.deliver_at is not None:
        headers.append((DUE, encode_due(message.deliver_at, datetime.now(UTC))))
    return headers


def encode_time(message: OutboundMessage) -> int:
    """The record's timestamp in milliseconds since 1970; 0 has the client take its clock.

    A forwarded message is new in this log, and its age must not make retention remove it: it gets the time of now, and
    its producer's time rides in a header.
    """
    time = message.publish_time
    if time is None or message.native is not None:
        return 0
    # An earlier time rides in a header, and the log's is as near to it as can be.
    return max(1, (time - _EPOCH) // _MICROSECOND // 1000)


def record_id(topic: str, partition: int, offset: int) -> str:
    """The id of a record whose publisher gave none."""
    return f"{topic}:{partition}:{offset}"


class RecordView:
    """How a record that confluent-kafka delivered is shown."""

    __slots__ = ("_last_time", "_plain")

    def __init__(self) -> None:
        self._plain: set[str] = set()
        """Names of headers that are known to be attributes: few, and the same in most records."""
        # Neighbours often have the same timestamp. One object, so that every thread sees a pair that belongs together.
        self._last_time = (0, _EPOCH)

    def id(self, raw: Any, /) -> str:
        for name, value in headers_of(raw) or ():
            if name == _ID and value is not None:
                return value.decode("utf-8", "replace")
        return record_id(raw.topic(), raw.partition(), raw.offset())

    def key(self, raw: Any, /) -> bytes | None:
        return raw.key()

    def attributes(self, raw: Any, /) -> Mapping[str, str]:
        headers = headers_of(raw)
        return NO_ATTRIBUTES if headers is None else self._attributes(headers)

    def attributes_of(self, raws: Sequence[Any], /) -> list[Mapping[str, str]]:
        """Those of many."""
        read = self._attributes
        return [NO_ATTRIBUTES if headers is None else read(headers) for headers in headers_of_each(raws)]

    def _attributes(self, headers: Headers) -> Mapping[str, str]:
        plain = self._plain
        shown: dict[str, str] = {}
        for name, value in headers:
            if value is None or (name not in plain and not self._is_plain(name)):
                if name == _ATTRIBUTES and value is not None:
                    _read_hostile(value, shown)
                continue
            try:
                shown[name] = value.decode()
            except UnicodeDecodeError:
                continue
        return MappingProxyType(shown) if shown else NO_ATTRIBUTES

    def publish_time(self, raw: Any, /) -> datetime | None:
        headers = headers_of(raw)
        if headers is not None and (told := _told_time(headers)) is not None:
            return told
        kind, milliseconds = raw.timestamp()
        return self._time(milliseconds) if kind == TIMESTAMP_CREATE_TIME else None

    def publish_times_of(self, raws: Sequence[Any], /) -> list[datetime | None]:
        """Those of many."""
        known, last = self._last_time
        found: list[datetime | None] = []
        for headers, (kind, milliseconds) in zip(headers_of_each(raws), map(_timestamp, raws), strict=True):
            if headers is not None and (told := _told_time(headers)) is not None:
                time = told
            elif kind != TIMESTAMP_CREATE_TIME:
                time = None
            elif milliseconds == known:
                time = last
            else:
                known, last = milliseconds, self._time(milliseconds)
                time = last
            found.append(time)
        return found

    def broker_time(self, raw: Any, /) -> datetime | None:
        """Only topics with `message.timestamp.type=LogAppendTime` have it."""
        kind, milliseconds = raw.timestamp()
        return self._time(milliseconds) if kind == TIMESTAMP_LOG_APPEND_TIME else None

    def publish_times(self, raws: Sequence[Any], /) -> list[int | None]:
        """Those of many, in microseconds since 1970, for columns."""
        found = _timestamps(raws, TIMESTAMP_CREATE_TIME)
        for index, headers in enumerate(headers_of_each(raws)):
            if headers is not None and (told := _told_time(headers)) is not None:
                found[index] = (told - _EPOCH) // _MICROSECOND
        return found

    def broker_times(self, raws: Sequence[Any], /) -> list[int | None]:
        """Those of many, in microseconds since 1970, for columns."""
        return _timestamps(raws, TIMESTAMP_LOG_APPEND_TIME)

    def delivery_attempt(self, raw: Any, /) -> int | None:
        return None

    def place(self, raw: Any, /) -> Place | None:
        return Place(raw.partition(), raw.offset())

    def native(self, raw: Any, /) -> Any:
        return raw

    def _is_plain(self, name: str) -> bool:
        """Whether a header of this name is an attribute."""
        if not name or name.startswith(RESERVED_PREFIX):
            return False
        if len(self._plain) >= _MOST_PLAIN:
            self._plain.clear()
        self._plain.add(name)
        return True

    def _time(self, milliseconds: int) -> datetime | None:
        known, time = self._last_time
        if milliseconds == known:
            return time
        if 0 <= milliseconds < _EXACT_AS_FLOAT:
            time = datetime.fromtimestamp(milliseconds / 1000, UTC)
        else:
            try:
                time = _EPOCH + timedelta(milliseconds=milliseconds)
            except OverflowError:
                return None
        self._last_time = (milliseconds, time)
        return time


RECORD_VIEW: Final = RecordView()
"""The one view of all records."""


def _told_time(headers: Headers) -> datetime | None:
    """What a header of ours says, if there is one that can be read."""
    for name, value in headers:
        if name == _TIME and value is not None:
            if b"_" in value:
                # A number to Python's `int` alone.
                return None
            try:
                return _EPOCH + timedelta(microseconds=int(value))
            except (ValueError, OverflowError):
                return None
    return None


def _timestamps(raws: Sequence[NativeRecord], wanted: int) -> list[int | None]:
    return [
        milliseconds * 1000 if kind == wanted and milliseconds <= _LATEST else None
        for kind, milliseconds in map(_timestamp, raws)
    ]


def _read_hostile(value: bytes, shown: dict[str, str]) -> None:
    for item in value.decode("utf-8", "replace").split("&"):
        name, equals, text = item.partition("=")
        # A foreign producer may write anything there, and an attribute without a name cannot be forwarded.
        if equals and name:
            shown[unquote(name)] = unquote(text)


def _unshown(native: NativeRecord, kept: Mapping[str, str]) -> Headers:
    """Headers of a foreign producer that attributes cannot show, for a message that is being forwarded.

    A name that the forwarder removed takes its earlier values along.
    """
    headers = headers_of(native) or ()
    shown: dict[str, int] = {
        name: index for index, (name, value) in enumerate(headers) if name and _text(value) is not None
    }
    return [
        (name, value)
        for index, (name, value) in enumerate(headers)
        if not name.startswith(RESERVED_PREFIX) and shown.get(name) != index and (name not in shown or name in kept)
    ]


def _text(value: bytes | None) -> str | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None
