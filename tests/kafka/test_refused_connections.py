"""Rejected connections and credentials: the error names the reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from pydantic import SecretStr

import broker
from broker.bus import Bus
from broker.errors import AuthenticationFailed, BrokerError, ConnectionFailed, InvalidSetting
from broker_kafka.group import GroupConsumer
from broker_kafka.settings import KafkaSettings
from tests.servers.kafka_security import USERS, SecureBroker

pytestmark = pytest.mark.xdist_group("kafka-security")


@pytest.fixture(scope="module")
def secure() -> Iterator[SecureBroker]:
    with SecureBroker() as broker:
        yield broker


async def refused(secure: SecureBroker, door: str, **values: Any) -> BrokerError:
    with pytest.raises(BrokerError) as caught:
        async with broker.connect(KafkaSettings(servers=(secure.server.address(door),), **values)):
            pass
    return caught.value


@pytest.mark.deep
async def test_a_missing_client_certificate_is_reported(secure: SecureBroker) -> None:
    authority = secure.certificates.authority
    for _ in range(3):
        error = await refused(secure, "MUTUAL", ssl_ca_location=authority)
        assert isinstance(error, AuthenticationFailed)
        assert "alert" in str(error)
        assert not error.retriable


@pytest.mark.parametrize(
    ("door", "values", "wants"),
    [
        ("TLS", {}, "TLS or a login"),
        ("SASL_PLAIN", {}, "TLS or a login"),
        (
            "SASL_PLAIN_TLS",
            {"security_protocol": "SASL_PLAINTEXT", "sasl_username": "ann", "sasl_password": "x"},
            "TLS",
        ),
    ],
)
async def test_a_dropped_connection_is_reported_with_the_protocol(
    secure: SecureBroker, door: str, values: dict[str, Any], wants: str
) -> None:
    error = await refused(secure, door, **values)
    assert isinstance(error, ConnectionFailed)
    protocol = values.get("security_protocol", "PLAINTEXT")
    assert f"security_protocol={protocol}: a listener that requires {wants} closes such connections" in error.advice


@pytest.mark.parametrize("way", ["location", "pem"])
async def test_an_encrypted_key_without_its_password_is_reported(
    secure: SecureBroker, tmp_path: Path, way: str
) -> None:
    key: Any = load_pem_private_key(secure.certificates.client_key.read_bytes(), None)
    locked: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"open"))
    file = tmp_path / "locked.pem"
    file.write_bytes(locked)
    given = {"ssl_key_location": file} if way == "location" else {"ssl_key_pem": locked.decode()}
    known = secure.certificates
    error = await refused(
        secure, "MUTUAL", ssl_ca_location=known.authority, ssl_certificate_location=known.client, **given
    )
    assert isinstance(error, InvalidSetting)
    assert "ssl_key_password" in error.advice
    assert "PRIVATE KEY" not in str(error)


def without_a_vault(config: str) -> Any:
    raise RuntimeError("the vault is closed")


@pytest.mark.parametrize(
    ("token", "reported"),
    [
        (without_a_vault, "RuntimeError: the vault is closed"),
        (lambda _: None, "NoneType"),
        (lambda _: (b"token", time.time() + 60), "bytes and float"),
        (lambda _: ("token", "tomorrow"), "str and str"),
        (lambda _: ("token", time.time() - 60), "the token expired"),
    ],
    ids=["raises", "nothing", "bytes", "no-time", "ended"],
)
async def test_a_failing_token_callback_is_reported(
    secure: SecureBroker, token: Callable[[str], tuple[str, float]], reported: str
) -> None:
    begin = time.monotonic()
    error = await refused(
        secure,
        "OIDC",
        ssl_ca_location=secure.certificates.authority,
        sasl_mechanism="OAUTHBEARER",
        oauth_cb=token,
        connect_timeout=60,
    )
    assert isinstance(error, AuthenticationFailed)
    assert reported in str(error)
    assert time.monotonic() - begin < 30, "the client waited for a token"


async def test_a_later_client_without_a_token_reports_why_once(secure: SecureBroker) -> None:
    good = secure.tokens.make_token("ann")
    calls: list[str | None] = []
    topic, closed = secure.admin.make_topic(), False

    def token(config: str | None) -> tuple[str, float]:
        calls.append(config)
        if closed:
            return without_a_vault("")
        return good, time.time() + 300

    settings = KafkaSettings(
        servers=(secure.server.address("OIDC"),),
        ssl_ca_location=secure.certificates.authority,
        sasl_mechanism="OAUTHBEARER",
        oauth_cb=token,
    )
    async with broker.connect(settings) as bus:
        await bus.topic(topic).publish(b"x")
        assert len(calls) == 2, "a token for each client"
        closed = True
        with pytest.raises(AuthenticationFailed, match="the vault is closed"):
            async with bus.records(topic, group=f"{topic}-group") as log:
                await log.next_record(timeout=60)
        with pytest.raises(AuthenticationFailed, match="the vault is closed"):
            async with GroupConsumer(bus, topic, group=f"{topic}-group") as group:
                await anext(aiter(group))


@pytest.mark.deep
async def test_revoked_credentials_are_reported_until_restored(secure: SecureBroker) -> None:
    settings = KafkaSettings(
        servers=(secure.server.address("SCRAM_512"),),
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="bob",
        sasl_password=SecretStr(USERS["bob"]),
        request_timeout=2.0,
    )

    async def healthy(bus: Bus, expected: bool) -> str:
        async with asyncio.timeout(60):
            while (health := await bus.health()).ok is not expected or (not expected and "SASL" not in health.detail):
                await asyncio.sleep(0.05)
        return health.detail

    async with broker.connect(settings) as bus:
        await asyncio.to_thread(secure.remove_scram_user, "bob")
        await asyncio.to_thread(secure.server.stop)
        await asyncio.to_thread(secure.server.start)
        try:
            assert "SASL authentication error" in await healthy(bus, False)
            with pytest.raises(ConnectionFailed, match="SASL authentication error") as caught:
                await bus.admin.topics()
            assert "check its credentials" in caught.value.advice
        finally:
            await asyncio.to_thread(secure.add_scram_users)
        await healthy(bus, True)
        await bus.admin.topics()
