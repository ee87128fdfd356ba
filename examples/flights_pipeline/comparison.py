"""Compares every row of the output with the expected row of the same key. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow

from examples.flights_pipeline.corruption import Corrupted
from examples.flights_pipeline.plain import Expected

if TYPE_CHECKING:
    # Spark, which `compare` does without.
    from examples.flights_pipeline.results import Results

__all__ = ["Compared", "compare", "compare_all", "compare_rows"]

K = TypeVar("K", bound=Hashable)

_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of one kind of result.

    :ivar equal: correct rows.
    :ivar differences: a sentence per kind of difference, with examples.
    """

    what: str
    expected: int
    found: int
    equal: int
    differences: list[str]


def compare_all(expected: Expected, spoilt: Iterable[Corrupted], found: Results) -> list[Compared]:
    """Compare joined rows, windows, aircraft, and the dead letters of each kind."""
    compared = [
        compare_rows("joined flights", "number", expected.joined, found.joined),
        compare("hours of carriers", expected.hours, found.hours),
        compare("aircraft", expected.aircraft, found.aircraft),
    ]
    kinds: dict[str, dict[str, object]] = {}
    for each in spoilt:
        kinds.setdefault(each.kind, {})[each.id] = (each.reason, each.data)
    known = {letter: kind for kind, letters in kinds.items() for letter in letters}
    for kind, letters in kinds.items():
        of_kind = {letter: what for letter, what in found.letters.items() if known.get(letter) == kind}
        compared.append(compare(f"dead: {kind}", letters, of_kind))
    strange = {letter: what for letter, what in found.letters.items() if letter not in known}
    return [*compared, compare("dead: of no kind", {}, strange)] if strange else compared


def compare_rows(what: str, key: str, expected: pyarrow.Table, found: pyarrow.Table) -> Compared:
    """Compare two tables with one row for each value of `key`, in any order."""
    one, two = (_sorted(table, key) for table in (expected, found))
    if one.equals(two):
        return Compared(what, one.num_rows, two.num_rows, one.num_rows, [])
    rows = [{row[key]: row for row in table.to_pylist()} for table in (one, two)]
    compared = compare(what, *rows)
    again = two.num_rows - len(rows[1])
    more = [f"{what}: {again:,} rows are there more than once"] if again else []
    if not more and not compared.differences:
        more = [f"{what}: the columns are {two.schema} and have to be {one.schema}"]
    return Compared(what, one.num_rows, two.num_rows, compared.equal, [*compared.differences, *more])


def compare(what: str, expected: Mapping[K, object], found: Mapping[K, object]) -> Compared:
    """Compare two mappings."""
    missing = [key for key in expected if key not in found]
    extra = [key for key in found if key not in expected]
    other = [key for key in expected if key in found and expected[key] != found[key]]
    differences: list[str] = []
    if missing:
        differences.append(f"{what}: {len(missing):,} are missing, such as {_some(missing)}")
    if extra:
        differences.append(f"{what}: {len(extra):,} should not be there, such as {_some(extra)}")
    if other:
        first = other[0]
        differences.append(f"{what}: {len(other):,} differ: {first} is {found[first]} and has to be {expected[first]}")
    return Compared(what, len(expected), len(found), len(expected) - len(missing) - len(other), differences)


def _sorted(table: Any, key: str) -> Any:
    return table.sort_by(key).combine_chunks().replace_schema_metadata(None)


def _some(keys: list[Any]) -> str:
    return ", ".join(map(str, keys[:_SHOWN]))
