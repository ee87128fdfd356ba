"""Pulsar's token goes over TLS only to servers whose certificate is right, at the open and after it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from pydantic import SecretStr

import broker
from broker.errors import BrokerError, ConnectionFailed
from broker_pulsar.connection import Connection
from broker_pulsar.settings import PulsarSettings
from tests.security.http_double import HttpDouble, answer
from tests.security.tls_double import TlsDouble
from tests.servers.certificates import Authority, Issued

TOKEN = "t0ken"


async def refused(server: TlsDouble, admin: HttpDouble, authority: Authority, seconds: float = 30) -> BrokerError:
    settings = PulsarSettings(
        service_url=f"pulsar+ssl://127.0.0.1:{server.port}",
        admin_url=admin.url,
        token=SecretStr(TOKEN),
        tls_ca=authority.file,
        connect_timeout=seconds,
        request_timeout=seconds,
    )
    with pytest.raises(BrokerError) as caught:
        async with broker.connect(settings):
            pass
    assert TOKEN not in str(caught.value)
    return caught.value


def clusters(certificate: Issued) -> HttpDouble:
    return HttpDouble(lambda _: answer(["standalone"]), certificate)


@pytest.mark.parametrize("fault", ["unknown authority", "wrong host"])
async def test_a_wrong_broker_is_refused_at_the_open(
    authority: Authority, wrong: Mapping[str, Issued], fault: str
) -> None:
    with TlsDouble(wrong[fault]) as server, clusters(authority.certificate("127.0.0.1")) as admin:
        error = await refused(server, admin, authority)
        assert isinstance(error, ConnectionFailed)
        assert "certificate" in str(error)
        assert not error.retriable
        server.wait_for(1)
    assert not any(server.received)
    assert not admin.requests


@pytest.mark.parametrize("fault", ["unknown authority", "wrong host"])
async def test_a_wrong_http_api_gets_no_token(authority: Authority, wrong: Mapping[str, Issued], fault: str) -> None:
    with TlsDouble(authority.certificate("127.0.0.1")) as server, clusters(wrong[fault]) as admin:
        error = await refused(server, admin, authority)
        assert "certificate" in str(error).lower()
    assert not admin.requests
    assert not any(server.received)


@pytest.mark.parametrize("fault", ["unknown authority", "wrong host"])
async def test_a_broker_that_is_another_one_at_a_reconnect_gets_no_token(
    authority: Authority, wrong: Mapping[str, Issued], fault: str
) -> None:
    """The check of the open passes; then the client, which is not ours, connects."""
    right = authority.certificate("127.0.0.1")
    with TlsDouble(right, wrong[fault]) as server, clusters(right) as admin:
        await refused(server, admin, authority)
        server.wait_for(2)
    assert not any(server.received)


async def test_the_client_verifies_without_tls_ca_too(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the authorities of the system; ours would refuse the server before, so its checks are left out."""

    async def passes(_: Connection) -> None:
        return

    monkeypatch.setattr(Connection, "_probe_brokers", passes)
    monkeypatch.setattr(Connection, "_check_credentials", passes)
    with TlsDouble(authority.certificate("127.0.0.1")) as server:
        url = f"pulsar+ssl://127.0.0.1:{server.port}?token={TOKEN}&connect_timeout=2&request_timeout=2"
        with pytest.raises(BrokerError):
            async with broker.connect(url):
                pass
        server.wait_for(1)
    assert not any(server.received)


async def test_the_double_would_see_the_token(authority: Authority) -> None:
    right = authority.certificate("127.0.0.1")
    with TlsDouble(right) as server, clusters(right) as admin:
        await refused(server, admin, authority, 4)
        server.wait_for(2)
    assert any(TOKEN.encode() in found for found in server.received)
    assert admin.tokens == [f"Bearer {TOKEN}"]
