"""`broker streams`: on the broker in memory in this process, and in processes on the embedded server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import broker.blocking
import broker_streams
from broker import Json, OutboundMessage, connect
from broker.cli.processes import address_of
from broker.cli.session import Options, Session
from broker_inmem.server import Broker
from broker_streams import Group, Input, Memory, View, operations
from broker_streams import command as streams_command
from broker_streams.blocking import Processor
from broker_streams.partition import PartitionState
from broker_streams.stores.directory import StateDirectory
from tests.cli.conftest import Cli, InnerCli, ProcessCli, ask
from tests.cli.streams_groups import counting

CODE = "tests.cli.streams_groups:counting"
SINGLE = "tests.cli.streams_groups:single"
PARTITIONS = 2
SECONDS = 60


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a group of its own."""
    name = f"g{os.getpid()}-{abs(hash(request.node.nodeid))}"
    monkeypatch.setenv("STREAMS_TEST", name)
    return name


def create_topics(cli: Cli, name: str) -> None:
    for topic in (f"{name}-in", f"{name}-totals"):
        cli("topics", "create", topic, "--partitions", str(PARTITIONS))


def publish(cli: Cli, name: str, *values: tuple[str, int]) -> None:
    lines = "".join(json.dumps({"key": key, "payload": value}) + "\n" for key, value in values)
    cli("publish", f"{name}-in", "--jsonl", stdin=lines)


def handle(cli: Cli, state_dir: Path, until: Callable[[dict[str, int]], bool]) -> None:
    """Run the group until its rows are as expected."""

    async def run() -> None:
        async with (
            connect(cli.url) as bus,
            asyncio.timeout(SECONDS),
            broker_streams.Processor(bus, counting(), state_dir=state_dir, checkpoint_interval=0.01) as processor,
        ):
            await processor.ready()
            while not until({key: await processor.get(key) or 0 for key in ("ann", "ben", "all")}):
                await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.fixture
def handled(memory: InnerCli, name: str, tmp_path: Path) -> InnerCli:
    """The rows are ann 3, ben 3 and all 6; the group has ended."""
    create_topics(memory, name)
    publish(memory, name, ("ann", 1), ("ben", 3), ("ann", 2))
    handle(memory, tmp_path, lambda rows: rows == {"ann": 3, "ben": 3, "all": 6})
    return memory


def rows_of(cli: Cli, name: str) -> dict[str, Any]:
    return {row["key"]: row.get("value") for row in cli("streams", "table", "export", f"{name}-table").lines}


def test_describe(memory: InnerCli, name: str) -> None:
    shown = memory("streams", "describe", CODE).text
    assert f"Group '{name}'" in shown
    assert f"{name}-in" in shown
    assert memory("streams", "describe", CODE, "--mermaid").text.startswith("flowchart LR\n")
    told = memory("streams", "describe", CODE, "--json").json
    assert (told["group"], told["table"], told["loop"]) == (name, f"{name}-table", f"{name}-loop")
    assert (told["inputs"], told["outputs"], told["visitors"]) == ([f"{name}-in"], [f"{name}-totals"], ["scale"])


def test_a_partitioner_of_its_own_is_described_by_its_name() -> None:
    def by_length(topic: str, key: bytes, partitions: int) -> int:
        return len(key) % partitions

    source = Input("orders", Json(int), lambda ctx, value: None)
    told = streams_command._group_json(Group("placed", source, partitioner=by_length))
    assert told["partitioner"].endswith("by_length")
    assert told["partitioner"] in Group("placed", source, partitioner=by_length).describe()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("tests.cli.streams_groups", "Write MODULE:NAME"),
        ("tests.cli.streams_groups:missing", "missing"),
        ("tests.cli.streams_groups:nothing", "is 3"),
        ("tests.cli.streams_groups:broken", "KeyError: 'a setting'"),
        ("no_such_module:group", "no_such_module"),
    ],
)
def test_code_that_is_no_group(memory: InnerCli, code: str, told: str) -> None:
    assert told in memory("streams", "describe", code, code=2).err


