"""Graphs: what is valid, how mistakes are told, and how a graph is shown. G1 to G5 are goka's observable behaviours."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from broker import Bytes, ConfigurationError, Json, Retry, Text, native_name
from broker_streams import (
    SKIP,
    DeadLetter,
    Group,
    Hopping,
    Input,
    Join,
    Lookup,
    Loop,
    Output,
    Persist,
    Retrying,
    Session,
    Timer,
    Tumbling,
    Visitor,
    differences,
    table_of,
)


def on_message(ctx, message): ...


async def on_message_async(ctx, message): ...


def on_timer(ctx): ...


def merge(earlier, later):
    return earlier + later


CLICKS = Input("clicks-in", Text(), on_message)
COUNTS = Persist(Json(int))
READ_IT = "Read it with ctx[persist]; for other keys send the group a message through a Loop"


def mistakes(*edges: Any, name: Any = "clicks", **options: Any) -> list[str]:
    """The lines of the error, without its head."""
    with pytest.raises(ConfigurationError) as raised:
        Group(name, *edges, **options)
    head, *lines = str(raised.value).split("\n- ")
    count = "a mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
    assert head == f"Group {name!r} has {count}:"
    assert all("\n" not in line for line in lines)
    return lines


def the_mistake(*edges: Any, **options: Any) -> str:
    (line,) = mistakes(*edges, **options)
    return line


class TestValid:
    def test_edges_are_found_by_kind(self):
        loop = Loop(Text(), on_message_async)
        users, prices, alerts = Join("users", Text()), Lookup("prices", Text()), Output("alerts", Text())
        hourly, remind, rebuild = Tumbling("hourly", Text(), size=3600), Timer("remind", on_timer), Visitor("v", merge)
        edges = (CLICKS, loop, COUNTS, users, prices, alerts, hourly, remind, rebuild)
        group = Group("clicks", *edges)
        assert group.edges == edges
        assert (group.inputs, group.loop, group.persist) == ((CLICKS,), loop, COUNTS)
        assert (group.joins, group.lookups, group.outputs) == ((users,), (prices,), (alerts,))
        assert (group.windows, group.timers, group.visitors) == ((hourly,), (remind,), (rebuild,))
        assert dict(group.consumed) == {"clicks-in": CLICKS, "clicks-loop": loop}

    def test_an_input_is_enough(self):
        group = Group("clicks", CLICKS)
        assert group.persist is None and group.loop is None
        assert group.table == "clicks-table", "checkpoints need a table"
        assert "clicks-loop" not in group.consumed

    def test_topics_of_a_native_name_are_native(self):
        group = Group(native_name("my clicks"), CLICKS)
        assert group.table == "my clicks-table"
        assert group == group.replace(edges=group.edges), "the names are accepted again"

    def test_durations_are_whole_milliseconds(self):
        assert Persist(Text()).ttl_ms is None
        assert Persist(Text(), ttl=1.0004).ttl_ms == 1000
        assert Tumbling("a", Text(), size=timedelta(minutes=1), grace=0.25).size_ms == 60_000
        assert Tumbling("a", Text(), size=1, grace=0.25).grace_ms == 250
        assert Hopping("a", Text(), size=10, advance=2.5).advance_ms == 2500
        session = Session("a", Text(), gap=30, merge=merge, close_after_idle=timedelta(seconds=90))
        assert (session.gap_ms, session.idle_seconds) == (30_000, 90.0)

    def test_a_list_of_topics_cannot_be_changed_afterwards(self):
        topics = ["one", "two"]
        edge = Input(topics, Text(), on_message)
        topics.append("three")
        assert edge.topics == ("one", "two")
        hash(edge)

    def test_edges_are_frozen(self):
        with pytest.raises(AttributeError):
            CLICKS.topic = "other"  # pyright: ignore[reportAttributeAccessIssue]

    def test_one_topic_may_be_read_and_written_with_one_codec(self):
        Group("clicks", Input("events", Json(int), on_message), Output("events", Json(int)), Join("users", Text()))
        Group("clicks", CLICKS, Join("users", Text()), Lookup("users", Text()), Output("users", Text()))

    def test_anything_that_can_be_called_is_a_callback(self):
        class Handler:
            def on_message(self, ctx, message): ...

            async def __call__(self, ctx, message): ...

        Group("clicks", Input("one", Text(), Handler()), Input("two", Text(), Handler().on_message))
        Group("clicks", Input("one", Text(), lambda ctx, message, more=1: None))


class TestGoka:
    """G1 to G5, and what goka does not validate."""

    @pytest.mark.parametrize(
        ("edges", "line"),
        [
            ([COUNTS], "There is no Input. A group consumes at least one topic"),
            ([], "There is no Input. A group consumes at least one topic"),
            ([Loop(Text(), on_message)], "There is no Input. A group consumes at least one topic"),
            (
                [CLICKS, Loop(Text(), on_message), Loop(Text(), on_message)],
                "There are 2 Loops. A group has one; let its callback tell the messages apart",
            ),
            (
                [CLICKS, COUNTS, Persist(Text()), COUNTS],
                "There are 3 Persists. A group has one table; put the values into one row",
            ),
            (
                [CLICKS, Visitor("rebuild", on_message)],
                "Visitor('rebuild'): there is no Persist, so there are no rows to visit",
            ),
            (
                [CLICKS, Output("clicks-table", Text())],
                "Output('clicks-table'): 'clicks-table' is the table of the group. Write it with ctx[persist] = value",
            ),
            (
                [Input(["clicks-in", "clicks-table"], Text(), on_message)],
                "Input('clicks-in,clicks-table'): 'clicks-table' is the table of the group. Only the group writes it",
            ),
            (
                [CLICKS, Join("clicks-table", Text())],
                f"Join('clicks-table'): 'clicks-table' is the table of the group. {READ_IT}",
            ),
            (
                [CLICKS, Lookup("clicks-table", Text())],
                f"Lookup('clicks-table'): 'clicks-table' is the table of the group. {READ_IT}",
            ),
            *(
                (
                    [CLICKS, edge],
                    f"{edge}: 'clicks-loop' is the loop of the group. Use Loop(codec, callback) and ctx.loop(...)",
                )
                for edge in (
                    Output("clicks-loop", Text()),
                    Input("clicks-loop", Text(), on_message),
                    Join("clicks-loop", Text()),
                    Lookup("clicks-loop", Text()),
                )
            ),
        ],
    )
    def test_g1_each_mistake_has_its_own_text(self, edges: list[Any], line: str):
        assert mistakes(*edges) == [line]

    @pytest.mark.parametrize("edges", [(CLICKS, Input("clicks-in", Text(), on_message_async)), (CLICKS, CLICKS)])
    def test_g2_a_topic_is_consumed_once(self, edges: Any):
        line = "'clicks-in' is consumed 2 times as Input. Name it once, and let one callback do both"
        assert mistakes(*edges) == [line]

    def test_g2_also_within_one_input(self):
        assert "'one' is consumed 2 times" in the_mistake(Input(["one", "two", "one"], Text(), on_message))

    def test_g3_the_edges_rebuild_an_equal_graph(self):
        group = Group("clicks", CLICKS, COUNTS, Output("alerts", Text()), partitioner="fnv1a", table="counts")
        again = Group("clicks", *group.edges, partitioner="fnv1a", table="counts")
        assert again == group == group.replace(edges=group.edges)
        assert hash(again) == hash(group)
        fewer = group.replace(edges=[CLICKS, COUNTS])
        assert fewer != group
        assert (fewer.outputs, fewer.table, fewer.partitioner) == ((), "counts", "fnv1a")
        assert group != Group("clicks", *group.edges)
        assert group != "clicks"

    def test_g4_the_topics_have_suffixes_or_names(self):
        assert table_of("clicks") == Group("clicks", CLICKS).table == "clicks-table"
        named = Group("clicks", CLICKS, Loop(Text(), on_message), table="clicks.t", loop="clicks.l")
        assert (named.table, named.loop_topic) == ("clicks.t", "clicks.l")
        assert set(named.consumed) == {"clicks-in", "clicks.l"}
        renamed = named.replace(name="visits")
        assert (renamed.name, renamed.table, renamed.loop_topic) == ("visits", "clicks.t", "clicks.l")
        assert Group("clicks", CLICKS).replace(name="visits").table == "visits-table"

    def test_g4_named_topics_are_checked_as_the_usual_ones(self):
        assert "'counts' is the table of the group" in the_mistake(CLICKS, Output("counts", Text()), table="counts")
        assert "'hops' is the loop of the group" in the_mistake(CLICKS, Output("hops", Text()), loop="hops")
        assert the_mistake(CLICKS, table="same", loop="same") == "table and loop are both 'same'. Name two topics"

    def test_g5_an_input_shows_all_its_topics(self):
        edge = Input(["aaa", "bbb", "ccc"], Text(), on_message)
        assert str(edge) == "Input('aaa,bbb,ccc')"
        assert edge.topics == ("aaa", "bbb", "ccc")

    @pytest.mark.parametrize(
        "other",
        [
            Output("events", Json(str)),
            Join("events", Json(str)),
            Lookup("events", Json(str)),
        ],
        ids=str,
    )
    def test_a_topic_has_one_codec(self, other: Any):
        line = the_mistake(Input("events", Json(int), on_message), other)
        assert line == f"'events' has two codecs: Json(int) in Input('events') and Json(str) in {other}. Take one"

    def test_a_topic_of_several_edges_is_told_once(self):
        edges = [Input("events", Json(int), on_message), Join("events", Json(str)), Output("events", Bytes())]
        assert "two codecs" in the_mistake(*edges)

    @pytest.mark.parametrize("name", ["", None, 5, "a", "with space", "9lives"])
    def test_a_group_has_a_portable_name(self, name: Any):
        assert "group name" in the_mistake(CLICKS, name=name)

    def test_the_table_of_another_group_is_not_written(self):
        line = the_mistake(CLICKS, Output("users-table", Text()))
        assert line.startswith("Output('users-table'): by its name 'users-table' is the table of group 'users'")

    @pytest.mark.parametrize("edge", [Join("users", Text()), Lookup("users", Text()), Output("users", Text())], ids=str)
    def test_an_edge_is_there_once(self, edge: Any):
        assert the_mistake(CLICKS, edge, edge) == f"{edge} is there 2 times. One is enough"

    def test_an_input_of_no_topic_is_not_dropped(self):
        assert the_mistake(CLICKS, Input([], Text(), on_message)) == "Input(''): it has no topic. Name at least one"


class TestMistakesOfEdges:
    @pytest.mark.parametrize(
        ("edge", "line"),
        [
            (Input("in", Text(), on_message), "Input('in'): topic name 'in' is not portable"),
            (Input(5, Text(), on_message), "Input(...): its topic is 5. It takes a str, or a list of them"),  # pyright: ignore[reportArgumentType]
            (Input("one", Text, on_message), "Input('one'): codec is the class Text. Pass an instance: Text()"),  # pyright: ignore[reportArgumentType]
            (Input("one", None, on_message), "Input('one'): its codec is None. It takes a codec"),  # pyright: ignore[reportArgumentType]
            (Input("one", 5, on_message), "Input('one'): codec is 5. It takes an object with encode and decode"),  # pyright: ignore[reportArgumentType]
            (Input("one", Text(), on_timer), "Input('one'): callback on_timer(ctx) cannot be called with context and"),  # pyright: ignore[reportArgumentType]
            (Input("one", Text(), None), "Input('one'): callback is None. It takes a function of context and message"),  # pyright: ignore[reportArgumentType]
            (Input("one", Text(), on_message, start="newest"), "Input('one'): start is 'newest'. It takes"),  # pyright: ignore[reportArgumentType]
            (Input("one", Text(), on_message, start=datetime(2026, 1, 1)), "Input('one'): start 2026-01-01T00:00:00"),  # noqa: DTZ001
            (Input("one", Text(), on_message, tombstones="drop"), "Input('one'): tombstones is 'drop'. It takes"),  # pyright: ignore[reportArgumentType]
            (Loop(Text(), on_timer), "Loop: callback on_timer(ctx) cannot be called with context and message"),  # pyright: ignore[reportArgumentType]
            (Join("", Text()), "Join(''): topic name '' is not portable"),
            (Timer("", on_timer), "Timer(''): its name is ''. It takes a str that is not empty"),
            (Timer("t", on_message), "Timer('t'): callback on_message(ctx, message) cannot be called with context:"),  # pyright: ignore[reportArgumentType]
            (Timer("t", on_timer, clock="cpu"), "Timer('t'): clock is 'cpu'. It takes \"event\" or \"wall\""),  # pyright: ignore[reportArgumentType]
            (Tumbling("w", Text(), size=0), "Tumbling('w'): size is 0. It takes seconds, or a timedelta, of 0.001"),
            (Tumbling("w", Text(), size=0.0004), "Tumbling('w'): size is 0.0004. It takes seconds"),
            (Tumbling("w", Text(), size=float("nan")), "Tumbling('w'): size is nan. It takes seconds"),
            (Tumbling("w", Text(), size=float("inf")), "Tumbling('w'): size is inf. It takes seconds"),
            (Tumbling("w", Text(), size=10**400), "Tumbling('w'): size is 1000"),
            (Tumbling("w", Text(), size=True), "Tumbling('w'): size is True. It takes seconds"),
            (Tumbling("w", Text(), size=timedelta(-1)), "Tumbling('w'): size is datetime.timedelta(days=-1)."),
            (Tumbling("w", Text(), size=1, grace=-1), "Tumbling('w'): grace is -1. It takes seconds, or a timedelta"),
            (Tumbling("w", Text(), size=1, on_close=on_timer), "Tumbling('w'): on_close on_timer(ctx) cannot be"),  # pyright: ignore[reportArgumentType]
            (Tumbling("w", Text(), size=1, on_late=5), "Tumbling('w'): on_late is 5. It takes a function of context"),  # pyright: ignore[reportArgumentType]
            (Tumbling("w", Text(), size=1, close_after_idle=0), "Tumbling('w'): close_after_idle is 0. It takes"),
            (Hopping("w", Text(), size=1, advance=2), "Hopping('w'): advance 2 is more than size 1: times between"),
            (Hopping("w", Text(), size=1, advance=0), "Hopping('w'): advance is 0. It takes seconds"),
            (Session("w", Text(), gap="1", merge=merge), "Session('w'): gap is '1'. It takes seconds"),  # pyright: ignore[reportArgumentType]
            (Session("w", Text(), gap=1, merge=on_timer), "Session('w'): merge on_timer(ctx) cannot be called with"),  # pyright: ignore[reportArgumentType]
            (Session("w", Text(), gap=1, merge=on_message_async), "Session('w'): merge on_message_async is a corou"),  # pyright: ignore[reportArgumentType]
            (Persist(Text(), ttl=0), "Persist: ttl is 0. It takes seconds, or a timedelta, of 0.001 or more, or None"),
            (Persist(Text(), version=0), "Persist: version is 0. It takes an int of 1 or more"),
            (Persist(Text(), version=2), "Persist: version is 2, and upgrade is None. Pass a function"),
            (Persist(Text(), upgrade=merge), "Persist: upgrade is given, and version is 1: there are no older rows"),
            (Persist(Text(), version=2, upgrade=on_timer), "Persist: upgrade on_timer(ctx) cannot be called"),  # pyright: ignore[reportArgumentType]
            (Persist(Text(), version=2, upgrade=on_message_async), "Persist: upgrade on_message_async is a coroutine"),  # pyright: ignore[reportArgumentType]
            ("users", "'users' is no edge. Pass objects of Input, Loop, Persist, Join, Lookup, Output, Visitor, Timer"),
            (None, "None is no edge. Pass objects of Input"),
            (Input, "<class 'broker_streams.edges.Input'> is no edge"),
        ],
    )
    def test_a_mistake_names_edge_field_and_value(self, edge: Any, line: str):
        assert the_mistake(Input("fine", Text(), on_message), edge).startswith(line)

    def test_a_generator_is_no_callback(self):
        def generates(ctx, message):
            yield

        assert "generates is a generator function" in the_mistake(Input("one", Text(), generates))  # pyright: ignore[reportArgumentType]

    @pytest.mark.parametrize(
        ("policies", "part"),
        [
            ({"on_error": Retry()}, "For a Retry take Retrying(retry)"),
            ({"on_error": "skip"}, "on_error is 'skip'. It takes STOP, SKIP, DeadLetter(topic) or Retrying"),
            ({"on_error": DeadLetter("a b")}, "on_error: dead-letter topic name 'a b' is not portable"),
            ({"on_error": Retrying(Retry(), DeadLetter(""))}, "then= of on_error: dead-letter topic name ''"),
            (
                {"on_undecodable": Retrying(Retry())},
                "on_undecodable is Retrying(5 attempts, then=STOP): the same bytes",
            ),
            (
                {"on_undecodable": DeadLetter("clicks-in")},
                "dead letters go to 'clicks-in', which is Input('clicks-in')",
            ),
            ({"on_error": DeadLetter("clicks-table")}, "go to 'clicks-table', which is the table of the group"),
            ({"on_error": DeadLetter("clicks-loop")}, "go to 'clicks-loop', which is the loop of the group"),
            ({"on_error": Retrying(Retry(), DeadLetter("users"))}, "go to 'users', which is Join('users')"),
            ({"on_error": DeadLetter("other-table")}, "go to 'other-table', which is by its name the table of group"),
        ],
    )
    @pytest.mark.parametrize("kind", ["Input", "Loop"])
    def test_policies_are_checked(self, policies: dict[str, Any], part: str, kind: str):
        if kind == "Input":
            edges = [Input("clicks-in", Text(), on_message, **policies)]
        else:
            edges = [CLICKS, Loop(Text(), on_message, **policies)]
        line = the_mistake(*edges, Join("users", Text()))
        assert part in line
        assert line.startswith(kind)

    @pytest.mark.parametrize(
        ("make", "line"),
        [
            (lambda: Timer("one", on_timer), "2 Timers have the name 'one'. Give each its own"),
            (lambda: Visitor("one", on_message), "2 Visitors have the name 'one'. Give each its own"),
            (lambda: Tumbling("one", Text(), size=1), "2 windows have the name 'one'. Give each its own"),
        ],
    )
    def test_names_are_given_once(self, make: Any, line: str):
        assert the_mistake(CLICKS, COUNTS, make(), make()) == line

    def test_windows_of_two_kinds_have_two_names(self):
        edges = (Tumbling("one", Text(), size=1), Session("one", Text(), gap=1, merge=merge))
        assert the_mistake(CLICKS, *edges) == "2 windows have the name 'one'. Give each its own"

    def test_options_are_checked(self):
        assert the_mistake(CLICKS, order="random") == 'order is \'random\'. It takes "time" or "arrival"'
        assert "partitioner is 'java'" in the_mistake(CLICKS, partitioner="java")
        assert "cannot be called with topic and key" in the_mistake(CLICKS, partitioner=on_timer)
        assert the_mistake(CLICKS, table="a b").startswith("table=: topic name 'a b' is not portable")
        assert the_mistake(CLICKS, loop=5).startswith("loop=: topic name is 5")

    def test_all_mistakes_are_told_at_once(self):
        lines = mistakes(
            Input("events", Json(int), on_timer, start="now", on_error="retry"),  # pyright: ignore[reportArgumentType]
            Join("events", Json(str)),
            Visitor("", on_timer),  # pyright: ignore[reportArgumentType]
            5,
            name="",
            order="random",
        )
        for part in (
            "group name ''",
            "order is 'random'",
            "Input('events'): callback",
            "Input('events'): start is 'now'",
            "Input('events'): on_error is 'retry'",
            "Visitor(''): its name",
            "Visitor(''): callback",
            "Visitor(''): there is no Persist",
            "5 is no edge",
            "'events' has two codecs",
        ):
            assert len([line for line in lines if line.startswith(part)]) == 1, part
        assert len(lines) == 10


def whole() -> Group:
    return Group(
        "clicks",
        Input(["clicks.web", "clicks.app"], Text(), on_message, on_error=Retrying(Retry(), DeadLetter("clicks.dead"))),
        Input("moves", Json(int), on_message_async, start=datetime(2026, 1, 1, tzinfo=UTC), on_undecodable=SKIP),
        Loop(Text(), on_message, on_error=DeadLetter("clicks.dead")),
        Persist(Json(int), version=2, upgrade=merge, ttl=timedelta(days=1)),
        Join("users", Json(str)),
        Lookup("prices", Json(float)),
        Output("alerts", Text()),
        Output("moves", Json(int)),
        Tumbling("hourly", Json(int), size=3600, grace=1.5, on_close=on_message),
        Hopping("often", Text(), size=10, advance=2.5, close_after_idle=5),
        Session("visits", Text(), gap=timedelta(minutes=30), merge=merge, on_late=on_message),
        Timer("remind", on_timer, clock="wall"),
        Visitor("rebuild", on_message),
        partitioner="fnv1a",
        order="arrival",
    )


class TestShown:
    def test_describe_lists_topics_windows_timers_and_policies(self):
        head, topics, windows, timers, visitors = [part.splitlines() for part in whole().describe().split("\n\n")]
        assert head == ["Group 'clicks': partitioner fnv1a, in order of arrival"]
        assert [line.split()[:2] for line in topics] == [
            ["topic", "role"],
            ["clicks.web", "input"],
            ["clicks.app", "input"],
            ["moves", "input"],
            ["clicks-loop", "loop"],
            ["clicks-table", "table"],
            ["users", "join"],
            ["prices", "lookup"],
            ["alerts", "output"],
            ["moves", "output"],
            ["clicks.dead", "dead"],
        ]
        assert topics[1].endswith(
            "Text()       on_message; from earliest; tombstones: skip; "
            "on_error: Retrying(5 attempts, then=DeadLetter('clicks.dead')); on_undecodable: STOP"
        )
        assert "from 2026-01-01T00:00:00+00:00" in topics[3]
        assert topics[3].endswith("on_error: STOP; on_undecodable: SKIP")
        assert topics[5].endswith("Json(int)    version 2; rows expire 86400 s after they were set")
        assert topics[10].endswith("of Input('clicks.web,clicks.app'), Loop")
        assert [" ".join(line.split()) for line in windows] == [
            "window kind codec details",
            "hourly tumbling Json(int) 3600 s; grace 1.5 s; on_close: on_message",
            "often hopping Text() 10 s every 2.5 s; closes after 5 s without messages",
            "visits session Text() gap 1800 s; on_late: on_message",
        ]
        assert [line.split() for line in timers[1:]] == [["remind", "wall", "on_timer"]]
        assert [line.split() for line in visitors[1:]] == [["rebuild", "on_message"]]

    def test_columns_are_aligned(self):
        _, topics, *_ = whole().describe().split("\n\n")
        lines = topics.splitlines()
        starts = {name: lines[0].index(name) for name in ("role", "codec", "details")}
        assert all(line[start - 2 : start] == "  " for line in lines for start in starts.values() if len(line) > start)

    def test_describe_of_a_small_group_has_no_empty_tables(self):
        shown = Group("clicks", CLICKS).describe()
        assert "window" not in shown and "timer" not in shown and "visitor" not in shown
        assert shown.splitlines()[-1].split() == ["clicks-table", "table", "-", "checkpoints"]

    def test_mermaid_draws_each_topic_once(self):
        lines = whole().mermaid().splitlines()
        assert lines[:2] == ["flowchart LR", '    group(["clicks"])']
        nodes = {line.split('"')[1]: line.strip().split("[")[0] for line in lines[2:] if "|" not in line}
        assert list(nodes) == [
            *("clicks.web", "clicks.app", "moves", "clicks-loop", "users", "prices"),
            *("clicks-table", "alerts", "clicks.dead"),
        ]
        assert len(set(nodes.values())) == len(nodes)
        arrows = [line.strip() for line in lines if "|" in line]
        assert arrows == [
            f'{nodes["clicks.web"]} -->|"on_message"| group',
            f'{nodes["clicks.app"]} -->|"on_message"| group',
            f'{nodes["moves"]} -->|"on_message_async"| group',
            f'{nodes["clicks-loop"]} -->|"on_message"| group',
            f'{nodes["users"]} -.->|"join"| group',
            f'{nodes["prices"]} -.->|"lookup"| group',
            f'group -->|"loop"| {nodes["clicks-loop"]}',
            f'{nodes["clicks-table"]} <-->|"table"| group',
            f'group -->|"output"| {nodes["alerts"]}',
            f'group -->|"output"| {nodes["moves"]}',
            f'group -.->|"dead letters"| {nodes["clicks.dead"]}',
        ]
        assert f'    {nodes["users"]}[("users")]' in lines
        assert f'    {nodes["alerts"]}[/"alerts"/]' in lines

    def test_mermaid_escapes_what_would_end_a_text(self):
        topic = native_name('a "b" <c> #d')
        shown = Group("clicks", Input(topic, Text(), lambda ctx, message: None)).mermaid()
        assert '[/"a #quot;b#quot; #lt;c#gt; #35;d"/]' in shown
        assert "#lt;lambda#gt;" in shown

    def test_repr_names_the_edges(self):
        assert repr(Group("clicks", CLICKS, COUNTS)) == "Group('clicks', Input('clicks-in'), Persist)"


class TestFingerprint:
    def test_an_equal_graph_has_an_equal_one_and_json_keeps_it(self):
        codec = Json(dict[str, Any])
        found = whole().fingerprint()
        assert codec.decode(codec.encode(found)) == found == whole().fingerprint()
        assert differences(found, whole().fingerprint()) == []

    @pytest.mark.parametrize(
        ("edges", "options", "lines"),
        [
            ([Input("more", Text(), on_message)], {}, ["input 'more' is new"]),
            ([Loop(Text(), on_message)], {}, ["loop was None, is 'clicks-loop'"]),
            ([Tumbling("hourly", Text(), size=60)], {}, ["window 'hourly' is new"]),
            ([Timer("remind", on_timer)], {}, ["timer 'remind' is new"]),
            ([], {"partitioner": "fnv1a"}, ["partitioner was 'broker', is 'fnv1a'"]),
            ([], {"table": "counts"}, ["table was 'clicks-table', is 'counts'"]),
            ([COUNTS], {}, ["version was None, is 1"]),
            ([Output("alerts", Text()), Join("users", Text()), Lookup("prices", Text())], {}, []),
            ([], {"order": "arrival"}, []),
        ],
    )
    def test_a_change_is_named(self, edges: Any, options: Any, lines: list[str]):
        before, after = Group("clicks", CLICKS).fingerprint(), Group("clicks", CLICKS, *edges, **options).fingerprint()
        assert differences(before, after) == lines
        assert differences(after, before) == [backwards(line) for line in lines]

    def test_a_changed_window_and_timer_are_named(self):
        before = Group("clicks", CLICKS, Tumbling("w", Text(), size=60), Timer("t", on_timer)).fingerprint()
        edges = (Hopping("w", Text(), size=60, advance=30), Timer("t", on_timer, clock="wall"))
        assert differences(before, Group("clicks", CLICKS, *edges).fingerprint()) == [
            "timer 't' was event time, is wall time",
            "window 'w' was tumbling 60 s of Text(), is hopping 60 s every 30 s of Text()",
        ]

    def test_another_codec_of_a_window_is_named(self):
        before = Group("clicks", CLICKS, Tumbling("w", Text(), size=60)).fingerprint()
        after = Group("clicks", CLICKS, Tumbling("w", Json(int), size=60)).fingerprint()
        assert differences(before, after) == ["window 'w' was tumbling 60 s of Text(), is tumbling 60 s of Json(int)"]

    def test_a_codec_without_a_repr_is_the_same_in_every_process(self):
        class Upper:
            def encode(self, payload: str) -> bytes:
                return payload.upper().encode()

            def decode(self, data: bytes | None) -> str:
                return (data or b"").decode()

        prints = [Group("clicks", CLICKS, Tumbling("w", codec, size=60)).fingerprint() for codec in (Upper(), Upper())]
        assert differences(prints[0], prints[1]) == []
        assert "Upper object" in prints[0]["windows"]["w"]

    def test_sizes_differ_to_the_millisecond(self):
        sizes = (0.001, 1, 1.25, 100, 123_456_789, 123_456_789.001)
        found = [Group("clicks", CLICKS, Tumbling("w", Text(), size=size)).fingerprint()["windows"] for size in sizes]
        assert [each["w"].removeprefix("tumbling ").removesuffix(" of Text()") for each in found] == [
            *("0.001 s", "1 s", "1.25 s", "100 s", "123456789 s", "123456789.001 s")
        ]

    def test_grace_and_callbacks_may_change(self):
        before = Group("clicks", CLICKS, Tumbling("w", Text(), size=60))
        after = Group("clicks", CLICKS, Tumbling("w", Text(), size=60, grace=5, on_close=on_message))
        assert differences(before.fingerprint(), after.fingerprint()) == []

    def test_a_fingerprint_of_an_older_release_may_lack_parts(self):
        assert differences({}, {"windows": {"w": "tumbling 60 s"}, "table": "t"}) == [
            "table was None, is 't'",
            "window 'w' is new",
        ]


def backwards(line: str) -> str:
    if line.endswith(" is new"):
        return line.removesuffix("new") + "gone"
    name, _, rest = line.partition(" was ")
    old, _, new = rest.partition(", is ")
    return f"{name} was {new}, is {old}"
