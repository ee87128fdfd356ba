"""`BackendSettings`: the base of every backend's settings, from a URL, the environment, a TOML file or arguments.

Precedence, highest first: keyword arguments or URL, environment variables `BROKER_<SCHEME>_<NAME>`, file, default.
Settings are read once, when the object is created, and never change; threads may share objects. Creating one does no
network I/O. Every problem is a `ConfigurationError` that names the setting, the origin of its value and the accepted
values, and shows no secret.
"""

from __future__ import annotations

import os
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Self, Union, cast, get_args, get_origin

import annotated_types
from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    PrivateAttr,
    SecretBytes,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from broker.errors import InvalidSetting, UnknownScheme, UnknownSetting
from broker.urls import MASK, UrlParts, is_secret_name, mask_url, mask_within, parse_url

__all__ = ["BackendSettings", "Form", "Origin", "SettingInfo", "describe_type", "is_secret", "is_sequence"]


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
    """Metadata of a field of text or a path: its form, as a pattern and in words for errors.

    `name: Annotated[str | None, Form(r"[a-z]+", "lower-case letters")] = None`. Immutable, safe from any thread.

    :param pattern: a regular expression that the whole text must match.
    :param words: the accepted values, after "It takes".
    """

    __slots__ = ("_pattern", "words")

    def __init__(self, pattern: str, words: str) -> None:
        self._pattern = re.compile(pattern)
        self.words = words

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, text: str | Path | None) -> str | Path | None:
        if text is not None and self._pattern.fullmatch(str(text)) is None:
            raise PydanticCustomError("form", "It has another form")
        return text


def describe_type(field: FieldInfo) -> str:
    """The values that the field accepts, in words."""
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
    """Whether the field takes several values, separated by commas in text."""
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


class Origin(NamedTuple):
    """Where a value came from; `where` is the name of the variable or file, or empty."""

    kind: Literal["default", "url", "environment", "file", "argument"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}" if self.where else self.kind


class SettingInfo(NamedTuple):
    """One line of `broker doctor`; `value` is text with secrets masked."""

    name: str
    value: str
    origin: Origin
    accepts: str
    description: str