def test_rows_of_a_table(handled: InnerCli, name: str) -> None:
    cli, table = handled, f"{name}-table"
    assert cli("streams", "table", "get", table, "ann").text == "3\n"
    assert cli("streams", "table", "get", table, "all", "--json").json == {"key": "all", "value": 6}
    assert "has no row 'zoe'" in cli("streams", "table", "get", table, "zoe", code=3).err
    assert cli("streams", "table", "items", table).text == "KEY  VALUE\nall  6\nann  3\nben  3\n"
    assert [row["key"] for row in cli("streams", "table", "items", table, "--prefix", "a", "--json").lines] == [
        "all",
        "ann",
    ]
    between = ("--start", "ann", "--stop", "ben")
    assert cli("streams", "table", "items", table, *between, "--json").lines == [{"key": "ann", "value": 3}]
    assert len(cli("streams", "table", "items", table, "--limit", "2", "--json").lines) == 2
    assert "no such rows" in cli("streams", "table", "items", table, "--prefix", "z").err
    # Neither the checkpoints nor the loop's senders are rows.
    assert rows_of(cli, name) == {"all": 6, "ann": 3, "ben": 3}


@pytest.mark.parametrize("command", [("items",), ("get", "ann"), ("export",)], ids=lambda command: command[0])
def test_a_missing_table_is_of_a_group_and_not_to_be_created(memory: InnerCli, command: tuple[str, ...]) -> None:
    kind, *key = command
    told = memory("streams", "table", kind, "clicks-table", *key, code=3).err
    assert "Table 'clicks-table' does not exist. Check the name: `broker topics list`. Group 'clicks' creates" in told
    assert "topics create" not in told
    for name in ("clicks", "-table"):
        told = memory("streams", "table", kind, *key, "--", name, code=3).err
        assert "A group creates its table when it first runs" in told


def test_values_that_are_not_json(memory: InnerCli) -> None:
    async def write() -> None:
        async with connect(memory.url) as bus:
            await bus.admin.ensure_topic("odd", partitions=2, compacted=True)
            rows = {b"nan": b"NaN", b"text": b"hi", b"raw": b"\xff", b"\xfe": b"[1, 2]", b"gone": b"1"}
            await bus.topic("odd").publish_batch([OutboundMessage(data, key) for key, data in rows.items()])
            await bus.topic("odd").publish(OutboundMessage(None, "gone"))

    asyncio.run(write())
    exported = memory("streams", "table", "export", "odd").lines
    assert exported == [
        {"key": "nan", "value_base64": "TmFO"},
        {"key": "raw", "value_base64": "/w=="},
        {"key": "text", "value_base64": "aGk="},
        {"key_base64": "/g==", "value": [1, 2]},
    ]
    assert memory("streams", "table", "get", "odd", "text").text == "hi\n"
    memory("streams", "table", "get", "odd", "gone", code=3)


def test_lag(handled: InnerCli, name: str) -> None:
    cli = handled
    behind = cli("streams", "lag", name, "--json").json
    assert {each["topic"] for each in behind} == {f"{name}-in", f"{name}-loop"}
    assert len(behind) == 2 * PARTITIONS
    assert sum(each["end"] for each in behind if each["topic"] == f"{name}-in") == 3
    assert sum(each["behind"] for each in behind if each["topic"] == f"{name}-in") == 0
    publish(cli, name, ("ann", 1), ("zoe", 1))
    by_name, by_code = (cli("streams", "lag", group, "--json").json for group in (name, CODE))
    assert by_name == by_code
    assert sum(each["behind"] for each in by_name if each["topic"] == f"{name}-in") == 2
    assert cli("streams", "lag", name).text.startswith("PARTITION")
    assert "has no table" in cli("streams", "lag", "nobody", code=3).err


