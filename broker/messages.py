"""The vocabulary: what is published, what is received, and how each is settled.

`Message` and `Record` are two families that never pretend to be each other; `Envelope` is what they
share, so that forwarders and codecs can be written once. Objects here hold no lock: use them from the
event loop that made them (`broker.blocking` crosses threads for you). Awaiting a settlement may be
cancelled; the settlement itself goes on, because it belongs to the consumer from the moment of the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from enum import IntEnum
from types import MappingProxyType, TracebackType
from typing import Any, Final, Generic, Protocol, Self, overload

import msgspec
from typing_extensions import TypeVar

from broker.errors import AlreadySettled, InvalidMessage, LeaseLost

__all__ = [
    "DEAD_LETTER_PREFIX",
    "RESERVED_PREFIX",
    "BatchOwner",
    "Envelope",
    "Message",
    "MessageBatch",
    "MessageOwner",
    "OutboundMessage",
    "Outcome",
    "Receipt",
    "Record",
    "RecordBatch",
    "RecordOwner",
    "SettleState",
    "View",
]

T = TypeVar("T", default=bytes)
T_co = TypeVar("T_co", covariant=True, default=bytes)

RESERVED_PREFIX: Final = "anybroker-"
"""Attributes under this prefix carry what a broker has no place for (key, times); users never see or set them."""
DEAD_LETTER_PREFIX: Final = "dead-letter-"
"""Attributes under this prefix tell why and whence a dead letter came; `redrive` removes them."""

NO_ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType({})


class _Unset:
    __slots__ = ()


UNSET: Final = _Unset()


class Envelope(Protocol):
    """What a Message and a Record have in common."""

    @property
    def topic(self) -> str: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def data(self) -> bytes | None: ...
    @property
    def attributes(self) -> Mapping[str, str]: ...
    @property
    def publish_time(self) -> datetime | None: ...
    @property
    def broker_time(self) -> datetime | None: ...
    @property
    def native(self) -> Any: ...


class OutboundMessage:
    """A message to be published; immutable once made.

    :param data: the body; None is a tombstone where the broker has one (`capabilities.publish.tombstones`).
    :param key: identity for partitioning and order; `str` is encoded as UTF-8. None and empty differ.
    :param attributes: text to text; they come back equal on every backend.
    :param id: what consumers see as `message.id`, and what the broker deduplicates by where it can.
    :param deliver_at: not before this moment (timezone-aware), where the broker schedules.
    :param ttl: seconds after which the broker may drop it, where it can.
    :param partition: the partition to append to, where the broker has them; otherwise the key decides.
    :param publish_time: the producer's clock; set when the message is published, if None.
    :raises InvalidMessage: a field has the wrong type or a reserved attribute name.
    """

    __slots__ = ("attributes", "data", "deliver_at", "id", "key", "native", "partition", "publish_time", "ttl")

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
        self.attributes: Final[Mapping[str, str]] = _checked_attributes(attributes) if attributes else NO_ATTRIBUTES
        if id is not None and (not isinstance(id, str) or not id):
            _wrong("id", id, "a non-empty str or None")
        self.id: Final[str | None] = id
        if deliver_at is not None and deliver_at.tzinfo is None:
            raise InvalidMessage(
                f"deliver_at {deliver_at.isoformat()} has no timezone", advice="Use datetime.now(UTC) + timedelta(...)"
            )
        self.deliver_at: Final[datetime | None] = deliver_at
        if ttl is not None and not ttl > 0:
            _wrong("ttl", ttl, "a number of seconds above 0, or None")
        self.ttl: Final[float | None] = ttl
        if partition is not None and (type(partition) is not int or partition < 0):
            _wrong("partition", partition, "an int of 0 or more, or None")
        self.partition: Final[int | None] = partition
        self.publish_time: Final[datetime | None] = publish_time
        self.native: Final[Any] = native

    @classmethod
    def from_message(cls, message: Envelope) -> OutboundMessage:
        """Copy a received message or record for forwarding: body, key, attributes, producer's time and id.

        `native` rides along, so that a backend of the same kind can forward what this model cannot show.
        """
        return cls(
            message.data,
            message.key,
            message.attributes,
            id=getattr(message, "id", None),
            publish_time=message.publish_time,
            native=message.native,
        )

    def __repr__(self) -> str:
        attributes = dict(self.attributes)
        return f"OutboundMessage(data={_brief(self.data)}, key={self.key!r}, attributes={attributes!r}, id={self.id!r})"


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The broker has the message.

    :ivar id: the message's id as consumers will see it.
    :ivar partition: where it was appended, None where the broker has no partitions.
    :ivar offset: its position in the log, None where the broker has no log.
    :ivar duplicate: the broker had a message of this id already and dropped this one.
    """

    id: str
    partition: int | None = None
    offset: int | None = None
    duplicate: bool = False


