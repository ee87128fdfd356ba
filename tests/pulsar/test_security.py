"""Authentication: token, OAuth 2.0, TLS and mutual TLS; each error names its cause."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs

import pytest
from pydantic import SecretStr

import broker
from broker.errors import AuthenticationFailed, ConnectionFailed, InvalidSetting, NotAuthorized, OperationTimeout
from broker_pulsar.credentials import Credentials
from broker_pulsar.http_api import HttpApi
from broker_pulsar.settings import PulsarSettings
from tests.servers.certificates import Authority
from tests.servers.pulsar import PulsarServer

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("pulsar-security")]

SECRET = bytes(range(32))


def token(role: str, seconds: float = 600.0) -> str:
    """A JSON web token that names a role."""

    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).rstrip(b"=").decode()

    claims = json.dumps({"sub": role, "exp": int(time.time() + seconds)}).encode()
    signed = f"{part(json.dumps({'alg': 'HS256', 'typ': 'JWT'}).encode())}.{part(claims)}"
    return f"{signed}.{part(hmac.new(SECRET, signed.encode(), hashlib.sha256).digest())}"


class Guarded(NamedTuple):
    """A broker that requires credentials on all its ports, and its certificate authority."""

    server: PulsarServer
    authority: Authority

    @property
    def plain(self) -> str:
        return f"pulsar://127.0.0.1:{self.server.ports['broker']}?admin_url=http://127.0.0.1:{self.server.ports['web']}"

    @property
    def tls(self) -> str:
        ports = self.server.ports
        return f"pulsar+ssl://127.0.0.1:{ports['broker_tls']}?admin_url=https://127.0.0.1:{ports['web_tls']}"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    host, admin = authority.certificate("127.0.0.1"), authority.certificate("admin")
    context = ssl.create_default_context(cafile=str(authority.file))
    context.load_cert_chain(admin.file, admin.key)
    provider = "org.apache.pulsar.broker.authentication.AuthenticationProvider"
    server = PulsarServer(
        {
            "authenticationEnabled": "true",
            "authorizationEnabled": "true",
            "authenticationProviders": f"{provider}Token,{provider}Tls",
            "tokenSecretKey": f"data:;base64,{base64.b64encode(SECRET).decode()}",
            "superUserRoles": "admin",
            "authenticationRefreshCheckSeconds": "1",
            "brokerClientAuthenticationPlugin": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
            "brokerClientAuthenticationParameters": f"token:{token('admin')}",
            "tlsCertificateFilePath": str(host.file),
            "tlsKeyFilePath": str(host.key),
            "tlsTrustCertsFilePath": str(authority.file),
            "tlsRequireTrustedClientCertOnConnect": "true",
        },
        headers={"Authorization": f"Bearer {token('admin')}"},
        tls=context,
    )
    with server:
        yield Guarded(server, authority)


async def passes(url: str) -> None:
    """Publish and consume one message."""
    topic = f"own-{uuid.uuid4().hex[:12]}"
    async with broker.connect(url) as bus:
        await bus.admin.ensure_topic(topic)
        await bus.topic(topic).publish(b"x")
        async with bus.messages(topic, subscription="billing") as inbox:
            message = await inbox.next_message(timeout=60)
            assert message is not None
            await message.ack()


async def test_a_token_authenticates(guarded: Guarded, tmp_path: Path) -> None:
    await passes(f"{guarded.plain}&token={token('admin')}")
    (tmp_path / "token").write_text(f"{token('admin')}\n")
    await passes(f"{guarded.plain}&token_file={tmp_path / 'token'}")


@pytest.mark.parametrize("credential", ["", "&token=garbage"])
async def test_a_missing_or_wrong_token_is_reported(guarded: Guarded, credential: str) -> None:
    began = time.monotonic()
    patient = "&connect_timeout=60&request_timeout=60"
    with pytest.raises(AuthenticationFailed):
        async with broker.connect(f"{guarded.plain}{credential}{patient}"):
            pass
    assert time.monotonic() - began < 30, "it took a timeout"


async def test_an_expired_token_is_reported(guarded: Guarded) -> None:
    with pytest.raises(AuthenticationFailed):
        async with broker.connect(f"{guarded.plain}&token={token('admin', -60)}"):
            pass


async def test_a_token_that_expires_later_is_reported(guarded: Guarded, tmp_path: Path) -> None:
    topic, file = f"own-{uuid.uuid4().hex[:12]}", tmp_path / "token"
    file.write_text(token("admin", 30))
    async with broker.connect(f"{guarded.plain}&token_file={file}&publish_timeout=10") as bus:
        await bus.admin.ensure_topic(topic)
        async with bus.messages(topic, subscription="billing") as inbox, bus.records(topic, group="audit") as log:
            await bus.topic(topic).publish(b"before")
            assert await inbox.next_message(timeout=60) is not None
            assert await log.next_record(timeout=60) is not None
            with pytest.raises(AuthenticationFailed):
                await inbox.next_message(timeout=90)
            with pytest.raises(AuthenticationFailed):
                await log.next_record(timeout=90)
            with pytest.raises(OperationTimeout, match="credentials"):
                await bus.topic(topic).publish(b"after")


async def test_a_token_that_is_renewed_in_time_keeps_the_connection(guarded: Guarded, tmp_path: Path) -> None:
    topic, file = f"own-{uuid.uuid4().hex[:12]}", tmp_path / "token"
    until = time.time() + 10
    file.write_text(token("admin", until - time.time()))
    async with broker.connect(f"{guarded.plain}&token_file={file}&publish_timeout=5") as bus:
        file.write_text(token("admin"))
        await bus.admin.ensure_topic(topic)
        async with bus.messages(topic, subscription="billing") as inbox, bus.records(topic, group="audit") as log:
            sent = 0
            while sent < 20 or time.time() < until + 3:
                await bus.topic(topic).publish(b"%d" % sent)
                message, record = await inbox.next_message(timeout=60), await log.next_record(timeout=20)
                assert message is not None
                assert record is not None
                assert message.payload == record.data == b"%d" % sent
                await message.ack()
                sent += 1


async def test_a_missing_token_file_is_named(guarded: Guarded) -> None:
    with pytest.raises(InvalidSetting, match="token_file"):
        async with broker.connect(f"{guarded.plain}&token_file=/nowhere/token"):
            pass


async def test_a_role_without_rights_is_not_authorized(guarded: Guarded) -> None:
    async with broker.connect(f"{guarded.plain}&token={token('guest')}") as bus:
        with pytest.raises(NotAuthorized):
            await bus.admin.ensure_topic("orders")
        with pytest.raises(NotAuthorized):
            await bus.topic("orders").publish(b"x")


async def test_mutual_tls_authenticates(guarded: Guarded) -> None:
    admin = guarded.authority.certificate("admin")
    await passes(f"{guarded.tls}&tls_ca={guarded.authority.file}&tls_cert={admin.file}&tls_key={admin.key}")


async def test_mutual_tls_with_a_token(guarded: Guarded) -> None:
    other = guarded.authority.certificate("transport")
    tls = f"tls_ca={guarded.authority.file}&tls_cert={other.file}&tls_key={other.key}"
    await passes(f"{guarded.tls}&{tls}&token={token('admin')}")


async def test_tls_without_a_client_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    host = authority.certificate("127.0.0.1")
    files = {"tlsCertificateFilePath": str(host.file), "tlsKeyFilePath": str(host.key)}
    with PulsarServer(files, tls=ssl.create_default_context(cafile=str(authority.file))) as server:
        url = Guarded(server, authority).tls
        await passes(f"{url}&tls_ca={authority.file}")
        with pytest.raises(ConnectionFailed, match="certificate"):
            await passes(url)


async def test_a_missing_certificate_is_reported(guarded: Guarded) -> None:
    with pytest.raises(AuthenticationFailed):
        async with broker.connect(f"{guarded.tls}&tls_ca={guarded.authority.file}&token={token('admin')}"):
            pass


async def test_an_unknown_authority_is_reported(guarded: Guarded) -> None:
    with pytest.raises(ConnectionFailed, match="certificate") as caught:
        async with broker.connect(f"{guarded.tls}&token={token('admin')}"):
            pass
    assert not caught.value.retriable


async def test_the_cluster_lists_its_brokers_for_a_superuser(guarded: Guarded) -> None:
    """So redirects may lead to them with the token; for others, `admin_hosts` names them."""
    web = guarded.server.ports["web"]
    for role, listed in (("admin", True), ("guest", False)):
        settings = PulsarSettings(
            service_url="pulsar://elsewhere.example", admin_url=f"http://localhost:{web}", token=SecretStr(token(role))
        )
        http = HttpApi(settings, Credentials(settings))
        headers = {"Authorization": f"Bearer {token(role)}"}
        try:
            trusted = await asyncio.to_thread(http._is_trusted, "127.0.0.1", headers, 10)
            assert trusted is listed
        finally:
            http.close()


class Issuer(ThreadingHTTPServer):
    """Issues OAuth 2.0 tokens for the secret of one client."""

    requests: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Issuer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._answer(200, {"token_endpoint": f"{self.server.url}/oauth/token"})

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.server.requests += 1
        if form.get("client_secret") != ["right"] or form.get("audience") != ["pulsar"]:
            self._answer(401, {"error": "invalid_client"})
        else:
            self._answer(200, {"access_token": token("admin"), "expires_in": 600})

    def _answer(self, status: int, body: object) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with Issuer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_oauth2_authenticates(guarded: Guarded, issuer: Issuer) -> None:
    client = "oauth2_allow_http=true&oauth2_client_id=shop&oauth2_client_secret=right&oauth2_audience=pulsar"
    await passes(f"{guarded.plain}&oauth2_issuer={issuer.url}&{client}")
    assert issuer.requests == 1


async def test_a_wrong_oauth2_secret_is_reported(guarded: Guarded, issuer: Issuer) -> None:
    client = "oauth2_allow_http=true&oauth2_client_id=shop&oauth2_client_secret=wrong&oauth2_audience=pulsar"
    with pytest.raises(AuthenticationFailed, match="OAuth"):
        async with broker.connect(f"{guarded.plain}&oauth2_issuer={issuer.url}&{client}"):
            pass
