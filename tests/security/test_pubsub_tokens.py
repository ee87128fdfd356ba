"""Token servers of Google's credentials that are hostile or get no TLS, and a hostile Cloud Monitoring."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import google.auth
import google.auth.exceptions
import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

import broker
from broker.errors import BackendError, ConnectionFailed, InvalidSetting
from broker.hooks import Hooks
from broker_pubsub import lag
from broker_pubsub.connection import Connection
from broker_pubsub.credentials import _check_addresses, _Tokens, is_transient, load
from broker_pubsub.settings import PubSubSettings
from tests.security.http_double import HttpDouble, Request, answer
from tests.security.tls_double import TlsDouble
from tests.servers.certificates import Authority

KEY = generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
DEEP = "[" * 100_000


CLEAR = "http://tokens.example/token"
LOGIN = {"type": "authorized_user", "client_id": "c", "client_secret": "s3cret", "refresh_token": "r"}
ACCOUNT = {"type": "service_account", "private_key": KEY, "client_email": "a@b.example"}
IMPERSONATION = "https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/a@b.example:generateAccessToken"
IMPERSONATED = {"type": "impersonated_service_account", "service_account_impersonation_url": IMPERSONATION}
EXTERNAL = {
    "type": "external_account",
    "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
    "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
    "token_url": "https://sts.googleapis.com/v1/token",
}
USER = {**LOGIN, "type": "external_account_authorized_user", "audience": "//iam.googleapis.com/x"}
METADATA = "http://169.254.169.254/metadata/identity/oauth2/token"
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a service account": ("token_uri", {**ACCOUNT, "token_uri": CLEAR}),
    "a login": ("token_uri", {**LOGIN, "token_uri": CLEAR}),
    "an external user": ("token_url", {**USER, "token_url": CLEAR}),
    "what it asks for names": ("token_info_url", {**USER, "token_url": EXTERNAL["token_url"], "token_info_url": CLEAR}),
    "an external account": ("token_url", {**EXTERNAL, "token_url": CLEAR, "credential_source": {"file": "/nowhere"}}),
    "a metadata server for tokens": ("token_url", {**EXTERNAL, "token_url": METADATA}),
    "a subject token": ("url", {**EXTERNAL, "credential_source": {"url": CLEAR}}),
    "impersonation": (
        "service_account_impersonation_url",
        {**IMPERSONATED, "service_account_impersonation_url": CLEAR, "source_credentials": LOGIN},
    ),
    "an impersonating account": ("token_uri", {**IMPERSONATED, "source_credentials": {**ACCOUNT, "token_uri": CLEAR}}),
    "an account of a data centre": ("token_uri", {"type": "gdch_service_account", "token_uri": CLEAR}),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "loopback": {**IMPERSONATED, "source_credentials": {**ACCOUNT, "token_uri": "http://localhost:1/token"}},
    "Azure": {**EXTERNAL, "credential_source": {"url": f"{METADATA}?resource=x", "format": {"type": "json"}}},
    "Google": {**EXTERNAL, "credential_source": {"url": "http://metadata.google.internal/computeMetadata/v1/x"}},
    "AWS": {
        **EXTERNAL,
        "credential_source": {
            "region_url": "http://169.254.169.254/latest/meta-data/placement/availability-zone",
            "url": "http://[fd00:ec2::254]/latest/meta-data/iam/security-credentials",
            "imdsv2_session_token_url": "http://[fd00:ec2::254]/latest/api/token",
            "regional_cred_verification_url": "https://sts.{region}.amazonaws.com?Action=GetCallerIdentity",
        },
    },
}


def settings(directory: Path, token_uri: str) -> PubSubSettings:
    file = directory / "account.json"
    account = {"type": "service_account", "private_key": KEY, "client_email": "a@b.example", "token_uri": token_uri}
    file.write_text(json.dumps(account), encoding="utf-8")
    return PubSubSettings(project="my-project", credentials_file=file)


@pytest.mark.parametrize("token_uri", [CLEAR, "HTTP://tokens.example/token", "http://[::1"])
def test_a_token_server_without_tls_is_refused(tmp_path: Path, token_uri: str) -> None:
    with pytest.raises(InvalidSetting, match=r"token_uri .* not https"):
        load(settings(tmp_path, token_uri))


@pytest.mark.parametrize("place", ["named", "gcloud"])
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_no_address_of_default_credentials_is_without_tls(
    case: tuple[str, dict[str, Any]], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    field, content = case
    file = tmp_path / "application_default_credentials.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    if place == "named":
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    asked: list[object] = []
    monkeypatch.setattr(google.auth, "default", lambda **options: asked.append(options) or (None, None))
    with pytest.raises(InvalidSetting, match=f"{field} .* not https") as caught:
        load(PubSubSettings(project="my-project"))
    # google.auth fetches tokens for some of them while it reads them.
    assert not asked
    assert "s3cret" not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize("content", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_the_loopback_and_metadata_servers_need_no_tls(content: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    _check_addresses(file)


def test_credentials_without_a_file_are_those_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    machine = object()
    monkeypatch.setattr(google.auth, "default", lambda **options: (machine, "my-project"))
    assert load(PubSubSettings(project="my-project")) is machine


def test_a_token_server_cannot_redirect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.file))
    found: list[object] = []
    with HttpDouble(lambda _: answer({"access_token": "t0ken", "expires_in": 60})) as clear:
        redirect = answer(status=307, Location=f"{clear.url}/token")
        with HttpDouble(lambda _: redirect, authority.certificate("127.0.0.1")) as server:
            tokens = _Tokens(load(settings(tmp_path, f"{server.url}/token")))
            context = type("Context", (), {"service_url": "https://pubsub.example/", "method_name": "x"})()
            tokens(context, lambda metadata, error: found.append(error or metadata))
            assert server.requests
        assert not clear.requests
    assert isinstance(found[0], RuntimeError)


BOMB = gzip.compress(b" " * (33 << 20))


@pytest.mark.parametrize(
    "raw",
    [
        answer(b" " * (33 << 20)),
        answer(BOMB, 200, **{"Content-Encoding": "gzip"}),
        answer(DEEP.encode()),
        answer(b"NaN"),
        answer([]),
        answer({"timeSeries": [5]}),
        answer({"timeSeries": [{"points": [{"value": {"int64Value": "x"}}]}]}),
    ],
    ids=["long", "expanding", "deep", "no number", "a list", "no series", "no count"],
)
def test_the_garbage_of_cloud_monitoring_is_an_error(
    raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply(request: Request) -> bytes:
        return answer({"access_token": "t0ken", "expires_in": 60}) if request.path == "/token" else raw

    with HttpDouble(reply) as server:
        monkeypatch.setattr(lag, "MONITORING", server.url)
        connection = Connection(settings(tmp_path, f"{server.url}/token"), Hooks())
        with pytest.raises(BackendError, match=r"Cloud Monitoring: the answer"):
            lag._read_metric(connection, "projects/my-project/subscriptions/billing")


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