class SettleState(IntEnum):
    """Where a message stands."""

    OPEN = 0
    SETTLING = 1
    SETTLED = 2
    UNKNOWN = 3
    """Asked for, but the answer was lost: it may come again."""
    LOST = 4
    """Its lease ended first: it comes again."""


class Outcome(IntEnum):
    """How a message was, or is being, settled."""

    ACK = 0
    NACK = 1
    """Handled and failed: deliver again, after the delay."""
    REJECT = 2
    """Never deliver again: dead-letter it."""
    RELEASE = 3
    """Not handled at all: deliver again at once; counts as an attempt only where the broker cannot help it."""


class View(Protocol):
    """How a backend shows the lazy part of its own raw messages; one stateless object for all of them."""

    def id(self, raw: Any, /) -> str: ...
    def key(self, raw: Any, /) -> bytes | None: ...
    def attributes(self, raw: Any, /) -> Mapping[str, str]: ...
    def publish_time(self, raw: Any, /) -> datetime | None: ...
    def broker_time(self, raw: Any, /) -> datetime | None: ...
    def delivery_attempt(self, raw: Any, /) -> int | None: ...
    def native(self, raw: Any, /) -> Any: ...


class MessageOwner(Protocol):
    """The consumer that handed a message over; it carries out what the message is asked to do."""

    async def settle(self, message: Message[Any], outcome: Outcome, delay: float | None, reason: str) -> None: ...
    async def extend(self, message: Message[Any], seconds: float) -> None: ...
    def begin(self, message: Message[Any]) -> None:
        """An `async with message` block begins."""
        ...

    async def finish(self, message: Message[Any], error: BaseException | None) -> bool:
        """It ends; True swallows the error."""
        ...


class BatchOwner(Protocol):
    """The consumer that handed a batch over."""

    async def settle_batch(self, messages: Sequence[Message[Any]], outcome: Outcome, delay: float | None) -> None: ...


