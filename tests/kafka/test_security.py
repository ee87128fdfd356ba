"""Every security protocol and mechanism, by the settings of the backend, on listeners that accept nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin._resource import ResourceType
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509 import load_pem_x509_certificate

import broker
from broker.bus import Bus
from broker.errors import (
    AuthenticationFailed,
    BrokerError,
    ConnectionFailed,
    InvalidSetting,
    NotAuthorized,
    PublishError,
    Unsupported,
)
from broker.hooks import Hooks
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.markers.wire import MessageId
from broker_kafka.queue.tracker import redelivery_checks
from broker_kafka.settings import KafkaSettings
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_security import USERS, SecureBroker

pytestmark = pytest.mark.xdist_group("kafka-security")

SECRETS = (*USERS.values(), "wr0ng-secret")
PATIENCE = 60.0  # seconds to connect: more than a busy machine takes, and less than a hang


@pytest.fixture(scope="module")
def secure() -> Iterator[SecureBroker]:
    with SecureBroker() as broker:
        yield broker


@pytest.fixture
def topic(secure: SecureBroker) -> str:
    return secure.admin.make_topic()


def at(secure: SecureBroker, door: str, connect_timeout: Any = PATIENCE, **values: Any) -> KafkaSettings:
    return KafkaSettings(servers=(secure.server.address(door),), connect_timeout=connect_timeout, **values)


def over_tls(secure: SecureBroker, **values: Any) -> dict[str, Any]:
    return {"ssl_ca_location": secure.certificates.authority, **values}


async def round_trip(target: KafkaSettings | str, topic: str) -> bytes | None:
    """Publish, read back and describe the topic, with a client of each kind; returns what was read."""
    async with broker.connect(target) as bus:
        receipt = await bus.topic(topic).publish(b"x")
        assert receipt.offset is not None
        async with bus.records(topic, group=f"{topic}-group", start="earliest") as records:
            async with asyncio.timeout(60):
                async for record in records:
                    if record.offset == receipt.offset:
                        assert topic in await bus.admin.topics()
                        return record.data
    raise AssertionError("the consumer ended by itself")


async def refused(target: KafkaSettings | str) -> BrokerError:
    """The error of opening, which comes quickly and shows no secret."""
    begin = time.monotonic()
    with pytest.raises(BrokerError) as caught:
        async with broker.connect(target):
            pass
    assert time.monotonic() - begin < PATIENCE / 2, "it waited for connect_timeout"
    for secret in SECRETS:
        assert secret not in str(caught.value)
        assert secret not in repr(target) or isinstance(target, str)
    return caught.value


async def test_tls(secure: SecureBroker, topic: str) -> None:
    address, authority = secure.server.address("TLS"), secure.certificates.authority
    for target in (
        at(secure, "TLS", ssl_ca_location=authority),
        at(secure, "TLS", ssl_ca_pem=authority.read_text()),
        f"kafka://{address}?ssl_ca_location={authority}",
        f"kafka://{address}?ssl.ca.location={authority}&ssl.cipher.suites=ECDHE-ECDSA-AES128-GCM-SHA256",
        at(secure, "TLS", security_protocol="SSL", enable_ssl_certificate_verification=False),
    ):
        assert await round_trip(target, topic) == b"x"


@pytest.mark.deep
async def test_a_certificate_of_an_unknown_authority_is_rejected(secure: SecureBroker) -> None:
    strange = secure.certificates.stranger_authority
    for wrong in (
        at(secure, "TLS", ssl_ca_location=strange),
        at(secure, "TLS", security_protocol="SSL"),
        at(secure, "SASL_PLAIN_TLS", sasl_username="ann", sasl_password=USERS["ann"]),
        at(secure, "SASL_PLAIN_TLS", sasl_username="ann", sasl_password=USERS["ann"], ssl_ca_location=strange),
    ):
        for _ in range(3):  # librdkafka reports it in one of two ways
            error = await refused(wrong)
            assert isinstance(error, AuthenticationFailed)
            assert "certificate verify failed" in str(error)
            assert not error.retriable


async def test_a_wrong_host_name_is_rejected_unless_the_check_is_off(secure: SecureBroker, topic: str) -> None:
    authority = secure.misnamed_authority
    assert isinstance(await refused(at(secure, "MISNAMED", ssl_ca_location=authority)), AuthenticationFailed)
    await round_trip(
        at(secure, "MISNAMED", ssl_ca_location=authority, ssl_endpoint_identification_algorithm="none"), topic
    )


@pytest.mark.deep
async def test_the_wrong_security_protocol_is_reported(secure: SecureBroker, kafka: KafkaServer) -> None:
    ann: dict[str, Any] = {"sasl_username": "ann", "sasl_password": USERS["ann"]}
    for wrong in (
        at(secure, "TLS"),
        at(secure, "MUTUAL"),
        at(secure, "SASL_PLAIN"),
        at(secure, "SASL_PLAIN_TLS", security_protocol="SASL_PLAINTEXT", **ann),
        at(secure, "SASL_PLAIN", **over_tls(secure, **ann)),
        at(secure, "PLAIN", **over_tls(secure)),
        KafkaSettings(servers=(kafka.bootstrap,), security_protocol="SASL_PLAINTEXT", connect_timeout=PATIENCE, **ann),
    ):
        error = await refused(wrong)
        assert isinstance(error, (AuthenticationFailed, ConnectionFailed)), wrong
        assert error.advice


async def test_mutual_tls(secure: SecureBroker, topic: str, tmp_path: Path) -> None:
    known = secure.certificates
    stranger = known.stranger
    files = {"ssl_certificate_location": known.client, "ssl_key_location": known.client_key}
    await round_trip(at(secure, "MUTUAL", **over_tls(secure, **files)), topic)
    texts = {"ssl_certificate_pem": known.client.read_text(), "ssl_key_pem": known.client_key.read_text()}
    await round_trip(at(secure, "MUTUAL", **over_tls(secure, **texts)), topic)
    for wrong in ({}, {"ssl_certificate_location": stranger, "ssl_key_location": stranger}):
        error = await refused(at(secure, "MUTUAL", **over_tls(secure, **wrong)))
        assert isinstance(error, (AuthenticationFailed, ConnectionFailed))


async def test_encrypted_private_keys(secure: SecureBroker, topic: str, tmp_path: Path) -> None:
    known = secure.certificates
    key: Any = serialization.load_pem_private_key(known.client_key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"open")
    pem = tmp_path / "locked.pem"
    pem.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    store = tmp_path / "client.p12"
    certificate = load_pem_x509_certificate(known.client.read_bytes())
    store.write_bytes(pkcs12.serialize_key_and_certificates(b"client", key, certificate, None, locked))
    files = over_tls(secure, ssl_certificate_location=known.client, ssl_key_location=pem)
    await round_trip(at(secure, "MUTUAL", **files, ssl_key_password="open"), topic)
    packed = over_tls(secure, ssl_keystore_location=store)
    await round_trip(at(secure, "MUTUAL", **packed, ssl_keystore_password="open"), topic)
    for malformed in (
        {**files, "ssl_key_password": "wr0ng-secret"},
        {**packed, "ssl_keystore_password": "wr0ng-secret"},
        {**files, "ssl_key_password": "open", "ssl_key_location": known.authority},
        {**files, "ssl_key_location": tmp_path / "nothing.pem"},
        {"ssl_ca_location": tmp_path / "nothing.pem"},
        {"ssl_ca_pem": "garbage"},
        {**over_tls(secure, ssl_certificate_pem="garbage"), "ssl_key_pem": known.client_key.read_text()},
    ):
        error = await refused(at(secure, "MUTUAL", **malformed))
        assert isinstance(error, InvalidSetting), malformed


@pytest.mark.deep
@pytest.mark.parametrize(
    ("door", "values"),
    [
        ("SASL_PLAIN", {"security_protocol": "SASL_PLAINTEXT"}),
        ("SASL_PLAIN_TLS", {}),
        ("SCRAM_256", {"sasl_mechanism": "SCRAM-SHA-256"}),
        ("SCRAM_512", {"sasl_mechanism": "SCRAM-SHA-512", "security_protocol": "SASL_PLAINTEXT"}),
    ],
)
async def test_user_and_password(secure: SecureBroker, topic: str, door: str, values: dict[str, Any]) -> None:
    if "security_protocol" not in values:
        values = over_tls(secure, **values)
    ann = {"sasl_username": "ann", "sasl_password": USERS["ann"]}
    await round_trip(at(secure, door, **values, **ann), topic)
    parameters = "&".join(f"{name}={value}" for name, value in values.items())
    password = quote(USERS["ann"], safe="")
    await round_trip(f"kafka://ann:{password}@{secure.server.address(door)}?{parameters}", topic)
    dotted = "&".join(f"{name.replace('_', '.')}={value}" for name, value in values.items())
    await round_trip(f"kafka://ann:{password}@{secure.server.address(door)}?{dotted}", topic)
    other = "SCRAM-SHA-256" if door != "SCRAM_256" else "PLAIN"
    for wrong in (
        {**ann, "sasl_password": "wr0ng-secret"},
        {**ann, "sasl_username": "eve"},
        {**ann, "sasl_username": "bob"},
        {**ann, "sasl_mechanism": other},
    ):
        error = await refused(at(secure, door, **{**values, **wrong}))
        assert isinstance(error, AuthenticationFailed)
        assert not error.retriable


def unsecured(secure: SecureBroker, user: str, **values: Any) -> KafkaSettings:
    base: dict[str, Any] = {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "OAUTHBEARER",
        "enable_sasl_oauthbearer_unsecure_jwt": True,
        "sasl_oauthbearer_config": f"principal={user}",
    }
    return at(secure, "UNSECURED", **{**base, **values})


def with_endpoint(secure: SecureBroker, user: str = "ann", **values: Any) -> KafkaSettings:
    base: dict[str, Any] = {
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauthbearer_method": "oidc",
        "sasl_oauthbearer_token_endpoint_url": secure.tokens.url(),
        "sasl_oauthbearer_allow_http": True,
        "sasl_oauthbearer_client_id": user,
        "sasl_oauthbearer_client_secret": USERS[user],
    }
    return at(secure, "OIDC", **over_tls(secure, **{**base, **values}))


def with_token(secure: SecureBroker, *tokens: str) -> KafkaSettings:
    given = iter(tokens * 50)
    return at(
        secure,
        "OIDC",
        **over_tls(secure, sasl_mechanism="OAUTHBEARER", oauth_cb=lambda _: (next(given), time.time() + 300)),
    )


async def test_unsecured_tokens(secure: SecureBroker, topic: str) -> None:
    await round_trip(unsecured(secure, "ann"), topic)
    address = secure.server.address("UNSECURED")
    await round_trip(
        f"kafka://{address}?security_protocol=SASL_PLAINTEXT&sasl_mechanism=OAUTHBEARER"
        "&enable_sasl_oauthbearer_unsecure_jwt=true&sasl_oauthbearer_config=principal%3Dann",
        topic,
    )
    password = {"sasl_username": "ann", "sasl_password": USERS["ann"], "security_protocol": "SASL_PLAINTEXT"}
    assert isinstance(await refused(at(secure, "UNSECURED", **password)), AuthenticationFailed)


@pytest.mark.deep
async def test_tokens_from_an_endpoint(secure: SecureBroker, topic: str) -> None:
    await round_trip(with_endpoint(secure), topic)
    await round_trip(with_endpoint(secure, "bob", sasl_oauthbearer_scope="orders"), topic)
    endpoint = secure.tokens.url("https")
    known = {"https.ca.location": str(secure.certificates.authority)}
    await round_trip(with_endpoint(secure, sasl_oauthbearer_token_endpoint_url=endpoint, properties=known), topic)
    for wrong in (
        {"sasl_oauthbearer_client_secret": "wr0ng-secret"},
        {"sasl_oauthbearer_client_id": "eve"},
        {"sasl_oauthbearer_token_endpoint_url": endpoint},
        {"sasl_oauthbearer_token_endpoint_url": secure.tokens.url() + "/elsewhere"},
    ):
        assert isinstance(await refused(with_endpoint(secure, **wrong)), AuthenticationFailed)


@pytest.mark.deep
async def test_tokens_from_a_callback(secure: SecureBroker, topic: str) -> None:
    make = secure.tokens.make_token
    await round_trip(with_token(secure, make("ann")), topic)
    for wrong in (make("ann", forged=True), make("ann", -60), make("ann", aud="another"), "no-token"):
        assert isinstance(await refused(with_token(secure, wrong)), AuthenticationFailed)


@pytest.mark.deep
async def test_a_connection_refreshes_its_tokens(secure: SecureBroker, topic: str) -> None:
    secure.tokens.lifetime = 3
    try:
        async with broker.connect(with_endpoint(secure)) as bus:
            orders = bus.topic(topic)
            await orders.publish(b"first")
            before = secure.tokens.requests
            count = 1
            async with asyncio.timeout(60):
                while secure.tokens.requests < before + 6:
                    await orders.publish(b"again")
                    count += 1
            await bus.health()
    finally:
        secure.tokens.lifetime = 300
    assert secure.admin.bounds(topic) == (0, count)


async def test_kerberos_without_support_in_librdkafka_is_an_error(secure: SecureBroker) -> None:
    settings = at(secure, "SASL_PLAIN", sasl_mechanism="GSSAPI", sasl_kerberos_service_name="kafka")
    error = await refused(settings)
    assert isinstance(error, Unsupported)
    assert "--no-binary" in error.advice


def as_ann(secure: SecureBroker, **values: Any) -> KafkaSettings:
    login = {"sasl_mechanism": "SCRAM-SHA-256", "sasl_username": "ann", "sasl_password": USERS["ann"]}
    return at(secure, "SCRAM_256", **over_tls(secure, **login, **values))


@pytest.fixture
async def ann(secure: SecureBroker) -> AsyncIterator[Bus]:
    async with broker.connect(as_ann(secure)) as bus:
        yield bus


async def test_a_topic_of_another_user(secure: SecureBroker, topic: str, ann: Bus) -> None:
    secure.restrict(topic, "bob")
    with pytest.raises(NotAuthorized, match=topic):
        await ann.topic(topic).publish(b"x")
    with pytest.raises((PublishError, NotAuthorized)):
        await ann.topic(topic).publish_batch([b"1", b"2"])
    with pytest.raises(NotAuthorized, match=topic):
        async with ann.records(topic, group=f"{topic}-group", start="earliest") as records, asyncio.timeout(60):
            async for _ in records:
                pytest.fail("ann may not read this")
    with pytest.raises(NotAuthorized, match=topic):
        await ann.admin.delete_topic(topic)
    assert topic not in await ann.admin.topics()
    assert secure.admin.bounds(topic) == (0, 0)


async def test_a_group_of_another_user(secure: SecureBroker, topic: str, group: str, ann: Bus) -> None:
    secure.restrict(group, "bob", ResourceType.GROUP)
    for start in ("earliest", "latest"):
        with pytest.raises(NotAuthorized, match=group):
            async with ann.records(topic, group=group, start=start) as records, asyncio.timeout(60):
                async for _ in records:
                    pytest.fail("ann may not join this")
    with pytest.raises(NotAuthorized, match=group):
        await ann.admin.reset_group(group, to="latest", topics=[topic])


async def test_a_transactional_id_of_another_user(secure: SecureBroker, topic: str, group: str, ann: Bus) -> None:
    secure.restrict(group, "bob", ResourceType.TRANSACTIONAL_ID)
    with pytest.raises(NotAuthorized, match=group):
        async with ann.transactional_publisher(group) as publisher, publisher.transaction():
            pytest.fail("ann may not begin this")


async def test_a_permission_granted_later_takes_effect(secure: SecureBroker, topic: str, ann: Bus) -> None:
    secure.restrict(topic, "bob")
    orders = ann.topic(topic)
    with pytest.raises(NotAuthorized):
        await orders.publish(b"x")
    secure.restrict(topic, "ann")
    async with asyncio.timeout(60):
        while True:  # librdkafka believes the refusal until it requests the metadata of the topic again
            with contextlib.suppress(NotAuthorized):
                assert (await orders.publish(b"y")).offset == 0
                break
            await asyncio.sleep(0.05)
    assert secure.admin.bounds(topic) == (0, 1)


@pytest.mark.parametrize("resource", [ResourceType.GROUP, ResourceType.TOPIC], ids=["group", "topic"])
async def test_unauthorized_tracker_positions_are_reported_once(
    secure: SecureBroker, topic: str, group: str, resource: ResourceType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redelivery_checks, "_POSITION_AGE", 0.0)
    # For a group, the client does not report why there is no answer.
    monkeypatch.setattr(redelivery_checks, "_LONG", 3.0)
    refused, warned = {ResourceType.GROUP: group, ResourceType.TOPIC: topic}[resource], list[str]()
    message = MessageId(topic, 0, 0, group)
    consumer = Consumer({"bootstrap.servers": secure.server.bootstrap, "group.id": group})
    consumer.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
    consumer.close()
    connection = Connection(as_ann(secure, request_timeout=2.0), Hooks())
    await connection.open()
    try:
        positions = redelivery_checks.GroupPositions(connection, group, warned.append)
        secure.restrict(refused, "bob", resource)
        for _ in range(3):
            assert not await positions.passed([message])
        assert len(warned) == 1
        assert refused in warned[0]
        secure.restrict(refused, "ann", resource)
        async with asyncio.timeout(60):
            while not await positions.passed([message]):
                await asyncio.sleep(0.05)
        assert len(warned) == 1
    finally:
        await connection.close()
