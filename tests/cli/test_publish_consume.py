"""`broker publish`, `broker consume` and `broker peek`."""

from __future__ import annotations

import base64
import json

import pytest

from broker.admin import AdminFacade
from broker.cli.streams import Source
from broker.errors import NotAuthorized


def bodies(result) -> list[str]:
    return [line["data"] for line in result.lines]


def consume(cli, topic, *options, subscription="s-1"):
    return cli("consume", topic, "-s", subscription, "--stop-when-idle", "1", "--json", *options)


def test_arguments_with_key_and_attributes(cli):
    topic = cli.topic()
    result = cli("publish", topic, "one", "two", "-k", "42", "-a", "type=created", "-a", "v=1", "--json")
    assert [line["argument"] for line in result.lines] == [1, 2]
    assert all(line["id"] for line in result.lines)
    assert all(not line["duplicate"] for line in result.lines)
    seen = consume(cli, topic).lines
    assert [line["data"] for line in seen] == ["one", "two"]
    assert [line["id"] for line in seen] == [line["id"] for line in result.lines]
    for line in seen:
        assert (line["key"], line["attributes"], line["topic"]) == ("42", {"type": "created", "v": "1"}, topic)
        assert line["delivery_attempt"] == 1
        assert line["publish_time"]


def test_lines_of_standard_input(cli):
    topic = cli.topic()
    assert "Published 3 messages" in cli("publish", topic, stdin=b"a\n\n\xff\xfe\n").err
    lines = consume(cli, topic).lines
    assert lines[0]["data"] == "a"
    assert lines[1]["data"] == ""
    assert "data" not in lines[2]
    assert base64.b64decode(lines[2]["data_base64"]) == b"\xff\xfe"


def test_rates(cli):
    topic = cli.topic()
    assert "Published 3 messages" in cli("publish", topic, "a", "b", "c", "--rate", "1000").err
    seen = consume(cli, topic, "--rate", "2", "--stop-when-idle", "0.3")
    assert bodies(seen) == ["a", "b", "c"]
    log = cli("consume", topic, "--records", "-g", "g-1", "--rate", "10", "--stop-when-idle", "3", "-n", "3", "--json")
    assert bodies(log) == ["a", "b", "c"]
    for command in (("publish", topic, "x"), ("consume", topic, "--ephemeral")):
        for rate in ("0", "-1", "nan", "fast"):
            refused = cli(*command, "--rate", rate, code=2)
            assert f"--rate is '{rate}'" in refused.err


def test_a_file_as_one_message(cli, tmp_path):
    topic = cli.topic()
    path = tmp_path / "body.bin"
    body = bytes(range(256)) * 100
    path.write_bytes(body)
    cli("publish", topic, "--whole", "--file", str(path), "--id", "the-one")
    [line] = consume(cli, topic).lines
    assert base64.b64decode(line["data_base64"]) == body
    assert line["id"] == "the-one"


def test_json_lines_and_back_again(cli):
    topic = cli.topic()
    copy = cli.topic()
    given = [
        {"data": "text", "key": "k", "attributes": {"a": "1"}, "id": "id-1"},
        {"payload": {"n": [1, 2]}},
        {"data_base64": "gA==", "key_base64": "/w=="},
    ]
    cli("publish", topic, "--jsonl", stdin="\n".join(map(json.dumps, given)))
    first = consume(cli, topic)
    cli("publish", copy, "--jsonl", stdin=first.out)
    second = consume(cli, copy)

    def content(result):
        return [
            {name: line.get(name) for name in ("data", "data_base64", "key", "key_base64", "attributes", "given_id")}
            for line in result.lines
        ]

    assert content(second) == content(first)
    assert json.loads(first.lines[1]["data"]) == {"n": [1, 2]}
    assert first.lines[2]["key_base64"] == "/w=="


def test_a_copy_to_the_same_topic_is_stored_unless_the_publisher_gave_its_id(cli):
    topic = cli.topic()
    cli("publish", topic, "--jsonl", stdin='{"data": "a", "id": "job-1"}\n{"data": "b"}\n{"data": "c"}')
    first = consume(cli, topic)
    assert sorted((line["data"], line["given_id"]) for line in first.lines) == [
        ("a", "job-1"),
        ("b", None),
        ("c", None),
    ]
    result = cli("publish", topic, "--jsonl", stdin=first.out)
    assert f"Published 2 messages to '{topic}', 1 dropped as a duplicate" in result.err
    assert sorted(bodies(consume(cli, topic))) == ["b", "c"]
    result = cli("publish", topic, "--jsonl", stdin='{"data": "a", "id": "job-1"}\n' * 3)
    assert f"Published 0 messages to '{topic}', 3 dropped as duplicates" in result.err


