"""A service account's credentials over TLS, and what becomes of work when its tokens are refused or cannot be had."""

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
from tests.pubsub.guarded import Front, TokenGiver, account_file

DENIED = (400, {"error": "invalid_grant", "error_description": "Invalid grant: account not found"})
AWAY = (503, {"error": "backend_error"})
QUOTA = (grpc.StatusCode.RESOURCE_EXHAUSTED, "Quota exceeded for quota metric 'Regional subscriber throughput'")


@pytest.fixture
def guarded(endpoint: str, giver: TokenGiver, tmp_path: Path) -> str:
    return f"{endpoint}&credentials_file={account_file(tmp_path, giver)}"


class Inbox:
    """A consumer on the front, and a publisher of its topic."""

    def __init__(self, bus: broker.Bus, topic: str, consumer: Any) -> None:
        self.bus = bus
        self.topic = topic
        self.consumer = consumer
        self.retried = asyncio.Event()

    async def publish(self, body: bytes) -> None:
        await self.bus.topic(self.topic).publish(body)

    async def next(self) -> Any:
        return await self.consumer.next_message(timeout=20)


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


async def test_refused_credentials_are_reported_at_open(guarded: str, giver: TokenGiver):
    giver.answer = DENIED
    with pytest.raises(errors.AuthenticationFailed, match="account not found"):
        async with broker.connect(guarded):
            pass


async def test_credentials_that_are_refused_later_end_publishes_and_consumers(inbox: Inbox, giver: TokenGiver):
    await inbox.publish(b"second")
    held = await inbox.next()
    giver.answer = DENIED
    with pytest.raises(errors.AuthenticationFailed, match="account not found"):
        await inbox.publish(b"third")
    with pytest.raises(errors.AuthenticationFailed, match="account not found"):
        await held.ack()
    with pytest.raises(errors.AuthenticationFailed, match="account not found"):
        await inbox.next()


async def test_a_token_that_the_server_refuses_is_reported(inbox: Inbox, front: Front):
    front.token = "another"
    with pytest.raises(errors.AuthenticationFailed):
        await inbox.publish(b"second")
    with pytest.raises(errors.AuthenticationFailed):
        await inbox.next()


@pytest.mark.deep
async def test_tokens_that_cannot_be_had_for_now_are_waited_for(inbox: Inbox, giver: TokenGiver):
    tokens, giver.answer = giver.answer, AWAY
    # What has no token is never sent, so that its outcome is known.
    with pytest.raises(errors.ConnectionFailed, match="token"):
        await inbox.publish(b"second")
    giver.answer = tokens
    await inbox.publish(b"third")
    message = await inbox.next()
    assert message.data == b"third"
    await message.ack()


@pytest.mark.parametrize(
    ("error", "passing"),
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
def test_permanent_and_temporary_refusals_are_distinguished(error: Exception, passing: bool):
    assert is_transient(error) is passing


def test_a_metadata_server_that_is_away_is_no_refusal():
    away = google.auth.exceptions.RefreshError("wrapped")
    away.__cause__ = google.auth.exceptions.TransportError("metadata.google.internal: timed out")
    assert is_transient(away)


async def test_throttled_pulls_are_made_after_growing_pauses(inbox: Inbox, front: Front):
    tried = asyncio.Event()

    def look(event: object) -> None:
        if front.calls["Pull"] - before >= 4:
            tried.set()

    before = front.calls["Pull"]
    inbox.bus.hooks.listen(look)
    loop = asyncio.get_running_loop()
    front.says["Pull"] = QUOTA
    begin = loop.time()
    async with asyncio.timeout(20):
        await tried.wait()
    assert loop.time() - begin > 0.2
    del front.says["Pull"]
    await inbox.publish(b"second")
    assert (await inbox.next()).data == b"second"


@pytest.mark.parametrize("call", ["Acknowledge", "GetSubscription"])
async def test_throttled_calls_that_may_be_repeated_are(inbox: Inbox, front: Front, call: str):
    await inbox.publish(b"second")
    held = await inbox.next()
    front.says[call] = QUOTA
    before = front.calls[call]
    work = asyncio.create_task(
        held.ack() if call == "Acknowledge" else inbox.bus.admin.describe_subscription(inbox.topic, "readers")
    )
    await eventually(lambda: work.done() or front.calls[call] >= before + 3, 20, "a third try")
    assert not work.done()
    del front.says[call]
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
    monitoring = TokenGiver()
    monkeypatch.setattr(lag, "MONITORING", monitoring.url)
    if answer is None:
        monitoring.stop()
    else:
        monitoring.answer = answer
    try:
        with pytest.raises(expected) as told:
            await inbox.bus.admin.lag(inbox.topic, "readers")
        assert told.value.retriable is (expected is not errors.NotAuthorized)
        assert ("monitoring.viewer" in told.value.advice) is (expected is errors.NotAuthorized)
    finally:
        if answer is not None:
            monitoring.stop()


async def test_the_lag_of_a_subscription_is_asked_for_in_its_own_project(inbox: Inbox, monkeypatch: pytest.MonkeyPatch):
    name = native_name("projects/another-project/subscriptions/readers")
    await inbox.bus.admin.ensure_subscription(inbox.topic, name)
    monitoring = TokenGiver()
    monkeypatch.setattr(lag, "MONITORING", monitoring.url)
    monitoring.answer = (200, {"timeSeries": [{"points": [{"value": {"int64Value": "7"}}]}]})
    try:
        assert await inbox.bus.admin.lag(inbox.topic, name) == Lag(waiting=7, current=False)
    finally:
        monitoring.stop()
    ((path, _, _),) = monitoring.asked
    assert path.startswith("/oauth2/projects/another-project/timeSeries?")
