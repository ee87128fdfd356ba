"""Credentials of a login, and acting as another account: whom Google's own library asks for tokens, and with what.

It asks hosts of Google's by HTTPS, which a proxy of the test's answers for.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

import broker
from broker import errors
from broker.testing.waiting import take
from tests.pubsub.guarded import TOKEN, TokenGiver, account_file, login_file
from tests.servers.certificates import Authority

ROBOT = "robot@anybroker-tests.iam.gserviceaccount.com"
CLOUD = "https://www.googleapis.com/auth/cloud-platform"


def gives(token: str) -> tuple[int, Any]:
    """What Google answers who may act as an account."""
    # A token that expires now is requested again for each call.
    return 200, {"accessToken": token, "expireTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}


def denies(status: int, text: str) -> tuple[int, Any]:
    return status, {"error": {"code": status, "message": text}}


@pytest.fixture
def google(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenGiver]:
    google = TokenGiver(authority)
    monkeypatch.setenv("HTTPS_PROXY", google.address)
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.file))
    yield google
    google.stop()


@pytest.fixture
def acting(endpoint: str, google: TokenGiver, giver: TokenGiver, tmp_path: Path) -> str:
    """A URL that acts as the robot; the own token is one that the server refuses."""
    giver.answer = (200, {"access_token": "own", "expires_in": 1, "token_type": "Bearer"})
    google.answer = gives(TOKEN)
    return f"{endpoint}&credentials_file={account_file(tmp_path, giver)}&impersonate={ROBOT}"


@pytest.fixture
async def bus(acting: str) -> AsyncIterator[broker.Bus]:
    async with broker.connect(acting) as bus:
        yield bus


async def test_work_is_done_as_the_account_that_is_impersonated(bus: broker.Bus, topic: str, google: TokenGiver):
    async with bus.messages(topic, subscription="readers") as inbox:
        await bus.topic(topic).publish(b"x")
        (message,) = await take(inbox, 1, 20)
        assert message.data == b"x"
        await message.ack()
    path, authorization, body = google.asked[0]
    assert path == f"/v1/projects/-/serviceAccounts/{ROBOT}:generateAccessToken"
    assert authorization == "Bearer own"
    assert CLOUD in json.loads(body)["scope"]
    assert json.loads(body)["lifetime"] == "3600s"


async def test_a_forbidden_impersonation_is_reported_at_open(acting: str, google: TokenGiver):
    google.answer = denies(403, "Permission 'iam.serviceAccounts.getAccessToken' denied")
    with pytest.raises(errors.AuthenticationFailed, match="getAccessToken"):
        async with broker.connect(acting):
            pass


async def test_a_revoked_impersonation_is_reported(bus: broker.Bus, topic: str, google: TokenGiver):
    async with bus.messages(topic, subscription="readers") as inbox:
        google.answer = denies(403, "Permission 'iam.serviceAccounts.getAccessToken' denied")
        with pytest.raises(errors.AuthenticationFailed, match="getAccessToken"):
            await bus.topic(topic).publish(b"x")
        with pytest.raises(errors.AuthenticationFailed, match="getAccessToken"):
            await inbox.next_message(timeout=20)


@pytest.mark.deep
async def test_an_account_that_cannot_be_had_for_now_is_waited_for(bus: broker.Bus, topic: str, google: TokenGiver):
    async with bus.messages(topic, subscription="readers") as inbox:
        google.answer = denies(503, "The service is currently unavailable.")
        with pytest.raises(errors.ConnectionFailed, match="token"):
            await bus.topic(topic).publish(b"x")
        google.answer = gives(TOKEN)
        await bus.topic(topic).publish(b"y")
        (message,) = await take(inbox, 1, 20)
        assert message.data == b"y"
        await message.ack()


@pytest.mark.parametrize("default", [False, True], ids=["file", "default"])
async def test_a_login_is_asked_for_no_scope_that_it_may_not_have(
    endpoint: str, google: TokenGiver, tmp_path: Path, default: bool, monkeypatch: pytest.MonkeyPatch
):
    file = login_file(tmp_path)
    if default:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    async with broker.connect(endpoint if default else f"{endpoint}&credentials_file={file}") as bus:
        await bus.admin.topics()
    path, _, body = google.asked[0]
    assert path == "/token"
    # Google gives such a token the scopes of the login, and refuses others than these.
    assert "scope" not in parse_qs(body)
