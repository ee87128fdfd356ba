"""Messages as Kafka records, and records as messages: headers, ids and times. Pure; safe from any thread.

Attributes are headers. Four headers are our own; a plain message has none of them:

| header | value |
| --- | --- |
| `anybroker-id` | the id that the publisher gave |
| `anybroker-time` | the producer's clock in microseconds since 1970, if the record's timestamp cannot hold it |
| `anybroker-attributes` | attributes with a NUL in the name, percent-encoded: librdkafka ends a header name there |
| `anybroker-deliver-at` | when the message is due; consumers of `queue=markers` deliver it then, others at once |

Headers are decoded on access. Of several headers with one name the last is the attribute, as with Kafka's `lastHeader`;
the others, and values that are not UTF-8, stay in `native` and are forwarded with it.

A header name that is not UTF-8 makes confluent-kafka fail at the first access and leave a list behind that crashes the
process at the next. `headers_of` and `headers_of_each` remove the headers of such a record and log it once for each
topic. Read headers only through them. *Concurrency.* Different records from any thread; the first access to the headers
of one record from one thread.
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
from broker.driver import NO_ATTRIBUTES, RESERVED_PREFIX, RESERVED_PREFIXES, Place, logger, shown_attributes

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
"""Seconds. Trackers rewrite waiting markers, so that the retention of the marker topic does not matter."""
_LONGEST: Final = timedelta(seconds=LONGEST_DELAY)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


def encode_due(moment: datetime, now: datetime) -> bytes:
    """The header's value, rounded up.

    :raises InvalidMessage: the moment is too far ahead.
    """
    if moment - now > _LONGEST:
        raise InvalidMessage(
            f"deliver_at is {moment.isoformat()}, and a queue on Kafka keeps messages for {_LONGEST.days} days",
            advice="Publish the message later",
        )
    return b"%d" % max(0, -((_EPOCH - moment) // _MILLISECOND))


def due_of(headers: tuple[tuple[str, bytes | None], ...]) -> int:
    """When a message is due, in milliseconds since 1970; 0 without the header."""
    for name, value in headers:
        if name == DUE and value is not None and value.isdigit() and len(value) < 15:
            return int(value)
    return 0


Headers = Sequence[tuple[str, bytes | None]]

# The interpreter's specialised method call ignores the exception that the client leaves; `methodcaller` does not.
_get_headers: Final = cast("Callable[[Any], Headers | None]", methodcaller("headers"))
_headers: Final = cast("Callable[[Any], Headers | None]", NativeRecord.headers)
_logged_topics: Final[set[str]] = set()
_MOST_LOGGED_TOPICS: Final = 1000


def headers_of(raw: Any) -> Headers | None:
    """The headers of a record; None if it has none."""
    try:
        return _get_headers(raw)
    except SystemError as error:
        return _unreadable(raw, error)


def headers_of_each(raws: Sequence[Any]) -> list[Headers | None]:
    """The headers of many records."""
    found: list[Headers | None] = []
    rest = iter(raws)
    while True:
        try:
            found.extend(map(_headers, rest))
            return found
        except SystemError as error:
            # The failed record is the next one; reading its headers again would crash.
            found.append(_unreadable(raws[len(found)], error))


def _unreadable(raw: Any, error: SystemError) -> Headers:
    if not isinstance(error.__cause__, UnicodeDecodeError):
        raise error
    raw.set_headers([])
    topic = raw.topic()
    if topic not in _logged_topics and len(_logged_topics) < _MOST_LOGGED_TOPICS:
        _logged_topics.add(topic)
        logger.warning(
            "Record %s[%d]@%d has a header name that is not UTF-8. confluent-kafka cannot read its headers; the record "
            "is delivered without headers, and so are all such records of the topic",
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
"""The earliest timestamp of a record: brokers take none below 0, and 0 makes the client use its clock."""
_LATEST: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MILLISECOND
_MOST_KNOWN_NAMES: Final = 1000
_LONGEST_KNOWN_NAME: Final = 200
_EXACT_AS_FLOAT: Final = 2**32 * 1000
"""Milliseconds below which seconds as a float are exact to the microsecond: until 2106."""

_timestamp: Final = cast("Callable[[Any], tuple[int, int]]", NativeRecord.timestamp)


def encode_headers(message: OutboundMessage) -> list[tuple[str, bytes | None]]:
    """The headers of a message; empty for a plain one.

    :raises InvalidMessage: `deliver_at` is too far ahead.
    """
    headers: list[tuple[str, bytes | None]] = []
    native = message.native
    if type(native) is NativeRecord:
        headers += _hidden_headers(native, message.attributes)
    if message.attributes is not NO_ATTRIBUTES:
        escaped: list[str] = []
        for name, value in message.attributes.items():
            if "\0" in name:
                # librdkafka ends a header name at NUL.
                escaped.append(f"{quote(name, safe='')}={quote(value, safe='')}")
            else:
                headers.append((name, value.encode()))
        if escaped:
            headers.append((_ATTRIBUTES, "&".join(escaped).encode()))
    if message.id is not None:
        headers.append((_ID, message.id.encode()))
    time = message.publish_time
    if time is not None and (native is not None or time.microsecond % 1000 or time < _FIRST):
        headers.append((_TIME, b"%d" % ((time - _EPOCH) // _MICROSECOND)))
    if message.deliver_at is not None:
        headers.append((DUE, encode_due(message.deliver_at, datetime.now(UTC))))
    return headers


def encode_time(message: OutboundMessage) -> int:
    """The record's timestamp in milliseconds since 1970; 0 makes the client use its clock.

    A forwarded message gets the current time, so that retention does not remove it for its age; its producer's time is
    in a header.
    """
    time = message.publish_time
    if time is None or message.native is not None:
        return 0
    # An earlier time is in a header, too.
    return max(1, (time - _EPOCH) // _MICROSECOND // 1000)


def record_id(topic: str, partition: int, offset: int) -> str:
    """The id of a record without an id of its publisher."""
    return f"{topic}:{partition}:{offset}"


class RecordView:
    """The view of confluent-kafka's records. Use `RECORD_VIEW`."""

    __slots__ = ("_attribute_names", "_last_time")

    def __init__(self) -> None:
        self._attribute_names: set[str] = set()
        """Header names that are known to be attributes: few, and the same in most records."""
        # Neighbours often share a timestamp. One tuple, so that every thread sees a consistent pair.
        self._last_time = (0, _EPOCH)

    def id(self, raw: Any, /) -> str:
        found = self.given_id(raw)
        return record_id(raw.topic(), raw.partition(), raw.offset()) if found is None else found

    def given_id(self, raw: Any, /) -> str | None:
        for name, value in headers_of(raw) or ():
            if name == _ID and value is not None:
                return value.decode("utf-8", "replace")
        return None

    def key(self, raw: Any, /) -> bytes | None:
        return raw.key()

    def attributes(self, raw: Any, /) -> Mapping[str, str]:
        headers = headers_of(raw)
        return NO_ATTRIBUTES if headers is None else self._attributes(headers)

    def attributes_of(self, raws: Sequence[Any], /) -> list[Mapping[str, str]]:
        read = self._attributes
        return [NO_ATTRIBUTES if headers is None else read(headers) for headers in headers_of_each(raws)]

    def _attributes(self, headers: Headers) -> Mapping[str, str]:
        known = self._attribute_names
        shown: dict[str, str] = {}
        suspect = False
        for name, value in headers:
            if value is None:
                continue
            if name not in known and not self._is_attribute(name):
                if name == _ATTRIBUTES:
                    suspect = True
                    _read_escaped(value, shown)
                    continue
                if name.startswith(RESERVED_PREFIX):
                    continue
                suspect = True
            try:
                shown[name] = value.decode()
            except UnicodeDecodeError:
                continue
        if suspect:
            return shown_attributes(shown)
        return MappingProxyType(shown) if shown else NO_ATTRIBUTES

    def publish_time(self, raw: Any, /) -> datetime | None:
        headers = headers_of(raw)
        if headers is not None and (time := _header_time(headers)) is not None:
            return time
        kind, milliseconds = raw.timestamp()
        return self._time(milliseconds) if kind == TIMESTAMP_CREATE_TIME else None

    def publish_times_of(self, raws: Sequence[Any], /) -> list[datetime | None]:
        known, last = self._last_time
        found: list[datetime | None] = []
        for headers, (kind, milliseconds) in zip(headers_of_each(raws), map(_timestamp, raws), strict=True):
            if headers is not None and (own := _header_time(headers)) is not None:
                time = own
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
        """None unless the topic has `message.timestamp.type=LogAppendTime`."""
        kind, milliseconds = raw.timestamp()
        return self._time(milliseconds) if kind == TIMESTAMP_LOG_APPEND_TIME else None

    def publish_times(self, raws: Sequence[Any], /) -> list[int | None]:
        """In microseconds since 1970, for columns."""
        return _publish_times(raws, _MICROSECOND)

    def publish_times_ms(self, raws: Sequence[Any], /) -> list[int | None]:
        """In milliseconds since 1970, for columns."""
        return _publish_times(raws, _MILLISECOND)

    def broker_times(self, raws: Sequence[Any], /) -> list[int | None]:
        """In microseconds since 1970, for columns."""
        return _timestamps(raws, TIMESTAMP_LOG_APPEND_TIME, _MICROSECOND)

    def broker_times_ms(self, raws: Sequence[Any], /) -> list[int | None]:
        """In milliseconds since 1970, for columns."""
        return _timestamps(raws, TIMESTAMP_LOG_APPEND_TIME, _MILLISECOND)

    def delivery_attempt(self, raw: Any, /) -> int | None:
        return None

    def place(self, raw: Any, /) -> Place | None:
        return Place(raw.partition(), raw.offset())

    def native(self, raw: Any, /) -> Any:
        return raw

    def _is_attribute(self, name: str) -> bool:
        """Whether a header of this name is an attribute; those of letters need a closer look."""
        if not name or name.startswith(RESERVED_PREFIXES):
            return False
        if len(self._attribute_names) >= _MOST_KNOWN_NAMES:
            self._attribute_names.clear()
        if len(name) <= _LONGEST_KNOWN_NAME:
            self._attribute_names.add(name)
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


