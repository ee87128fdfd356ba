"""What a class of Python is to Spark: a tree of structures, lists, maps and values. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

__all__ = ["Field", "Leaf", "Listed", "Mapped", "Node", "Structure"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value without parts.

    :ivar allowed: all the values there are, of an enum or a literal.
    :ivar uuid: it is the text of a UUID.
    """

    type: DataType
    allowed: tuple[str | int, ...] = ()
    uuid: bool = False


@dataclass(frozen=True, slots=True)
class Listed:
    """Elements of one kind."""

    element: Node
    nullable: bool

    @property
    def type(self) -> DataType:
        return ArrayType(self.element.type, self.nullable)


@dataclass(frozen=True, slots=True)
class Mapped:
    """Values of one kind by text."""

    value: Node
    nullable: bool

    @property
    def type(self) -> DataType:
        return MapType(StringType(), self.value.type, self.nullable)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a structure.

    :ivar name: in Python, and of the column.
    :ivar encoded: in JSON.
    :ivar required: it can be neither missing nor null.
    :ivar default: what stands for it where it is missing or null, a builtin; None is null.
    :ivar other: a second name in JSON, which counts where the first is missing.
    """

    name: str
    encoded: str
    node: Node
    required: bool
    default: Any = None
    other: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Those that it may have in JSON."""
        return (self.encoded,) if self.other is None else (self.encoded, self.other)


@dataclass(frozen=True, slots=True)
class Structure:
    """Fields by name."""

    fields: tuple[Field, ...]

    @property
    def type(self) -> StructType:
        return StructType(
            [StructField(each.name, each.node.type, not each.required and each.default is None) for each in self.fields]
        )


Node = Leaf | Listed | Mapped | Structure
