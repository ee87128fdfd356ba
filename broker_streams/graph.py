"""`Group`: the graph of what a processor reads, keeps and writes. Frozen data, complete and checked when it is made.

    clicks = Persist(Json(int))
    alerts = Output("alerts", Json(Alert))
    group = Group("clicks", Input("clicks-topic", Json(Click), on_click), clicks, alerts)

`Group(...)` raises one `ConfigurationError` with every mistake of the graph, a line each, each naming its edge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

from broker import ConfigurationError, Partitioner
from broker.checks import name_of
from broker_streams.edges import (
    Callback,
    Edge,
    Hopping,
    Input,
    Loop,
    Session,
    Start,
    Timer,
    TimerCallback,
    Tombstones,
    Tumbling,
    Visitor,
    VisitorCallback,
    WindowCallback,
    Windowed,
)
from broker_streams.failures import policy_topics
from broker_streams.handles import Join, Lookup, Output, Persist
from broker_streams.mistakes import Order, derived_name, mistakes_of

__all__ = [
    "Callback",
    "Edge",
    "Group",
    "Hopping",
    "Input",
    "Join",
    "Lookup",
    "Loop",
    "Order",
    "Output",
    "Persist",
    "Session",
    "Start",
    "Timer",
    "TimerCallback",
    "Tombstones",
    "Tumbling",
    "Visitor",
    "VisitorCallback",
    "WindowCallback",
    "Windowed",
    "differences",
    "table_of",
]

E = TypeVar("E")


def table_of(group: str) -> str:
    """The topic of a group's table, unless the group names another: `clicks-table` of `clicks`."""
    return derived_name(group, "-table")


