"""`Batch`: the base class of `MessageBatch` and `RecordBatch`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar, overload

__all__ = ["Batch"]

S = TypeVar("S")


class Batch(Sequence[S], Generic[S]):
    """An immutable sequence of messages or records. A slice is a plain sequence. Any thread may read a batch."""

    __slots__ = ("_items",)

    def __init__(self, items: Sequence[S]) -> None:
        self._items = items

    @overload
    def __getitem__(self, index: int) -> S: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[S]: ...
    def __getitem__(self, index: int | slice) -> S | Sequence[S]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[S]:
        return iter(self._items)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._items)}>"
