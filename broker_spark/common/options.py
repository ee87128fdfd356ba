"""The options of a source: strings, as Spark passes them, checked when a read is planned. Pure.

Names ignore case and underscores: `maxRows`, `max_rows` and `maxrows` are the same option. `start` and `end` are:

    earliest | latest | 2026-01-31T12:00:00+00:00 | {"0": 17, "1": "latest"} | {"orders": {"0": 17}, "refunds": {…}}

A time means the first message with a broker time at or after it. An offset is the next one to read, so an end offset is
exclusive. A partition or topic that the object does not name is read from its earliest to its latest message.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Literal, NoReturn, cast

from broker.errors import ConfigurationError, InvalidName
from broker.names import check_name, native_name
from broker_spark.common.connections import check_reachable
from broker_spark.common.files import check_place
from broker_spark.common.json_state import parse_object, shown
from broker_spark.common.schema import COLUMNS, check_columns, nearest

__all__ = [
    "CONNECTORS",
    "NATIVE",
    "Bound",
    "Position",
    "SourceOptions",
    "as_text",
    "as_texts",
    "canonical",
    "find_url",
    "is_spark_option",
    "parse_choice",
    "parse_position",
    "plain_name",
    "refuse_option",
    "topic_name",
]

Bound = Literal["earliest", "latest"]

CONNECTORS: Final = ("auto", "always", "never")
"""Values of `connector` of `broker_spark.read`, the default first."""
NATIVE: Final = "native:"
"""Begins the text of a name in the broker's own form."""
_SPARKS: Final = frozenset({"checkpointlocation", "outputmode", "queryname", "truncate", "numrows"})
"""Options that Spark adds to those of a source or sink for its own use."""
_MOST: Final = 2**31 - 1
"""The largest count that the layers below accept."""
_DIGITS: Final = 9
"""Most digits of a partition number."""
_TAKES: Final = (
    'It takes "earliest", "latest", a time such as 2026-01-31T12:00:00+00:00, or offsets as {"0": 17} '
    'or {"topic": {"0": 17}}'
)
_SIZES: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def refuse_option(name: str, value: object, takes: str) -> NoReturn:
    """:raises ConfigurationError: always, with the option, its value and the accepted values."""
    raise ConfigurationError(f"Option {name} is {value!r}", advice=f"It takes {takes}")


def canonical(options: Mapping[str, str], known: Mapping[str, Any], what: str) -> dict[str, str]:
    """The options under their names in `known`.

    :raises ConfigurationError: an option is unknown, or given twice.
    """
    names = {plain_name(name): name for name in known}
    found: dict[str, str] = {}
    for given, value in options.items():
        name = names.get(plain_name(given))
        if name is None:
            if is_spark_option(given):
                continue
            near = nearest(plain_name(given), list(names))
            for plain, spelled in names.items():
                near = re.sub(rf"\b{plain}\b", spelled, near)
            raise ConfigurationError(f"{what} has no option {given!r}", advice=near)
        if name in found:
            raise ConfigurationError(f"Option {name} is given twice", advice="Give it once")
        found[name] = str(value)
    return found


def as_text(value: Any) -> str:
    """The value of an option as a string for Spark."""
    if isinstance(value, datetime):
        return value.isoformat()
    return json.dumps(value) if isinstance(value, bool | dict) else str(value)


def as_texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as strings for Spark; None leaves an option out, as in Spark itself."""
    return {name: as_text(value) for name, value in options.items() if value is not None}


def is_spark_option(name: str) -> bool:
    """Whether Spark adds this option for its own use, so that sources and sinks ignore it."""
    return plain_name(name) in _SPARKS


def find_url(given: str | None) -> str:
    """The URL of the broker: the given one, or BROKER_URL.

    :raises ConfigurationError: there is no URL, it is invalid, or other processes cannot reach that broker.
    """
    url = given or os.environ.get("BROKER_URL", "")
    if not url:
        raise ConfigurationError("Option url is not given", advice="Give a broker's URL, or set BROKER_URL")
    check_reachable(url)
    return url


def _count(name: str, text: str) -> int:
    """A whole number of 1 or more."""
    found = int(text) if re.fullmatch(r" *[0-9]{1,10} *", text) else 0
    if not 1 <= found <= _MOST:
        refuse_option(name, text, f"a whole number of 1 or more, up to {_MOST}")
    return found


def parse_choice(name: str, text: str, choices: tuple[str, ...]) -> str:
    """One of these words."""
    if text.strip().lower() not in choices:
        refuse_option(name, text, " or ".join(choices))
    return text.strip().lower()


def topic_name(name: str) -> str:
    """The name of a topic; `native:name` is a name in the broker's own form."""
    native = name.removeprefix(NATIVE)
    if native != name:
        return native_name(native)
    return _portable(name, "topic", f"; one in the broker's own form is written {f'{NATIVE}{name}'!r}")


def _portable(name: str, what: str, more: str = "") -> str:
    """Check a name. Options are strings, so the advice cannot be `native_name`.

    :param more: other accepted forms, for the advice.
    """
    try:
        return check_name(name, what)
    except InvalidName as error:
        raise InvalidName(error.message, advice=f"{InvalidName.portable_advice}{more}") from None


