"""Messages as Kafka records, and records as messages. Pure functions and one view, safe from any thread.

Attributes are headers as they are. Two things ride in headers of our own: `anybroker-id`, the id that a publisher gave,
and `anybroker-time`, the producer's clock in microseconds since 1970 where the record's timestamp cannot tell it. A
plain message has neither. A third tells when a message with `deliver_at` is due: see `scheduling`. Headers are read
only when somebody asks. Of several headers of one name the last is shown, as Kafka's own `lastHeader` does; they and
those that are no text stay in `native`, and are forwarded with it. Of names that are no text: see `record_headers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, cast
from urllib.parse import quote, unquote

from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME
from confluent_kafka import Message as NativeRecord

from broker.envelopes import NO_ATTRIBUTES, RESERVED_PREFIX, Place
from broker.outbound import OutboundMessage
from broker_kafka.record_headers import Headers, headers_of, headers_of_each
from broker_kafka.scheduling import DUE, encode_due

__all__ = ["RECORD_VIEW", "NativeRecord", "RecordView", "encode_headers", "encode_time", "record_id"]

_ID: Final = "anybroker-id"
_TIME: Final = "anybroker-time"
_ATTRIBUTES: Final = "anybroker-attributes"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
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
