"""`OutboundMessage` and `OutboundPayload`: what is published, validated when it is created. Immutable; safe from any
thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, Generic, NoReturn, TypedDict, TypeVar, Unpack

from broker.checks import is_finite
from broker.envelopes import NO_ATTRIBUTES, RESERVED_PREFIXES, UNSET, Envelope, brief, reserved_prefixes
from broker.errors import InvalidMessage

__all__ = ["OutboundMessage", "OutboundPayload", "check_batch", "check_no_fields"]

T_co = TypeVar("T_co", covariant=True)

_SHOWN: Final = 100
"""Maximum length of a value in an error."""


class OutboundFields(TypedDict, total=False):
    """The fields of an `OutboundMessage`, for `replace`."""

    data: bytes | None
    key: bytes | str | None
    attributes: Mapping[str, str] | None
    id: str | None
    deliver_at: datetime | None
    ttl: float | None
    partition: int | None
    publish_time: datetime | None
    native: Any


class OutboundMessage:
    """A message to publish; immutable.

    :param data: the body; None is a tombstone (`capabilities.publish.tombstones`).
    :param key: selects the partition, and orders messages; a str is encoded as UTF-8. None is not the empty key.
    :param attributes: str to str; the same on every backend.
    :param id: `message.id` at the consumer; brokers with deduplication use it.
    :param deliver_at: earliest time of delivery, timezone-aware (`capabilities.publish.deliver_at`).
    :param ttl: seconds after which the broker may drop the message (`capabilities.publish.ttl`).
    :param partition: the partition to append to (`capabilities.publish.partitions`); by default the key decides.
    :param publish_time: the producer's time, timezone-aware; by default the time of publishing.
    :param native: an object of the client library to forward, as `from_message` sets it.
    :ivar plain: the message has only a body and a key, for which backends have a fast path.
    :raises InvalidMessage: a field has the wrong type, is not valid UTF-8, or an attribute name is reserved.
    """

    __slots__ = ("attributes", "data", "deliver_at", "id", "key", "native", "partition", "plain", "publish_time", "ttl")

    def __init__(
        self,
        data: bytes | None,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
        id: str | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        partition: int | None = None,
        publish_time: datetime | None = None,
        native: Any = None,
    ) -> None:
        if data is not None and type(data) is not bytes:
            data = _as_bytes(data)
        self.data: Final[bytes | None] = data
        self.key: Final[bytes | None] = key if key is None or type(key) is bytes else _as_key(key)
        self.attributes: Final[Mapping[str, str]] = (
            NO_ATTRIBUTES if attributes is None else _checked_attributes(attributes)
        )
        if id is not None and not (type(id) is str and id and id.isascii()):
            _check_id(id)
        self.id: Final[str | None] = id
        if deliver_at is not None:
            _check_time("deliver_at", deliver_at, "datetime.now(UTC) + timedelta(...)")
        self.deliver_at: Final[datetime | None] = deliver_at
        if ttl is not None and not (is_finite(ttl) and ttl > 0):
            _wrong("ttl", ttl, "a finite number of seconds above 0, or None")
        self.ttl: Final[float | None] = ttl
        if partition is not None and (type(partition) is not int or partition < 0):
            _wrong("partition", partition, "an int of 0 or more, or None")
        self.partition: Final[int | None] = partition
        if publish_time is not None and (type(publish_time) is not datetime or publish_time.tzinfo is None):
            _check_time("publish_time", publish_time, "datetime.now(UTC)")
        self.publish_time: Final[datetime | None] = publish_time
        self.native: Final[Any] = native
        self.plain: Final[bool] = (
            self.attributes is NO_ATTRIBUTES
            and id is None
            and partition is None
            and publish_time is None
            and native is None
            and deliver_at is None
            and ttl is None
        )

    @classmethod
    def from_message(cls, message: Envelope) -> OutboundMessage:
        """Copy a received message or record for forwarding: body, key, attributes, publish time and `given_id`.

        Also keeps `native`, from which a backend of the same kind forwards what `OutboundMessage` cannot express. An id
        that the SDK or the broker made is not copied, since a broker that deduplicates would drop a copy to the same
        topic; `from_message(message).replace(id=message.id)` copies it, which drops a repetition of the copy.

        :raises InvalidMessage: `message` is neither a message nor a record.
        """
        try:
            data, native = message.data, message.native
        except AttributeError:
            _wrong("message", message, "a received message or record")
        return cls(
            data,
            message.key,
            message.attributes,
            id=_given_id(message),
            publish_time=message.publish_time,
            native=native,
        )

    def replace(self, **changes: Unpack[OutboundFields]) -> OutboundMessage:
        """A copy in which some fields are changed; all others stay, `native` among them.

        :param changes: fields by name, as the constructor takes them; None removes one.
        :raises InvalidMessage: a field is invalid.
        """
        fields: OutboundFields = {
            "data": self.data,
            "key": self.key,
            "attributes": self.attributes,
            "id": self.id,
            "deliver_at": self.deliver_at,
            "ttl": self.ttl,
            "partition": self.partition,
            "publish_time": self.publish_time,
            "native": self.native,
        }
        return OutboundMessage(**(fields | changes))

    def __repr__(self) -> str:
        attributes = dict(self.attributes)
        return f"OutboundMessage(data={brief(self.data)}, key={self.key!r}, attributes={attributes!r}, id={self.id!r})"


class OutboundPayload(Generic[T_co]):
    """A payload with all other fields of a message, for a topic with a codec, which encodes the payload; immutable.

    :param payload: of the codec's type; bytes or None for a topic without a codec.
    :param key: as of `OutboundMessage`, like all other parameters.
    :raises InvalidMessage: a field has the wrong type, is not valid UTF-8, or an attribute name is reserved.
    """

    __slots__ = ("_fields", "payload")

    def __init__(
        self,
        payload: T_co,
        key: bytes | str | None = None,
        attributes: Mapping[str, str] | None = None,
        id: str | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        partition: int | None = None,
        publish_time: datetime | None = None,
    ) -> None:
        self.payload: Final[T_co] = payload
        self._fields: Final = OutboundMessage(None, key, attributes, id, deliver_at, ttl, partition, publish_time)

    def encoded(self, data: bytes | None) -> OutboundMessage:
        """The message with this body.

        :raises InvalidMessage: `data` is not bytes.
        """
        return self._fields.replace(data=data)

    def __repr__(self) -> str:
        fields = self._fields
        return (
            f"OutboundPayload(payload={_shown(self.payload)}, key={fields.key!r}, "
            f"attributes={dict(fields.attributes)!r}, id={fields.id!r})"
        )


def _given_id(message: Envelope) -> str | None:
    """The id for a copy. Only the SDK's own messages and records tell which ids publishers gave."""
    found = getattr(message, "given_id", UNSET)
    return getattr(message, "id", None) or None if found is UNSET else found  # pyright: ignore[reportReturnType]


