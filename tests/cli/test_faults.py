"""Interruptions and errors of the real command: no loss, the right exit code, and no traceback."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import broker.cli.app
from broker.cli import main
from tests.cli.conftest import BROKER, ProcessCli
from tests.servers.nats import NatsServer


def rest(process, topic, subscription="s-1") -> list[str]:
    result = process.inner("consume", topic, "-s", subscription, "--stop-when-idle", "3", "--json")
    return [line["data"] for line in result.lines]


@pytest.mark.deep
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_consume_releases_unprinted_messages(process, number, code):
    topic = process.topic()
    body = "x" * 1000
    sent = [f"{n:04} {body}" for n in range(1000)]
    process.inner("publish", topic, stdin="\n".join(sent))
    # Nothing reads the output: the pipe fills, and the remaining messages cannot be printed.
    child = process.start("consume", topic, "-s", "s-1", "--json")
    first = child.stdout.readline()
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert err == b""
    printed = [json.loads(line)["data"] for line in (first + out).splitlines() if line.endswith(b"}")]
    assert 0 < len(printed) < 1000
    # Printed messages were acked, and the rest arrives at once: after a lease, this reader would have ended.
    assert sorted(printed + rest(process, topic)) == sent


@pytest.mark.deep
def test_ctrl_c_for_the_whole_process_group_still_settles(tmp_path, process):
    # Without another owner the command has started the server itself: it must not die of the same Ctrl-C.
    alone = type(process)(f"embedded://{tmp_path / 'data'}")
    topic = alone.topic()
    alone.inner("publish", topic, *"abcde")
    child = alone.start("consume", topic, "-s", "s-1", "--json", start_new_session=True)
    printed = [json.loads(child.stdout.readline())["data"] for _ in range(5)]
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, b"")
    assert sorted(printed) == list("abcde")
    assert rest(alone, topic) == []


@pytest.mark.deep
def test_a_closed_pipe_releases_unprinted_messages(process):
    topic = process.topic()
    sent = [f"{n:04} {'x' * 1000}" for n in range(500)]
    process.inner("publish", topic, stdin="\n".join(sent))
    child = process.start("consume", topic, "-s", "s-1", "--json")
    first = json.loads(child.stdout.readline())["data"]
    child.stdout.close()
    assert child.wait(20) == 141
    assert child.stderr.read() == b""
    child.stderr.close()
    # Output that is still in the pipe was not read.
    assert [first, *sorted(rest(process, topic))] == sent


def test_what_the_reader_of_a_pipe_has_not_read_is_not_acked(process):
    topic = process.topic()
    process.inner("publish", topic, "-k", "k", *"abcde")
    child = process.start("consume", topic, "-s", "s-1", "--json")
    # Without a buffer this reads one line, and the rest stays in the pipe.
    assert json.loads(child.stdout.readline())["data"] == "a"
    child.stdout.close()
    assert child.wait(20) == 141
    child.stderr.close()
    assert sorted(rest(process, topic)) == list("bcde")


def test_a_pipe_to_a_topic_that_does_not_exist_loses_nothing(process):
    topic = process.topic()
    process.inner("publish", topic, "-k", "k", *"abcd")
    pipe = f'"$0" consume {topic} -s s-1 --stop-when-idle 1 --json | "$0" publish {topic}-typo --jsonl'
    done = subprocess.run(["sh", "-c", pipe, BROKER], env=process.environment, capture_output=True, timeout=50)
    assert done.returncode == 3
    assert done.stderr.decode().startswith(f"broker: Topic '{topic}-typo' does not exist"), done.stderr
    assert sorted(rest(process, topic)) == list("abcd")


def test_an_idle_consume_notices_that_its_reader_is_gone(process):
    topic = process.topic()
    process.inner("publish", topic, "only")
    child = process.start("consume", topic, "-s", "s-1", "--json")
    child.stdout.readline()
    child.stdout.close()
    assert child.wait(20) == 141
    child.stderr.close()


@pytest.mark.deep
def test_only_printed_records_are_committed(process):
    topic = process.topic()
    sent = [f"{n:04} {'x' * 1000}" for n in range(500)]
    process.inner("publish", topic, stdin="\n".join(sent))
    options = ("consume", topic, "--records", "-g", "g-1", "--json")
    child = process.start(*options)
    first = child.stdout.readline()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    printed = [json.loads(line)["data"] for line in (first + out).splitlines() if line.endswith(b"}")]
    again = [line["data"] for line in process.inner(*options, "--stop-when-idle", "3").lines]
    assert printed + again == sent


@pytest.mark.deep
def test_an_interrupted_publish_counts_the_published_messages(process):
    topic = process.topic()
    child = process.start("publish", topic, "--json", stdin=subprocess.PIPE)
    child.stdin.write(b"one\ntwo\nthr")
    child.stdin.flush()
    receipts = [json.loads(child.stdout.readline()) for _ in range(2)]
    child.send_signal(signal.SIGINT)
    child.wait(20)
    child.communicate()
    assert child.returncode == 130
    assert [receipt["line"] for receipt in receipts] == [1, 2]
    assert rest(process, topic) == ["one", "two"]


def test_a_terminal_shows_progress_and_asks_for_confirmation(process):
    topic = process.topic()
    master, slave = pty.openpty()
    try:
        child = process.start("topics", "delete", topic, stdin=slave, stdout=slave, stderr=slave)
        seen = b""
        while b"[y/N]" not in seen:
            seen += os.read(master, 1000)
        os.write(master, b"n\n")
        assert child.wait(20) == 1
        process.inner("topics", "describe", topic)
        child = process.start("publish", topic, "one", stdin=slave, stdout=slave, stderr=slave)
        assert child.wait(20) == 0
        seen = os.read(master, 100_000)
        assert b"Published" in seen
    finally:
        os.close(master)
        os.close(slave)


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("", 2, "--url"),
        ("nonsense", 2, "not a broker URL"),
        ("embeded:", 2, "Did you mean 'embedded'?"),
        ("inmem:?no_such=1", 2, "no_such"),
        ("nats://127.0.0.1:1", 4, "server"),
        ("nats://user:secret@127.0.0.1:1", 4, "server"),
        ("kafka://127.0.0.1:1", 4, "No broker at 127.0.0.1:1"),
        ("pulsar://127.0.0.1:1", 4, "No broker at pulsar://127.0.0.1:1"),
    ],
)
def test_an_unreachable_url(url, code, says, capsys, monkeypatch):
    monkeypatch.delenv("BROKER_URL", raising=False)
    assert main(["--url", url, "topics", "list"]) == code
    reported = capsys.readouterr()
    assert says in reported.err
    assert reported.err.startswith("broker: ")
    assert reported.err.count("\n") == 1
    assert "secret" not in reported.err
    assert not reported.out


def test_errors_as_json(memory):
    error = json.loads(memory("topics", "describe", "missing", "--json", code=3).err)["error"]
    assert error["type"] == "TopicNotFound"
    assert "missing" in error["message"]
    assert "broker topics create" in error["advice"]
    assert error["retriable"] is False


@pytest.mark.parametrize(
    "command", [("lag", "orders", ""), ("groups", "describe", ""), ("peek", ""), ("dead", "list", "", "s-1")]
)
def test_an_empty_name_is_one_line(memory, command):
    reported = memory(*command, code=2).err
    assert reported.startswith("broker: The name '' is invalid: The native name is empty."), reported
    assert len(reported.splitlines()) == 1


def test_the_url_may_precede_or_follow_the_command(memory, monkeypatch, capsys):
    monkeypatch.setenv("BROKER_URL", "nonsense")
    assert main(["topics", "list", "--json", "--url", memory.url]) == 0
    assert main(["--url", memory.url, "topics", "list", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n[]\n"


def test_debug_shows_the_traceback(memory, monkeypatch, capsys):
    monkeypatch.setenv("BROKER_URL", memory.url)
    assert main(["--debug", "topics", "describe", "missing"]) == 3
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last):\n" in shown
    assert "\nbroker.errors.TopicNotFound: " in shown


def test_an_unexpected_error_is_one_line(memory, monkeypatch):
    def fail(self):
        raise RuntimeError("that\nwas not planned")

    monkeypatch.setattr("broker.bus.Bus.admin", property(fail))
    result = memory("topics", "list", code=1)
    expected = "broker: RuntimeError: that was not planned. Run the command with --debug for the traceback\n"
    assert result.err == expected


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_libraries_are_reported_with_pip_line(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from broker.cli import main; sys.exit(main(['--help']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"broker: The command line needs {missing}. Run: pip install 'anybroker[cli]'\n"


def test_another_package_adds_a_command(memory, monkeypatch):
    module = type(sys)("cli_plugin")
    exec(  # noqa: S102
        "import typer\n"
        "from broker.cli.session import AsJson, Session, command, new_app\n"
        "app = new_app('count')\n"
        "@command(app, 'count')\n"
        "async def count(session: Session, topic: str, *, as_json: AsJson = False) -> None:\n"
        "    '''Count.'''\n"
        "    info = await session.bus.admin.describe_topic(topic)\n"
        "    session.answer({'messages': info.messages}, f'{info.messages} messages')\n",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, "cli_plugin", module)
    points = [
        EntryPoint("count", "cli_plugin:app", broker.cli.app.ENTRY_POINT_GROUP),
        EntryPoint("broken", "no_such_module:app", broker.cli.app.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: points)
    topic = memory.topic()
    memory("publish", topic, "one")
    assert memory("count", topic).text == "1 messages\n"
    assert memory("count", topic, "--json").json == {"messages": 1}
    assert "no-such" in memory("count", "no-such-topic", code=3).err
    listing = memory("--help")
    assert "count" in listing.text
    assert "'broken'" in listing.err
    assert "no_such_module" in memory("broken", code=1).err


def test_help_and_version(memory):
    assert "Exit codes: 0 done" in memory("--help").text
    assert memory("--version").text.startswith("anybroker ")
    for name in broker.cli.app.BUILT_IN:
        assert "Usage:" in memory(name, "--help").text
    assert "Did you mean 'topics'?" in memory("topcs", code=2).err
    assert "Usage:" in memory(code=2).err


def test_wrong_credentials(memory):
    with NatsServer.with_token("right-token") as server:
        address = server.url.partition("://")[2].rpartition("@")[2]
        right, wrong = f"nats://right-token@{address}", f"nats://wrong-token@{address}"
        assert memory("topics", "list", "--json", "--url", right).json == []
        result = memory("topics", "list", "--url", wrong, code=5)
        assert "credentials" in result.err
        doctor = memory("doctor", "--url", wrong, code=5)
        for text in (result.err, doctor.err, doctor.text):
            assert "-token" not in text


@pytest.mark.deep
def test_a_killed_server_loses_no_message():
    with NatsServer() as server:
        process = ProcessCli(server.url)
        topic = process.topic()
        process.inner("publish", topic, *"abc")
        child = process.start("consume", topic, "-s", "s-1", "--json")
        seen = [json.loads(child.stdout.readline())["data"] for _ in range(3)]
        server.kill()
        assert json.loads(child.stderr.readline())["event"] == "Disconnected"
        server.restart()
        process.inner("publish", topic, *"def")
        while len(set(seen)) < 6:
            seen.append(json.loads(child.stdout.readline())["data"])
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=60)
        assert child.returncode == 130
        assert set(seen) == set("abcdef")
        assert rest(process, topic) == []


@pytest.mark.deep
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_is_no_error(process, closed):
    topic = process.topic()
    command = f'exec "$0" publish {topic} hello {closed}'
    done = subprocess.run(["sh", "-c", command, BROKER], env=process.environment, capture_output=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert rest(process, topic) == ["hello"]
