"""Errors of a wrong URL when a bus opens."""

from __future__ import annotations

import asyncio
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import broker
from broker.errors import BrokerError, ConnectionFailed, InvalidSetting
from tests.servers.pulsar import PulsarServer

pytestmark = pytest.mark.xdist_group("pulsar")


async def refused(url: str) -> BrokerError:
    with pytest.raises(BrokerError) as caught:
        async with broker.connect(url):
            pass
    return caught.value


@pytest.mark.deep
async def test_the_port_of_the_web_service_is_refused(pulsar_server: PulsarServer) -> None:
    port = pulsar_server.ports["web"]
    error = await refused(f"pulsar://127.0.0.1:{port}?admin_url={pulsar_server.admin_url}&connect_timeout=1")
    assert isinstance(error, ConnectionFailed)
    assert f"pulsar://127.0.0.1:{port}" in error.message
    assert "6650" in error.advice


async def test_a_port_without_tls_is_reported(pulsar_server: PulsarServer) -> None:
    error = await refused(f"{pulsar_server.service_url}?admin_url={pulsar_server.admin_url.replace('http', 'https')}")
    assert isinstance(error, ConnectionFailed)
    assert "does not speak TLS" in error.message
    error = await refused(pulsar_server.url.replace("pulsar://", "pulsar+ssl://"))
    assert isinstance(error, ConnectionFailed)
    assert "by TLS: " in error.message
    assert not error.message.endswith(": ")


async def test_another_web_server_is_refused(pulsar_server: PulsarServer) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        serving = asyncio.create_task(asyncio.to_thread(server.serve_forever, 0.01))
        try:
            error = await refused(f"{pulsar_server.service_url}?admin_url=http://127.0.0.1:{server.server_address[1]}")
        finally:
            await asyncio.to_thread(server.shutdown)
            await serving
    assert isinstance(error, ConnectionFailed)
    assert "admin_url" in error.advice


async def test_a_malformed_token_is_refused_and_not_shown(pulsar_server: PulsarServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\nand more\n")
    for setting, name in (("token=secret%0Aand", "'token'"), (f"token_file={tmp_path / 'token'}", "token_file")):
        error = await refused(f"{pulsar_server.url}&{setting}")
        assert isinstance(error, InvalidSetting)
        assert name in error.message
        assert "secret" not in str(error)


async def test_an_unwritable_client_log_is_reported(
    pulsar_server: PulsarServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_PULSAR_CLIENT_LOG", f"{tmp_path}/missing/client.log")
    error = await refused(pulsar_server.url)
    assert isinstance(error, InvalidSetting)
    assert "client_log" in error.message


async def test_an_unknown_listener_is_refused(pulsar_server: PulsarServer) -> None:
    with pytest.raises(InvalidSetting, match=r"listener_name.*'nowhere', and the broker has no such listener"):
        async with broker.connect(f"{pulsar_server.url}&listener_name=nowhere"):
            pass
