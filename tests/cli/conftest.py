"""The command line on the in-memory broker and an embedded nats-server, in this process and in subprocesses."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from broker.cli import main
from tests.holding import holding

BROKER = Path(sys.executable).with_name("broker")
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Result:
    """The output and exit code of a command."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


class Cli:
    """Runs `broker ARGUMENTS` to its end and checks the exit code."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, *arguments: str, stdin: bytes | str = b"", code: int = 0) -> Result:
        result = self.run(arguments, stdin.encode() if isinstance(stdin, str) else stdin)
        assert result.code == code, f"{arguments}: exit code {result.code}\n{result.text}\n{result.err}"
        assert "Traceback" not in result.err
        return result

    def run(self, arguments: tuple[str, ...], stdin: bytes) -> Result:
        raise AssertionError("either process or memory")

    def topic(self, *options: str) -> str:
        """A new topic with a unique name."""
        name = f"t{os.getpid()}-{next(_numbers)}"
        self("topics", "create", name, *options)
        return name


class ProcessCli(Cli):
    """The console script, in a subprocess."""

    def run(self, arguments: tuple[str, ...], stdin: bytes) -> Result:
        done = subprocess.run([BROKER, *arguments], input=stdin, capture_output=True, env=self.environment, timeout=50)
        return Result(done.returncode, done.stdout, done.stderr.decode())

    @property
    def inner(self) -> InnerCli:
        """The same commands in this process, for steps that are not under test: quicker by half a second."""
        return InnerCli(self.url)

    def topic(self, *options: str) -> str:
        return self.inner.topic(*options)

    def start(self, *arguments: str, **options: Any) -> Any:
        """Start it and return; the caller ends it."""
        pipe = subprocess.PIPE
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe} | options
        # Without a buffer, `communicate` continues where `readline` ended.
        return subprocess.Popen([BROKER, *arguments], env=self.environment, bufsize=0, **streams)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "BROKER_URL": self.url}


class InnerCli(Cli):
    """`main()` in this process, with streams in memory."""

    def run(self, arguments: tuple[str, ...], stdin: bytes) -> Result:
        with pytest.MonkeyPatch.context() as patch:
            out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            patch.setenv("BROKER_URL", self.url)
            code = main(arguments)
            return Result(code, out.buffer.getvalue(), err.buffer.getvalue().decode())


def ask(url: str, path: str) -> tuple[int, str]:
    """Status and body."""
    with closing(HTTPConnection(url.partition("//")[2], timeout=60)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@pytest.fixture(scope="session")
def embedded_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A durable embedded server, kept running by this process so that commands need not start their own."""
    with holding(f"embedded://{tmp_path_factory.mktemp('embedded')}") as url:
        yield url


@pytest.fixture
def process(embedded_url: str) -> ProcessCli:
    """Real processes on the embedded server."""
    return ProcessCli(embedded_url)


@pytest.fixture
def memory() -> Iterator[InnerCli]:
    """This process on a broker in memory."""
    from broker_inmem.options import BrokerOptions
    from broker_inmem.server import Broker

    # By default, messages without a key come in any order; these tests check the order of the input.
    server = Broker(BrokerOptions(shuffle=0), name=f"cli-{os.getpid()}-{next(_numbers)}")
    yield InnerCli(server.url)
    del server


@pytest.fixture
def embedded(embedded_url: str) -> InnerCli:
    """This process on the embedded server."""
    return InnerCli(embedded_url)


@pytest.fixture(params=["memory", "embedded"])
def cli(request: pytest.FixtureRequest) -> Cli:
    """In this process, on both brokers."""
    return request.getfixturevalue(request.param)
