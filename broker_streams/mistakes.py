"""What is wrong with a graph: every mistake as a line that names its edge. Pure.

Edges are taken as they come: an untyped caller may have put anything into them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal, cast, get_args

from broker import ConfigurationError, native_name
from broker.checks import check_accepts, check_choice, check_codec, check_time, is_async, is_finite, is_whole, name_of
from broker.names import NativeName, check_name
from broker.partitioners import check_partitioner
from broker_streams.edges import Hopping, Input, Loop, Session, Timer, Tombstones, Tumbling, Visitor, Windowed
from broker_streams.failures import policy_mistakes, policy_topics
from broker_streams.handles import Clock, Join, Lookup, Output, Persist, as_ms

__all__ = ["Order", "derived_name", "mistakes_of"]

Order = Literal["time", "arrival"]
"""Topics of a partition are merged by the time of their messages, or handled as they arrive."""

_TABLE: Final = "-table"
_LOOP: Final = "-loop"
_KINDS: Final = (Input, Loop, Persist, Join, Lookup, Output, Visitor, Timer, Windowed)
_LONGEST_MS: Final = 1 << 50
"""Thirty thousand years. Times are 64-bit integers on the wire."""


def derived_name(group: str, suffix: str) -> str:
    """The name of a topic of a group."""
    name = group + suffix
    return native_name(name) if isinstance(group, NativeName) else name


def mistakes_of(
    name: str, edges: Sequence[Any], *, table: object, loop: object, partitioner: object, order: object
) -> list[str]:
    """Every mistake of a graph, each a line. A later check that would only repeat an earlier one is left out."""
    found = [*_caught(check_name, name, "group")]
    for option, topic in (("table", table), ("loop", loop)):
        if topic is not None:
            found += [f"{option}=: {mistake}" for mistake in _caught(check_name, topic, "topic")]
    found += [*_caught(check_partitioner, partitioner), *_caught(check_choice, "order", order, get_args(Order))]
    for edge in edges:
        if _is(edge, *_KINDS):
            found += [f"{_shown(edge)}: {mistake}" for mistake in _edge_mistakes(edge)]
        else:
            kinds = "Input, Loop, Persist, Join, Lookup, Output, Visitor, Timer, Tumbling, Hopping or Session"
            found.append(f"{edge!r} is no edge. Pass objects of {kinds}")
    known = [edge for edge in edges if _is(edge, *_KINDS)]
    found += _count_mistakes(known)
    if isinstance(name, str):
        own_table = derived_name(name, _TABLE) if table is None else table
        own_loop = derived_name(name, _LOOP) if loop is None else loop
        if own_table == own_loop:
            found.append(f"table and loop are both {own_table!r}. Name two topics")
        found += _topic_mistakes(known, own_table, own_loop)
    return found


def _count_mistakes(edges: Sequence[Any]) -> Iterator[str]:
    """Too few and too many edges of a kind, and names that two of a kind have."""
    kinds: Counter[type] = Counter([edge.__class__ for edge in edges])
    if not kinds[Input]:
        yield "There is no Input. A group consumes at least one topic"
    if kinds[Loop] > 1:
        yield f"There are {kinds[Loop]} Loops. A group has one; let its callback tell the messages apart"
    if kinds[Persist] > 1:
        yield f"There are {kinds[Persist]} Persists. A group has one table; put the values into one row"
    if not kinds[Persist]:
        for edge in edges:
            if _is(edge, Visitor):
                yield f"{_shown(edge)}: there is no Persist, so there are no rows to visit"
    for kind, what in ((Visitor, "Visitors"), (Timer, "Timers"), (Windowed, "windows")):
        names = Counter([edge.name for edge in edges if _is(edge, kind) and isinstance(edge.name, str)])
        for name, count in names.items():
            if count > 1:
                yield f"{count} {what} have the name {name!r}. Give each its own"
    for kind in (Join, Lookup, Output):
        topics = Counter([edge.topic for edge in edges if _is(edge, kind) and isinstance(edge.topic, str)])
        for topic, count in topics.items():
            if count > 1:
                yield f"{kind.__name__}({topic!r}) is there {count} times. One is enough"


def _topic_mistakes(edges: Sequence[Any], table: object, loop: object) -> Iterator[str]:
    """Topics that are used in two ways which exclude each other."""
    uses = [(topic, edge) for edge in edges for topic in _topics(edge)]
    for topic, edge in uses:
        if topic == table:
            yield f"{_shown(edge)}: {topic!r} is the table of the group. {_for_table(edge)}"
        elif topic == loop:
            yield f"{_shown(edge)}: {topic!r} is the loop of the group. Use Loop(codec, callback) and ctx.loop(...)"
        elif _is(edge, Output) and (owner := _owner_of(topic)):
            yield (
                f"{_shown(edge)}: by its name {topic!r} is the table of group {owner!r}, which alone may write it. "
                "Send its group a message, or take another topic"
            )
    consumed = [(topic, edge) for topic, edge in uses if _is(edge, Input)]
    for topic, count in Counter([topic for topic, _ in consumed]).items():
        if count > 1:
            yield f"{topic!r} is consumed {count} times as Input. Name it once, and let one callback do both"
    yield from _codec_mistakes(uses)
    taken = {topic: _shown(edge) for topic, edge in uses if not _is(edge, Output)}
    taken |= {str(table): "the table of the group", str(loop): "the loop of the group"}
    for edge in edges:
        policies = (getattr(edge, "on_error", None), getattr(edge, "on_undecodable", None))
        for topic in sorted(policy_topics(*policies)):
            owner = _owner_of(topic)
            use = taken.get(topic, f"by its name the table of group {owner!r}" if owner else None)
            if use is not None:
                yield (
                    f"{_shown(edge)}: its dead letters go to {topic!r}, which is {use}. "
                    "Give dead letters a topic of their own"
                )


def _owner_of(topic: str) -> str:
    """The group whose table a topic is by its name; empty if it is none."""
    return topic.removesuffix(_TABLE) if topic.endswith(_TABLE) else ""


def _codec_mistakes(uses: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """Topics that two edges read or write with different codecs."""
    first: dict[str, Any] = {}
    reported: set[str] = set()
    for topic, edge in uses:
        other = first.setdefault(topic, edge)
        if other.__class__ is not edge.__class__ and other.codec != edge.codec and topic not in reported:
            reported.add(topic)
            yield (
                f"{topic!r} has two codecs: {other.codec!r} in {_shown(other)} and {edge.codec!r} in {_shown(edge)}. "
                "Take one"
            )


def _topics(edge: Any) -> list[str]:
    """The topics that an edge names."""
    if _is(edge, Input):
        topics: tuple[object, ...] = edge.topics if isinstance(edge.topic, tuple) else (edge.topic,)
    elif _is(edge, Join, Lookup, Output):
        topics = (edge.topic,)
    else:
        topics = ()
    return [topic for topic in topics if isinstance(topic, str)]


def _for_table(edge: object) -> str:
    if _is(edge, Output):
        return "Write it with ctx[persist] = value"
    if _is(edge, Input):
        return "Only the group writes it"
    return "Read it with ctx[persist]; for other keys send the group a message through a Loop"


def _edge_mistakes(edge: Any) -> Iterator[str]:
    """What is wrong with an edge by itself, without its name."""
    if _is(edge, Input):
        yield from _input_topic_mistakes(edge.topic)
    elif _is(edge, Join, Lookup, Output):
        yield from _caught(check_name, edge.topic, "topic")
    elif _is(edge, Visitor, Timer, Windowed) and not (isinstance(edge.name, str) and edge.name):
        yield f"its name is {edge.name!r}. It takes a str that is not empty"
    if not _is(edge, Visitor, Timer):
        yield from _codec_mistake(edge.codec)
    if _is(edge, Input, Loop):
        yield from _caught(check_accepts, "callback", edge.callback, "context", "message")
        yield from policy_mistakes("on_error", edge.on_error)
        yield from policy_mistakes("on_undecodable", edge.on_undecodable)
    if _is(edge, Input):
        yield from _start_mistakes(edge.start)
        yield from _caught(check_choice, "tombstones", edge.tombstones, get_args(Tombstones))
    elif _is(edge, Visitor):
        yield from _caught(check_accepts, "callback", edge.callback, "context", "meta")
    elif _is(edge, Timer):
        yield from _caught(check_accepts, "callback", edge.callback, "context")
        yield from _caught(check_choice, "clock", edge.clock, get_args(Clock))
    elif _is(edge, Persist):
        yield from _persist_mistakes(edge)
    elif _is(edge, Windowed):
        yield from _window_mistakes(edge)


def _input_topic_mistakes(topic: object) -> Iterator[str]:
    if isinstance(topic, tuple):
        if not topic:
            yield "it has no topic. Name at least one"
        for each in cast("tuple[object, ...]", topic):
            yield from _caught(check_name, each, "topic")
    elif isinstance(topic, str):
        yield from _caught(check_name, topic, "topic")
    else:
        yield f"its topic is {topic!r}. It takes a str, or a list of them"


def _codec_mistake(codec: object) -> Iterator[str]:
    if codec is None:
        yield "its codec is None. It takes a codec; Bytes() leaves bytes as they are"
    else:
        yield from _caught(check_codec, codec, envelopes=False)


def _start_mistakes(start: object) -> Iterator[str]:
    if isinstance(start, datetime):
        yield from _caught(check_time, "start", start)
    elif start not in ("earliest", "latest"):
        yield f'start is {start!r}. It takes "earliest", "latest" or a datetime'


def _persist_mistakes(edge: Persist[Any]) -> Iterator[str]:
    if not (is_whole(edge.version) and edge.version >= 1):
        yield f"version is {edge.version!r}. It takes an int of 1 or more"
    elif edge.upgrade is None and edge.version > 1:
        yield f"version is {edge.version}, and upgrade is None. Pass a function that upgrades the bytes of older rows"
    elif edge.upgrade is not None and edge.version == 1:
        yield "upgrade is given, and version is 1: there are no older rows. Raise version"
    if edge.upgrade is not None:
        yield from _plain("upgrade", edge.upgrade, "version", "bytes")
    yield from _duration("ttl", edge.ttl, optional=True)


def _window_mistakes(edge: Any) -> Iterator[str]:
    yield from _duration("grace", edge.grace, zero=True)
    yield from _duration("close_after_idle", edge.close_after_idle, optional=True)
    for name in ("on_close", "on_late"):
        if (callback := getattr(edge, name)) is not None:
            yield from _caught(check_accepts, name, callback, "context", "window")
    if _is(edge, Session):
        yield from _duration("gap", edge.gap)
        yield from _plain("merge", edge.merge, "earlier value", "later value")
    elif _is(edge, Tumbling):
        yield from _duration("size", edge.size)
    elif _is(edge, Hopping):
        wrong = [*_duration("size", edge.size), *_duration("advance", edge.advance)]
        yield from wrong
        if not wrong and edge.advance_ms > edge.size_ms:
            yield f"advance {edge.advance} is more than size {edge.size}: times between windows belong to none"


def _duration(name: str, value: object, *, zero: bool = False, optional: bool = False) -> Iterator[str]:
    if value is None and optional:
        return
    least = 0 if zero else 1
    valid = isinstance(value, timedelta) or (is_finite(value) and abs(value) <= _LONGEST_MS)
    if not valid or not least <= as_ms(cast("timedelta | float", value)) <= _LONGEST_MS:
        takes = f"seconds, or a timedelta, of {'0 or more' if zero else '0.001 or more'}"
        yield f"{name} is {value!r}. It takes {takes}{', or None' if optional else ''}"


def _plain(name: str, function: object, *arguments: str) -> Iterator[str]:
    """Check a function that the engine calls and does not await."""
    if is_async(function):
        yield f"{name} {name_of(function)} is a coroutine function. Pass a plain function"
    else:
        yield from _caught(check_accepts, name, function, *arguments)


def _is(edge: Any, *kinds: type) -> bool:
    """As isinstance. Narrowing a value of any type to a generic class would give types that are half known."""
    return isinstance(edge, kinds)


def _caught(check: Callable[..., object], *arguments: object, **options: object) -> Iterator[str]:
    try:
        check(*arguments, **options)
    except ConfigurationError as error:
        yield str(error)


def _shown(edge: object) -> str:
    """The edge by its name, even if its fields are of the wrong types."""
    try:
        return str(edge)
    except Exception:
        return f"{type(edge).__name__}(...)"