def test_visit_joins_the_group(handled: InnerCli, name: str, tmp_path: Path) -> None:
    cli = handled
    publish(cli, name, ("ann", 100))
    arguments = ("streams", "visit", CODE, "scale", "--meta", "10", "--state-dir", str(tmp_path))
    assert cli(*arguments, "--json").json == {"group": name, "visitor": "scale", "visited": 3}
    # It handles no messages.
    assert rows_of(cli, name) == {"all": 60, "ann": 30, "ben": 30}
    assert "no Visitor 'none'" in cli("streams", "visit", CODE, "none", code=2).err
    assert "not JSON" in cli("streams", "visit", CODE, "scale", "--meta", "{", code=2).err


def test_reset_asks_and_tells_what_it_deletes(handled: InnerCli, name: str, tmp_path: Path) -> None:
    cli, here = handled, ("--state-dir", str(tmp_path))
    planned = cli("streams", "reset", name, *here, "--table", "--dry-run").text
    for text in (f"{name}-in[0]", f"{name}-table-0.lmdb", f"rows of {name}-table", "Nothing was changed"):
        assert text in planned
    assert "--yes" in cli("streams", "reset", name, *here, code=2).err
    assert rows_of(cli, name) == {"all": 6, "ann": 3, "ben": 3}
    assert [each for each in cli("streams", "lag", name, "--json").json if each["behind"]] == []


def test_reset_with_its_table_starts_from_nothing(handled: InnerCli, name: str, tmp_path: Path) -> None:
    cli, here = handled, ("--state-dir", str(tmp_path))
    done = cli("streams", "reset", name, *here, "--table", "--yes", "--json").json
    assert (done["group"], done["to"], done["rows_deleted"], done["dry_run"]) == (name, "earliest", 3, False)
    assert {Path(path).name for path in done["stores"]} == {f"{name}-table-{n}.lmdb" for n in range(PARTITIONS)}
    assert not any(Path(path).exists() for path in done["stores"])
    assert rows_of(cli, name) == {}
    behind = {each["topic"]: 0 for each in cli("streams", "lag", name, "--json").json}
    for each in cli("streams", "lag", name, "--json").json:
        behind[each["topic"]] += each["behind"]
    assert behind == {f"{name}-in": 3, f"{name}-loop": 0}
    handle(cli, tmp_path, lambda rows: rows["all"] >= 6)
    # Nothing counts twice: the old messages of the loop are skipped, the new ones are not taken for repetitions.
    assert rows_of(cli, name) == {"all": 6, "ann": 3, "ben": 3}


def test_reset_keeps_rows_and_moves_positions(handled: InnerCli, name: str, tmp_path: Path) -> None:
    cli, here = handled, ("--state-dir", str(tmp_path))
    publish(cli, name, ("ann", 1000))
    cli("streams", "reset", CODE, *here, "--to", "latest", "--yes")
    publish(cli, name, ("ann", 10))
    handle(cli, tmp_path, lambda rows: rows["all"] >= 16)
    assert rows_of(cli, name) == {"all": 16, "ann": 13, "ben": 3}
    cli("streams", "reset", name, *here, "--yes")
    handle(cli, tmp_path, lambda rows: rows["all"] >= 16 + 1016)
    assert rows_of(cli, name) == {"all": 1032, "ann": 1026, "ben": 6}


def test_reset_is_refused_while_a_member_runs(handled: InnerCli, name: str, tmp_path: Path) -> None:
    cli = handled
    with StateDirectory(tmp_path, name, "0"):
        told = cli("streams", "reset", name, "--state-dir", str(tmp_path), "--yes", code=1).err
    assert f"process {os.getpid()}" in told