class BackendSettings(BaseModel):
    """Base class of a backend's settings.

    A subclass names its URL schemes in `schemes`, declares typed fields (secrets as `SecretStr`) with a description
    each, and overrides `url_values` to map the user, hosts and path of a URL to settings. Query parameters of the URL
    have the names of the fields. Lists are separated by commas in URLs and in the environment.

    :raises UnknownSetting: there is no such setting; the error names the most similar one.
    :raises InvalidSetting: a value is invalid.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    schemes: ClassVar[tuple[str, ...]] = ()
    """The URL schemes of this backend; the first names its environment variables."""

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict[str, Origin])
    _url: str | None = PrivateAttr(default=None)

    if not TYPE_CHECKING:  # Type checkers derive the signature from the fields.

        def __init__(self, **values: Any) -> None:
            self._fill(values, dict.fromkeys(values, Origin("argument")))

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Read a URL; other settings come from the environment, or are the defaults.

        :raises UnknownScheme: the scheme is not one of `schemes`.
        :raises UnknownSetting: the backend does not have a parameter.
        :raises InvalidSetting: the URL or a value is invalid.
        """
        parts = parse_url(url)
        if parts.scheme not in cls.schemes:
            raise UnknownScheme(
                f"{cls.__name__} does not have the scheme {parts.scheme!r}",
                advice=f"Use {_listed(cls.schemes)}",
            )
        values = dict(cls.url_values(parts))
        for name, value in cls.query_values(parts.query).items():
            if name in values:
                raise InvalidSetting(
                    f"Setting {name!r} is given by the parameter and by another part of {cls._mask(url)!r}",
                    advice="Give it once",
                )
            values[name] = value
        return cls._make(values, dict.fromkeys(values, Origin("url")), cls._mask(url))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], *, table: str | None = None) -> Self:
        """Read a TOML file whose keys are the settings; environment variables take precedence.

        :param table: read this table of the file instead of its top level; dots separate nested tables.
        :raises UnknownSetting: the backend does not have a setting.
        :raises InvalidSetting: the file cannot be read, has no such table, or a value is invalid.
        """
        origin = Origin("file", str(path))
        values = _read_table(path, table)
        environment = cls._environment()
        cls._check_names(values, dict.fromkeys(values, origin))
        kept = {name: value for name, value in values.items() if name not in environment}
        return cls._make(kept, dict.fromkeys(kept, origin))

    @classmethod
    def url_values(cls, parts: UrlParts) -> Mapping[str, Any]:
        """The settings in scheme, user, hosts and path of a URL; the caller adds the parameters.

        An override calls `refuse_parts` with the parts that it does not use.

        :raises InvalidSetting: the URL has a part that this backend does not use.
        """
        cls.refuse_parts(parts, "user", "password", "hosts", "path")
        return {}

    @classmethod
    def query_values(cls, query: Mapping[str, str]) -> Mapping[str, Any]:
        """The settings in the parameters of a URL; a subclass may combine several into one."""
        return query

    @classmethod
    def refuse_parts(cls, parts: UrlParts, *names: Literal["user", "password", "hosts", "path"]) -> None:
        """Refuse a URL that has one of these parts.

        :raises InvalidSetting: the URL has one.
        """
        for name in names:
            value = getattr(parts, name)
            if value and value != "/":
                shown = (
                    MASK
                    if name in {"user", "password"}
                    else repr(",".join(map(str, value)) if name == "hosts" else value)
                )
                raise InvalidSetting(
                    f"A URL of the scheme {parts.scheme!r} takes no {name}, but {shown} is given",
                    advice=f"Leave the {name} out",
                )

    @classmethod
    def advice_on_unknown(cls, name: str) -> str:
        """The advice on an unknown setting; a subclass may know what was meant."""
        names = sorted(cls.model_fields)
        near = get_close_matches(name, names, 1, 0.6)
        return f"Did you mean {near[0]!r}?" if near else f"It has {_listed(names)}"

    def check_given(self) -> None:
        """Refuse settings that contradict each other. Unlike in a validator, `origin` is known here.

        :raises InvalidSetting: they do.
        """

    @property
    def url(self) -> str:
        """The URL of these settings, with secrets masked; only the scheme if they do not come from a URL."""
        return self._url if self._url is not None else f"{self.schemes[0]}:"

    def replaced(self, changes: Mapping[str, Any]) -> Self:
        """A copy of these settings with changes, whose origin is "argument"; the others keep their origins.

        :raises UnknownSetting: there is no such setting.
        :raises InvalidSetting: a value is invalid, or contradicts the others.
        """
        values = {name: getattr(self, name) for name in self.model_fields_set} | dict(changes)
        return self._make(values, self._origins | dict.fromkeys(changes, Origin("argument")), self._url)

    def origin(self, name: str) -> Origin:
        """Where the value of a setting came from.

        :raises UnknownSetting: there is no such setting.
        """
        if name not in type(self).model_fields:
            raise self._unknown(name, None)
        return self._origins.get(name, Origin("default"))

    def explain(self) -> list[SettingInfo]:
        """Every setting with its masked value, origin, accepted values and description."""
        return [
            SettingInfo(
                name,
                self._shown(name, getattr(self, name)),
                self.origin(name),
                describe_type(field),
                field.description or "",
            )
            for name, field in type(self).model_fields.items()
        ]

    @classmethod
    def environment_prefix(cls) -> str:
        """The prefix of this backend's environment variables, such as `BROKER_NATS_`."""
        scheme = cls.schemes[0] if cls.schemes else ""
        return f"BROKER_{scheme}_".upper().replace("+", "_").replace("-", "_").replace(".", "_")

    @field_validator("*", mode="before")
    @classmethod
    def _read_text(cls, value: object, info: ValidationInfo) -> object:
        if _has_nul(value):
            raise ValueError("it contains a NUL, which ends a text for clients written in C")
        if isinstance(value, str) and info.field_name is not None and is_sequence(cls.model_fields[info.field_name]):
            return [item.strip() for item in value.split(",") if item.strip()]
        return value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, _masked(value)

    @classmethod
    def _make(cls, values: Mapping[str, Any], origins: Mapping[str, Origin], url: str | None = None) -> Self:
        settings = cls.__new__(cls)
        settings._fill(values, origins)
        settings._url = url
        return settings

    def _fill(self, values: Mapping[str, Any], origins: Mapping[str, Origin]) -> None:
        self._check_names(values, origins)
        environment = self._environment()
        origins = {**{name: Origin("environment", variable) for name, variable in environment.items()}, **origins}
        try:
            super().__init__(**{**{name: os.environ[variable] for name, variable in environment.items()}, **values})
        except ValidationError as error:
            raise self._invalid(error, values, origins) from None
        self._origins = dict(origins)
        self.check_given()

    @classmethod
    def _check_names(cls, values: Mapping[str, Any], origins: Mapping[str, Origin]) -> None:
        for name in values:
            if name not in cls.model_fields:
                raise cls._unknown(name, origins[name])

    @classmethod
    def _environment(cls) -> dict[str, str]:
        """The settings in the environment, with the variable of each."""
        prefix = cls.environment_prefix()
        present = {variable.upper(): variable for variable in os.environ}
        found = {name: present.get(f"{prefix}{name}".upper()) for name in cls.model_fields}
        return {name: variable for name, variable in found.items() if variable is not None}

    @classmethod
    def _unknown(cls, name: str, origin: Origin | None) -> UnknownSetting:
        source = f" (from {origin})" if origin is not None else ""
        return UnknownSetting(f"{cls.__name__} has no setting {name!r}{source}", advice=cls.advice_on_unknown(name))

    @classmethod
    def _invalid(
        cls, error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, Origin]
    ) -> InvalidSetting:
        first = error.errors(include_url=False, include_context=False)[0]
        reason = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            return InvalidSetting(f"The settings of {cls.__name__} do not fit together: {reason}")
        name = str(first["loc"][0])
        origin = origins.get(name, Origin("default"))
        if first["type"] == "missing":
            return InvalidSetting(
                f"Setting {name!r} of {cls.__name__} is not given",
                advice=f"Give it in the URL or as {cls.environment_prefix()}{name.upper()}",
            )
        value = os.environ.get(origin.where) if origin.kind == "environment" else values.get(name)
        field = cls.model_fields[name]
        accepts = describe_type(field)
        # These messages say more than `accepts`. A message of a validator may quote a secret.
        shown = (
            first["type"].startswith(("value_error", "string_", "finite_"))
            and not is_secret(field)
            and not is_secret_name(name)
        )
        detail = f": {reason}" if shown else ""
        return InvalidSetting(
            f"Setting {name!r} (from {origin}) is {cls._shown(name, value)}{detail}", advice=f"It takes {accepts}"
        )

    @classmethod
    def _shown(cls, name: str, value: object) -> str:
        if value is None:
            return "none"
        if isinstance(value, (SecretStr, SecretBytes)) or is_secret(cls.model_fields[name]):
            return MASK
        shown = _masked(value)
        if isinstance(shown, dict):
            pairs = cast("dict[object, object]", shown).items()
            return ",".join(f"{key}={item}" for key, item in pairs) or "none"
        if isinstance(shown, (list, tuple)):
            return ",".join(str(item) for item in cast("Sequence[object]", shown)) or "empty"
        return repr(shown) if isinstance(shown, str) else str(shown)

    @classmethod
    def _mask(cls, url: str) -> str:
        secret = [name for name, field in cls.model_fields.items() if is_secret(field)]
        return mask_url(url, [*secret, *(name.replace("_", ".") for name in secret)])


