"""Servers that the tests of a process, or of all workers of a run, share."""

from __future__ import annotations

import atexit
import uuid
from typing import Self

import pytest

from tests.servers import shared
from tests.servers.server_process import Servers
from tests.servers.shared import Shared, end_those_of_groups


class Server(Servers):
    def __init__(self) -> None:
        self.did: list[str] = []
        self.address = uuid.uuid4().hex

    def start(self) -> Self:
        self.did.append("start")
        return self

    def close(self) -> None:
        self.did.append("close")


@pytest.fixture(autouse=True)
def none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_of_groups", [])


def test_one_is_started_for_all_and_another_after_its_end() -> None:
    server = Shared(Server)
    server.end()
    first = server()
    assert server() is first
    server.end()
    second = server()
    assert (first.did, second.did) == (["start", "close"], ["start"])
    server.end()


def test_servers_of_a_group_end_with_it() -> None:
    lasting, passing = Shared(Server), Shared.in_groups(Server)
    made = [lasting(), passing()]
    end_those_of_groups()
    end_those_of_groups()
    assert [each.did for each in made] == [["start"], ["start", "close"]]
    assert passing() is not made[1]
    lasting.end()
    passing.end()


def test_the_workers_of_one_run_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
    owner, other = Shared.by_all_workers(Server), Shared.by_all_workers(Server)
    started = owner()
    assert other() is not started
    assert other().address == owner().address == started.address
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
    assert Shared.by_all_workers(Server)().address != started.address


def test_one_that_does_not_start_is_closed_and_another_is_tried() -> None:
    made: list[Server] = []

    class Broken(Server):
        def start(self) -> Self:
            made.append(self)
            raise RuntimeError("no port")

    server = Shared(Broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no port"):
            server()
    assert [each.did for each in made] == [["close"], ["close"]]


def test_a_server_that_fails_to_end_does_not_keep_others() -> None:
    class Stubborn(Server):
        def close(self) -> None:
            raise RuntimeError("had to be killed")

    stubborn, other = Shared.in_groups(Stubborn), Shared.in_groups(Server)
    kept, ended = stubborn(), other()
    with pytest.raises(ExceptionGroup, match="did not end"):
        end_those_of_groups()
    atexit.unregister(kept.close)
    assert ended.did == ["start", "close"]