def test_members_elsewhere_are_in_the_way(
    handled: InnerCli, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = handled
    monkeypatch.setattr(operations, "_JOIN_SECONDS", 0.5)
    monkeypatch.setattr(streams_command, "_JOIN_SECONDS", 0.5)
    with broker.blocking.connect(cli.url) as bus, Processor(bus, counting(), store=Memory()) as member:
        member.ready()
        told = cli("streams", "reset", name, "--state-dir", str(tmp_path), "--table", "--yes", code=1).err
        assert f"Group '{name}' has members" in told
        told = cli("streams", "visit", CODE, "scale", "--meta", "0", "--store", "memory", code=1).err
        assert "belong to other members, so nothing was visited" in told
    assert rows_of(cli, name) == {"all": 6, "ann": 3, "ben": 3}


def test_a_visitor_that_fails_is_told(handled: InnerCli, tmp_path: Path) -> None:
    told = handled("streams", "visit", CODE, "scale", "--meta", "null", "--state-dir", str(tmp_path), code=1).err
    assert "TypeError" in told
    assert "the visitor failed" in told


def test_run_ends_in_order(process: ProcessCli, name: str, tmp_path: Path) -> None:
    cli = process.inner
    create_topics(cli, name)
    publish(cli, name, ("ann", 1), ("ben", 2))
    options = ("--state-dir", str(tmp_path), "--checkpoint-interval", "0.05s", "--listen", "0")
    child = process.start("streams", "run", SINGLE, *options)
    try:
        lines = read_until(child, lambda lines: any("Recovered partition 1" in line for line in lines))
        assert any(f"Created table {name}-table with 2 partitions" in line for line in lines)
        (url,) = (line.split()[-1] for line in lines if line.startswith("broker: Probes and metrics are at "))
        wait_for_rows(cli, name, {"ann": 1, "ben": 2})
        wait_for_page(url, "/ready", (200, "ok\n"))
        assert ask(url, "/live") == (200, "ok\n")
        status, text = ask(url, "/metrics")
        assert (status, f'anybroker_streams_processor_state{{group="{name}",state="running"}} 1\n' in text) == (
            200,
            True,
        )
        assert ask(url, "/health") == (404, "Use /live or /ready or /metrics\n")
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=SECONDS)
        assert child.returncode == 0
    finally:
        child.kill()
        child.communicate()
    assert [each for each in cli("streams", "lag", name, "--json").json if each["behind"]] == []
    reset = cli("streams", "reset", name, "--state-dir", str(tmp_path), "--table", "--yes")
    assert "2 rows deleted" in reset.text
    assert "deduplication window" in reset.err
    assert rows_of(cli, name) == {}
    assert sum(each["behind"] for each in cli("streams", "lag", name, "--json").json) == 2


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.deep)]
)
def test_processes_share_the_work_and_end_with_their_parent(
    process: ProcessCli, name: str, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    cli = process.inner
    create_topics(cli, name)
    publish(cli, name, ("ann", 1), ("ben", 2))
    options = ("--state-dir", str(tmp_path), "--checkpoint-interval", "0.05s", "--processes", "2", "--listen", "0")
    child = process.start("streams", "run", SINGLE, *options)
    try:
        wait_for_rows(cli, name, {"ann": 1, "ben": 2})
        told = ("Probes and metrics are at", "Recovered")
        wanted = [f"broker[{n}]: {text}" for n in (1, 2) for text in told]
        read_until(child, lambda lines: all(any(text in line for line in lines) for text in wanted))
        child.send_signal(number)
        # Until the last process has closed the streams that they share.
        child.communicate(timeout=SECONDS)
        assert child.returncode == status
    finally:
        child.kill()
        child.communicate()
    assert {path.name for path in (tmp_path / name).iterdir()} == {"0", "1"}


def test_a_process_that_fails_ends_all_with_its_status(process: ProcessCli, name: str, tmp_path: Path) -> None:
    cli = process.inner
    create_topics(cli, name)
    publish(cli, name, ("ann", 7))
    code = "tests.cli.streams_groups:failing"
    done = process("streams", "run", code, "--state-dir", str(tmp_path), "--processes", "2", code=1)
    assert "ValueError: no 7" in done.err
    assert "of 2 ended with 1; the others stop" in done.err


def test_processes_need_a_broker_that_they_can_share(memory: InnerCli, name: str) -> None:
    assert "cannot be shared" in memory("streams", "run", CODE, "--processes", "2", code=2).err


def test_an_address_that_cannot_be_used(memory: InnerCli, name: str, tmp_path: Path) -> None:
    run = ("streams", "run", CODE, "--state-dir", str(tmp_path), "--listen")
    assert "--listen is 'somewhere'" in memory(*run, "somewhere", code=2).err
    assert "there are 3 processes" in memory(*run, "65534", "--processes", "3", code=2).err
    create_topics(memory, name)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"The address 127.0.0.1:{port} cannot be used" in memory(*run, port, code=2).err
    # The group was not joined.
    assert f"{name}-table" not in memory("topics", "list").text


def test_processes_listen_at_the_ports_that_follow() -> None:
    assert [address_of("9000", member, 3) for member in (1, 2, 3)] == [
        ("127.0.0.1", port) for port in (9000, 9001, 9002)
    ]
    assert address_of("[::1]:0", 2, 3) == ("[::1]", 0)
    assert address_of("127.0.0.2:65535", 0, 1) == ("127.0.0.2", 65535)


async def test_a_processor_is_ready_while_it_and_its_broker_are_well(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Broker(name=name)
    async with connect(server.url) as bus:
        for topic in (f"{name}-in", f"{name}-totals"):
            await bus.admin.ensure_topic(topic, partitions=PARTITIONS)
        processor = broker_streams.Processor(bus, counting(), store=Memory())
        probes = streams_command._probes(Session(Options(), _bus=bus), processor, ("127.0.0.1", 0), 0)
        async with asyncio.timeout(SECONDS), probes:
            url = capsys.readouterr().err.split()[-1]

            async def told(wanted: tuple[int, str]) -> None:
                while await asyncio.to_thread(ask, url, "/ready") != wanted:
                    await asyncio.sleep(0.01)

            await told((503, "the processor is idle\n"))
            async with processor:
                await told((200, "ok\n"))
                server.faults.stop()
                await told((503, "the connection to the broker is broken\n"))
                assert await asyncio.to_thread(ask, url, "/live") == (200, "ok\n")
                server.faults.start()
                await told((200, "ok\n"))
                processor._states[1] = PartitionState.RECOVERING
                await told((503, "partition 1 is recovering\n"))
                processor._states[1] = PartitionState.RUNNING
            await told((503, "the processor is stopped\n"))


@pytest.mark.parametrize(
    ("option", "value"),
    [("--standby", "some"), ("--store", "paper"), ("--guarantee", "maybe"), ("--checkpoint-interval", "soon")],
)
def test_options_that_cannot_be_used(memory: InnerCli, name: str, option: str, value: str) -> None:
    told = memory("streams", "run", CODE, option, value, code=2).err
    assert value in told


def read_until(child: Any, enough: Callable[[list[str]], bool]) -> list[str]:
    """Read standard error until enough lines came."""
    lines: list[str] = []
    while not enough(lines):
        line = child.stderr.readline().decode()
        assert line, f"it ended: {lines}"
        lines.append(line)
    return lines


def wait_for_page(url: str, path: str, wanted: tuple[int, str]) -> None:
    deadline = time.monotonic() + SECONDS
    while (found := ask(url, path)) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def wait_for_rows(cli: InnerCli, name: str, wanted: dict[str, int]) -> None:
    """Follow the table until it has these rows."""

    async def wait() -> None:
        async with connect(cli.url) as bus, asyncio.timeout(SECONDS):
            await bus.admin.ensure_topic(f"{name}-table", partitions=PARTITIONS, compacted=True)
            async with View(bus, f"{name}-table", Json(int)) as view:
                await view.ready()
                changes = view.changes()
                while dict(view.items()) != wanted:
                    await anext(changes)

    asyncio.run(wait())