def _as_key(key: object) -> bytes:
    if isinstance(key, str):
        try:
            return key.encode()
        except UnicodeEncodeError as error:
            _not_text("key", key, error)
    if isinstance(key, (bytes, bytearray, memoryview)):
        return bytes(key)  # pyright: ignore[reportUnknownArgumentType]
    return _wrong("key", key, "bytes, str or None")


def _as_bytes(data: object) -> bytes:
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)  # pyright: ignore[reportUnknownArgumentType]
    return _wrong("data", data, "bytes or None; OutboundPayload takes what the codec of the topic encodes")


def _check_id(id: object) -> None:
    if not isinstance(id, str) or not id:
        _wrong("id", id, "a non-empty str or None")
    try:
        id.encode()
    except UnicodeEncodeError as error:
        _not_text("id", id, error)


def _check_time(field: str, moment: object, example: str) -> None:
    if not isinstance(moment, datetime):
        _wrong(field, moment, f"a timezone-aware datetime such as {example}, or None")
    if moment.tzinfo is None:
        raise InvalidMessage(f"{field} {moment.isoformat()} has no timezone", advice=f"Use {example}")


def _checked_attributes(attributes: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(attributes, (dict, Mapping)):
        _wrong("attributes", attributes, "a mapping of str to str, or None")
    if not attributes:
        return NO_ATTRIBUTES
    copy = dict(attributes)
    for name, value in copy.items():
        if type(name) is not str or type(value) is not str:
            _wrong(f"attributes[{name!r}]", value, "a str under a str name")
        if not name:
            raise InvalidMessage("An attribute has an empty name", advice="Give every attribute a name")
        if name.startswith(RESERVED_PREFIXES):
            for prefix in reserved_prefixes(copy):
                if name.startswith(prefix):
                    raise InvalidMessage(
                        f"Attribute {name!r} begins with the reserved prefix {prefix!r}", advice="Rename the attribute"
                    )
        try:
            # ASCII is the common case and needs no encoding.
            _ = (name.isascii() and value.isascii()) or (name.encode(), value.encode())
        except UnicodeEncodeError as error:
            raise InvalidMessage(
                f"Attribute {name!r} cannot be encoded as UTF-8", native=error, advice="Remove the lone surrogate"
            ) from None
    return MappingProxyType(copy)


def check_batch(payloads: object) -> None:
    """Check that a batch is a sequence of messages. A single body is one too, and would become a message per byte.

    :raises InvalidMessage: `payloads` is a single body or message, or not a sequence.
    """
    if isinstance(payloads, (list, tuple)):
        return
    if not isinstance(payloads, Sequence) or isinstance(payloads, (bytes, bytearray, memoryview, str)):
        raise InvalidMessage(
            f"The batch is {_shown(payloads)} of type {type(payloads).__name__}",  # pyright: ignore[reportUnknownArgumentType]
            advice="It takes a list of messages: [message, …], or list(iterator)",
        )


def check_no_fields(message: OutboundMessage | OutboundPayload[Any], **fields: object) -> None:
    """Check that no field was given beside a message that has its own.

    :raises InvalidMessage: a field was given.
    """
    if given := [f"{name}=" for name, value in fields.items() if value is not None]:
        kind = type(message).__name__
        raise InvalidMessage(
            f"{' and '.join(given)} given together with an {kind}", advice=f"Give the fields to the {kind}"
        )


def _wrong(field: str, value: object, wanted: str) -> NoReturn:
    raise InvalidMessage(f"{field} is {_shown(value)} of type {type(value).__name__}", advice=f"It takes {wanted}")


def _not_text(field: str, value: str, error: UnicodeEncodeError) -> NoReturn:
    raise InvalidMessage(
        f"{field} {_shown(value)} cannot be encoded as UTF-8", native=error, advice="Remove the lone surrogate"
    ) from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
