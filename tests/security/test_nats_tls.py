"""NATS over TLS: a server, or a man in the middle, that offers none gets no credentials."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

import broker
from broker.errors import ConnectionFailed
from broker.hooks import Hooks
from broker_jetstream.connection import Connection
from broker_jetstream.settings import JetStreamSettings
from tests.jetstream.support import until
from tests.security.hostile_nats import HostileNats, context_of
from tests.servers.nats import Jwt, make_nkey

Open = Callable[[JetStreamSettings], Awaitable[Connection]]
PASSWORD = "s3cret"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca(authority: trustme.CA, tmp_path: Path) -> str:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


@pytest.fixture(params=["fast", "public"])
def fast_path(request: pytest.FixtureRequest) -> str:
    return "true" if request.param == "fast" else "false"


@pytest.fixture
async def connect() -> AsyncIterator[Open]:
    opened: list[Connection] = []

    async def open_one(settings: JetStreamSettings) -> Connection:
        connection = Connection(settings, Hooks())
        opened.append(connection)
        await connection.open()
        return connection

    yield open_one
    for connection in opened:
        await connection.close()


async def refused(url: str) -> ConnectionFailed:
    with pytest.raises(ConnectionFailed) as caught:
        async with broker.connect(url):
            pass
    assert not caught.value.retriable
    assert PASSWORD not in f"{caught.value} {caught.value!r}"
    return caught.value


@pytest.mark.parametrize("info", [{}, {"tls_available": True}, {"tls_required": None}], ids=["none", "offered", "null"])
@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_a_server_without_tls_gets_nothing(scheme: str, info: dict[str, Any], ca: str, fast_path: str) -> None:
    async with HostileNats(nonce="abc", auth_required=True, **info) as server:
        url = f"{scheme}://ann:{PASSWORD}@127.0.0.1:{server.port}?tls_ca={ca}&fast_path={fast_path}"
        error = await refused(url)
        assert "offers no TLS" in str(error)
        assert f"{scheme}://127.0.0.1:{server.port}" in str(error)
        assert server.plain == []


@pytest.mark.parametrize("setting", ["tls_hostname", "tls_cert", "none"])
async def test_every_setting_of_tls_asks_for_it(setting: str, authority: trustme.CA, tmp_path: Path) -> None:
    pem = tmp_path / "client.pem"
    authority.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(str(pem))
    query = {"tls_hostname": "nats.example.org", "tls_cert": str(pem)}
    async with HostileNats() as server:
        wanted = f"&{setting}={query[setting]}" if setting in query else ""
        # One tls:// server asks for TLS with all.
        hosts = f"nats://127.0.0.1:{server.port}" + ("" if wanted else ",tls://127.0.0.1:1")
        await refused(f"nats:?servers={hosts}&token={PASSWORD}{wanted}")
        assert server.plain == []


@pytest.mark.parametrize("way", ["token", "nkey_seed", "creds_file", "nothing"])
async def test_no_way_of_authentication_is_sent_in_clear(way: str, ca: str, tmp_path: Path) -> None:
    creds = tmp_path / "user.creds"
    creds.write_text(Jwt().credentials())
    values = {"token": PASSWORD, "nkey_seed": make_nkey()[0], "creds_file": str(creds)}
    async with HostileNats(nonce="abc", auth_required=True) as server:
        login = f"&{way}={values[way]}" if way in values else ""
        await refused(f"tls://127.0.0.1:{server.port}?tls_ca={ca}{login}")
        assert server.plain == []


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_a_reconnect_sends_nothing_without_tls(
    scheme: str, ca: str, authority: trustme.CA, connect: Open, fast_path: str
) -> None:
    async with HostileNats(tls=context_of(authority, "127.0.0.1")) as server:
        url = f"{scheme}://ann:{PASSWORD}@127.0.0.1:{server.port}"
        connection = await connect(
            JetStreamSettings.from_url(f"{url}?tls_ca={ca}&reconnect_wait=0.01&fast_path={fast_path}")
        )
        assert [each["pass"] for each in server.connects] == [PASSWORD]
        tls, server.tls = server.tls, None
        greeted = server.greeted
        server.cut()
        # The second attempt comes after the first was refused.
        await until(lambda: server.greeted > greeted + 1)
        assert server.plain == []
        error = connection.down_error()
        assert isinstance(error, ConnectionFailed) and not error.retriable and "offers no TLS" in str(error)
        # A message that was written meanwhile is not flushed to the open socket either.
        if connection.client.is_reconnecting:
            await connection.client.publish("orders", b"secret")
        server.tls = tls
        await connection.wait_connected(10)
        assert server.plain == []
        assert len(server.connects) == 2


async def test_servers_named_before_tls_are_ignored(ca: str, authority: trustme.CA, connect: Open) -> None:
    async with (
        HostileNats(tls=context_of(authority, "127.0.0.1")) as stranger,
        HostileNats(tls=context_of(authority, "127.0.0.1")) as server,
    ):
        server.info["connect_urls"] = [f"127.0.0.1:{stranger.port}"]
        url = f"tls://ann:{PASSWORD}@127.0.0.1:{server.port}?tls_ca={ca}"
        connection = await connect(JetStreamSettings.from_url(url))
        assert [each.port for each in connection.client.servers] == [server.port]


@pytest.mark.parametrize("what", ["wrong name", "unknown authority"])
async def test_a_wrong_certificate_gets_no_password(what: str, ca: str, authority: trustme.CA, fast_path: str) -> None:
    wrong_name = what == "wrong name"
    context = context_of(authority if wrong_name else trustme.CA(), "elsewhere.example" if wrong_name else "127.0.0.1")
    async with HostileNats(tls=context) as server:
        error = await refused(f"tls://ann:{PASSWORD}@127.0.0.1:{server.port}?tls_ca={ca}&fast_path={fast_path}")
        assert "certificate is not trusted" in str(error)
        assert (server.plain, server.secured) == ([], [])
