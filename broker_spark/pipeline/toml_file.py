"""Reads a pipeline from a TOML file. An error names file, key, value and fix.

    name = "delays"
    url = "nats://localhost"
    checkpoint = "/var/lib/app/delays"
    transform = "delays:by_carrier"

    [sources.flights]
    topic = "flights"
    decode = "delays:Flight"

    [sinks.delays]
    topic = "delays"

    [dead_letters]
    topic = "flights.dead"

`module:name` is searched beside the file first. Reading the file imports these modules; Spark's workers get
their code.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from pyspark import cloudpickle

from broker.errors import ConfigurationError
from broker_spark.common.options import as_text
from broker_spark.common.schema import nearest
from broker_spark.pipeline.definition import CallSink, FileSink, Pipeline, Sink, Source, TableSink, TopicSink, is_whole
from broker_spark.pipeline.expectations import Expect

__all__ = ["read_pipeline"]

_TOP: Final[Mapping[str, tuple[type, ...]]] = {
    "name": (str,),
    "url": (str,),
    "checkpoint": (str,),
    "transform": (str,),
    "sql": (str,),
    "trigger": (str,),
    "on_batch": (str,),
    "output_mode": (str,),
    "master": (str,),
    "spark": (dict,),
    "sources": (dict,),
    "sinks": (dict,),
    "dead_letters": (dict,),
}
_REQUIRED: Final = ("name", "checkpoint", "sources", "sinks")
_SINKS: Final[Mapping[str, tuple[Any, Mapping[str, tuple[type, ...]]]]] = {
    "topic": (TopicSink, {"key": (str,), "where": (str,), "url": (str,)}),
    "path": (FileSink, {"format": (str,), "partition_by": (list,), "where": (str,), "options": (dict,)}),
    "table": (
        TableSink,
        {"format": (str,), "where": (str,), "options": (dict,), "merge_by": (list,), "order_by": (list,)},
    ),
    "call": (CallSink, {"where": (str,)}),
}
_EXPECT: Final[Mapping[str, tuple[type, ...]]] = {"condition": (str,), "action": (str,)}
_PLAIN: Final = (str, int, float, bool)
_SHOWN: Final = {str: "text", list: "a list of text", dict: "a table", int: "a number", bool: "true or false"}


def read_pipeline(path: str | Path) -> Pipeline:
    """The pipeline of a file.

    :raises ConfigurationError: the file cannot be read, a key is unknown or missing, or a value cannot be used.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}", advice="Give a TOML file") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}", advice="Fix the file") from error
    try:
        return _File(path.parent).pipeline(content)
    except ConfigurationError as error:
        raise cast("Any", type(error))(f"{path}: {error.message}", advice=error.advice) from error