class Message(msgspec.Struct, Generic[T], eq=False, gc=False):
    """A unit that is settled on its own.

    The fields are set by the backend and the core; applications read `topic`, `key`, `data`, `payload`,
    `attributes`, `id`, `delivery_attempt`, `publish_time`, `broker_time`, `native`, `state` and `lease_lost`.

    Used as `async with message:` it is acked when the block ends, and settled by the consumer's retry
    policy when the block raises an `Exception`, which is reported to the hooks and not raised further; so is an
    ack that the broker refuses, since the message comes again and the loop around the block is to go on.
    Cancellation gives the message back and goes on.
    """

    topic: str
    data: bytes | None
    raw: Any
    view: View
    lease: Any = None
    """The backend's lease handle; messages may share one."""
    size: int = 0
    """Bytes counted by flow control."""
    owner: MessageOwner | None = None
    state: SettleState = SettleState.OPEN
    outcome: Outcome | None = None
    decoded: Any = UNSET
    lease_ends: float | None = None
    """Loop time at which renewal stops; None before hand-over or where there is no bound."""
    in_use: bool = False
    """A handler, or an `async with` block, is working on it: a close waits for that."""
    retries: int = 0
    """How often it was handed over again from memory, without the broker."""
    scope: Any = None
    """What the hooks entered around its handling."""

    @property
    def id(self) -> str:
        """The publisher's id if it gave one, else the broker's; the same on every redelivery."""
        return self.view.id(self.raw)

    @property
    def key(self) -> bytes | None:
        return self.view.key(self.raw)

    @property
    def attributes(self) -> Mapping[str, str]:
        return self.view.attributes(self.raw)

    @property
    def publish_time(self) -> datetime | None:
        """The producer's clock, UTC."""
        return self.view.publish_time(self.raw)

    @property
    def broker_time(self) -> datetime | None:
        """The broker's clock, UTC."""
        return self.view.broker_time(self.raw)

    @property
    def delivery_attempt(self) -> int | None:
        """How many times it was delivered, this time and retries from memory included; None where nobody counts."""
        attempt = self.view.delivery_attempt(self.raw)
        return None if attempt is None else attempt + self.retries

    @property
    def native(self) -> Any:
        """The client library's own object."""
        return self.view.native(self.raw)

    @property
    def payload(self) -> T:
        """The body as the consumer's codec decoded it; the bytes themselves without a codec."""
        decoded = self.decoded
        return self.data if decoded is UNSET else decoded  # pyright: ignore[reportReturnType]

    @property
    def lease_lost(self) -> bool:
        """Whether somebody else may have it by now: stop the work, an ack will be refused."""
        return self.state is SettleState.LOST

    async def ack(self) -> None:
        """Say that it was handled. Harmless when it was acked before.

        :raises LeaseLost: its lease ended, or the broker refused the ack; it comes again.
        :raises AlreadySettled: it was settled another way.
        :raises SettleError: the broker did not confirm (only where acks are confirmed).
        """
        await self._settle(Outcome.ACK, None, "")

    async def nack(self, delay: float | None = None) -> None:
        """Have it delivered again.

        :param delay: seconds to wait first; None leaves that to the retry policy's first step.
        :raises Unsupported: nobody can keep a delay that long.
        :raises LeaseLost, AlreadySettled, SettleError: as for `ack`.
        """
        await self._settle(Outcome.NACK, delay, "")

    async def reject(self, reason: str = "rejected") -> None:
        """Give up on it: it goes to the dead letters with this reason.

        :raises LeaseLost, AlreadySettled, SettleError: as for `ack`.
        """
        await self._settle(Outcome.REJECT, None, reason)

    async def extend(self, seconds: float) -> None:
        """Keep the lease renewed until `seconds` from now, beyond `max_lease` if need be.

        :raises LeaseLost: it was lost before.
        """
        if self.state is SettleState.LOST:
            raise LeaseLost(f"Message {self.id!r} of topic {self.topic!r} was lost before it was extended")
        if self.owner is not None:
            await self.owner.extend(self, seconds)

    async def _settle(self, outcome: Outcome, delay: float | None, reason: str) -> None:
        if self.owner is not None:
            await self.owner.settle(self, outcome, delay, reason)
        else:
            self.begin_settling(outcome)
            self.state = SettleState.SETTLED

    def begin_settling(self, outcome: Outcome) -> bool:
        """Move from open to settling; False if it is being, or was, settled the same way before.

        :raises LeaseLost: its lease ended.
        :raises AlreadySettled: it was settled another way.
        """
        if self.state is SettleState.OPEN:
            self.state = SettleState.SETTLING
            self.outcome = outcome
            return True
        if self.state is SettleState.LOST:
            raise LeaseLost(f"Message {self.id!r} of topic {self.topic!r} was lost before it was settled")
        if self.outcome is not outcome:
            was = "another way" if self.outcome is None else f"with {self.outcome.name.lower()}"
            raise AlreadySettled(
                f"Message {self.id!r} of topic {self.topic!r} was settled {was} before {outcome.name.lower()}"
            )
        return False

    async def __aenter__(self) -> Self:
        self.in_use = True
        if self.owner is not None:
            self.owner.begin(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.in_use = False
        if self.owner is not None:
            return await self.owner.finish(self, error)
        if self.state is SettleState.OPEN:
            await self._settle(Outcome.ACK if error is None else Outcome.NACK, None, "")
        return isinstance(error, Exception)

    def __repr__(self) -> str:
        state = self.state.name.lower()
        return f"<Message {self.id!r} of {self.topic!r}, key={self.key!r}, data={_brief(self.data)}, {state}>"


class MessageBatch(Sequence[Message[T]], Generic[T]):
    """Messages handed over together, to be settled together or one by one."""

    __slots__ = ("_messages", "_owner")

    def __init__(self, messages: list[Message[T]], owner: BatchOwner | None = None) -> None:
        self._messages = messages
        self._owner = owner

    @overload
    def __getitem__(self, index: int) -> Message[T]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message[T]]: ...
    def __getitem__(self, index: int | slice) -> Message[T] | Sequence[Message[T]]:
        return self._messages[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message[T]]:
        return iter(self._messages)

    async def ack(self) -> None:
        """Ack those that are still open.

        :raises SettleError: the first failure, after all were tried; each message's `state` tells its own.
        """
        await self._settle(Outcome.ACK, None)

    async def nack(self, delay: float | None = None) -> None:
        """Have those that are still open delivered again, after `delay` seconds.

        :raises SettleError: the first failure, after all were tried.
        """
        await self._settle(Outcome.NACK, delay)

    async def _settle(self, outcome: Outcome, delay: float | None) -> None:
        if self._owner is not None:
            await self._owner.settle_batch(self._messages, outcome, delay)
            return
        for message in self._messages:
            if message.state is SettleState.OPEN:
                await (message.ack() if outcome is Outcome.ACK else message.nack(delay))

    def __repr__(self) -> str:
        return f"<MessageBatch of {len(self._messages)}>"


class RecordOwner(Protocol):
    """The consumer that handed a record over."""

    async def commit_records(self, records: Sequence[Record[Any]]) -> None: ...


