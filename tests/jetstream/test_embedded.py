"""The embedded server: temporary, durable, shared, and ended with its owner."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from broker.errors import TopicNotFound, Unsupported
from broker.hooks import Connected, Event, Hooks
from broker.messages import Outcome
from broker.outbound import OutboundMessage
from broker_jetstream import server as server_module
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.server import DirectoryLock, EmbeddedServer
from broker_jetstream.settings import JetStreamSettings
from tests.jetstream.support import make_topic, publish, receive, settle_all, subscribe, until

Open = Callable[[str], Awaitable[JetStreamBackend]]

OWNER = """
import asyncio, sys
from broker.hooks import Hooks
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.settings import JetStreamSettings

async def main():
    backend = JetStreamBackend(JetStreamSettings.from_url(sys.argv[1]), Hooks())
    await backend.open()
    print(backend._server.process_id or 0, backend._connection.server, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await backend.close()

asyncio.run(main())
"""


class Owner:
    """Another process that opened the URL."""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._printed: tuple[int, str] | None = None

    def printed(self) -> tuple[int, str]:
        """The server's process, or 0 if another process owns it, and its URL."""
        if self._printed is None:
            assert self.process.stdout is not None
            number, url = self.process.stdout.readline().split()
            self._printed = int(number), url
        return self._printed

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.process.communicate("\n", timeout=10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
async def open_url() -> AsyncIterator[Open]:
    opened: list[JetStreamBackend] = []

    async def open_one(url: str, listener: Any = None) -> JetStreamBackend:
        hooks = Hooks()
        if listener is not None:
            hooks.listen(listener)
        backend = JetStreamBackend(JetStreamSettings.from_url(url), hooks)
        opened.append(backend)
        await backend.open()
        return backend

    yield open_one
    for backend in opened:
        await backend.close()


def alive(process: int) -> bool:
    """Whether a thread of the process runs; a zombie does not."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/stat")]
    except OSError:
        # A thread ended during the read: the caller checks again.
        return Path(f"/proc/{process}").exists()
    return any(stat.rpartition(")")[2].split()[0] != "Z" for stat in stats)


def command_of(process: int) -> list[str]:
    return Path(f"/proc/{process}/cmdline").read_text().split("\0")


def process_of(backend: JetStreamBackend) -> int:
    assert backend._server is not None
    number = backend._server.process_id
    assert number is not None
    return number


async def test_a_temporary_server_removes_its_directory_at_close(open_url: Open, topic: str) -> None:
    backend = await open_url("embedded:")
    assert backend._server is not None
    directory, process = backend._server._directory, process_of(backend)
    assert directory is not None
    assert directory.exists()
    assert directory.stat().st_mode & 0o077 == 0
    assert backend.capabilities.durable is False
    await make_topic(backend, topic)
    await publish(backend, topic, OutboundMessage(b"x"))
    await backend.close()
    assert not directory.exists()
    assert not alive(process)


async def test_two_temporary_servers_share_nothing(open_url: Open, topic: str) -> None:
    one, two = await open_url("embedded:"), await open_url("embedded:")
    await make_topic(one, topic)
    assert await two.admin().list_topics() == []


async def test_a_durable_directory_keeps_messages(open_url: Open, topic: str, tmp_path: Path) -> None:
    url = f"embedded://{tmp_path}/new/store"
    first = await open_url(url)
    assert first.capabilities.durable is True
    await make_topic(first, topic)
    await publish(first, topic, OutboundMessage(b"kept"))
    port = first._connection.server
    await first.close()
    second = await open_url(url)
    assert second._connection.server == port
    (message,) = await receive(await subscribe(second, topic), 1)
    assert message.data == b"kept"


@pytest.mark.parametrize("kind", ["temporary", "durable"])
async def test_an_error_names_the_server_by_its_url(open_url: Open, topic: str, tmp_path: Path, kind: str) -> None:
    url = "embedded:" if kind == "temporary" else f"embedded://{tmp_path}/a%20b"
    backend = await open_url(url)
    with pytest.raises(TopicNotFound) as caught:
        await backend.admin().describe_topic(topic)
    assert caught.value.message == f"Topic {topic!r} does not exist on {url}"


async def test_processes_share_one_server(open_url: Open, topic: str, tmp_path: Path) -> None:
    url = f"embedded://{tmp_path}"
    others = [Owner(url) for _ in range(4)]
    try:
        mine = await open_url(url)
        printed = [await asyncio.to_thread(other.printed) for other in others]
        assert {where for _, where in printed} == {mine._connection.server}
        servers = {number for number, _ in printed if number} | {mine._server.process_id or 0} - {0}  # pyright: ignore[reportOptionalMemberAccess]
        assert len(servers) == 1
    finally:
        for other in others:
            other.close()


async def test_the_server_ends_with_its_owner_and_the_next_one_starts_at_once(
    open_url: Open, topic: str, tmp_path: Path
) -> None:
    url = f"embedded://{tmp_path}"
    owner = Owner(url)
    process, where = await asyncio.to_thread(owner.printed)
    assert alive(process)
    owner.kill()
    await until(lambda: not alive(process))
    begin = time.monotonic()
    backend = await open_url(url)
    assert time.monotonic() - begin < 10
    assert backend._connection.server == where
    assert process_of(backend) != process


async def test_another_process_restarts_the_server_when_the_owner_is_killed(
    open_url: Any, topic: str, tmp_path: Path
) -> None:
    url = f"embedded://{tmp_path}"
    owner = Owner(url)
    try:
        await asyncio.to_thread(owner.printed)
        events: list[list[Event]] = [[], []]
        joiners = [await open_url(url, each.append) for each in events]
        await make_topic(joiners[0], topic)
        source = await subscribe(joiners[1], topic)
        await publish(joiners[0], topic, OutboundMessage(b"before"))
        assert len(await receive(source, 1)) == 1
        owner.kill()
        await until(lambda: all(Connected(server=joiners[0]._connection.server, again=True) in each for each in events))
        await publish(joiners[0], topic, OutboundMessage(b"after"))
        (message,) = await receive(source, 1)
        assert message.data == b"after"
        assert await source.settle(settle_all([message], Outcome.ACK)) == [None]
        numbers = [joiner._server.process_id for joiner in joiners]
        assert sum(number is not None for number in numbers) == 1
    finally:
        owner.close()


async def test_a_second_backend_of_the_process_restarts_the_server_when_the_owner_closes(
    open_url: Any, topic: str, tmp_path: Path
) -> None:
    url = f"embedded://{tmp_path}"
    owner, joiner = await open_url(url), await open_url(url)
    await make_topic(owner, topic)
    source = await subscribe(joiner, topic)
    await owner.close()
    await publish(joiner, topic, OutboundMessage(b"x"))
    assert len(await receive(source, 1)) == 1


async def test_clients_follow_the_server_to_another_port(open_url: Any, topic: str, tmp_path: Path) -> None:
    url = f"embedded://{tmp_path}"
    owner, joiner = await open_url(url), await open_url(url)
    await make_topic(owner, topic)
    source = await subscribe(joiner, topic)
    before = joiner._connection.server
    # The next server gets another port than the old one.
    (tmp_path / "port").write_text("1")
    await owner.close()
    await publish(joiner, topic, OutboundMessage(b"x"))
    assert joiner._connection.server != before
    assert len(await receive(source, 1)) == 1


async def test_a_killed_server_is_restarted(open_url: Any, topic: str) -> None:
    backend = await open_url("embedded:")
    await make_topic(backend, topic)
    source = await subscribe(backend, topic)
    os.kill(process_of(backend), signal.SIGKILL)
    await publish(backend, topic, OutboundMessage(b"x"))
    assert len(await receive(source, 1)) == 1


async def test_clients_without_the_token_are_refused(open_url: Open, topic: str, tmp_path: Path) -> None:
    from broker.errors import AuthenticationFailed

    backend = await open_url(f"embedded://{tmp_path}")
    stranger = JetStreamBackend(JetStreamSettings(servers=(backend._connection.server,)), Hooks())
    with pytest.raises(AuthenticationFailed):
        await stranger.open()
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0
    assert (tmp_path / "nats-server.conf").stat().st_mode & 0o077 == 0


async def test_directories_of_killed_processes_are_removed(
    monkeypatch: pytest.MonkeyPatch, open_url: Open, tmp_path: Path
) -> None:
    # Servers of other tests remove such directories too.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owner = Owner("embedded:")
    process, _ = await asyncio.to_thread(owner.printed)
    config = command_of(process)[2]
    directory = Path(config).parent
    assert directory.parent == tmp_path
    owner.kill()
    await until(lambda: not alive(process))
    assert directory.exists()
    await open_url("embedded:")
    assert not directory.exists()


async def test_a_directory_that_is_being_created_is_not_removed(
    monkeypatch: pytest.MonkeyPatch, open_url: Open
) -> None:
    lock, swept = fcntl.flock, 0

    def sweep_first(descriptor: int, operation: int) -> None:
        nonlocal swept
        if not swept:
            swept += 1
            server_module._sweep()  # as another process does that starts between the creation and the lock
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    backend = await open_url("embedded:")
    assert swept == 1
    assert Path(command_of(process_of(backend))[2]).parent.exists()


async def test_several_temporary_servers_start_concurrently(open_url: Open) -> None:
    backends = await asyncio.gather(*(open_url("embedded:") for _ in range(4)))
    assert len({process_of(backend) for backend in backends}) == 4


async def test_a_temporary_directory_stays_locked_while_its_server_is_down() -> None:
    server = EmbeddedServer("")
    await server.ensure()
    directory, process = server._directory, server.process_id
    assert directory is not None and process is not None
    os.kill(process, signal.SIGKILL)
    await until(lambda: not alive(process))
    server_module._sweep()
    assert (await server.ensure()).owner
    server_module._sweep()
    assert server._directory == directory and directory.exists()
    await server.stop()
    assert not directory.exists()


def test_a_lock_on_a_removed_file_is_taken_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, lock, calls = tmp_path / "lock", fcntl.flock, 0

    def remove_first(descriptor: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            path.unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    lock_of_file = DirectoryLock.take(path)
    assert lock_of_file is not None and calls == 2
    assert DirectoryLock.take(path) is None
    lock_of_file.release()
    again = DirectoryLock.take(path)
    assert again is not None
    again.release()


async def test_a_forked_child_does_not_keep_the_lock(open_url: Open, topic: str, tmp_path: Path) -> None:
    url = f"embedded://{tmp_path}"
    backend = await open_url(url)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        await backend.close()
        async with asyncio.timeout(60):
            assert (await open_url(url)).capabilities.durable
    finally:
        os.close(writer)
        await asyncio.to_thread(os.waitpid, child, 0)
        os.close(reader)


async def test_a_directory_may_have_any_name(open_url: Open, topic: str, tmp_path: Path) -> None:
    directory = tmp_path / 'déjà vu "日本"'
    directory.mkdir()
    backend = await open_url(f"embedded://{quote(str(directory))}")
    await make_topic(backend, topic)
    await publish(backend, topic, OutboundMessage(b"kept"))
    await backend.close()
    assert (directory / "jetstream").is_dir()


def test_a_system_without_file_locks_can_connect_to_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    backend = JetStreamBackend(JetStreamSettings.from_url("nats://127.0.0.1:1"), Hooks())
    assert backend.capabilities.backend == "jetstream"
    with pytest.raises(Unsupported, match="nats://host:port"):
        DirectoryLock.take(tmp_path / "lock")


async def test_a_stale_lock_file_does_not_block_a_start(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("12345")
    (tmp_path / "nats-server_1.ports").write_text('{"nats": ["nats://127.0.0.1:1"]}')
    server = EmbeddedServer(str(tmp_path))
    place = await server.ensure()
    assert place.owner
    await server.stop()
    await server.stop()
