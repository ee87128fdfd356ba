"""Pulsar's HTTP API and OAuth issuers that are hostile: where secrets go, and what their answers become."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import SecretStr

from broker.errors import AuthenticationFailed, BrokerError, ConnectionFailed, InvalidSetting, OperationTimeout
from broker.hooks import Hooks
from broker_pulsar.admin import PulsarAdmin
from broker_pulsar.connection import Connection
from broker_pulsar.credentials import Credentials
from broker_pulsar.http_api import HttpApi
from broker_pulsar.log_stats import topic_bounds
from broker_pulsar.settings import PulsarSettings
from tests.security.admin_calls import admin_calls
from tests.security.http_double import HttpDouble, Request, answer
from tests.servers.certificates import Authority

TOKEN = "t0ken"
BEARER = f"Bearer {TOKEN}"


def serving(body: object = b"[]") -> HttpDouble:
    return HttpDouble(lambda _: answer(body))


def redirecting(location: str, authority: Authority | None = None, brokers: object = None) -> HttpDouble:
    """Sends every request elsewhere, except the one for the list of brokers."""

    def answers(request: Request) -> bytes:
        if request.path == "/admin/v2/brokers":
            return answer(status=403) if brokers is None else answer(brokers)
        return answer(status=307, Location=location)

    return HttpDouble(answers, None if authority is None else authority.certificate("127.0.0.1"))


async def ask(server: HttpDouble, **settings: Any) -> object:
    values: dict[str, Any] = {"admin_url": server.url, "request_timeout": 30, "token": TOKEN, **settings}
    chosen = PulsarSettings(**values)
    http = HttpApi(chosen, Credentials(chosen))
    try:
        return await http.get("/clusters", "Asking")
    finally:
        http.close()


# Redirects.


async def test_no_redirect_leaves_tls(authority: Authority) -> None:
    with serving() as plain, redirecting(f"{plain.url}/x", authority) as server:
        for token in (TOKEN, None):
            with pytest.raises(ConnectionFailed, match="without TLS") as caught:
                await ask(server, tls_ca=authority.file, token=token)
            assert not caught.value.retriable
            assert TOKEN not in str(caught.value)
    assert not plain.requests


async def test_a_redirect_to_another_port_of_the_host_is_followed(authority: Authority) -> None:
    with (
        HttpDouble(lambda _: answer([1]), authority.certificate("127.0.0.1")) as other,
        redirecting(f"{other.url}/x?y=1", authority) as server,
    ):
        assert await ask(server, tls_ca=authority.file) == [1]
    assert other.tokens == [BEARER]
    assert [request.path for request in other.requests] == ["/x?y=1"]


@pytest.mark.parametrize("brokers", [None, [], ["broker-7:8080"], {}, b"<html>", [None, 5, "[::1"]], ids=repr)
async def test_a_foreign_host_does_not_get_the_token(brokers: object) -> None:
    refused = pytest.raises(ConnectionFailed, match=r"localhost.* must not get the token.* admin_hosts")
    with serving() as foreign, redirecting(foreign.at("localhost"), brokers=brokers) as server, refused:
        await ask(server)
    assert not foreign.requests


@pytest.mark.parametrize(
    ("brokers", "settings"),
    [
        (["broker-7:8080", "LocalHost:8080"], {}),
        (None, {"admin_hosts": ("LOCALHOST",)}),
        (None, {"service_url": "pulsar://127.0.0.1:6650,localhost:6650"}),
    ],
    ids=["listed by the cluster", "admin_hosts", "the URL"],
)
async def test_a_broker_of_the_cluster_gets_the_token(brokers: object, settings: dict[str, Any]) -> None:
    with serving([1]) as other, redirecting(other.at("localhost"), brokers=brokers) as server:
        assert await ask(server, **settings) == [1]
    assert other.tokens == [BEARER]


async def test_without_a_token_any_host_is_followed() -> None:
    with serving([1]) as other, redirecting(other.at("localhost")) as server:
        assert await ask(server, token=None) == [1]


def test_a_domain_of_hosts() -> None:
    settings = PulsarSettings.from_url("pulsar://h?token=t&admin_hosts=.Pulsar.example,other.example")
    http = HttpApi(settings, Credentials(settings))
    trusted = {host: http._redirected("https://h/x", f"https://{host}/x", {}, "", 0)[0] for host in ("any.example",)}
    assert trusted == {"any.example": "https://any.example"}
    for host in ("a.pulsar.example", "other.example", "h"):
        assert http._is_trusted(host, {}, 0)
    http.close()


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:99999/x",
        "http://127.0.0.1:none/x",
        "http://[::1/x",
        "http:///x",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
        "http://127.0.0.1:1/\xff\xfe",
        "http://" + "a" * 300 + "/",
        "//",
    ],
)
async def test_redirects_to_nowhere_are_broker_errors(location: str) -> None:
    with redirecting(location) as server:
        with pytest.raises(BrokerError):
            await ask(server, token=None, request_timeout=1)
        with pytest.raises(BrokerError):
            await ask(server, request_timeout=1)


async def test_a_relative_redirect_stays_with_its_server() -> None:
    def answers(request: Request) -> bytes:
        return answer([1]) if request.path == "/other" else answer(status=307, Location="/other")

    with HttpDouble(answers) as server:
        assert await ask(server) == [1]
    assert server.tokens == [BEARER, BEARER]


# The issuer of OAuth tokens.


def oauth(issuer: str, **settings: Any) -> PulsarSettings:
    return PulsarSettings(
        oauth2_issuer=issuer,
        oauth2_client_id="shop",
        oauth2_client_secret=SecretStr("s3cret"),
        connect_timeout=30,
        **settings,
    )


def fetch(issuer: str, **settings: Any) -> str:
    return Credentials(oauth(issuer, **settings)).token()


@contextlib.contextmanager
def issuing(
    discovery: Callable[[], bytes], token: bytes = b"", authority: Authority | None = None
) -> Generator[HttpDouble]:
    def answers(request: Request) -> bytes:
        return discovery() if request.path == "/.well-known/openid-configuration" else token

    with HttpDouble(answers, None if authority is None else authority.certificate("127.0.0.1")) as server:
        yield server


def secrets_seen(server: HttpDouble) -> bool:
    return any(b"s3cret" in request.body or "s3cret" in request.path for request in server.requests)


def test_an_issuer_without_tls_needs_a_setting() -> None:
    for issuer in ("http://127.0.0.1:1", "HTTP://issuer/token"):
        with pytest.raises(InvalidSetting, match=r"oauth2_issuer .*oauth2_allow_http=true"):
            oauth(issuer)
        oauth(issuer, oauth2_allow_http=True)


def test_an_issuer_without_tls_issues_if_the_setting_allows() -> None:
    with issuing(
        lambda: answer({"token_endpoint": f"{server.url}/oauth/token"}), answer({"access_token": "t"})
    ) as server:
        assert fetch(server.url, oauth2_allow_http=True) == "t"
    assert secrets_seen(server)


def test_an_issuer_with_tls(authority: Authority) -> None:
    granted = answer({"access_token": "t", "expires_in": "60"})
    with issuing(lambda: answer({"token_endpoint": f"{server.url}/token"}), granted, authority) as server:
        assert fetch(server.url, tls_ca=authority.file) == "t"
        assert fetch(f"{server.url}/token", tls_ca=authority.file) == "t"


@pytest.mark.parametrize("allow", [False, True])
def test_an_issuer_with_tls_cannot_name_an_endpoint_without(authority: Authority, allow: bool) -> None:
    with serving({"access_token": "t"}) as plain:
        for endpoint in (f"{plain.url}/token", f"HTTP{plain.url[4:]}/token", "file:///etc/passwd", "127.0.0.1"):
            with issuing(lambda named=endpoint: answer({"token_endpoint": named}), b"", authority) as server:
                with pytest.raises(AuthenticationFailed, match="not https") as caught:
                    fetch(server.url, tls_ca=authority.file, oauth2_allow_http=allow)
                assert "s3cret" not in str(caught.value)
                assert not secrets_seen(server)
    assert not plain.requests


def test_the_discovery_of_an_issuer_with_tls_is_not_redirected_to_http(authority: Authority) -> None:
    with (
        serving({"token_endpoint": "https://127.0.0.1:1/token"}) as plain,
        issuing(lambda: answer(status=302, Location=plain.url), b"", authority) as server,
        pytest.raises(AuthenticationFailed, match="302"),
    ):
        fetch(server.url, tls_ca=authority.file)
    assert not plain.requests


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_request_for_a_token_is_not_redirected(authority: Authority, status: int) -> None:
    with (
        serving({"access_token": "t"}) as plain,
        issuing(lambda: b"", answer(status=status, Location=plain.url), authority) as server,
        pytest.raises(AuthenticationFailed, match=str(status)),
    ):
        fetch(f"{server.url}/token", tls_ca=authority.file)
    assert not plain.requests


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        answer(b"<html>"),
        answer(DEEP),
        answer(b"\xff"),
        answer([]),
        answer({}),
        answer(None),
        answer({"access_token": None}),
        answer({"access_token": 5}),
        answer({"access_token": "a\r\nX-Evil: 1"}),
        answer({"access_token": "a b"}),
        answer({"access_token": "\u00e9"}),
        answer(b'{"access_token": "t", "expires_in": NaN}'),
        answer(b'{"access_token": "t", "expires_in": 1e999}'),
        answer({"access_token": "t", "expires_in": "nan"}),
        answer({"access_token": "t", "expires_in": -1}),
        answer({"access_token": "t", "expires_in": [1]}),
        answer(status=500),
        answer(b" " * (33 << 20)),
    ],
    ids=lambda token: repr(token[:60]),
)
def test_the_garbage_of_an_issuer_is_a_broker_error(token: bytes) -> None:
    with issuing(lambda: token, token) as server:
        for issuer in (server.url, f"{server.url}/token"):
            credentials = Credentials(oauth(issuer, oauth2_allow_http=True))
            with pytest.raises((AuthenticationFailed, ConnectionFailed)) as caught:
                credentials.token()
            assert "s3cret" not in str(caught.value)
            # As the client calls it, in a thread in which an exception would end the process.
            assert credentials._supply() == ""


@pytest.mark.parametrize(
    "endpoint", ["http://[::1/token", "http://127.0.0.1:99999/token", "http:///token", "", None, {}, "http://\u00e9/"]
)
def test_an_endpoint_that_is_no_address_is_a_broker_error(endpoint: object) -> None:
    refused = pytest.raises((AuthenticationFailed, ConnectionFailed))
    with issuing(lambda: answer({"token_endpoint": endpoint})) as server, refused:
        fetch(server.url, oauth2_allow_http=True)


# The answers of the HTTP API.

WRONG: tuple[object, ...] = (
    b"<html>",
    DEEP,
    b"NaN",
    b"\xff",
    [],
    [None, 5, {}],
    {},
    "text",
    5,
    True,
    {"partitions": []},
    {"partitions": -1},
    {"partitions": 10**9},
    {"partitions": {"x": 5}, "subscriptions": 5, "msgBacklog": "many", "storageSize": {}},
    {"ledgers": [5], "entryId": "x", "ledgerId": 10**30, "cursors": {"billing": {"markDeletePosition": "a:b"}}},
    {"subscriptions": {"billing": [], "anybroker-ephemeral-1": 5}, "msgBacklog": 10**400, "messages": 1e300},
)


def calls(connection: Connection) -> list[Callable[[], Awaitable[object]]]:
    """Everything that reads answers, and needs no client."""
    admin = PulsarAdmin(connection)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return [
        *admin_calls(admin, start),
        lambda: topic_bounds(connection, "orders"),
        lambda: connection.cleanup._check("orders"),
        connection._check_credentials,
    ]


@pytest.mark.parametrize("body", WRONG, ids=lambda body: repr(body)[:60])
async def test_a_wrong_answer_is_a_broker_error(body: object) -> None:
    with serving(body) as server:
        connection = Connection(PulsarSettings(admin_url=server.url, request_timeout=1), Hooks())
        for number, call in enumerate(calls(connection)):
            try:
                await call()
            except BrokerError:
                continue
            except Exception as error:
                raise AssertionError(f"call {number}: {error!r}") from error
        await connection.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"garbage",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        answer(b" " * (33 << 20)),
        answer(DEEP),
        answer({"reason": "x" * 1_000_000}, status=409),
        answer(DEEP, status=500),
    ],
    ids=lambda raw: repr(raw[:60]),
)
async def test_what_is_no_http_is_a_broker_error(raw: bytes) -> None:
    with HttpDouble(lambda _: raw) as server, pytest.raises(BrokerError) as caught:
        await ask(server, request_timeout=1)
    assert TOKEN not in str(caught.value)
    assert len(str(caught.value)) < 2000


async def test_an_answer_that_never_ends_times_out() -> None:
    """Each byte comes in time; only all of them do not."""
    done, closed = asyncio.Event(), asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        with contextlib.suppress(OSError):
            while not done.is_set():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.transport.abort()
        closed.set()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        settings = PulsarSettings(admin_url=f"http://127.0.0.1:{port}", request_timeout=1)
        http = HttpApi(settings, Credentials(settings))
        with pytest.raises(OperationTimeout):
            await http.get("/clusters", "Asking")
        done.set()
        await closed.wait()
        http.close()
