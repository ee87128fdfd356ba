"""Credentials of a login, and impersonation: the token requests of Google's library.

Its HTTPS requests go to hosts of Google; a proxy of the test answers for them.
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
from tests.pubsub.secured import TOKEN, TokenServer, account_file, login_file
from tests.servers.certificates import Authority

ROBOT = "robot@anybroker-tests.iam.gserviceaccount.com"
CLOUD = "https://www.googleapis.com/auth/cloud-platform"


def issues(token: str) -> tuple[int, Any]:
    """Google's answer to an account that may impersonate. The token expires at once, so each call requests one."""
    return 200, {"accessToken": token, "expireTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}


def denies(status: int, text: str) -> tuple[int, Any]:
    return status, {"error": {"code": status, "message": text}}


@pytest.fixture
def google(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenServer]:
    google = TokenServer(authority)
    monkeypatch.setenv("HTTPS_PROXY", google.address)
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.file))
    yield google
    google.stop()


@pytest.fixture
def impersonating(endpoint: str, google: TokenServer, token_server: TokenServer, tmp_path: Path) -> str:
    """A URL that impersonates the robot; the server refuses the token of the account itself."""
    token_server.answer = (200, {"access_token": "own", "expires_in": 1, "token_type": "Bearer"})
    google.answer = issues(TOKEN)
    return f"{endpoint}&credentials_file={account_file(tmp_path, token_server)}&impersonate={ROBOT}"


@pytest.fixture
async def bus(impersonating: str) -> AsyncIterator[broker.Bus]:
    async with broker.connect(impersonating) as bus:
        yield bus


async def test_calls_use_the_token_of_the_impersonated_account(bus: broker.Bus, topic: str, google: TokenServer):
    async with bus.messages(topic, subscription="readers") as inbox:
        await bus.topic(topic).publish(b"x")
        (message,) = await take(inbox, 1, 20)
        assert message.data == b"x"
        await message.ack()
    path, authorization, body = google.requests[0]
    assert path == f"/v1/projects/-/serviceAccounts/{ROBOT}:generateAccessToken"
    assert authorization == "Bearer own"
    assert CLOUD in json.loads(body)["scope"]
    assert json.loads(body)["lifetime"] == "3600s"


async def test_a_forbidden_impersonation_is_reported_at_open(impersonating: str, google: TokenServer):
    google.answer = denies(403, "Permission 'iam.serviceAccounts.getAccessToken' denied")
    with pytest.raises(errors.AuthenticationFailed, match="getAccessToken"):
        async with broker.connect(impersonating):
            pass


async def test_a_revoked_impersonation_is_reported(bus: broker.Bus, topic: str, google: TokenServer):
    async with bus.messages(topic, subscription="readers") as inbox:
        google.answer = denies(403, "Permission 'iam.serviceAccounts.getAccessToken' denied")
        with pytest.raises(errors.AuthenticationFailed, match="getAccessToken"):
            await bus.topic(topic).publish(b"x")
        with pytest.raises(errors.AuthenticationFailed, match="getAccessToken"):
            await inbox.next_message(timeout=60)


@pytest.mark.deep
async def test_an_unavailable_impersonation_can_be_retried(bus: broker.Bus, topic: str, google: TokenServer):
    async with bus.messages(topic, subscription="readers") as inbox:
        google.answer = denies(503, "The service is currently unavailable.")
        with pytest.raises(errors.ConnectionFailed, match="token"):
            await bus.topic(topic).publish(b"x")
        google.answer = issues(TOKEN)
        await bus.topic(topic).publish(b"y")
        (message,) = await take(inbox, 1, 20)
        assert message.data == b"y"
        await message.ack()


@pytest.mark.parametrize("default", [False, True], ids=["file", "default"])
async def test_a_token_of_a_login_is_requested_without_scopes(
    endpoint: str, google: TokenServer, tmp_path: Path, default: bool, monkeypatch: pytest.MonkeyPatch
):
    file = login_file(tmp_path)
    if default:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    async with broker.connect(endpoint if default else f"{endpoint}&credentials_file={file}") as bus:
        await bus.admin.topics()
    path, _, body = google.requests[0]
    assert path == "/token"
    # Google issues the scopes of the login, and refuses others.
    assert "scope" not in parse_qs(body)