class Record(msgspec.Struct, Generic[T], eq=False, gc=False):
    """An entry of an ordered, partitioned log.

    `offset` only grows within a partition; it is not dense, but `offset + 1` is a legal position.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    data: bytes | None
    raw: Any
    view: View
    size: int = 0
    owner: RecordOwner | None = None
    decoded: Any = UNSET
    generation: int = 0
    """Which assignment of the partition handed it over; a commit of an older one is refused."""

    @property
    def id(self) -> str:
        """The publisher's id if it gave one, else one made of partition and offset."""
        return self.view.id(self.raw)

    @property
    def attributes(self) -> Mapping[str, str]:
        return self.view.attributes(self.raw)

    @property
    def publish_time(self) -> datetime | None:
        """The producer's clock, UTC."""
        return self.view.publish_time(self.raw)

    @property
    def broker_time(self) -> datetime | None:
        """The broker's clock, UTC."""
        return self.view.broker_time(self.raw)

    @property
    def native(self) -> Any:
        """The client library's own object."""
        return self.view.native(self.raw)

    @property
    def payload(self) -> T:
        """The body as the consumer's codec decoded it; the bytes themselves without a codec."""
        decoded = self.decoded
        return self.data if decoded is UNSET else decoded  # pyright: ignore[reportReturnType]

    async def commit(self) -> None:
        """Settle this record and every lower offset of its partition.

        :raises LeaseLost: the partition was taken away since; its new owner reads the record again.
        :raises SettleError: the broker did not take the commit.
        """
        if self.owner is not None:
            await self.owner.commit_records((self,))

    def __repr__(self) -> str:
        return f"<Record {self.topic!r}[{self.partition}]@{self.offset}, key={self.key!r}, data={_brief(self.data)}>"


class RecordBatch(Sequence[Record[T]], Generic[T]):
    """Records read together, in order within each partition."""

    __slots__ = ("_owner", "_records")

    def __init__(self, records: list[Record[T]], owner: RecordOwner | None = None) -> None:
        self._records = records
        self._owner = owner

    @overload
    def __getitem__(self, index: int) -> Record[T]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record[T]]: ...
    def __getitem__(self, index: int | slice) -> Record[T] | Sequence[Record[T]]:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record[T]]:
        return iter(self._records)

    async def commit(self) -> None:
        """Settle all records of the batch and every lower offset of their partitions.

        :raises LeaseLost: a partition was taken away since; the commits of the others were carried out.
        """
        if self._owner is not None:
            await self._owner.commit_records(self._records)

    def to_arrow(self) -> Any:
        """The batch as a `pyarrow.Table`.

        Columns: topic, partition, offset, id, key, data, attributes, publish_time, broker_time.

        :raises MissingClient: pyarrow is not installed.
        """
        from broker.arrow import records_to_arrow

        return records_to_arrow(self._records)

    def __repr__(self) -> str:
        return f"<RecordBatch of {len(self._records)}>"


def _as_key(key: object) -> bytes:
    if isinstance(key, str):
        return key.encode()
    return key if isinstance(key, bytes) else _wrong("key", key, "bytes, str or None")


def _as_bytes(data: object) -> bytes:
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)  # pyright: ignore[reportUnknownArgumentType]
    return _wrong("data", data, "bytes or None; give the topic a codec to publish other types")


def _checked_attributes(attributes: Mapping[str, str]) -> Mapping[str, str]:
    copy = dict(attributes)
    for name, value in copy.items():
        if type(name) is not str or type(value) is not str:
            _wrong(f"attributes[{name!r}]", value, "a str under a str name")
        if not name:
            raise InvalidMessage("An attribute name is empty", advice="Give every attribute a name")
        if name.startswith(RESERVED_PREFIX):
            raise InvalidMessage(
                f"Attribute {name!r} begins with the reserved prefix {RESERVED_PREFIX!r}", advice="Rename it"
            )
        try:
            # ASCII is the common case and needs no encoding to be known as valid.
            _ = (name.isascii() and value.isascii()) or (name.encode(), value.encode())
        except UnicodeEncodeError as error:
            raise InvalidMessage(
                f"Attribute {name!r} cannot be written as UTF-8", native=error, advice="Remove the lone surrogate"
            ) from None
    return MappingProxyType(copy)


def _wrong(field: str, value: object, wanted: str) -> Any:
    raise InvalidMessage(f"{field} is {value!r} of type {type(value).__name__}", advice=f"It takes {wanted}")


def _brief(data: bytes | None) -> str:
    return repr(data) if data is None or len(data) <= 32 else f"{data[:32]!r}… ({len(data)} bytes)"