def _header_time(headers: Headers) -> datetime | None:
    """The value of `anybroker-time`, if the header exists and is valid."""
    for name, value in headers:
        if name == _TIME and value is not None:
            if b"_" in value:
                # Only Python's `int` takes underscores.
                return None
            try:
                return _EPOCH + timedelta(microseconds=int(value))
            except (ValueError, OverflowError):
                return None
    return None


def _publish_times(raws: Sequence[NativeRecord], unit: timedelta) -> list[int | None]:
    """In units since 1970."""
    found = _timestamps(raws, TIMESTAMP_CREATE_TIME, unit)
    each = headers_of_each(raws)
    if any(each):
        for index, headers in enumerate(each):
            if headers is not None and (time := _header_time(headers)) is not None:
                found[index] = (time - _EPOCH) // unit
    return found


def _timestamps(raws: Sequence[NativeRecord], wanted: int, unit: timedelta) -> list[int | None]:
    factor = _MILLISECOND // unit
    return [
        milliseconds * factor if kind == wanted and milliseconds <= _LATEST else None
        for kind, milliseconds in map(_timestamp, raws)
    ]


def _read_escaped(value: bytes, shown: dict[str, str]) -> None:
    for item in value.decode("utf-8", "replace").split("&"):
        name, equals, text = item.partition("=")
        if equals:
            shown[unquote(name)] = unquote(text)


def _hidden_headers(native: NativeRecord, kept: Mapping[str, str]) -> Headers:
    """The headers of a forwarded message that are not among its attributes, from a foreign producer.

    Removing an attribute removes every header of that name.
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