def _size(name: str, text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15}) *([kmg]?)b?", text.strip().lower())
    if match is None or int(match[1]) < 1:
        refuse_option(name, text, "a size of 1 byte or more, such as 67108864 or 64m")
    return int(match[1]) * _SIZES[match[2]]


def _seconds(name: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < 1e9:
        refuse_option(name, text, "seconds above 0")
    return found


def _topics(name: str, text: str) -> tuple[str, ...]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        refuse_option(name, text, "one topic, or several with commas between")
    return tuple(dict.fromkeys(topic_name(each) for each in names))


def _pattern(name: str, text: str) -> str:
    if not text:
        refuse_option(name, text, "a regular expression for whole topic names, for instance orders-.*")
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigurationError(
            f"Option {name} is {text!r}, which is not a regular expression: {error}",
            advice="Give an expression that matches whole topic names, for instance orders-.*",
        ) from None
    return text


def _columns(name: str, text: str) -> tuple[str, ...]:
    return tuple(check_columns([part.strip() for part in text.split(",") if part.strip()]))


@dataclass(frozen=True, slots=True)
class Position:
    """A start or an end.

    :ivar default: the position of all partitions that `offsets` does not name.
    :ivar offsets: by topic, or "" for the only topic, and by partition.
    """

    default: Bound | datetime
    offsets: Mapping[str, Mapping[int, int | Bound]] = field(default_factory=dict[str, Mapping[int, "int | Bound"]])

    def of(self, topic: str) -> Mapping[int, int | Bound]:
        """The positions of the topic's partitions."""
        return self.offsets.get(topic, self.offsets.get("", {}))

    @property
    def moves(self) -> bool:
        """Whether the position changes with each new message."""
        return self.default == "latest" or any("latest" in places.values() for places in self.offsets.values())


def parse_position(name: str, text: str, default: Bound) -> Position:
    """Parse a start or end position.

    :param name: the name of the option, for the error.
    :raises ConfigurationError: the text is not a position.
    """
    text = text.strip()
    if text in {"earliest", "latest"}:
        return Position(cast("Bound", text))
    if text.startswith("{"):
        return Position(default, _offsets(name, text))
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"Option {name} is {shown(text)}", advice=_TAKES) from None
    if time.tzinfo is None:
        raise ConfigurationError(
            f"Option {name} is {text!r}, which has no timezone",
            advice=f"Add the offset, for instance {time.isoformat()}+00:00 for UTC",
        )
    return Position(time)


def _offsets(name: str, text: str) -> dict[str, Mapping[int, int | Bound]]:
    found = parse_object(text, f"Option {name}", _TAKES)
    if not found:
        raise ConfigurationError(f"Option {name} names no partition", advice=_TAKES)
    if all(map(_is_number, found)):
        return {"": _partitions(name, found)}
    for topic, partitions in found.items():
        if not isinstance(partitions, dict):
            raise ConfigurationError(f"Option {name} has {shown(partitions)} for {shown(topic)}", advice=_TAKES)
    return {topic: _partitions(name, partitions) for topic, partitions in found.items()}


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS


def _partitions(name: str, given: Mapping[str, Any]) -> dict[int, int | Bound]:
    found: dict[int, int | Bound] = {}
    for key, value in given.items():
        fits = value in {"earliest", "latest"} if isinstance(value, str) else type(value) is int and value >= 0
        if not _is_number(key) or not fits:
            raise ConfigurationError(
                f"Option {name} has {shown(value)} for partition {shown(key)}",
                advice='Partitions are numbers, and each has an offset of 0 or more, "earliest" or "latest"',
            )
        found[int(key)] = cast("int | Bound", value)
    return found


