"""Errors of librdkafka and the brokers are translated into their classes."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from broker import errors
from broker.outbound import OutboundMessage
from broker_kafka.client.delivery_reports import publish_error
from broker_kafka.errors import configuration_error, kafka_error, translate
from broker_kafka.settings import KafkaSettings


@pytest.mark.parametrize(
    ("code", "expected", "retriable"),
    [
        (KafkaError.FENCED_LEADER_EPOCH, errors.BackendError, True),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, errors.TopicNotFound, False),
        (KafkaError._UNKNOWN_TOPIC, errors.TopicNotFound, False),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, errors.NotAuthorized, False),
        (KafkaError._AUTHENTICATION, errors.AuthenticationFailed, False),
        (KafkaError._SSL, errors.AuthenticationFailed, False),
        (KafkaError.MSG_SIZE_TOO_LARGE, errors.MessageTooLarge, False),
        (KafkaError._TRANSPORT, errors.ConnectionFailed, True),
        (KafkaError._DESTROY_BROKER, errors.ConnectionFailed, True),
        (KafkaError._MSG_TIMED_OUT, errors.OperationTimeout, True),
        (KafkaError.ILLEGAL_GENERATION, errors.LeaseLost, False),
        (KafkaError._FENCED, errors.TransactionFatal, False),
        (KafkaError.OFFSET_OUT_OF_RANGE, errors.OffsetOutOfRange, False),
        (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, errors.BackendError, True),
        (KafkaError.NOT_ENOUGH_REPLICAS, errors.BackendError, True),
        (KafkaError.KAFKA_STORAGE_ERROR, errors.StorageFailed, True),
        (KafkaError.NON_EMPTY_GROUP, errors.BackendError, False),
    ],
)
def test_codes(code: int, expected: type[errors.BrokerError], retriable: bool) -> None:
    error = translate(KafkaError(code), "Publishing to 'orders'")
    assert type(error) is expected
    assert error.retriable is retriable
    assert str(error).startswith("Publishing to 'orders': ")
    assert isinstance(error.native, KafkaException)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (KafkaError.OFFSET_METADATA_TOO_LARGE, r"offset\.metadata\.max\.bytes, 4096"),
        (KafkaError.FENCED_INSTANCE_ID, "group_protocol=classic keeps the later, and consumer the earlier"),
    ],
)
def test_errors_have_advice(code: int, advice: str) -> None:
    with pytest.raises(errors.BrokerError, match=advice):
        raise translate(KafkaError(code), "Committing")


def test_a_too_large_message_is_reported_with_its_size() -> None:
    message = OutboundMessage(b"four", b"key")
    error = publish_error(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), "orders", message, None)
    assert isinstance(error, errors.MessageTooLarge)
    assert "'orders'" in str(error)
    assert "the key and body have 7 bytes" in str(error)
    assert "max.message.bytes" in str(error)


@pytest.mark.parametrize(
    ("settings", "expected", "text"),
    [
        (KafkaSettings(properties={"client.racc": "a"}), errors.UnknownSetting, "Did you mean 'client.rack'?"),
        (KafkaSettings(properties={"broker.address.family": "v5"}), errors.InvalidSetting, "broker.address.family"),
        (KafkaSettings(properties={"log.connection.close": "maybe"}), errors.InvalidSetting, "log.connection.close"),
        (KafkaSettings(properties={"max.in.flight": "10"}), errors.InvalidSetting, "`max.in.flight` must be set <= 5"),
        (KafkaSettings(properties={"retries": "0"}), errors.InvalidSetting, "`retries` must be set >= 1"),
        (
            KafkaSettings(
                sasl_mechanism="GSSAPI", sasl_kerberos_service_name="kafka", security_protocol="SASL_PLAINTEXT"
            ),
            errors.Unsupported,
            "without Kerberos",
        ),
    ],
)
def test_a_property_that_librdkafka_rejects_is_named(settings: KafkaSettings, expected: type[Any], text: str) -> None:
    with pytest.raises(KafkaException) as caught:
        Producer(settings.client_config("producer"))
    error = translate(caught.value)
    assert type(error) is expected
    assert text in str(error)


def test_an_error_wrapped_by_a_callback_is_found() -> None:
    wrapped = SystemError("returned a result with an exception set")
    wrapped.__cause__ = KafkaException(KafkaError(KafkaError._FENCED))
    found = kafka_error(wrapped)
    assert found is not None
    assert found.code() == KafkaError._FENCED
    assert type(translate(RuntimeError("odd"), "Polling")) is errors.BackendError


def test_errors_show_values_but_no_secrets() -> None:
    said = KafkaException(KafkaError(KafkaError._INVALID_ARG, '"ssl.key.password" does not fit "linger.ms"'))
    text = str(configuration_error(said, "Making a client", {"ssl.key.password": "hunter2", "linger.ms": "7"}))
    assert "linger.ms is '7'" in text
    assert "hunter2" not in text


@pytest.mark.parametrize(("name", "value"), [("topic.blacklist", "("), ("plugin.library.paths", "no-such-library")])
def test_a_property_that_librdkafka_leaves_unnamed_is_named(name: str, value: str) -> None:
    with pytest.raises(KafkaException) as refused:
        Producer({name: value})
    text = configuration_error(refused.value, "Opening a producer", {name: value})
    assert isinstance(text, errors.InvalidSetting)
    assert f"{name} is {value!r}" in str(text)


@pytest.mark.parametrize("name", ["ssl.key.pem", "sasl.oauthbearer.assertion.private.key.pem"])
def test_a_rejected_private_key_is_not_shown(name: str) -> None:
    said = KafkaException(KafkaError(KafkaError._INVALID_ARG, f"{name} failed: not in PEM format?"))
    text = str(configuration_error(said, "Making a client", {name: "hunter2"}))
    assert name in text
    assert "hunter2" not in text


def test_a_private_key_among_the_properties_is_not_shown() -> None:
    settings = KafkaSettings(properties={"sasl.oauthbearer.assertion.private.key.pem": "hunter2"})
    assert "hunter2" not in repr(settings)
