"""What a setting's type accepts, in words; pure functions over pydantic's field descriptions."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import GetCoreSchemaHandler, SecretBytes, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

__all__ = ["Form", "describe_type", "is_secret", "is_sequence"]

_WORDS: Final[Mapping[object, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    SecretStr: "text",
    SecretBytes: "text",
    Path: "a path",
    timedelta: "a duration such as 30 (seconds) or PT1M",
}


class Form:
    """Metadata of a field of text: a form that its text has, which is told in words and not as a pattern.

    `name: Annotated[str | None, Form(r"[a-z]+", "lower-case letters")] = None`. Immutable, safe from any thread.

    :param pattern: a regular expression that the whole text matches.
    :param words: what it takes, after "It takes".
    """

    __slots__ = ("_pattern", "words")

    def __init__(self, pattern: str, words: str) -> None:
        self._pattern = re.compile(pattern)
        self.words = words

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, text: str | None) -> str | None:
        if text is not None and self._pattern.fullmatch(text) is None:
            raise PydanticCustomError("form", "It has another form")
        return text


def describe_type(field: FieldInfo) -> str:
    """What the field accepts, for people."""
    for constraint in field.metadata:
        if isinstance(constraint, Form):
            return constraint.words
    bounds = "".join(
        text
        for constraint in field.metadata
        for kind, text in (
            (annotated_types.Ge, f", at least {getattr(constraint, 'ge', '')}"),
            (annotated_types.Gt, f", above {getattr(constraint, 'gt', '')}"),
            (annotated_types.Le, f", at most {getattr(constraint, 'le', '')}"),
            (annotated_types.Lt, f", below {getattr(constraint, 'lt', '')}"),
        )
        if isinstance(constraint, kind)
    )
    return f"{_words(field.annotation)}{bounds}"


def is_secret(field: FieldInfo) -> bool:
    """Whether the field's value must not be shown."""
    return any(member in (SecretStr, SecretBytes) for member in _members(field.annotation))


def is_sequence(field: FieldInfo) -> bool:
    """Whether the field takes several values, which text gives split by commas."""
    return any(_is_several(member) for member in _members(field.annotation))


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for member in get_args(annotation) if member is not type(None))
    return (annotation,)


def _is_several(annotation: Any) -> bool:
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, (Sequence, AbstractSet)) and not issubclass(kind, (str, bytes))


def _words(annotation: Any) -> str:
    return " or ".join(_member_words(member) for member in _members(annotation))


def _member_words(annotation: Any) -> str:
    arguments: tuple[Any, ...] = get_args(annotation)
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if _is_enum(annotation):
        return f"one of {', '.join(str(member.value) for member in annotation)}"
    if _is_mapping(annotation):
        return "name=value pairs split by commas"
    if _is_several(annotation):
        items = [argument for argument in arguments if argument is not Ellipsis]
        return f"a list split by commas, each {_words(items[0])}" if items else "a list split by commas"
    return _WORDS.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _is_mapping(annotation: Any) -> bool:
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, Mapping)


def _is_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Enum)
