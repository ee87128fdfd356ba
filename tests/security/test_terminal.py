"""Nothing that a server or a producer sends reaches the terminal as a control."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest

import broker.cli
from broker.blocking import connect
from broker.cli import main, output
from broker.cli.session import Options, Session
from broker.driver.contract import Lag, TopicInfo
from broker.errors import BackendError
from broker.hooks import Warned
from broker.outbound import OutboundMessage
from broker.probes import ProbeServer, probe
from broker_inmem.server import Broker

FORGED = "broker: all is well"
HOSTILE = f"\x1b]0;owned\x07\x1b[2J\x9b2J\x7f\r\u202e\u2066\u2028\ud800\n{FORGED}"
"""A title and a cleared screen, in seven and eight bits; reordered text; and a line of its own."""
SENDABLE = HOSTILE.replace("\ud800", "")
ROOT = Path(broker.cli.__file__).parent.parent.parent
PRINTS: Final = {
    "broker/cli/output.py": "escapes",
    "broker/cli/streams.py": "writes the bytes that the module above has made",
    "broker/cli/session.py": "asks whether it is a terminal, and closes it",
    "broker/cli/__init__.py": "says which libraries are missing",
    "broker/testing/worker.py": "tells its parent process, in hexadecimal digits",
    "broker_inmem/pytest_plugin.py": "a number that pytest shows",
    "broker_spark/runtime/workers.py": "what PySpark prints, but for closed connections",
    "broker_streams/stores/locks.py": "writes its lock file, and nothing on a terminal",
}
"""The only modules that print, and what."""
PRINTING: Final = {
    "print",
    "pprint",
    "input",
    "echo",
    "secho",
    "Console",
    "StreamHandler",
    "print_exc",
    "print_exception",
}


def clean(text: str) -> bool:
    lines = text.split("\n")
    return all(line.isprintable() for line in lines) and not any(line.startswith(FORGED) for line in lines)


class Terminal(io.TextIOWrapper):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def server() -> Iterator[Broker]:
    server = Broker(name=f"terminal-{uuid4().hex}")
    with connect(server.url) as bus:
        bus.admin.ensure_topic("orders")
        bus.admin.ensure_subscription("orders", "billing")
        message = OutboundMessage(SENDABLE.encode(), SENDABLE, {"a" + SENDABLE: SENDABLE}, id=SENDABLE)
        bus.topic("orders").publish_batch([message])
    yield server
    Broker.forget(server.name)


def prints(text: str) -> bool:
    """Whether the code of a module can print."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(name) | ast.Attribute(_, name) if name in PRINTING:
                return True
            case ast.Attribute(ast.Name("sys"), "stdout" | "stderr" | "__stdout__" | "__stderr__"):
                return True
            case ast.Attribute(ast.Name("os"), "write" | "writev"):
                return True
            case ast.Attribute(ast.Name("typer" | "click"), "confirm" | "prompt" | "progressbar"):
                return True
            case ast.ImportFrom("sys", names) if any(name.name.strip("_").startswith("std") for name in names):
                return True
            case _:
                pass
    return False


def test_only_one_module_prints() -> None:
    packages = [path.parent for path in ROOT.glob("broker*/__init__.py")]
    assert {"broker", "broker_kafka", "broker_spark"} <= {package.name for package in packages}
    modules = [module for package in packages for module in package.rglob("*.py")]
    assert {str(module.relative_to(ROOT)) for module in modules if prints(module.read_text())} == PRINTS.keys()


@pytest.mark.parametrize(
    "code",
    [
        "print(name)",
        "sys.stdout.write(name)",
        "out = sys.stderr",
        "from sys import stdout as out",
        "typer.secho(name)",
        "os.write(1, name)",
        "logging.StreamHandler()",
        "rich.console.Console().log(name)",
        "traceback.print_exc()",
    ],
)
def test_a_module_that_prints_is_found(code: str) -> None:
    assert prints(f"def show(name):\n    {code}")
    assert not prints("subprocess.run(name, stdout=subprocess.DEVNULL)")