class _File:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def pipeline(self, content: Mapping[str, Any]) -> Pipeline:
        _check("", content, _TOP)
        for name in _REQUIRED:
            if name not in content:
                raise ConfigurationError(f"{name} is missing", advice="Add it")
        values: dict[str, Any] = {
            name: content[name]
            for name in ("name", "url", "checkpoint", "sql", "trigger", "output_mode", "master")
            if name in content
        }
        values["checkpoint"] = self._place(content["checkpoint"])
        for name in ("transform", "on_batch"):
            if name in content:
                values[name] = self._load(name, content[name])
        values["config"] = self._config(content.get("spark", {}))
        values["sources"] = {name: self._source(f"sources.{name}", table) for name, table in content["sources"].items()}
        values["sinks"] = {name: self._sink(f"sinks.{name}", table) for name, table in content["sinks"].items()}
        if "dead_letters" in content:
            values["dead_letters"] = self._sink("dead_letters", content["dead_letters"])
        return Pipeline(**values)

    def _config(self, table: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in table.items():
            if isinstance(value, dict):
                _refuse(
                    f"spark.{name}", value, 'a value: write settings of Spark in quotes, "spark.driver.memory" = "2g"'
                )
            if not isinstance(value, _PLAIN):
                _refuse(f"spark.{name}", value, "text, a number, or true or false")
        return dict(table)

    def _source(self, place: str, table: Any) -> Source:
        _check_kind(place, table, (dict,))
        rest = dict(table)
        decode = rest.pop("decode", None)
        expect = self._expect(f"{place}.expect", rest.pop("expect", {}))
        topic, url = rest.pop("topic", ""), rest.pop("url", None)
        for name, value in (("topic", topic), ("url", url), ("decode", decode)):
            if value is not None:
                _check_kind(f"{place}.{name}", value, (str,))
        options = {name: _text(f"{place}.{name}", value) for name, value in rest.items()}
        return Source(
            topic,
            None if decode is None else self._load(f"{place}.decode", decode),
            url,
            {name: self._place(value) if name.lower() == "spool" else value for name, value in options.items()},
            expect,
        )

    def _expect(self, place: str, table: Any) -> dict[str, Expect]:
        _check_kind(place, table, (dict,))
        found: dict[str, Expect] = {}
        for name, values in table.items():
            _check_kind(f"{place}.{name}", values, (dict,))
            _check(f"{place}.{name}.", values, _EXPECT)
            if "condition" not in values:
                raise ConfigurationError(f"{place}.{name}.condition is missing", advice="Add it")
            found[name] = Expect(**values)
        return found

    def _sink(self, place: str, table: Any) -> Sink:
        _check_kind(place, table, (dict,))
        kinds = [name for name in _SINKS if name in table]
        if len(kinds) != 1:
            raise ConfigurationError(
                f"{place} has {' and '.join(kinds) or 'no target'}", advice=f"Give one of {', '.join(_SINKS)}"
            )
        kind = kinds[0]
        made, known = _SINKS[kind]
        rest = dict(table)
        target: Any = rest.pop(kind)
        _check_kind(f"{place}.{kind}", target, (str,))
        if kind == "topic":
            options = {name: _text(f"{place}.{name}", rest.pop(name)) for name in list(rest) if name not in known}
            _check(f"{place}.", rest, known)
            return TopicSink(target, **rest, options=options)
        _check(f"{place}.", rest, known)
        for name in (each for each in rest if known[each] == (list,)):
            for index, each in enumerate(rest[name]):
                _check_kind(f"{place}.{name}[{index}]", each, (str,))
        if kind == "call":
            target = self._load(f"{place}.call", target)
        elif kind == "path":
            target = self._place(target)
        return cast("Any", made)(target, **rest)

    def _place(self, path: str) -> str:
        """A directory, relative to the file; Spark would resolve it in its own working directory."""
        return path if is_whole(path) else str((self._directory / path).absolute())

    def _load(self, place: str, value: str) -> Any:
        """The object of `module:name`."""
        module, _, name = value.partition(":")
        if not all(part.isidentifier() for part in module.split(".")) or not name:
            _refuse(place, value, "module:name")
        directory = str(self._directory.absolute())
        if directory not in sys.path:
            sys.path.insert(0, directory)
        before = set(sys.modules)
        try:
            found: Any = import_module(module)
        except ImportError as error:
            raise ConfigurationError(
                f"{place} is {value!r}, and module {module} cannot be imported: {error}",
                advice="Put it beside the file, or install it",
            ) from error
        except (Exception, SystemExit) as error:
            raise ConfigurationError(
                f"{place} is {value!r}, and module {module} fails: {type(error).__name__}: {error}",
                advice="Fix the module",
            ) from error
        self._ship({module.partition(".")[0], *(set(sys.modules) - before)})
        for part in name.split("."):
            if not hasattr(found, part):
                public = [each for each in dir(found) if not each.startswith("_")]
                raise ConfigurationError(
                    f"{place} is {value!r}, and there is no {part!r} in {module}", advice=nearest(part, public)
                )
            found = getattr(found, part)
        return found

    def _ship(self, names: set[str]) -> None:
        """Pickle the modules that lie beside the file with their code: workers do not find them."""
        here = self._directory.absolute()
        for name in names:
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None)
            if file is None:
                continue
            path = Path(file).absolute()
            if (path.parent.parent if path.name == "__init__.py" else path.parent) == here:
                cast("Any", cloudpickle).register_pickle_by_value(module)


def _check(prefix: str, table: Mapping[str, Any], known: Mapping[str, tuple[type, ...]]) -> None:
    for name, value in table.items():
        if name not in known:
            raise ConfigurationError(f"There is no key {prefix}{name}", advice=nearest(name, list(known)))
        _check_kind(f"{prefix}{name}", value, known[name])


def _check_kind(place: str, value: Any, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds):
        _refuse(place, value, " or ".join(_SHOWN[kind] for kind in kinds))


def _text(place: str, value: Any) -> str:
    """An option as text for Spark."""
    if isinstance(value, (bool, dict, datetime)):
        return as_text(value)
    if not isinstance(value, _PLAIN):
        _refuse(place, value, "text, a number, a time, a table, or true or false")
    return str(value)


def _refuse(place: str, value: Any, takes: str) -> NoReturn:
    raise ConfigurationError(f"{place} is {value!r}", advice=f"It takes {takes}")