def _has_nul(value: object) -> bool:
    """Whether a text has a NUL; also a name or a value of a mapping, and an item of a list."""
    if isinstance(value, SecretStr):
        return "\0" in value.get_secret_value()
    if isinstance(value, (str, Path)):
        return "\0" in str(value)
    if isinstance(value, Mapping):
        return any(map(_has_nul, (part for pair in cast("Mapping[object, object]", value).items() for part in pair)))
    return isinstance(value, (list, tuple)) and any(map(_has_nul, cast("Sequence[object]", value)))


def _masked(value: object) -> object:
    """The value without the secrets in its texts, and without the values of secret names in mappings."""
    if isinstance(value, str):
        return mask_within(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {name: MASK if is_secret_name(str(name)) else _masked(item) for name, item in items}
    if isinstance(value, (list, tuple)):
        items = [_masked(item) for item in cast("Sequence[object]", value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _read_table(path: str | os.PathLike[str], table: str | None) -> dict[str, Any]:
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"Settings cannot be read from {str(path)!r}: {error}", native=error) from error
    for part in table.split(".") if table else ():
        tables: dict[str, dict[str, Any]] = {name: value for name, value in values.items() if isinstance(value, dict)}
        if part not in tables:
            raise InvalidSetting(
                f"The file {str(path)!r} has no table [{table}]", advice=f"Its tables are {_listed(list(tables))}"
            )
        values = tables[part]
    return values


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) if names else "none"
