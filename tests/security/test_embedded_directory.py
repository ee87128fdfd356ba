"""The directory of an embedded server: files of other users are refused, and ours are closed to other users."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import broker
from broker.errors import InvalidSetting
from broker.hooks import Hooks
from broker_jetstream import server as server_module
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.server import DirectoryLock, EmbeddedServer
from broker_jetstream.settings import JetStreamSettings
from tests.jetstream.support import until
from tests.security.conftest import STRANGER
from tests.security.hostile_nats import HostileNats


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir(0o700)
    return path


@pytest.fixture
def loose_umask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def entries(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*"))


def set_mode(path: Path, mode: int) -> None:
    path.chmod(mode)


def files_with(directory: Path, text: str) -> list[Path]:
    return [path for path in entries(directory) if path.is_file() and text in path.read_text("latin-1")]


async def refused(directory: Path) -> InvalidSetting:
    """The error of opening; nothing was written."""
    before = entries(directory)
    with pytest.raises(InvalidSetting) as caught:
        async with broker.connect(f"embedded://{directory}"):
            pass
    assert entries(directory) == before
    return caught.value


async def test_a_directory_of_another_user_is_refused(directory: Path, give_away: Callable[[Path], None]) -> None:
    give_away(directory)
    error = await refused(directory)
    assert str(directory) in str(error) and str(STRANGER) in str(error)
    assert error.advice


async def test_a_link_of_another_user_is_refused(
    directory: Path, tmp_path: Path, give_away: Callable[[Path], None]
) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory)
    give_away(link)
    assert str(link) in str(await refused(link))


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o1777], ids=oct)
async def test_a_directory_that_others_can_write_to_is_refused(directory: Path, mode: int) -> None:
    set_mode(directory, mode)
    error = await refused(directory)
    assert str(directory) in str(error) and "chmod" in error.advice
    set_mode(directory, 0o755)
    async with broker.connect(f"embedded://{directory}") as bus:
        assert (await bus.health()).ok


@pytest.mark.parametrize(
    "name", ["token", "lock", "port", "nats-server.conf", "nats-server.log", "nats-server_1.ports"]
)
async def test_a_file_of_another_user_is_refused(directory: Path, name: str, give_away: Callable[[Path], None]) -> None:
    path = directory / name
    path.write_text("planted")
    path.chmod(0o600)
    give_away(path)
    error = await refused(directory)
    assert str(path) in str(error) and str(STRANGER) in str(error)
    assert path.read_text() == "planted"


async def test_a_store_of_another_user_is_refused(directory: Path, give_away: Callable[[Path], None]) -> None:
    (directory / "jetstream").mkdir()
    give_away(directory / "jetstream")
    assert str(directory / "jetstream") in str(await refused(directory))


@pytest.mark.parametrize("name", ["token", "port", "nats-server.conf"])
async def test_a_link_is_neither_followed_nor_overwritten(directory: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    (directory / name).symlink_to(target)
    # The names that an attacker could guess.
    for process in range(os.getpid() - 3, os.getpid() + 4):
        (directory / f".{name}.{process}").symlink_to(target)
    async with broker.connect(f"embedded://{directory}"):
        assert not (directory / name).is_symlink()
    assert target.read_text() == "precious"


def test_the_lock_follows_no_link(directory: Path, tmp_path: Path) -> None:
    (directory / "lock").symlink_to(tmp_path / "made")
    with pytest.raises(OSError):
        DirectoryLock.take(directory / "lock")
    assert not (tmp_path / "made").exists()


@pytest.mark.usefixtures("loose_umask")
async def test_a_new_directory_and_all_in_it_is_private(tmp_path: Path) -> None:
    directory = tmp_path / "some" / "new" / "store"
    async with broker.connect(f"embedded://{directory}") as bus:
        await bus.admin.ensure_topic("orders")
        await bus.topic("orders").publish(b"secret")
        paths = [directory.parent.parent, directory.parent, directory, *entries(directory)]
        assert len(paths) > 8
        assert {str(path): oct(path.stat().st_mode) for path in paths if path.stat().st_mode & 0o077} == {}


async def test_the_token_is_neither_in_the_arguments_nor_readable(directory: Path) -> None:
    set_mode(directory, 0o755)
    server = EmbeddedServer(str(directory))
    try:
        address = await server.ensure()
        # Where there is no /proc there is nothing to read.
        process = Path(f"/proc/{server.process_id}")
        for part in ("cmdline", "environ"):
            with contextlib.suppress(FileNotFoundError):
                assert address.token.encode() not in (process / part).read_bytes()
        holders = files_with(directory, address.token)
        assert {path.name for path in holders} == {"token", "nats-server.conf"}
        assert [path.stat().st_mode & 0o777 for path in holders] == [0o600, 0o600]
        assert address.token not in repr(address)
    finally:
        await server.stop()


async def test_a_token_that_others_could_read_is_replaced(directory: Path) -> None:
    (directory / "token").write_text("known")
    (directory / "token").chmod(0o644)
    server = EmbeddedServer(str(directory))
    try:
        assert (await server.ensure()).token != "known"
    finally:
        await server.stop()
    kept = (directory / "token").read_text()
    try:
        assert (await server.ensure()).token == kept
    finally:
        await server.stop()


def test_a_cleanup_follows_no_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: Path) -> None:
    monkeypatch.setattr(server_module.tempfile, "tempdir", str(tmp_path))
    (directory / "lock").touch()
    (tmp_path / f"{server_module.PREFIX}planted").symlink_to(directory)
    taken: list[Path] = []
    monkeypatch.setattr(DirectoryLock, "take", taken.append)
    server_module._sweep()
    assert taken == [] and directory.exists()


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "public"])
async def test_whoever_takes_the_port_of_a_dead_server_gets_no_token(directory: Path, fast: bool) -> None:
    settings = JetStreamSettings(embedded=str(directory), reconnect_wait=0.01, fast_path=fast)
    backend = JetStreamBackend(settings, Hooks())
    await backend.open()
    connection, server = backend._connection, backend._server
    restart, taken = connection.restart_server, asyncio.Event()
    assert restart is not None and server is not None and server.process_id is not None

    async def restart_later() -> None:
        await taken.wait()
        await restart()

    try:
        connection.restart_server = restart_later
        port = int(connection.server.rpartition(":")[2])
        os.kill(server.process_id, signal.SIGKILL)
        await until(lambda: not connection.connected)
        async with HostileNats(port=port) as neighbour:
            taken.set()
            await until(lambda: connection.epoch == 2)
            assert neighbour.plain == []
            assert int(connection.server.rpartition(":")[2]) != port
    finally:
        await backend.close()


async def test_the_greeting_shows_nothing_of_the_token(directory: Path) -> None:
    server = EmbeddedServer(str(directory))
    try:
        address = await server.ensure()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.url.rpartition(":")[2]))
        greeting = await reader.readline()
        writer.close()
        await writer.wait_closed()
        parts = [address.token[start : start + 6] for start in range(len(address.token) - 5)]
        assert [part for part in parts if part.encode() in greeting] == []
    finally:
        await server.stop()
