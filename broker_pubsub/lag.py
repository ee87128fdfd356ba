"""How far behind a subscription is. The service tells it in Cloud Monitoring only; an emulator tells it nowhere.

On the service it is the metric `num_undelivered_messages`, a minute or more old. On an emulator a subscription of our
own is put to a snapshot of the other, and what it gets is counted and acked; the other one does not notice.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Any, Final

import grpc
import requests
from google.auth.transport.requests import AuthorizedSession

from broker import BackendError, BrokerError, ConnectionFailed, Lag, NotAuthorized, Unsupported
from broker_pubsub import credentials, subscriptions
from broker_pubsub.connection import Connection
from broker_pubsub.errors import classify, is_status
from broker_pubsub.protocol import AcknowledgeRequest, Methods, PullRequest, request_of

__all__ = ["measure"]

METRIC: Final = "pubsub.googleapis.com/subscription/num_undelivered_messages"
MONITORING: Final = "https://monitoring.googleapis.com/v3"
_MINUTES: Final = 10
_LAST_PULL: Final = 1.2
"""Seconds; the emulator answers a pull with nothing a second before its end."""


async def measure(connection: Connection, topic: str, found: Any) -> Lag:
    """What waits and what is unsettled, together.

    :raises NotAuthorized, AuthenticationFailed, ConnectionFailed, BackendError: Cloud Monitoring does not tell.
    :raises Unsupported: of a topic that retains nothing an emulator does not tell.
    """
    if connection.settings.emulator is not None:
        return Lag(waiting=await _count(connection, topic, found.name))
    return Lag(waiting=await asyncio.to_thread(_ask_monitoring, connection, found.name), current=False)


async def _count(connection: Connection, topic: str, path: str) -> int:
    what = f"Counting what {path!r} has"
    asked = request_of(Methods.GET_TOPIC, topic=connection.names.topic(topic))
    described = await connection.call(Methods.GET_TOPIC, asked, f"Topic {topic!r}", "topic")
    if not described.HasField("message_retention_duration"):
        # A snapshot on an emulator holds what the topic does.
        raise Unsupported(
            f"An emulator does not tell the lag of a topic that retains nothing, and {topic!r} does not",
            advice="Make it with a retention, or a setting topic_retention that is not 0",
        )
    mark = f"{connection.names.project}/snapshots/lag~{token_hex(8)}"
    fresh = subscriptions.temporary(connection, topic)
    fresh.enable_message_ordering = False
    await connection.call(
        Methods.CREATE_SNAPSHOT, request_of(Methods.CREATE_SNAPSHOT, name=mark, subscription=path), what
    )
    try:
        await subscriptions.create(connection, topic, fresh, "latest")
        await subscriptions.seek(connection, fresh.name, mark, what)
        number = 0
        while taken := await _take(connection, fresh.name, what):
            number += taken
        return number
    finally:
        await connection.call(Methods.DELETE_SNAPSHOT, request_of(Methods.DELETE_SNAPSHOT, snapshot=mark), what)
        await subscriptions.delete(connection, fresh.name, what)


async def _take(connection: Connection, path: str, what: str) -> int:
    try:
        taken = await connection.start(Methods.PULL, PullRequest(subscription=path, max_messages=1000), _LAST_PULL)
    except (BrokerError, grpc.aio.AioRpcError) as error:
        if is_status(error, grpc.StatusCode.DEADLINE_EXCEEDED):
            return 0
        raise classify(error, what) from None
    ack_ids = [received.ack_id for received in taken.received_messages]
    if ack_ids:
        await connection.call(Methods.ACKNOWLEDGE, AcknowledgeRequest(subscription=path, ack_ids=ack_ids), what)
    return len(ack_ids)


def _ask_monitoring(connection: Connection, path: str) -> int:
    """Blocking. A subscription that nothing is told of has nothing."""
    session: Any = AuthorizedSession(credentials.load(connection.settings))
    now = datetime.now(UTC)
    # That of a native name may be another than the connection's.
    project, _, name = path.partition("/subscriptions/")
    try:
        answer = session.get(
            f"{MONITORING}/{project}/timeSeries",
            params={
                "filter": f'metric.type="{METRIC}" AND resource.labels.subscription_id="{name}"',
                "interval.startTime": (now - timedelta(minutes=_MINUTES)).isoformat(),
                "interval.endTime": now.isoformat(),
            },
            timeout=connection.settings.request_timeout,
        )
        answer.raise_for_status()
        series: Any = answer.json().get("timeSeries") or []
        return int(series[0]["points"][0]["value"]["int64Value"]) if series else 0
    except Exception as error:
        raise _told(error, f"Cloud Monitoring does not tell the lag of {path!r}") from None
    finally:
        session.close()


def _told(error: Exception, what: str) -> BrokerError:
    if isinstance(error, requests.HTTPError) and error.response is not None:
        status = error.response.status_code
        if status in (401, 403):
            return NotAuthorized(
                f"{what}: {error}",
                native=error,
                advice="Grant this account the role roles/monitoring.viewer in the subscription's project",
            )
        return BackendError(f"{what}: {error}", native=error, retriable=status == 429 or status >= 500)
    if isinstance(error, requests.RequestException) or credentials.is_passing(error):
        return ConnectionFailed(f"{what}: {error}", native=error, advice="Check that this host may reach it")
    return classify(error, what)
