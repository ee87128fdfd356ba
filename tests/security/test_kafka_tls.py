"""Secrets of Kafka's clients go over TLS only, to servers whose certificate is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import pytest
from pydantic import SecretStr

import broker
from broker.errors import AuthenticationFailed, BrokerError, InvalidSetting
from broker_kafka.settings import KafkaSettings
from tests.security.http_double import HttpDouble, Request, answer
from tests.security.tls_double import TlsDouble
from tests.servers.certificates import Authority, Issued

OIDC = (
    "sasl_mechanism=OAUTHBEARER&sasl_oauthbearer_method=oidc&sasl_oauthbearer_client_id=shop"
    "&sasl_oauthbearer_client_secret=s3cret&sasl_oauthbearer_token_endpoint_url=https://127.0.0.1:1/token"
)
METADATA = "sasl.oauthbearer.metadata.authentication.type"


async def refused(settings: KafkaSettings) -> BrokerError:
    with pytest.raises(BrokerError) as caught:
        async with broker.connect(settings):
            pass
    assert "s3cret" not in repr(caught.value)
    assert "s3cret" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
@pytest.mark.parametrize("fault", ["unknown authority", "wrong host"])
async def test_a_wrong_certificate_is_refused_before_the_password(
    authority: Authority, wrong: Mapping[str, Issued], fault: str, mechanism: Any
) -> None:
    with TlsDouble(wrong[fault]) as server:
        error = await refused(
            KafkaSettings(
                servers=(f"127.0.0.1:{server.port}",),
                sasl_mechanism=mechanism,
                sasl_username="ann",
                sasl_password=SecretStr("s3cret"),
                ssl_ca_location=authority.file,
                connect_timeout=30,
            )
        )
        assert isinstance(error, AuthenticationFailed)
        assert server.wait_for(1)[0] == b""
    assert not any(server.received)


async def test_the_double_would_see_what_is_sent(authority: Authority) -> None:
    with TlsDouble(authority.certificate("127.0.0.1")) as server:
        await refused(
            KafkaSettings(
                servers=(f"127.0.0.1:{server.port}",),
                sasl_username="ann",
                sasl_password=SecretStr("s3cret"),
                ssl_ca_location=authority.file,
                connect_timeout=3,
            )
        )
        assert server.wait_for(1)[0] != b""


def oidc(endpoint: str, authority: Authority, properties: Mapping[str, str] | None = None) -> KafkaSettings:
    return KafkaSettings(
        servers=("127.0.0.1:1",),
        sasl_mechanism="OAUTHBEARER",
        sasl_oauthbearer_method="oidc",
        sasl_oauthbearer_token_endpoint_url=endpoint,
        sasl_oauthbearer_client_id="shop",
        sasl_oauthbearer_client_secret=SecretStr("s3cret"),
        properties={"https.ca.location": str(authority.file), **(properties or {})},
        connect_timeout=30,
    )


def asks(server: HttpDouble) -> list[Request]:
    return [request for request in server.requests if b"client_credentials" in request.body]


@pytest.mark.parametrize("status", [302, 307])
async def test_a_request_for_a_token_is_not_redirected(authority: Authority, status: int) -> None:
    with HttpDouble(lambda _: answer({})) as plain:
        moved = answer(status=status, Location=f"{plain.url}/token")
        with HttpDouble(lambda _: moved, authority.certificate("127.0.0.1")) as server:
            await refused(oidc(f"{server.url}/token", authority))
            assert asks(server)
    assert not plain.requests


@pytest.mark.parametrize("fault", ["unknown authority", "wrong host"])
async def test_a_wrong_token_endpoint_gets_no_secret(
    authority: Authority, wrong: Mapping[str, Issued], fault: str
) -> None:
    with HttpDouble(lambda _: answer({}), wrong[fault]) as server:
        await refused(oidc(f"{server.url}/token", authority))
    assert not server.requests


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage",
        answer(b"<html>"),
        answer({}),
        answer({"access_token": 5}),
        answer({"access_token": "a.b.c"}),
        answer({"access_token": "a.e30.c"}),
        answer(b'{"access_token": "a.eyJleHAiOk5hTn0.c"}'),
        answer(b'{"access_token":' + b"[" * 100_000),
        answer(b" " * 3_000_000),
    ],
    ids=lambda raw: repr(raw[:60]),
)
async def test_the_garbage_of_a_token_endpoint_is_a_broker_error(authority: Authority, raw: bytes) -> None:
    with HttpDouble(lambda _: raw, authority.certificate("127.0.0.1")) as server:
        await refused(oidc(f"{server.url}/token", authority))
        assert asks(server)


def test_a_token_endpoint_without_tls_needs_a_setting() -> None:
    KafkaSettings.from_url(f"kafka://h?{OIDC}")
    for scheme in ("http", "HTTP"):
        url = f"kafka://h?{OIDC.replace('=https:', f'={scheme}:')}"
        with pytest.raises(InvalidSetting, match=r"token_endpoint_url.*sasl_oauthbearer_allow_http=true") as caught:
            KafkaSettings.from_url(url)
        assert "s3cret" not in str(caught.value)
        settings = KafkaSettings.from_url(f"{url}&sasl_oauthbearer_allow_http=true")
        assert not any("allow" in name for name in settings.client_config("admin"))


@pytest.mark.parametrize("kind", ["none", "NONE", " none ", "", "azure", "azure_imds,none"])
def test_only_a_kind_of_metadata_without_credentials_needs_no_tls(kind: str) -> None:
    url = f"kafka://h?{OIDC.replace('=https:', '=http:')}&{METADATA}={quote(kind)}"
    with pytest.raises(InvalidSetting, match=r"token_endpoint_url.*sasl_oauthbearer_allow_http=true"):
        KafkaSettings.from_url(url)
    with pytest.raises(InvalidSetting, match=r"token_endpoint_url.*sasl_oauthbearer_allow_http=true"):
        KafkaSettings.from_url(f"kafka://h?{OIDC}").replaced(
            {"sasl_oauthbearer_token_endpoint_url": "http://h", "properties": {METADATA: kind}}
        )
    KafkaSettings.from_url(f"{url}&sasl_oauthbearer_allow_http=true")


def test_an_endpoint_of_aws_without_tls_needs_a_setting() -> None:
    url = (
        f"kafka://h?sasl_mechanism=OAUTHBEARER&sasl_oauthbearer_method=oidc&{METADATA}=aws_iam&sasl_oauthbearer_config="
    )
    given = "region=eu-west-1,audience=http://kafka"
    for endpoint in ("", ",sts_endpoint=https://sts"):
        KafkaSettings.from_url(url + quote(given + endpoint))
    for endpoint in (",sts_endpoint=http://me:s3cret@sts", ",sts_endpoint=http://sts,sts_endpoint=https://sts"):
        with pytest.raises(InvalidSetting, match=r"oauthbearer_config.*sasl_oauthbearer_allow_http=true") as caught:
            KafkaSettings.from_url(url + quote(given + endpoint))
        assert "s3cret" not in str(caught.value)
        KafkaSettings.from_url(f"{url}{quote(given + endpoint)}&sasl_oauthbearer_allow_http=true")


async def test_a_metadata_endpoint_gets_no_credentials(authority: Authority) -> None:
    with HttpDouble(lambda _: answer({})) as server:
        await refused(oidc(f"{server.url}/token", authority, {METADATA: "azure_imds"}))
        assert server.requests
    for request in server.requests:
        assert (request.method, request.body) == ("GET", b"")
        assert "authorization" not in request.headers
        assert "s3cret" not in str(request)
