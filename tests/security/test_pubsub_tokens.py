"""Token servers of Google's credentials that are hostile."""

from __future__ import annotations

import json
from pathlib import Path

import google.auth.exceptions
import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

import broker
from broker.errors import ConnectionFailed, InvalidSetting
from broker_pubsub.credentials import _Tokens, is_transient, load
from broker_pubsub.settings import PubSubSettings
from tests.security.http_double import HttpDouble, answer
from tests.security.tls_double import TlsDouble
from tests.servers.certificates import Authority

KEY = generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
DEEP = "[" * 100_000


def settings(directory: Path, token_uri: str) -> PubSubSettings:
    file = directory / "account.json"
    account = {"type": "service_account", "private_key": KEY, "client_email": "a@b.example", "token_uri": token_uri}
    file.write_text(json.dumps(account), encoding="utf-8")
    return PubSubSettings(project="my-project", credentials_file=file)


@pytest.mark.parametrize("token_uri", ["http://tokens.example/token", "HTTP://tokens.example/token", "http://[::1"])
def test_a_token_server_without_tls_is_refused(tmp_path: Path, token_uri: str) -> None:
    with pytest.raises(InvalidSetting, match=r"token_uri .* not https"):
        load(settings(tmp_path, token_uri))


@pytest.mark.parametrize(
    "text", [DEEP, '{"error":' + DEEP, "NaN", "[]", "5", "{}", '{"error": {"code": NaN}}', "\ud800"]
)
def test_the_garbage_of_a_token_server_is_permanent(text: str) -> None:
    assert not is_transient(google.auth.exceptions.RefreshError("Unable to acquire", text))


@pytest.mark.parametrize(
    "raw",
    [b"garbage", answer(b"<html>"), answer(DEEP.encode()), answer({}), answer({"access_token": 5}), answer([])],
    ids=lambda raw: repr(raw[:60]),
)
def test_the_garbage_of_a_token_server_reaches_grpc_as_an_error(
    raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in gRPC's thread would leave the call without an answer."""
    authority = Authority(tmp_path)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.file))
    found: list[object] = []
    with HttpDouble(lambda _: raw, authority.certificate("127.0.0.1")) as server:
        tokens = _Tokens(load(settings(tmp_path, f"{server.url}/token")))
        context = type("Context", (), {"service_url": "https://pubsub.example/", "method_name": "x"})()
        tokens(context, lambda metadata, error: found.append(error or metadata))
        assert server.requests
    assert len(found) == 1
    assert isinstance(found[0], RuntimeError)


@pytest.mark.parametrize("fault", ["unknown authority", "wrong host"])
async def test_a_wrong_server_gets_no_token(
    fault: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    authority = Authority(tmp_path)
    other = Authority(tmp_path_factory.mktemp("other"))
    wrong = other.certificate("127.0.0.1") if fault == "unknown authority" else authority.certificate("other.example")
    with (
        HttpDouble(lambda _: answer({"access_token": "t0ken", "expires_in": 60})) as tokens,
        TlsDouble(wrong) as server,
    ):
        chosen = settings(tmp_path, f"{tokens.url}/token").replaced(
            {"endpoint": f"127.0.0.1:{server.port}", "tls_ca": authority.file, "connect_timeout": 30}
        )
        with pytest.raises(ConnectionFailed):
            async with broker.connect(chosen):
                pass
        server.wait_for(1)
    assert not any(server.received)