def test_a_bad_line_ends_the_run_after_publishing_earlier_lines(cli):
    topic = cli.topic()
    given = b'{"data": "1"}\n{"data": "2"}\n{"data": "3", "attributes": {"n": 3}}\n{"data": "4"}\n'
    result = cli("publish", topic, "--jsonl", stdin=given, code=6)
    assert "Line 3, field 'attributes.n': 3 is a number, not text. Write it as text: \"3\"" in result.err
    assert "Published 2 messages" in result.err
    assert "1 not published; stopped at line 3. Use --keep-going to continue after errors" in result.err
    assert bodies(consume(cli, topic)) == ["1", "2"]


def test_keep_going_is_suggested_only_if_the_run_stopped(cli):
    topic = cli.topic()
    assert "--keep-going" not in cli("publish", topic, "one", "two").err
    kept = cli("publish", topic, "--jsonl", "--keep-going", stdin='no\n{"data": "3"}', code=6)
    assert "Published 1 message" in kept.err
    assert "stopped at" not in kept.err
    alone = cli("publish", topic, "--whole", stdin=b"x" * 9_000_000, code=6)
    assert "1 not published" in alone.err
    assert "stopped at" not in alone.err


def test_keep_going_publishes_valid_lines_and_reports_the_rest(cli):
    topic = cli.topic()
    result = cli(
        "publish", topic, "--jsonl", "--keep-going", "--json", stdin='{"data": "1"}\nno\n{"data": "3"}', code=6
    )
    assert [line["line"] for line in result.lines] == [1, 3]
    [error] = [json.loads(line) for line in result.err.splitlines()]
    assert (error["line"], error["error"]["type"]) == (2, "BadLine")
    assert bodies(consume(cli, topic)) == ["1", "3"]


def test_a_refused_message_is_reported_with_its_line(cli):
    topic = cli.topic()
    big = b"x" * 9_000_000
    result = cli("publish", topic, stdin=b"ok\n" + big + b"\nmore", code=6)
    assert "Line 2" in result.err
    assert "Published 1 message" in result.err
    assert len(result.err) < 1000


@pytest.mark.parametrize("option", [(), ("--jsonl",), ("--whole",)])
def test_publish_looks_for_the_topic_before_it_reads(memory, option, monkeypatch):
    async def read(source):
        raise AssertionError("the input was read")

    monkeypatch.setattr(Source, "read", read)
    result = memory("publish", "missing", *option, stdin="{", code=3)
    assert "missing" in result.err
    assert "broker topics create" in result.err
    assert result.err.count("\n") == 1


def test_publish_needs_no_right_to_look_for_the_topic(memory, monkeypatch):
    async def refuse(admin, topic):
        raise NotAuthorized(f"Topic {topic!r} cannot be described")

    topic = memory.topic()
    monkeypatch.setattr(AdminFacade, "topic_identity", refuse)
    assert "Published 1 message" in memory("publish", topic, stdin="one").err


@pytest.mark.parametrize("name", ["memory", "process"])
def test_a_thousand_lines_in_order(name, request):
    cli = request.getfixturevalue(name)
    topic = cli.topic()
    wanted = [f"line {number}" for number in range(1000)]
    result = cli("publish", topic, "-k", "k", "--json", stdin="\n".join(wanted))
    assert [line["line"] for line in result.lines] == list(range(1, 1001))
    assert bodies(consume(cli, topic)) == wanted


def test_a_limit_leaves_the_rest_to_the_next(cli):
    topic = cli.topic()
    cli("publish", topic, "-k", "k", *"abcde")
    assert bodies(consume(cli, topic, "-n", "2")) == ["a", "b"]
    assert sorted(bodies(consume(cli, topic))) == ["c", "d", "e"]
    assert bodies(consume(cli, topic)) == []


def test_text_for_people_and_raw_bodies(cli):
    topic = cli.topic()
    cli("publish", topic, "-k", "key", "-a", "a=1", "bell\x07")
    text = cli("consume", topic, "-s", "s-1", "-n", "1").text
    assert "key" in text
    assert "a=1" in text
    assert r"bell\x07" in text
    assert "\x07" not in text
    assert cli("consume", topic, "-s", "s-2", "-n", "1", "--raw").out == b"bell\x07\n"


def test_records_of_a_group(cli):
    topic = cli.topic()
    cli("publish", topic, *"abcd")
    options = ("consume", topic, "--records", "-g", "g-1", "--json")
    first = cli(*options, "-n", "3").lines
    assert [line["data"] for line in first] == ["a", "b", "c"]
    assert all(isinstance(line["offset"], int) and isinstance(line["partition"], int) for line in first)
    assert bodies(cli(*options, "--stop-when-idle", "2")) == ["d"]
    assert bodies(cli(*options, "--stop-when-idle", "1")) == []


def test_an_ephemeral_reader_leaves_nothing(cli):
    topic = cli.topic()
    cli("publish", topic, "a")
    assert bodies(cli("consume", topic, "--ephemeral", "-n", "1", "--json")) == ["a"]


