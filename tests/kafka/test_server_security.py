"""The listeners of the secure test broker accept valid credentials and reject others, by the raw client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin._resource import ResourceType

from tests.servers.kafka_client import SECONDS, produce, read_all, round_trip
from tests.servers.kafka_security import DOORS, SecureBroker

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-server-security")]


@pytest.fixture(scope="module")
def secure() -> Iterator[SecureBroker]:
    with SecureBroker() as broker:
        yield broker


@pytest.fixture
def topic(secure: SecureBroker) -> str:
    return secure.admin.make_topic()


def refusal(config: dict[str, Any]) -> KafkaError:
    """The first error of a client that connects."""
    errors: list[KafkaError] = []
    client = Producer({"log_level": 0, **config, "error_cb": errors.append})
    deadline = time.monotonic() + SECONDS
    while not errors:
        assert time.monotonic() < deadline, "it was not rejected"
        client.poll(0.02)
    with pytest.raises(KafkaException):
        client.list_topics(timeout=0.2)
    return errors[0]


@pytest.mark.parametrize("door", DOORS)
def test_valid_credentials_are_accepted(secure: SecureBroker, topic: str, door: str) -> None:
    produce(secure.raw(door), topic, [b"let in"], partition=0)
    assert [message.value() for message in read_all(secure.raw(door), topic)] == [b"let in"]


@pytest.mark.parametrize("door", ["TLS", "SASL_PLAIN_TLS", "SCRAM_256", "OIDC"])
def test_the_client_rejects_an_unknown_authority(secure: SecureBroker, door: str) -> None:
    strange = str(secure.certificates.stranger_authority)
    without = secure.raw(door)
    del without["ssl.ca.location"]
    for config in ({**without, "ssl.ca.location": strange}, without):
        error = refusal(config)
        # librdkafka calls it one or the other, as it happens.
        assert error.code() in {KafkaError._SSL, KafkaError._TRANSPORT}
        assert "certificate verify failed" in error.str()


def test_mutual_tls_requires_a_certificate_of_its_authority(secure: SecureBroker) -> None:
    without = secure.raw("MUTUAL")
    del without["ssl.certificate.location"], without["ssl.key.location"]
    stranger = str(secure.certificates.stranger)
    # With TLS 1.3 the client learns of it after its own handshake, and may find the connection closed instead.
    expected = {KafkaError._SSL, KafkaError._TRANSPORT}
    assert refusal(without).code() in expected
    assert refusal({**without, "ssl.certificate.location": stranger, "ssl.key.location": stranger}).code() in expected


@pytest.mark.parametrize("door", ["SASL_PLAIN", "SASL_PLAIN_TLS", "SCRAM_256", "SCRAM_512"])
@pytest.mark.parametrize("wrong", [{"sasl.password": "wrong"}, {"sasl.username": "eve"}, {"sasl.mechanism": None}])
def test_wrong_credentials_are_refused(secure: SecureBroker, door: str, wrong: dict[str, Any]) -> None:
    right = secure.raw(door)
    if "sasl.mechanism" in wrong:
        wrong = {"sasl.mechanism": "PLAIN" if door.startswith("SCRAM") else "SCRAM-SHA-512"}
    assert refusal({**right, **wrong}).code() == KafkaError._AUTHENTICATION


def test_a_client_without_tokens_is_refused(secure: SecureBroker) -> None:
    for door in ("UNSECURED", "OIDC"):
        config = {
            "bootstrap.servers": secure.server.address(door),
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "ann",
            "sasl.password": "wrong",
        }
        if door == "OIDC":
            config |= {"security.protocol": "SASL_SSL", "ssl.ca.location": str(secure.certificates.authority)}
        assert refusal(config).code() == KafkaError._AUTHENTICATION


def with_token(secure: SecureBroker, token: str, door: str = "OIDC") -> dict[str, Any]:
    config = {name: value for name, value in secure.raw(door).items() if "oauthbearer" not in name}
    return {**config, "oauth_cb": lambda _: (token, time.time() + 300)}


def test_the_token_server_serves_only_its_clients(secure: SecureBroker, topic: str) -> None:
    round_trip(secure.raw("OIDC", "bob"), topic)
    right = secure.raw("OIDC")
    over_tls = {
        "sasl.oauthbearer.token.endpoint.url": secure.tokens.url("https"),
        "https.ca.location": str(secure.certificates.authority),
    }
    round_trip({**right, **over_tls}, topic)
    over_tls["https.ca.location"] = str(secure.certificates.stranger_authority)
    for wrong in ({"sasl.oauthbearer.client.secret": "wrong"}, {"sasl.oauthbearer.client.id": "eve"}, over_tls):
        assert refusal({**right, **wrong}).code() == KafkaError._AUTHENTICATION
    secure.tokens.status = 403
    try:
        assert refusal(right).code() == KafkaError._AUTHENTICATION
    finally:
        secure.tokens.status = 200


def test_the_broker_checks_tokens(secure: SecureBroker, topic: str) -> None:
    tokens = secure.tokens
    round_trip(with_token(secure, tokens.make_token("ann")), topic)
    head, body, _ = tokens.make_token("ann").split(".")
    unsigned = f"eyJhbGciOiJub25lIn0.{body}."
    for wrong in (
        tokens.make_token("ann", forged=True),
        tokens.make_token("ann", -60),
        tokens.make_token("ann", aud="another"),
        tokens.make_token("ann", iss="https://elsewhere.example.org"),
        f"{head}.{body}.AAAA",
        unsigned,
    ):
        assert refusal(with_token(secure, wrong)).code() == KafkaError._AUTHENTICATION
    expired = refusal(with_token(secure, tokens.make_token("ann", -60), "UNSECURED"))
    assert expired.code() == KafkaError._AUTHENTICATION


def test_a_topic_of_another_user_is_rejected(secure: SecureBroker, topic: str) -> None:
    secure.restrict(topic, "bob")
    for door in ("SASL_PLAIN", "SCRAM_256", "SCRAM_512", "UNSECURED", "OIDC"):
        produce(secure.raw(door, "bob"), topic, [b"1"])
        with pytest.raises(KafkaException) as caught:
            produce(secure.raw(door, "ann"), topic, [b"1"])
        assert caught.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert secure.admin.bounds(topic) == (0, 5)


def test_a_group_of_another_user_is_rejected(secure: SecureBroker, topic: str, group: str) -> None:
    secure.restrict(group, "bob", ResourceType.GROUP)
    assert first_poll(secure, "bob", group, topic) == KafkaError._PARTITION_EOF
    assert first_poll(secure, "ann", group, topic) == KafkaError.GROUP_AUTHORIZATION_FAILED


def first_poll(secure: SecureBroker, user: str, group: str, topic: str) -> int:
    """The code of the first error of a member of the group."""
    own = {"group.id": group, "enable.partition.eof": True, "log_level": 0, "group.protocol": "consumer"}
    consumer = Consumer({**secure.raw("SCRAM_256", user), **own})
    try:
        consumer.subscribe([topic])
        message = consumer.poll(SECONDS)
        assert message is not None
        error = message.error()
        assert error is not None
        return error.code()
    finally:
        consumer.close()
