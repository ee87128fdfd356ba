"""What a class of Python is to Spark: a tree of structures, lists, maps and values. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

__all__ = ["Field", "Leaf", "Listed", "Mapped", "Node", "Structure"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value without parts.

    :ivar type: of the column.
    :ivar hint: the type in Python, such as `datetime` or `UUID`; of each enum `Enum`.
    """

    type: DataType
    hint: Any


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
    """Values of one kind by keys of another."""

    value: Node
    nullable: bool
    key: Leaf = field(default_factory=lambda: Leaf(StringType(), str))

    @property
    def type(self) -> DataType:
        return MapType(self.key.type, self.value.type, self.nullable)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a structure.

    :ivar name: in Python, and of the column.
    :ivar encoded: in JSON.
    :ivar nullable: its type or its default is None.
    :ivar get: reads it of a payload; None is the attribute of its name.
    """

    name: str
    encoded: str
    node: Node
    nullable: bool
    get: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Structure:
    """Fields by name."""

    fields: tuple[Field, ...]

    @property
    def type(self) -> StructType:
        return StructType([StructField(each.name, each.node.type, each.nullable) for each in self.fields])


Node = Leaf | Listed | Mapped | Structure