def test_the_library_itself_exports_no_csv() -> None:
    """Whose values a spreadsheet may take for formulas. Spark writes it if a pipeline asks for this format."""
    writes = re.compile(r"^\s*(import|from) csv\b|\b(to|write)_csv\b|\.csv\(", re.MULTILINE)
    assert [path for path in ROOT.glob("broker*/**/*.py") if writes.search(path.read_text())] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["peek", "orders"],
        ["peek", "orders", "--json"],
        ["consume", "orders", "-s", "billing", "-n", "1"],
        ["consume", "orders", "-s", "billing", "-n", "1", "--json"],
    ],
    ids=" ".join,
)
def test_messages(server: Broker, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--url", server.url]) == 0
    shown = capsys.readouterr()
    assert clean(shown.out + shown.err)
    assert "owned" in shown.out
    if "--json" in arguments:
        message = json.loads(shown.out)
        assert (message["id"], message["data"], message["key"]) == (SENDABLE, SENDABLE, SENDABLE)
        assert message["attributes"] == {"a" + SENDABLE: SENDABLE}


@pytest.mark.parametrize("terminal", [False, True])
def test_raw_is_exact_but_on_a_terminal(server: Broker, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = io.BytesIO()
    stream = (Terminal if terminal else io.TextIOWrapper)(kept, "utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["consume", "orders", "-s", "billing", "-n", "1", "--raw", "--url", server.url]) == 0
    if terminal:
        assert r"\x1b]0;owned\x07" in kept.getvalue().decode()
        assert all(line.isprintable() for line in kept.getvalue().decode().split("\n"))
    else:
        assert kept.getvalue() == SENDABLE.encode() + b"\n"


def test_binary_bodies_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal(io.BytesIO(), "utf-8"))
    assert output.raw_line(b"\xff\x1b[2J\xc2\x9b") == rb"\xff\x1b[2J\x9b" + b"\n"


@pytest.mark.parametrize("as_json", [False, True])
class TestServers:
    """What a server says: in errors, events and names."""

    def test_an_error(
        self, server: Broker, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(_: object) -> Any:
            raise BackendError(HOSTILE, advice=HOSTILE)

        monkeypatch.setattr("broker.bus.Bus.admin", property(fail))
        assert main(["topics", "list", "--url", server.url, *(["--json"] if as_json else [])]) == 1
        shown = capsys.readouterr().err
        assert clean(shown)
        assert shown.count("\n") == 1
        if as_json:
            assert json.loads(shown)["error"]["message"] == HOSTILE

    def test_names(
        self, server: Broker, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Admin:
            async def subscriptions(self, topic: str) -> list[str]:
                return [HOSTILE, topic]

            async def lag(self, topic: str, name: str) -> Lag:
                return Lag(waiting=1, unsettled=2, partitions={0: 3})

            async def describe_topic(self, name: str) -> TopicInfo:
                return TopicInfo(name=name, partitions=1, native={HOSTILE: {HOSTILE: 1}})

            async def topics(self) -> list[str]:
                return []

        monkeypatch.setattr("broker.bus.Bus.admin", property(lambda _: Admin()))
        for arguments in (["subscriptions", "list", "orders"], ["lag", "orders"]):
            assert main([*arguments, "--url", server.url, *(["--json"] if as_json else [])]) == 0
            shown = capsys.readouterr().out
            assert clean(shown)
            if as_json:
                assert json.loads(shown)[0]["subscription"] == HOSTILE
        if not as_json:
            assert main(["topics", "describe", "orders", "--url", server.url]) == 0
            assert clean(capsys.readouterr().out)

    def test_events_and_answers(self, as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
        session = Session(Options(), as_json=as_json)
        session._observe(Warned(text=HOSTILE))
        session.answer({"name": HOSTILE}, HOSTILE)
        session.note(HOSTILE)
        session.table([HOSTILE], ("A",), [(HOSTILE,)], empty="")
        shown = capsys.readouterr()
        assert clean(shown.out)
        assert clean(shown.err)
        assert (shown.out.count("\n"), shown.err.count("\n")) == (2 if as_json else 3, 2)


def test_questions_progress_and_tables_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Terminal(io.BytesIO(), "utf-8", write_through=True))
    output.ask(HOSTILE)
    output.show_table(("A",), [(HOSTILE,)])
    with output.counter(f"[red]{HOSTILE}", shown=True, total=3) as count:
        count(2)
    shown = (sys.stdout.buffer.getvalue() + sys.stderr.buffer.getvalue()).decode()  # pyright: ignore[reportAttributeAccessIssue]
    for control in ("\x1b]0;", "\x07", "\x1b[2J", "\x9b", "\u202e", "\u2066", f"\n{FORGED}"):
        assert control not in shown
    assert "owned" in shown


def test_the_log_and_tracebacks(
    server: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level

    def fail(_: object) -> Any:
        try:
            raise RuntimeError(HOSTILE)
        except RuntimeError as error:
            logging.getLogger("broker.test").exception("it said %s", HOSTILE)
            raise BackendError(HOSTILE) from error

    monkeypatch.setattr("broker.bus.Bus.admin", property(fail))
    try:
        assert main(["--debug", "topics", "list", "--url", server.url]) == 1
    finally:
        root.setLevel(level)
    shown = capsys.readouterr().err
    assert all(line.isprintable() for line in shown.split("\n"))
    assert shown.count("Traceback (most recent call last):\n") == 3
    (line,) = [line for line in shown.split("\n") if "it said" in line and "ERROR" in line]
    assert FORGED in line


def test_invalid_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topics", SENDABLE]) == 2
    assert main([SENDABLE]) == 2
    shown = capsys.readouterr().err
    assert clean(shown)
    assert shown.count("\n") == 2


def test_health_shows_no_controls() -> None:
    server = ProbeServer("127.0.0.1", 0, {"/health": probe(lambda: HOSTILE)})
    assert clean(server._answer("GET /health HTTP/1.1").decode().replace("\r\n", "\n"))


@pytest.mark.parametrize("character", ["\x7f", "\x9b", "\u202e", "\ufeff", "\U000e0001", "\ud800", "\u2028", "é", "😀"])
def test_json_means_the_same(character: str) -> None:
    line = output.json_line({f"a{character}": [character, "\\u0041"]})
    assert json.loads(line) == {f"a{character}": [character, "\\u0041"]}
    assert line.decode().rstrip("\n").isprintable()
    assert (character.encode("utf-8", "surrogatepass") in line) == character.isprintable()