def test_follow_reads_the_log_and_settles_nothing(cli):
    topic = cli.topic("--partitions", "2")
    cli("publish", topic, *"abcd")
    options = ("consume", topic, "--follow", "--json", "--stop-when-idle", "1")
    lines = cli(*options).lines
    assert sorted(line["data"] for line in lines) == ["a", "b", "c", "d"]
    assert all(isinstance(line["offset"], int) and isinstance(line["partition"], int) for line in lines)
    assert len(cli(*options, "-n", "3").lines) == 3
    assert cli(*options, "--start", "latest").lines == []
    assert len(cli(*options, "--start", "5m").lines) == 4
    assert cli("subscriptions", "list", topic, "--json").json == []


def test_peek_shows_the_last_and_consumes_nothing(cli):
    topic = cli.topic("--partitions", "2")
    cli("subscriptions", "create", topic, "s-1")
    sent = "\n".join(json.dumps({"data": f"m{n}", "key": f"k{n}"}) for n in range(19))
    cli("publish", topic, "--jsonl", stdin=sent)
    cli("publish", topic, "m19", "--key", "k19")
    everything = cli("peek", topic, "-n", "50", "--json").lines
    assert sorted(line["data"] for line in everything) == sorted(f"m{n}" for n in range(20))
    assert {line["partition"] for line in everything} == {0, 1}
    assert cli("peek", topic, "-n", "3", "--json").lines == everything[-3:]
    assert everything[-1]["data"] == "m19"
    [one] = [line for line in everything if line["data"] == "m7"]
    options = ("peek", topic, "--partition", str(one["partition"]), "--json", "-n", "1")
    assert cli(*options, "--from", str(one["offset"])).lines == [one]
    assert "m19" in cli("peek", topic).text
    assert "no partition 9" in cli("peek", topic, "--partition", "9", code=3).err
    assert cli("lag", topic, "s-1", "--json").json[0]["waiting"] == 20


def test_peek_since_a_time(cli):
    topic = cli.topic()
    cli("publish", topic, "a", "b", "c")
    lines = cli("peek", topic, "--json").lines
    assert [line["data"] for line in lines] == ["a", "b", "c"]
    assert cli("peek", topic, "--since", lines[0]["broker_time"], "--json").lines == lines
    assert cli("peek", topic, "--since", "2100-01-01T00:00Z", "--json").lines == []
    assert cli("peek", topic, "--since", "5m", "--json").lines == lines


def test_peek_of_a_subscription_releases(cli):
    topic = cli.topic()
    cli("subscriptions", "create", topic, "s-1")
    cli("publish", topic, *"abc")
    assert sorted(bodies(cli("peek", topic, "-s", "s-1", "-n", "2", "--json"))) == ["a", "b"]
    assert sorted(bodies(consume(cli, topic))) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("consume", "topic"), "--subscription NAME"),
        (("consume", "topic", "-s", "abc", "--ephemeral"), "--subscription NAME"),
        (("consume", "topic", "-g", "abc"), "--records"),
        (("consume", "topic", "--follow", "-s", "abc"), "without a group or subscription"),
        (("consume", "topic", "-s", "abc", "--start", "soon"), "It takes earliest, latest, a time such as"),
        (("consume", "topic", "-s", "abc", "--start", "2030-01-01T00:00"), "Write 2030-01-01T00:00:00Z for UTC"),
        (("subscriptions", "create", "topic", "abc", "--start", "5"), "It takes earliest, latest, a time such as"),
        (("peek", "topic", "--since", "2030-01-01"), "--since is '2030-01-01', which has no timezone"),
        (("peek", "topic", "--since", "5"), "--since is '5'"),
        (("peek", "topic", "--since", "0m"), "--since is '0m'"),
        (("peek", "topic", "--since", "9999w9"), "--since is '9999w9'"),
        (("groups", "reset", "abc", "--to", "2030-01-01"), "--to is '2030-01-01', which has no timezone"),
        (("groups", "reset", "abc", "--to", "soon"), "It takes earliest, latest, an offset, a time such as"),
        (("consume", "topic", "-s", "a"), "not portable"),
        (("publish", "topic", "a", "--jsonl"), "--jsonl"),
        (("publish", "topic", "--jsonl", "--whole"), "--whole"),
        (("publish", "topic", "a", "b", "--id", "x"), "--id"),
        (("publish", "topic", "a", "-a", "nope"), "name=value"),
        (("publish", "topic", "--file", "no-such-file"), "cannot be read"),
        (("publish", "!", "a"), "not portable"),
        (("peek", "topic", "--from", "1", "--since", "2030-01-01"), "--since"),
        (("peek", "topic", "-s", "abc", "--from", "1"), "--from"),
        (("topics", "create", "topic", "--retention", "soon"), "7d"),
        (("topics", "create", "topic", "--retention", "99999999999w"), "too long"),
        (("topics", "create", "topic", "--partitions", "0"), "--partitions"),
        (("lag",), "TOPIC"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage_errors_are_one_line(memory, command, says):
    memory("topics", "create", "topic")
    result = memory(*command, code=2)
    assert says in result.err
    assert result.err.startswith("broker: ")
    assert result.err.count("\n") == 1
    assert not result.out