_READERS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    "url": lambda _, text: text,
    "topic": _topics,
    "topicPattern": _pattern,
    "start": lambda name, text: parse_position(name, text, "earliest"),
    "end": lambda name, text: parse_position(name, text, "latest"),
    "columns": _columns,
    "maxRows": _count,
    "maxBytes": _size,
    "minRows": _count,
    "maxDelay": _seconds,
    "tasksPerPartition": _count,
    "onDataLoss": lambda name, text: parse_choice(name, text, ("fail", "skip")),
    "arrowRows": _count,
    "group": lambda _, text: _portable(text, "group"),
    "subscription": lambda _, text: _portable(text, "subscription"),
    "spool": lambda _, text: check_place(text),
    "aheadRows": _count,
    "aheadBytes": _size,
    "tasks": _count,
}
_STREAM_ONLY: Final = ("subscription", "maxRows", "maxBytes", "minRows", "maxDelay", "group")
_LOG_ONLY: Final = ("tasksPerPartition", "onDataLoss", "group")
_QUEUE_ONLY: Final = ("spool", "aheadRows", "aheadBytes", "tasks")
_BATCH_ONLY: Final = ("end",)
_EARLIEST: Final = Position("earliest")
_LATEST: Final = Position("latest")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of a source, as `docs/spark.md` describes them.

    :ivar topics: topic names; empty if there is a pattern.
    :ivar subscription: read its messages through the spool; None: read the log.
    :ivar given: the names of the options that were given.
    """

    url: str = field(repr=False)
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    start: Position = _EARLIEST
    end: Position = _LATEST
    columns: tuple[str, ...] = COLUMNS
    max_rows: int = 200_000
    max_bytes: int | None = None
    min_rows: int | None = None
    max_delay: float = 60.0
    tasks_per_partition: int = 1
    on_data_loss: Literal["fail", "skip"] = "fail"
    arrow_rows: int = 10_000
    group: str | None = None
    subscription: str | None = None
    spool: str = field(default="", repr=False)
    ahead_rows: int = 0
    ahead_bytes: int = 256 << 20
    tasks: int = 4
    given: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Parse the options of a read. No I/O.

        :raises ConfigurationError: an option is unknown, invalid, or contradicts another.
        """
        found = canonical(options, _READERS, "The source")
        if ("topic" in found) == ("topicPattern" in found):
            raise ConfigurationError(
                "Options topic and topicPattern are both given"
                if "topic" in found
                else "Neither option topic nor topicPattern is given",
                advice="Give one of them",
            )
        values: dict[str, Any] = {name: _READERS[name](name, text) for name, text in found.items()}
        parsed = {_FIELDS.get(name, _snake(name)): value for name, value in values.items()}
        parsed["url"] = find_url(values.get("url"))
        _check_family(found, "subscription" in found)
        made = cls(**cast("Any", parsed), given=frozenset(found))
        if "aheadRows" not in found:
            made = replace(made, ahead_rows=2 * made.max_rows)
        if made.min_rows is not None and made.min_rows > made.max_rows:
            refuse_option("minRows", made.min_rows, f"no more than maxRows, which is {made.max_rows}")
        for name, position in (("start", made.start), ("end", made.end)):
            _check_topics(name, position, made)
        _check_times(made.start, made.end)
        _check_ahead(made)
        return made

    def for_batch(self) -> SourceOptions:
        """:raises ConfigurationError: an option is for streams only."""
        return self._refuse(_STREAM_ONLY, "a stream", "Remove it, or use readStream")

    def for_stream(self) -> SourceOptions:
        """:raises ConfigurationError: an option is for batch reads only."""
        return self._refuse(_BATCH_ONLY, "a batch read", "Remove it, or use read")

    def _refuse(self, names: tuple[str, ...], what: str, advice: str) -> SourceOptions:
        for name in names:
            if name in self.given:
                raise ConfigurationError(f"Option {name} is for {what} only", advice=advice)
        return self


def _check_family(found: Mapping[str, str], queue: bool) -> None:
    """:raises ConfigurationError: an option does not apply to a log or to a subscription, or the spool is missing."""
    for name in _LOG_ONLY if queue else _QUEUE_ONLY:
        if name in found:
            raise ConfigurationError(
                f"Option {name} is for a {'log' if queue else 'subscription'} only",
                advice="Remove it, or remove option subscription" if queue else "Remove it, or add option subscription",
            )
    if queue and "spool" not in found:
        raise ConfigurationError(
            "Option spool is not given",
            advice="Give a directory of this query that all executors can reach, such as one beside its checkpoint",
        )


def _check_times(start: Position, end: Position) -> None:
    """Check the order of two times. Offsets are checked later, against those of the log.

    :raises ConfigurationError: both are times, and start is after end.
    """
    if isinstance(start.default, datetime) and isinstance(end.default, datetime) and start.default > end.default:
        refuse_option("end", end.default.isoformat(), f"a time that is not before start, {start.default.isoformat()}")


def _check_ahead(made: SourceOptions) -> None:
    if made.subscription is None:
        return
    if made.start.offsets:
        refuse_option(
            "start", "offsets", "earliest, latest or a time for a subscription, and applies only to a new one"
        )
    if made.ahead_rows < (made.min_rows or 1):
        refuse_option("aheadRows", made.ahead_rows, f"no fewer than minRows, which is {made.min_rows}")


_FIELDS: Final = {"topic": "topics", "topicPattern": "pattern"}


def _snake(name: str) -> str:
    return re.sub(r"([A-Z])", r"_\1", name).lower()


def plain_name(name: str) -> str:
    """The name of an option in lower case, without underscores."""
    return name.lower().replace("_", "")


def _check_topics(name: str, position: Position, options: SourceOptions) -> None:
    for topic in position.offsets:
        if topic == "" and len(options.topics) != 1:
            refuse_option(name, "offsets of no topic", 'the topic too if there are several: {"topic": {"0": 17}}')
        if topic and options.topics and topic not in options.topics:
            refuse_option(
                name, f"an offset of topic {topic!r}", f"the topics that are read: {', '.join(options.topics)}"
            )
        if topic and options.pattern is not None and not re.fullmatch(options.pattern, topic):
            refuse_option(name, f"an offset of topic {topic!r}", f"topics that match topicPattern {options.pattern!r}")
