"""Credentials of a service account over TLS: refused and unavailable tokens, throttled calls, and the lag."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import google.auth.exceptions
import grpc
import pytest

import broker
from broker import Lag, errors
from broker.names import native_name
from broker.testing.waiting import eventually
from broker_pubsub import lag
from broker_pubsub.credentials import is_transient
from tests.pubsub.secured import SecuredServer, TokenServer, account_file

DENIED = (400, {"error": "invalid_grant", "error_description": "Invalid grant: account not found"})
AWAY = (503, {"error": "backend_error"})
QUOTA = (grpc.StatusCode.RESOURCE_EXHAUSTED, "Quota exceeded for quota metric 'Regional subscriber throughput'")


@pytest.fixture
def guarded(endpoint: str, token_server: TokenServer, tmp_path: Path) -> str:
    return f"{endpoint}&credentials_file={account_file(tmp_path, token_server)}"


class Inbox:
    """A consumer on the secured server, and a publisher of its topic."""

    def __init__(self, bus: broker.Bus, topic: str, consumer: Any) -> None:
        self.bus = bus
        self.topic = topic
        self.consumer = consumer
        self.retried = asyncio.Event()

    async def publish(self, body: bytes) -> None:
        await self.bus.topic(self.topic).publish(body)

    async def next(self) -> Any:
        return await self.consumer.next_message(timeout=60)


@pytest.fixture
async def inbox(guarded: str, topic: str) -> AsyncIterator[Inbox]:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(broker.connect(guarded))
        await bus.admin.ensure_subscription(topic, "readers", exactly_once=True)
        consumer = await stack.enter_async_context(bus.messages(topic, subscription="readers", confirm_acks=True))
        made = Inbox(bus, topic, consumer)
        await made.publish(b"first")
        await (await made.next()).ack()
        yield made


async def test_refused_credentials_are_reported_at_open(guarded: str, token_server: TokenServer):
    token_server.answer = DENIED
    with pytest.raises(errors.AuthenticationFailed, match="account not found"):
        async with broker.connect(guarded):
            pass


async def test_credentials_refused_later_fail_publishes_acks_and_fetches(inbox: Inbox, token_server: TokenServer):
    await inbox.publish(b"second")
    held = await inbox.next()
    token_server.answer = DENIED
    with pytest.raises(errors.AuthenticationFailed, match="account not found"):
        await inbox.publish(b"third")
    with pytest.raises(errors.AuthenticationFailed, match="account not found"):
        await held.ack()
    with pytest.raises(errors.AuthenticationFailed, match="account not found"):
        await inbox.next()


async def test_a_token_refused_by_the_server_is_reported(inbox: Inbox, secured: SecuredServer):
    secured.token = "another"
    with pytest.raises(errors.AuthenticationFailed):
        await inbox.publish(b"second")
    with pytest.raises(errors.AuthenticationFailed):
        await inbox.next()


@pytest.mark.deep
async def test_unavailable_tokens_can_be_retried(inbox: Inbox, token_server: TokenServer):
    tokens, token_server.answer = token_server.answer, AWAY
    # A call without a token is never sent, so its outcome is known.
    with pytest.raises(errors.ConnectionFailed, match="token"):
        await inbox.publish(b"second")
    token_server.answer = tokens
    await inbox.publish(b"third")
    message = await inbox.next()
    assert message.data == b"third"
    await message.ack()


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (google.auth.exceptions.TransportError("[Errno 101] Network is unreachable: oauth2.googleapis.com"), True),
        (google.auth.exceptions.RefreshError("internal_failure", retryable=True), True),
        (google.auth.exceptions.RefreshError("invalid_grant"), False),
        (google.auth.exceptions.RefreshError("Unable to acquire", '{"error": {"code": 503}}'), True),
        (google.auth.exceptions.RefreshError("Unable to acquire", '{"error": {"code": 429}}'), True),
        (google.auth.exceptions.RefreshError("Unable to acquire", '{"error": {"code": 403}}'), False),
        (ValueError("no key"), False),
    ],
)
def test_transient_and_permanent_errors_of_tokens(error: Exception, transient: bool):
    assert is_transient(error) is transient


def test_an_unreachable_metadata_server_is_transient():
    away = google.auth.exceptions.RefreshError("wrapped")
    away.__cause__ = google.auth.exceptions.TransportError("metadata.google.internal: timed out")
    assert is_transient(away)


async def test_throttled_pulls_are_retried_after_growing_pauses(inbox: Inbox, secured: SecuredServer):
    tried = asyncio.Event()

    def look(event: object) -> None:
        if secured.calls["Pull"] - before >= 4:
            tried.set()

    before = secured.calls["Pull"]
    inbox.bus.hooks.listen(look)
    loop = asyncio.get_running_loop()
    secured.errors["Pull"] = QUOTA
    begin = loop.time()
    async with asyncio.timeout(60):
        await tried.wait()
    assert loop.time() - begin > 0.2
    del secured.errors["Pull"]
    await inbox.publish(b"second")
    assert (await inbox.next()).data == b"second"


@pytest.mark.parametrize("call", ["Acknowledge", "GetSubscription"])
async def test_throttled_idempotent_calls_are_retried(inbox: Inbox, secured: SecuredServer, call: str):
    await inbox.publish(b"second")
    held = await inbox.next()
    secured.errors[call] = QUOTA
    before = secured.calls[call]
    work = asyncio.create_task(
        held.ack() if call == "Acknowledge" else inbox.bus.admin.describe_subscription(inbox.topic, "readers")
    )
    await eventually(lambda: work.done() or secured.calls[call] >= before + 3, 20, "a third try")
    assert not work.done()
    del secured.errors[call]
    await work


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((403, {"error": {"message": "Permission denied"}}), errors.NotAuthorized),
        ((503, {"error": {"message": "backend error"}}), errors.BackendError),
        (None, errors.ConnectionFailed),
    ],
)
async def test_an_unavailable_lag_raises_the_cause(
    inbox: Inbox, answer: tuple[int, Any] | None, expected: type[errors.BrokerError], monkeypatch: pytest.MonkeyPatch
):
    monitoring = TokenServer()
    monkeypatch.setattr(lag, "MONITORING", monitoring.url)
    if answer is None:
        monitoring.stop()
    else:
        monitoring.answer = answer
    try:
        with pytest.raises(expected) as raised:
            await inbox.bus.admin.lag(inbox.topic, "readers")
        assert raised.value.retriable is (expected is not errors.NotAuthorized)
        assert ("monitoring.viewer" in raised.value.advice) is (expected is errors.NotAuthorized)
    finally:
        if answer is not None:
            monitoring.stop()


async def test_the_lag_is_read_from_the_project_of_the_subscription(inbox: Inbox, monkeypatch: pytest.MonkeyPatch):
    name = native_name("projects/another-project/subscriptions/readers")
    await inbox.bus.admin.ensure_subscription(inbox.topic, name)
    monitoring = TokenServer()
    monkeypatch.setattr(lag, "MONITORING", monitoring.url)
    monitoring.answer = (200, {"timeSeries": [{"points": [{"value": {"int64Value": "7"}}]}]})
    try:
        assert await inbox.bus.admin.lag(inbox.topic, name) == Lag(waiting=7, current=False)
    finally:
        monitoring.stop()
    ((path, _, _),) = monitoring.requests
    assert path.startswith("/oauth2/projects/another-project/timeSeries?")
