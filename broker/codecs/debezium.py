"""Changes of a database's rows, as Debezium publishes them in JSON.

Source: Debezium's documentation, "Data change events" of each connector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import msgspec

from broker.codecs.errors import not_encodable, reason_of
from broker.codecs.json import Json
from broker.errors import DecodeError

if TYPE_CHECKING:
    from broker.protocols import Codec

__all__ = ["Change", "Debezium"]

T = TypeVar("T")

Operation = Literal["c", "u", "d", "r", "t", "m", "tombstone"]


class Change(msgspec.Struct, Generic[T], frozen=True, omit_defaults=True):
    """What happened to a row.

    :ivar op: `c` create, `u` update, `d` delete, `r` read by a snapshot, `t` truncate, `m` a message of the database's
        log; `tombstone` is the empty message that follows a delete, for compacted topics.
    :ivar before: the row before an update or a delete, where the database logs it.
    :ivar after: the row after a create, an update or a read.
    :ivar ts_ms: when Debezium handled the change, in milliseconds since 1970.
    """

    op: Operation
    before: T | None = None
    after: T | None = None
    ts_ms: int | None = None


class Debezium(Generic[T]):
    """Debezium's JSON, with its schema or without (`schemas.enable`), of rows of a type that `Json` takes.

    :raises ConfigurationError: JSON cannot represent the type.
    """

    __slots__ = ("_bare", "_wrapped", "row", "type")

    def __init__(self, row: type[T]) -> None:
        Json(row)
        self.row = row
        define = cast("Any", msgspec.defstruct)
        fields: list[tuple[str, Any, Any]] = [("before", row | None, None), ("after", row | None, None)]
        self.type: type[Change[T]] = define(f"ChangeOf{row.__name__}", fields, bases=(Change,), frozen=True)
        """The class of the changes."""
        self._bare = Json(self.type)
        self._wrapped = Json(cast("type[Any]", define("Wrapped", [("payload", self.type)], frozen=True)))

    def encode(self, payload: Change[T]) -> bytes | None:
        """Without the schema; a tombstone as an empty message.

        :raises InvalidMessage: the payload cannot be encoded as JSON.
        """
        if not isinstance(payload, Change):
            raise not_encodable(repr(self), payload)
        return None if payload.op == "tombstone" else self._bare.encode(payload)

    def decode(self, data: bytes | None) -> Change[T]:
        """:raises DecodeError: the bytes are no change of such a row."""
        if data is None:
            return self.type(op="tombstone")
        try:
            return self._decode(data)
        except DecodeError as error:
            reason = reason_of(error.native or error)
            raise DecodeError(f"{self!r} cannot decode the payload: {reason}", native=error.native) from error

    def _decode(self, data: bytes) -> Change[T]:
        # The converter writes the schema first.
        if data.startswith(b'{"schema"'):
            return self._wrapped.decode(data).payload
        try:
            return self._bare.decode(data)
        except DecodeError:
            if b'"payload"' not in data:
                raise
            return self._wrapped.decode(data).payload

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Debezium) and self.row is other.row  # pyright: ignore[reportUnknownMemberType]

    def __hash__(self) -> int:
        return hash((Debezium, self.row))

    def __repr__(self) -> str:
        return f"Debezium({self.row.__name__})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Debezium, (self.row,)


if TYPE_CHECKING:
    _codec: Codec[Change[int]] = Debezium(int)