class Group:
    """A graph; immutable. Equal if name, topics, options and edges are.

    :param name: of the group, and the stem of its topics.
    :param edges: in any order.
    :param table: the topic of the table, by default `<name>-table`. It has the checkpoints too, so every group has one.
    :param loop: the topic of the loop, by default `<name>-loop`.
    :param partitioner: which partition a key belongs to, in every topic of the group.
    :param order: "time" merges the topics of a partition by the time of their messages, so that a repetition gives the
        same; "arrival" handles messages as they come.
    :ivar consumed: the edge of each topic that is consumed; the loop's topic is among them.
    :raises ConfigurationError: with every mistake of the graph, a line each.
    """

    __slots__ = (
        "consumed",
        "edges",
        "inputs",
        "joins",
        "lookups",
        "loop",
        "loop_topic",
        "name",
        "order",
        "outputs",
        "partitioner",
        "persist",
        "table",
        "timers",
        "visitors",
        "windows",
    )

    def __init__(
        self,
        name: str,
        *edges: Edge,
        table: str | None = None,
        loop: str | None = None,
        partitioner: Partitioner = "broker",
        order: Order = "time",
    ) -> None:
        found = mistakes_of(name, edges, table=table, loop=loop, partitioner=partitioner, order=order)
        if found:
            count = "a mistake" if len(found) == 1 else f"{len(found)} mistakes"
            raise ConfigurationError("\n- ".join([f"Group {name!r} has {count}:", *found]))
        self.name: Final = name
        self.edges: Final = edges
        self.table: Final[str] = table_of(name) if table is None else table
        self.loop_topic: Final[str] = _loop_of(name) if loop is None else loop
        self.partitioner: Final[Partitioner] = partitioner
        self.order: Final[Order] = order
        self.inputs: Final[tuple[Input[Any], ...]] = _of(Input, edges)
        self.joins: Final[tuple[Join[Any], ...]] = _of(Join, edges)
        self.lookups: Final[tuple[Lookup[Any], ...]] = _of(Lookup, edges)
        self.outputs: Final[tuple[Output[Any], ...]] = _of(Output, edges)
        self.visitors: Final = _of(Visitor, edges)
        self.timers: Final = _of(Timer, edges)
        self.windows: Final[tuple[Windowed[Any], ...]] = _of(Windowed, edges)
        self.persist: Final[Persist[Any] | None] = _first(Persist, edges)
        self.loop: Final[Loop[Any] | None] = _first(Loop, edges)
        consumed: dict[str, Input[Any] | Loop[Any]] = {topic: edge for edge in self.inputs for topic in edge.topics}
        if self.loop is not None:
            consumed[self.loop_topic] = self.loop
        self.consumed: Final[Mapping[str, Input[Any] | Loop[Any]]] = MappingProxyType(consumed)

    def replace(self, *, name: str | None = None, edges: Iterable[Edge] | None = None) -> Group:
        """A copy with another name or other edges. Its topics are named after the new name unless they were given.

        :raises ConfigurationError: the new graph has mistakes.
        """
        return Group(
            self.name if name is None else name,
            *(self.edges if edges is None else edges),
            table=None if self.table == table_of(self.name) else self.table,
            loop=None if self.loop_topic == _loop_of(self.name) else self.loop_topic,
            partitioner=self.partitioner,
            order=self.order,
        )

    def fingerprint(self) -> dict[str, Any]:
        """What the stored state and positions depend on, by name, for JSON; see `differences`."""
        return {
            "group": self.name,
            "table": self.table,
            "partitioner": _partitioner_name(self.partitioner),
            "version": None if self.persist is None else self.persist.version,
            "inputs": {topic: "input" for edge in self.inputs for topic in edge.topics},
            "loop": None if self.loop is None else self.loop_topic,
            "timers": {timer.name: f"{timer.clock} time" for timer in self.timers},
            "windows": {window.name: f"{_geometry(window)} of {_codec_name(window.codec)}" for window in self.windows},
        }

    def describe(self) -> str:
        """The graph as a text for people: topics with their roles, windows, timers, visitors and policies."""
        sections = [
            _table("topic", "role", "codec", "details", rows=self._topic_rows()),
            _table("window", "kind", "codec", "details", rows=[_window_row(window) for window in self.windows]),
            _table("timer", "clock", "callback", rows=[(t.name, t.clock, name_of(t.callback)) for t in self.timers]),
            _table("visitor", "callback", rows=[(v.name, name_of(v.callback)) for v in self.visitors]),
        ]
        order = "the time of the messages" if self.order == "time" else "arrival"
        head = f"Group {self.name!r}: partitioner {_partitioner_name(self.partitioner)}, in order of {order}"
        return "\n\n".join([head, *filter(None, sections)])

    def mermaid(self) -> str:
        """The graph as a Mermaid flowchart, for Markdown and https://mermaid.live."""
        chart = _Chart(self.name)
        for topic, edge in self.consumed.items():
            chart.arrow(chart.topic(topic), "-->", "group", name_of(edge.callback))
        for join in self.joins:
            chart.arrow(chart.topic(join.table, table=True), "-.->", "group", "join")
        for lookup in self.lookups:
            chart.arrow(chart.topic(lookup.table, table=True), "-.->", "group", "lookup")
        if self.loop is not None:
            chart.arrow("group", "-->", chart.topic(self.loop_topic), "loop")
        if self.persist is not None or self.windows or self.timers:
            chart.arrow(chart.topic(self.table, table=True), "<-->", "group", "table")
        for output in self.outputs:
            chart.arrow("group", "-->", chart.topic(output.topic), "output")
        for topic in self._dead_letters():
            chart.arrow("group", "-.->", chart.topic(topic), "dead letters")
        return chart.text()

    def _topic_rows(self) -> Iterator[tuple[str, ...]]:
        for edge in self.inputs:
            for topic in edge.topics:
                start = edge.start.isoformat() if isinstance(edge.start, datetime) else edge.start
                details = f"{name_of(edge.callback)}; from {start}; tombstones: {edge.tombstones}; {_policies(edge)}"
                yield topic, "input", repr(edge.codec), details
        if self.loop is not None:
            details = f"{name_of(self.loop.callback)}; {_policies(self.loop)}"
            yield self.loop_topic, "loop", repr(self.loop.codec), details
        if self.persist is None:
            kept = [*(["windows"] if self.windows else []), *(["timers"] if self.timers else []), "checkpoints"]
            yield self.table, "table", "-", ", ".join(kept)
        else:
            details = f"version {self.persist.version}"
            if self.persist.ttl_ms is not None:
                details += f"; rows expire {_span(self.persist.ttl_ms)} after they were set"
            yield self.table, "table", repr(self.persist.codec), details
        for join in self.joins:
            yield join.table, "join", repr(join.codec), "row of the same key"
        for lookup in self.lookups:
            yield lookup.table, "lookup", repr(lookup.codec), "row of any key; a copy of the whole table"
        for output in self.outputs:
            yield output.topic, "output", repr(output.codec), ""
        for topic, names in self._dead_letters().items():
            yield topic, "dead letters", "-", "of " + ", ".join(names)

    def _dead_letters(self) -> dict[str, list[str]]:
        """The dead-letter topics, and the edges that use each."""
        found: dict[str, list[str]] = {}
        for edge in (*self.inputs, *([self.loop] if self.loop else [])):
            for topic in sorted(policy_topics(edge.on_error, edge.on_undecodable)):
                found.setdefault(topic, []).append(str(edge))
        return found

    def _identity(self) -> tuple[object, ...]:
        return self.name, self.table, self.loop_topic, self.partitioner, self.order, self.edges

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((self.name, self.table, self.loop_topic))

    def __repr__(self) -> str:
        return f"Group({self.name!r}, {', '.join(map(str, self.edges))})"


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """How the graph of one fingerprint became that of another, each change a line; empty if they are equal."""
    found: list[str] = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if not (isinstance(old, Mapping) or isinstance(new, Mapping)):
            found.append(f"{name} was {old!r}, is {new!r}")
            continue
        one = name.removesuffix("s")
        olds, news = cast("Mapping[str, Any]", old or {}), cast("Mapping[str, Any]", new or {})
        for each in sorted({*olds, *news}):
            if each not in news:
                found.append(f"{one} {each!r} is gone")
            elif each not in olds:
                found.append(f"{one} {each!r} is new")
            elif olds[each] != news[each]:
                found.append(f"{one} {each!r} was {olds[each]}, is {news[each]}")
    return found


