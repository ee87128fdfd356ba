"""Programs that run a command beside a server: their help, and commands that do not exist."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.servers import run_kafka, run_pstest, run_pubsub, run_pulsar
from tests.servers.servicebus import serve

PROGRAMS = (run_kafka, run_pulsar, run_pubsub, run_pstest, serve)


@pytest.fixture(params=PROGRAMS, ids=lambda program: program.__name__)
def program(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_names_the_command_to_give(program: ModuleType, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([option]) == 0
    assert f"python -m {program.__name__} " in capsys.readouterr().out


def test_a_command_that_does_not_exist_starts_no_server(
    program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["no-such-command", "--help"]) == 127
    assert capsys.readouterr().err == "There is no command 'no-such-command'; --help says how to name one\n"
