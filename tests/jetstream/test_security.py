"""Every way to authenticate, against a server that requires it and refuses others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from broker.errors import (
    AuthenticationFailed,
    BrokerError,
    ConnectionFailed,
    InvalidSetting,
    NotAuthorized,
    Unsupported,
)
from broker.hooks import Hooks
from broker.messages import Outcome
from broker.outbound import OutboundMessage
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.errors import connect_error
from broker_jetstream.settings import JetStreamSettings
from tests.jetstream.support import make_topic, publish, receive, settle_all, subscribe
from tests.servers.nats import Certificates, Jwt, NatsServer, make_nkey

# Long enough to distinguish a timeout from a busy machine.
PATIENT: dict[str, Any] = {"connect_timeout": 30.0, "request_timeout": 30.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("security")


@pytest.fixture(scope="module")
def certificates(folder: Path) -> Certificates:
    return Certificates(folder)


def served(server: NatsServer) -> Iterator[NatsServer]:
    with server:
        yield server


@pytest.fixture(scope="module")
def token_server() -> Iterator[NatsServer]:
    yield from served(NatsServer.with_token("s3cret/@:"))


@pytest.fixture(scope="module")
def user_server() -> Iterator[NatsServer]:
    yield from served(NatsServer.with_user("ann", "pa/ss@:"))


SEED, PUBLIC = make_nkey()


@pytest.fixture(scope="module")
def nkey_server() -> Iterator[NatsServer]:
    yield from served(NatsServer.with_nkey(PUBLIC))


JWT = Jwt()


@pytest.fixture(scope="module")
def jwt_server() -> Iterator[NatsServer]:
    yield from served(NatsServer.with_jwt(JWT))


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates) -> Iterator[NatsServer]:
    yield from served(NatsServer.with_tls(certificates))


@pytest.fixture(scope="module")
def mutual_server(certificates: Certificates) -> Iterator[NatsServer]:
    yield from served(NatsServer.with_tls(certificates, verify=True))


@pytest.fixture(scope="module")
def first_server(certificates: Certificates) -> Iterator[NatsServer]:
    yield from served(NatsServer.with_tls(certificates, first=True))


async def round_trip(settings: JetStreamSettings, topic: str) -> str:
    """Publish, receive and ack a message; returns the address of the server."""
    backend = JetStreamBackend(settings, Hooks())
    await backend.open()
    try:
        await make_topic(backend, topic)
        await publish(backend, topic, OutboundMessage(b"x"))
        source = await subscribe(backend, topic, confirm_acks=True)
        found = await receive(source, 1)
        assert await source.settle(settle_all(found, Outcome.ACK)) == [None]
        return backend._connection.server
    finally:
        await backend.close()


async def refused(settings: JetStreamSettings) -> BrokerError:
    """The error of opening, which is raised at once and shows no secret."""
    backend = JetStreamBackend(settings, Hooks())
    begin = time.monotonic()
    with pytest.raises(BrokerError) as caught:
        await backend.open()
    assert time.monotonic() - begin < 15, "it waited for a timeout"
    for secret in ("s3cret", "pa/ss", SEED[5:]):
        assert secret not in str(caught.value)
        assert secret not in repr(settings)
    return caught.value


def at(server: NatsServer, **values: Any) -> JetStreamSettings:
    return JetStreamSettings(servers=(server.url,), **{**PATIENT, **values})


async def test_token(token_server: NatsServer, topic: str) -> None:
    await round_trip(at(token_server, token="s3cret/@:"), topic)
    await round_trip(JetStreamSettings.from_url(f"nats://s3cret%2F%40%3A@127.0.0.1:{token_server.port}"), topic)
    await round_trip(JetStreamSettings.from_url(f"{token_server.url}?token=s3cret/%40:"), topic)
    for wrong in ({"token": "wrong"}, {}, {"user": "ann", "password": "s3cret/@:"}):
        assert isinstance(await refused(at(token_server, **wrong)), AuthenticationFailed)


async def test_user_and_password(user_server: NatsServer, topic: str) -> None:
    await round_trip(at(user_server, user="ann", password="pa/ss@:"), topic)
    await round_trip(JetStreamSettings.from_url(f"nats://ann:pa%2Fss%40%3A@127.0.0.1:{user_server.port}"), topic)
    for wrong in ({"user": "ann", "password": "wrong"}, {"user": "bob", "password": "pa/ss@:"}, {}):
        assert isinstance(await refused(at(user_server, **wrong)), AuthenticationFailed)


async def test_nkey(nkey_server: NatsServer, topic: str, folder: Path) -> None:
    path = folder / "user.nk"
    path.write_text(f"{SEED}\n")
    await round_trip(at(nkey_server, nkey_seed=SEED), topic)
    await round_trip(at(nkey_server, nkey_seed_file=path), topic)
    for wrong in ({"nkey_seed": make_nkey()[0]}, {}):
        assert isinstance(await refused(at(nkey_server, **wrong)), AuthenticationFailed)
    path.write_text("garbage")
    for malformed in ({"nkey_seed": "garbage"}, {"nkey_seed_file": path}, {"nkey_seed_file": folder / "none"}):
        assert isinstance(await refused(at(nkey_server, **malformed)), InvalidSetting)


async def test_credentials_file(jwt_server: NatsServer, topic: str, folder: Path) -> None:
    good, stranger, empty = folder / "good.creds", folder / "stranger.creds", folder / "empty.creds"
    good.write_text(JWT.credentials())
    stranger.write_text(Jwt().credentials())
    empty.write_text("")
    await round_trip(at(jwt_server, creds_file=good), topic)
    await round_trip(JetStreamSettings.from_url(f"{jwt_server.url}?creds_file={good}"), topic)
    for wrong in ({"creds_file": stranger}, {}):
        assert isinstance(await refused(at(jwt_server, **wrong)), AuthenticationFailed)
    for malformed in (empty, folder / "none.creds"):
        assert isinstance(await refused(at(jwt_server, creds_file=malformed)), InvalidSetting)


async def test_tls(tls_server: NatsServer, certificates: Certificates, topic: str) -> None:
    await round_trip(at(tls_server, tls_ca=certificates.authority), topic)
    await round_trip(JetStreamSettings.from_url(f"{tls_server.url}?tls_ca={certificates.authority}"), topic)
    plain_url = f"nats://127.0.0.1:{tls_server.port}"
    await round_trip(JetStreamSettings(servers=(plain_url,), tls_ca=certificates.authority), topic)
    await round_trip(at(tls_server, tls_ca=certificates.authority, tls_hostname="localhost"), topic)
    for wrong in (
        {"tls_ca": certificates.stranger_authority},
        {},
        {"tls_ca": certificates.authority, "tls_hostname": "elsewhere"},
    ):
        error = await refused(at(tls_server, **wrong))
        assert isinstance(error, ConnectionFailed)
        assert not error.retriable
        assert "tls_ca" in error.advice
    assert isinstance(await refused(JetStreamSettings(servers=(plain_url,), **PATIENT)), ConnectionFailed)


async def test_mutual_tls(mutual_server: NatsServer, certificates: Certificates, topic: str) -> None:
    mine = {"tls_ca": certificates.authority, "tls_cert": certificates.client, "tls_key": certificates.client_key}
    await round_trip(at(mutual_server, **mine), topic)
    for wrong in (
        {"tls_ca": certificates.authority},
        {"tls_ca": certificates.authority, "tls_cert": certificates.stranger},
    ):
        error = await refused(at(mutual_server, **wrong))
        assert isinstance(error, AuthenticationFailed)
        assert "tls_cert" in error.advice


async def test_an_encrypted_key_needs_its_password(
    mutual_server: NatsServer, certificates: Certificates, topic: str, folder: Path
) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(certificates.client_key.read_bytes(), None)
    path = folder / "encrypted.pem"
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"open")))
    mine = {"tls_ca": certificates.authority, "tls_cert": certificates.client, "tls_key": path}
    await round_trip(at(mutual_server, **mine, tls_key_password="open"), topic)
    for wrong in ({"tls_key_password": "shut"}, {}):
        assert isinstance(await refused(at(mutual_server, **mine, **wrong)), InvalidSetting)


async def test_tls_from_the_first_byte(first_server: NatsServer, certificates: Certificates, topic: str) -> None:
    await round_trip(at(first_server, tls_ca=certificates.authority, tls_handshake_first=True), topic)
    error = await refused(at(first_server, tls_ca=certificates.authority, connect_timeout=1))
    assert isinstance(error, ConnectionFailed)


@pytest.mark.parametrize("name", ["tls_ca", "tls_cert"])
async def test_unusable_files_are_reported(
    tls_server: NatsServer, certificates: Certificates, folder: Path, name: str
) -> None:
    garbage = folder / "garbage.pem"
    garbage.write_text("no certificate")
    for path in (garbage, folder / "missing.pem"):
        error = await refused(at(tls_server, **{"tls_ca": certificates.authority, name: path}))
        assert isinstance(error, InvalidSetting)
        assert name in str(error)


async def test_missing_permissions_are_reported(topic: str) -> None:
    forbidden = 'permissions: { publish: { deny: ["secret-topic.>", "$JS.API.STREAM.PURGE.>"] } }'
    with NatsServer.with_user("ann", "x", forbidden) as server:
        backend = JetStreamBackend(at(server, user="ann", password="x"), Hooks())
        await backend.open()
        try:
            await make_topic(backend, "secret-topic")
            await make_topic(backend, topic)
            begin = time.monotonic()
            with pytest.raises(NotAuthorized):
                await backend.admin().purge(topic)
            (outcome,) = await backend.publish_target("secret-topic").publish([OutboundMessage(b"x")])
            assert isinstance(outcome, NotAuthorized)
            assert time.monotonic() - begin < 15
            await publish(backend, topic, OutboundMessage(b"allowed"))
        finally:
            await backend.close()


async def test_a_server_without_jetstream_is_reported() -> None:
    with NatsServer(jetstream=False) as server:
        backend = JetStreamBackend(at(server, request_timeout=0.5), Hooks())
        with pytest.raises(Unsupported, match="no JetStream"):
            await backend.open()


async def test_an_unreachable_server_is_tried_once() -> None:
    with NatsServer() as server:
        url = server.url
    backend = JetStreamBackend(JetStreamSettings(servers=(url,), **PATIENT), Hooks())
    begin = time.monotonic()
    with pytest.raises(ConnectionFailed):
        await backend.open()
    assert time.monotonic() - begin < 15


async def test_an_unresponsive_server_fails_in_time() -> None:
    with NatsServer() as server:
        server.pause()
        backend = JetStreamBackend(at(server, connect_timeout=0.5), Hooks())
        begin = time.monotonic()
        with pytest.raises(ConnectionFailed):
            await backend.open()
        assert time.monotonic() - begin < 20, "it waited for request_timeout"


async def test_the_second_server_is_tried(topic: str) -> None:
    with NatsServer() as server:
        servers = ("nats://127.0.0.1:1", server.url, "nats://127.0.0.1:2")
        assert await round_trip(JetStreamSettings(servers=servers), topic) == server.url


@pytest.mark.parametrize("error", [BrokenPipeError(), ConnectionResetError(), nats.errors.UnexpectedEOF()])
def test_a_tls_connection_closed_by_the_server_is_a_refusal(error: Exception) -> None:
    # Which of these it is depends on who writes first after the handshake.
    assert isinstance(connect_error(error, "tls://host", tls=True), AuthenticationFailed)
    assert isinstance(connect_error(error, "nats://host", tls=False), ConnectionFailed)
