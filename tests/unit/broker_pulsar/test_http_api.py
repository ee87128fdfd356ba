"""Which errors of Pulsar's HTTP API are transient."""

from __future__ import annotations

import ssl

import pytest

from broker.errors import ConnectionFailed
from broker_pulsar.errors import http_error, is_transient_failure, is_transient_status

NO_BOOKIE = """
 --- An unexpected error occurred in the server ---

Message: org.apache.bookkeeper.mledger.ManagedLedgerException: Not enough non-faulty bookies available error code: -6
"""


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (307, ""),
        (412, "Failed for Subscription Busy: Failed to fence subscription"),
        (429, "Too Many Requests"),
        (500, NO_BOOKIE),
        (500, "org.apache.pulsar.broker.service.BrokerServiceException$PersistenceException: ..."),
        (500, "ServiceUnitNotReadyException: Namespace bundle is being unloaded"),
        (500, "java.net.ConnectException: Connection refused"),
        (500, "java.util.concurrent.TimeoutException"),
        (502, ""),
        (503, "Broker is shutting down"),
        (504, ""),
    ],
)
def test_transient_statuses(status: int, reason: str) -> None:
    assert is_transient_status(status, reason)
    assert http_error(status, reason, "A topic").retriable


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (200, ""),
        (204, ""),
        (400, NO_BOOKIE),
        (401, ""),
        (403, ""),
        (404, "Topic not found"),
        (405, ""),
        (408, ""),
        (409, "This topic already exists"),
        (412, "Subscription has active connected consumers"),
        (500, ""),
        (500, "java.lang.NullPointerException"),
        (501, ""),
    ],
)
def test_permanent_statuses(status: int, reason: str) -> None:
    assert not is_transient_status(status, reason)


def test_a_rate_limit_names_its_setting() -> None:
    assert "httpRequestsMaxPerSecond" in http_error(429, "Too Many Requests", "A topic").advice


def test_the_stack_trace_of_the_broker_is_omitted() -> None:
    stack = "\nStacktrace:\n\njava.lang.IllegalStateException\n\tat org.apache.pulsar.Broker.go(Broker.java:1)"
    assert http_error(500, NO_BOOKIE + stack, "A topic").message == (
        "A topic: the broker answers 500: org.apache.bookkeeper.mledger.ManagedLedgerException: "
        "Not enough non-faulty bookies available error code: -6"
    )


def test_a_broken_connection_is_transient() -> None:
    assert is_transient_failure(ConnectionFailed("away", native=ConnectionRefusedError()))
    assert is_transient_failure(ConnectionFailed("cut", native=ConnectionResetError()))
    assert is_transient_failure(ConnectionFailed("cut in the handshake", native=ssl.SSLEOFError()))


def test_a_refused_certificate_is_permanent() -> None:
    assert not is_transient_failure(ConnectionFailed("not trusted", native=ssl.SSLCertVerificationError()))
    assert not is_transient_failure(ConnectionFailed("no certificate", native=ssl.SSLError()))
    assert not is_transient_failure(ConnectionFailed("for good", native=OSError(), retriable=False))
