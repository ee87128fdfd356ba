"""`broker run`: apps in one process and in workers, with probes, signals and kills."""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import InnerCli, ProcessCli, ask

SECONDS = 60.0
APPS = "tests.cli.apps"
_numbers = itertools.count(1)


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> str:
    """The prefix of the topics of the apps; those in this process read it when they are imported."""
    from tests.cli import apps

    name = f"app{os.getpid()}-{next(_numbers)}"
    monkeypatch.setenv("APP_TEST", name)
    monkeypatch.setattr(apps, "NAME", name)
    return name


def create_topics(cli: InnerCli, name: str) -> None:
    for topic in ("orders", "invoices", "dead"):
        cli("topics", "create", f"{name}-{topic}")


def order(cli: InnerCli, name: str, *numbers: int) -> None:
    cli("publish", f"{name}-orders", stdin="".join(f'{{"number": {number}}}\n' for number in numbers))


def invoices(cli: InnerCli, name: str) -> Iterator[dict[str, int]]:
    """All of them, without consuming."""
    for line in cli("peek", f"{name}-invoices", "--limit", "100000", "--json").lines:
        yield json.loads(line["data"])


def waiting(cli: InnerCli, name: str) -> int:
    """How many orders no worker has acked."""
    (found,) = cli("lag", f"{name}-orders", "billing", "--json").json
    return found["waiting"] + found["unsettled"]


def read_until(child: Any, wanted: Callable[[str], object], stream: str = "stderr") -> str:
    """What the process has written, once it is what is wanted."""
    said, file = b"", getattr(child, stream)
    deadline = time.monotonic() + SECONDS
    while not wanted(said.decode()):
        assert time.monotonic() < deadline, said.decode()
        if select.select([file], [], [], 0.1)[0]:
            part = os.read(file.fileno(), 65_536)
            assert part, said.decode()
            said += part
    return said.decode()


def addresses(text: str) -> list[str]:
    return re.findall(r"Probes and metrics are at (\S+)", text)


def test_an_app_runs_until_it_is_idle(memory: InnerCli, name: str) -> None:
    create_topics(memory, name)
    order(memory, name, 1, 2, 3)
    memory("run", f"{APPS}:idle")
    assert sorted(each["number"] for each in invoices(memory, name)) == [1, 2, 3]


def test_mistakes(memory: InnerCli, name: str) -> None:
    create_topics(memory, name)
    for target, code, says in (
        ("shop", 2, "'shop' names no App. Write MODULE:NAME"),
        (f"{APPS}:nothing", 2, "cannot be loaded: AttributeError"),
        (f"{APPS}:Order", 2, "cannot be loaded: TypeError"),
        (f"{APPS}:NAME", 2, "It has to be an App"),
        (f"{APPS}:wrong", 2, "Parameter order of handler"),
        (f"{APPS}:two", 3, f"'{name}-missing'"),
        (f"{APPS}:failing", 1, "no database"),
    ):
        assert says in memory("run", target, code=code).err
    assert "cannot be shared by processes" in memory("run", f"{APPS}:billing", "--workers", "2", code=2).err
    assert "--listen is 'x'" in memory("run", f"{APPS}:billing", "--listen", "x", code=2).err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = memory("run", f"{APPS}:billing", "--listen", port, code=2).err
        assert f"The address 127.0.0.1:{port} cannot be used" in said


def test_probes_through_a_stop(process: ProcessCli, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = process.inner
    create_topics(cli, name)
    order(cli, name, 1)
    monkeypatch.setenv("APP_UNTIL", str(tmp_path / "end"))
    child = process.start("run", f"{APPS}:slow", "--listen", "0")
    try:
        (url,) = addresses(read_until(child, addresses))
        read_until(child, lambda said: "begun" in said, "stdout")
        assert ask(url, "/ready") == (200, "ok\n")
        assert 'anybroker_received_messages_total{topic="' in ask(url, "/metrics")[1]
        child.send_signal(signal.SIGTERM)
        read_until(child, lambda said: "App billing stops" in said)
        assert ask(url, "/ready") == (503, "app billing stops\n")
        assert ask(url, "/live") == (200, "ok\n")
        (tmp_path / "end").touch()
        said, _ = child.communicate(timeout=SECONDS)
        assert (child.returncode, said.strip()) == (0, b"ended")
    finally:
        child.kill()
        child.communicate()
    assert waiting(cli, name) == 0


def test_a_second_signal_does_not_wait(
    process: ProcessCli, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = process.inner
    create_topics(cli, name)
    order(cli, name, 1)
    monkeypatch.setenv("APP_UNTIL", str(tmp_path / "never"))
    child = process.start("run", f"{APPS}:slow")
    try:
        read_until(child, lambda said: "begun" in said, "stdout")
        child.send_signal(signal.SIGTERM)
        read_until(child, lambda said: "interrupt again" in said)
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=SECONDS)
        assert child.returncode == 128 + signal.SIGTERM
    finally:
        child.kill()
        child.communicate()


def test_workers_survive_the_kill_of_one_under_load(embedded_url: str, name: str) -> None:
    # What the killed worker held is delivered again after its lease.
    process = ProcessCli(f"{embedded_url}?lease_seconds=2")
    cli, count = process.inner, 3000
    create_topics(cli, name)
    order(cli, name, *range(count))
    child = process.start("run", f"{APPS}:billing", "--workers", "2", "--listen", "0")
    try:
        read_until(child, lambda said: len(addresses(said)) == 2)
        killed = next(each["worker"] for each in until_some(cli, name))
        os.kill(killed, signal.SIGKILL)
        read_until(child, lambda said: "ended by SIGKILL; it starts again" in said and len(addresses(said)) == 1)
        deadline = time.monotonic() + SECONDS
        while waiting(cli, name):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        while len(found := list(invoices(cli, name))) < count:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=SECONDS)
        assert child.returncode == 0
    finally:
        child.kill()
        child.communicate()
    assert Counter(each["number"] for each in found) == Counter(range(count))
    workers = {each["worker"] for each in found}
    assert killed in workers
    assert len(workers) >= 2


def until_some(cli: InnerCli, name: str) -> list[dict[str, int]]:
    deadline = time.monotonic() + SECONDS
    while not (found := list(invoices(cli, name))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_worker_that_fails_ends_all(process: ProcessCli, name: str) -> None:
    create_topics(process.inner, name)
    said = process("run", f"{APPS}:failing", "--workers", "2", code=1).err
    assert "no database" in said
    assert "of 2 ended with 1; the others stop" in said