class _Chart:
    """Lines of a Mermaid flowchart around one group. A topic is one node, however often it is used."""

    def __init__(self, group: str) -> None:
        self._nodes: dict[str, str] = {}
        self._lines = ["flowchart LR", f"    group([{_quoted(group)}])"]
        self._arrows: list[str] = []

    def topic(self, topic: str, *, table: bool = False) -> str:
        """The node of a topic."""
        node = self._nodes.get(topic)
        if node is None:
            node = self._nodes[topic] = f"topic{len(self._nodes)}"
            shape = f"[({_quoted(topic)})]" if table else f"[/{_quoted(topic)}/]"
            self._lines.append(f"    {node}{shape}")
        return node

    def arrow(self, start: str, line: str, end: str, label: str) -> None:
        self._arrows.append(f"    {start} {line}|{_quoted(label)}| {end}")

    def text(self) -> str:
        return "\n".join([*self._lines, *self._arrows])


def _quoted(text: str) -> str:
    text = text.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
    return f'"{text}"'


def _table(*columns: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Rows under a header, aligned; empty without rows."""
    lines = [columns, *rows]
    if len(lines) == 1:
        return ""
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    return "\n".join(["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines])


def _window_row(window: Windowed[Any]) -> tuple[str, ...]:
    details = [_geometry(window).split(" ", 1)[1]]
    if window.grace_ms:
        details.append(f"grace {_span(window.grace_ms)}")
    for name, callback in (("on_close", window.on_close), ("on_late", window.on_late)):
        if callback is not None:
            details.append(f"{name}: {name_of(callback)}")
    if window.idle_seconds is not None:
        details.append(f"closes after {_span(round(window.idle_seconds * 1000))} without messages")
    return window.name, type(window).__name__.lower(), repr(window.codec), "; ".join(details)


def _geometry(window: Windowed[Any]) -> str:
    """Which windows there are: what their rows depend on."""
    kind = type(window).__name__.lower()
    if isinstance(window, Hopping):
        return f"{kind} {_span(window.size_ms)} every {_span(window.advance_ms)}"
    if isinstance(window, Session):
        return f"{kind} gap {_span(window.gap_ms)}"
    return f"{kind} {_span(window.size_ms)}" if isinstance(window, Tumbling) else kind


def _codec_name(codec: object) -> str:
    """The same in every process: without the addresses that a codec may have in its repr."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(codec))


def _span(milliseconds: int) -> str:
    """Exact seconds: fingerprints have them."""
    seconds, rest = divmod(milliseconds, 1000)
    return f"{seconds}.{rest:03}".rstrip("0").rstrip(".") + " s"


def _policies(edge: Input[Any] | Loop[Any]) -> str:
    return f"on_error: {edge.on_error!r}; on_undecodable: {edge.on_undecodable!r}"


def _partitioner_name(partitioner: Partitioner) -> str:
    return partitioner if isinstance(partitioner, str) else name_of(partitioner)


def _loop_of(group: str) -> str:
    return derived_name(group, "-loop")


def _of(kind: type[E], edges: Iterable[object]) -> tuple[E, ...]:
    return tuple([edge for edge in edges if isinstance(edge, kind)])


def _first(kind: type[E], edges: Iterable[object]) -> E | None:
    return next((edge for edge in edges if isinstance(edge, kind)), None)
