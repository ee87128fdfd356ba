"""Why a value does not decode, as expressions that give a sentence, or null. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from typing import Final, cast

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

from broker_spark.decode.json_columns import changes, is_variant
from broker_spark.decode.schema_tree import Leaf, Listed, Mapped, Node, Structure

__all__ = ["is_whole", "problem", "unread"]

_SHOWN: Final = 60
"""Characters of a wrong value that a reason shows."""


_NO_JSON: Final = "The value is not JSON"
_ODD: Final = "The value has a name twice, or is not JSON"
"""Spark takes single quotes for JSON where it tells the one from the other."""
_OTHER: Final = "The value is another JSON than the class has"


def is_whole(node: Node, raw: Column, made: Column, required: bool) -> Column:
    """Whether nothing is wrong with it, which is quick to tell; of all else `problem` tells what it is."""
    match node:
        case Structure(fields):
            parts = [
                is_whole(each.node, raw.getField(each.encoded), made.getField(each.name), each.required)
                for each in fields
            ]
            found = reduce(Column.__and__, parts) & made.isNotNull()
        case Listed() | Mapped():
            wrong = problem(node, raw, made, required, "")
            found = made.isNotNull() if wrong is None else made.isNotNull() & wrong.isNull()
        case Leaf():
            found = made.isNotNull()
    return found if required else found | _is_absent(node, raw)


def _is_absent(node: Node, raw: Column) -> Column:
    return raw.isNull() | F.is_variant_null(raw) if is_variant(node) else raw.isNull()


def problem(node: Node, raw: Column, made: Column, required: bool, path: str) -> Column | None:
    """Why what was read is wrong, null if it is not; None if it cannot be.

    What was made of it is looked at first: where that is there, a leaf is right.
    """
    absent = _is_absent(node, raw)
    missing = F.when(absent, F.lit(f"{path} is missing or null"))
    match node:
        case Leaf():
            if not changes(node):
                return F.when(made.isNull(), F.lit(f"{path} is missing or null")) if required else None
            text = F.to_json(raw) if is_variant(node) else raw.cast("string")
            wrong = _told(path, text, _due(node))
            return F.when(made.isNull(), missing.otherwise(wrong) if required else F.when(~absent, wrong))
        case Structure(fields):
            problems = _some(
                *(
                    problem(
                        each.node,
                        raw.getField(each.encoded),
                        made.getField(each.name),
                        each.required,
                        f"{path}.{each.encoded}".lstrip("."),
                    )
                    for each in fields
                )
            )
            inside = F.coalesce(*problems) if problems else None
        case Listed(element, nullable):
            inside = _each(raw, made, element, nullable, f"{path}[]")
        case Mapped(value, nullable):
            inside = _each(F.map_values(raw), F.map_values(made), value, nullable, f"{path}[]")
    if required:
        return missing if inside is None else missing.otherwise(inside)
    return None if inside is None else F.when(~absent, inside)


def _each(raw: Column, made: Column, node: Node, nullable: bool, path: str) -> Column | None:
    """The first problem of the parts of a list or map."""
    if problem(node, F.lit(None), F.lit(None), not nullable, path) is None:
        return None
    problems = F.zip_with(raw, made, lambda one, two: cast("Column", problem(node, one, two, not nullable, path)))
    return F.get(F.filter(problems, lambda each: each.isNotNull()), F.lit(0))


def _some(*problems: Column | None) -> list[Column]:
    return [each for each in problems if each is not None]


def _told(path: str, text: Column, due: str) -> Column:
    shown = F.when(F.length(text) > _SHOWN, F.concat(F.substring(text, 1, _SHOWN), F.lit("…"))).otherwise(text)
    return F.concat(F.lit(f"{path} is "), shown, F.lit(f", and {due} is due"))


def _due(node: Leaf) -> str:
    if node.allowed:
        return f"one of {', '.join(json.dumps(each) for each in node.allowed)}"
    return "uuid" if node.uuid else node.type.simpleString()


def unread(structure: Structure, text: Column, value: Column) -> Column:
    """Why `from_json` could not read it."""
    causes = [
        # What follows a value spoils all of it, and then no field is to blame.
        F.when(value.isNotNull() & found.isNotNull() & raw.isNull(), _told(path, found, kind))
        for path, raw, found, kind in _causes(structure, text, value, (), "")
    ]
    is_json = F.get_json_object(text, "$").isNotNull()
    return (
        F.when(F.try_parse_json(text).isNotNull(), F.coalesce(*causes, F.lit(_OTHER)))
        .when(is_json, F.lit(_ODD))
        .otherwise(F.lit(_NO_JSON))
    )


def _causes(
    structure: Structure, text: Column, value: Column, above: Sequence[str], path: str
) -> list[tuple[str, Column, Column, str]]:
    found: list[tuple[str, Column, Column, str]] = []
    for each in structure.fields:
        names = (*above, each.encoded)
        raw = value.getField(each.encoded)
        if isinstance(each.node, Structure):
            found += _causes(each.node, text, raw, names, f"{path}{each.encoded}.")
        if not is_variant(each.node) and not any("'" in name for name in names):
            # As a variant it keeps the quotes of a text.
            place = "$" + "".join(f"['{name}']" for name in names)
            there = F.to_json(F.try_variant_get(F.try_parse_json(text), place, "variant"))
            found.append((f"{path}{each.encoded}", raw, there, each.node.type.simpleString()))
    return found
