"""The management endpoint of Service Bus that is hostile."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from broker.errors import BrokerError
from broker.hooks import Hooks
from broker_servicebus.connection import Connection
from broker_servicebus.settings import ServiceBusSettings
from tests.security.http_double import HttpDouble, answer
from tests.servers.certificates import Authority


async def ask(server: HttpDouble, authority: Authority) -> object:
    connection = Connection(
        ServiceBusSettings(
            namespace="mine.example",
            key_name="policy",
            key=SecretStr("s3cret"),
            admin_endpoint=server.url,
            tls_ca=authority.file,
            request_timeout=5,
        ),
        Hooks(),
    )
    connection._create_clients()
    try:
        return await connection.request("Asking", lambda admin: admin.get_namespace_properties(), once=True)
    finally:
        await connection.close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(authority: Authority, status: int) -> None:
    """The client would sign the request again, for any host and without TLS too."""
    issued = authority.certificate("127.0.0.1")
    with HttpDouble(lambda _: answer()) as plain, HttpDouble(lambda _: answer(), issued) as other:
        for location in (plain.url, other.url):
            moved = answer(status=status, Location=f"{location}/x")
            with HttpDouble(lambda _, moved=moved: moved, issued) as server:
                with pytest.raises(BrokerError):
                    await ask(server, authority)
                assert server.tokens[0] is not None
    assert not plain.requests
    assert not other.requests


BOMB = b"<!DOCTYPE x [<!ENTITY a 'aaaaaaaaaa'>" + b"".join(
    b"<!ENTITY %c '%b'>" % (97 + level, b"&%c;" % (96 + level) * 10) for level in range(1, 12)
)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"garbage\r\n\r\n",
        answer(b"<html>"),
        answer(b"<entry/>"),
        answer(b"<x>" * 100_000),
        answer(b"<x>" * 10_000 + b"</x>" * 10_000),
        answer(BOMB + b"]><entry>&l;</entry>"),
        answer(b"\xff"),
        answer({}),
    ],
    ids=lambda raw: repr(raw[:60]),
)
async def test_the_garbage_of_the_endpoint_is_a_broker_error(authority: Authority, raw: bytes) -> None:
    with HttpDouble(lambda _: raw, authority.certificate("127.0.0.1")) as server, pytest.raises(BrokerError) as caught:
        await ask(server, authority)
    assert "s3cret" not in str(caught.value)


async def test_an_unknown_authority_gets_no_credentials(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Authority(tmp_path_factory.mktemp("other"))
    for certificate in (other.certificate("127.0.0.1"), authority.certificate("mine.example")):
        with HttpDouble(lambda _: answer(), certificate) as server:
            with pytest.raises(BrokerError, match="certificate"):
                await ask(server, authority)
            assert not server.requests
