"""The backlog of a subscription.

The service reports it only in Cloud Monitoring, as the metric `num_undelivered_messages`, a minute or more old. An
emulator does not report it: a temporary subscription is moved to a snapshot of the other one, and its messages are
counted and acked. The other subscription is not affected.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from time import monotonic
from typing import Any, Final

import grpc
import requests
from google.auth.transport.requests import AuthorizedSession

from broker import BackendError, BrokerError, ConnectionFailed, Lag, NotAuthorized, Unsupported
from broker.driver import read_answer, reads_answer
from broker.driver.answers import LONGEST_ANSWER
from broker_pubsub import credentials, subscriptions
from broker_pubsub.connection import Connection
from broker_pubsub.errors import is_status, translate
from broker_pubsub.protocol import AcknowledgeRequest, Methods, PullRequest, request_of

__all__ = ["measure"]

METRIC: Final = "pubsub.googleapis.com/subscription/num_undelivered_messages"
MONITORING: Final = "https://monitoring.googleapis.com/v3"
_MINUTES: Final = 10
_CHUNK: Final = 1 << 16
_LAST_PULL: Final = 1.2
"""Seconds; the emulator sends an empty answer one second before the deadline of a call."""


async def measure(connection: Connection, topic: str, found: Any) -> Lag:
    """Waiting and unsettled messages together.

    :raises NotAuthorized, AuthenticationFailed, ConnectionFailed, BackendError: Cloud Monitoring did not answer.
    :raises Unsupported: an emulator, and a topic without retention.
    """
    if connection.settings.emulator is not None:
        return Lag(waiting=await _count(connection, topic, found.name))
    return Lag(waiting=await asyncio.to_thread(_read_metric, connection, found.name), current=False)


async def _count(connection: Connection, topic: str, path: str) -> int:
    what = f"Counting the messages of {path!r}"
    request = request_of(Methods.GET_TOPIC, topic=connection.names.topic(topic))
    described = await connection.call(Methods.GET_TOPIC, request, f"Topic {topic!r}", "topic")
    if not described.HasField("message_retention_duration"):
        # A snapshot of an emulator contains what the topic retains.
        raise Unsupported(
            f"An emulator cannot report the lag of a topic without retention, and {topic!r} has none",
            advice="Create the topic with a retention, or set topic_retention above 0",
        )
    mark = f"{connection.names.project}/snapshots/lag~{token_hex(8)}"
    counter = subscriptions.temporary(connection, topic)
    counter.enable_message_ordering = False
    await connection.call(
        Methods.CREATE_SNAPSHOT, request_of(Methods.CREATE_SNAPSHOT, name=mark, subscription=path), what
    )
    try:
        await subscriptions.create(connection, topic, counter, "latest")
        await subscriptions.seek(connection, counter.name, mark, what)
        number = 0
        while pulled := await _pull_batch(connection, counter.name, what):
            number += pulled
        return number
    finally:
        await connection.call(Methods.DELETE_SNAPSHOT, request_of(Methods.DELETE_SNAPSHOT, snapshot=mark), what)
        await subscriptions.delete(connection, counter.name, what)


async def _pull_batch(connection: Connection, path: str, what: str) -> int:
    try:
        pulled = await connection.start(Methods.PULL, PullRequest(subscription=path, max_messages=1000), _LAST_PULL)
    except (BrokerError, grpc.aio.AioRpcError) as error:
        if is_status(error, grpc.StatusCode.DEADLINE_EXCEEDED):
            return 0
        raise translate(error, what) from None
    ack_ids = [received.ack_id for received in pulled.received_messages]
    if ack_ids:
        await connection.call(Methods.ACKNOWLEDGE, AcknowledgeRequest(subscription=path, ack_ids=ack_ids), what)
    return len(ack_ids)


def _read_metric(connection: Connection, path: str) -> int:
    """Read the metric; blocks. A subscription without data points has no backlog."""
    settings, what = connection.settings, f"Reading the lag of {path!r} from Cloud Monitoring"
    session: Any = AuthorizedSession(credentials.load(settings), auth_request=credentials.TokenRequest())
    now = datetime.now(UTC)
    # A native name may be in another project.
    project, _, name = path.partition("/subscriptions/")
    try:
        with session.get(
            f"{MONITORING}/{project}/timeSeries",
            params={
                "filter": f'metric.type="{METRIC}" AND resource.labels.subscription_id="{name}"',
                "interval.startTime": (now - timedelta(minutes=_MINUTES)).isoformat(),
                "interval.endTime": now.isoformat(),
            },
            timeout=settings.request_timeout,
            stream=True,
        ) as answer:
            answer.raise_for_status()
            body = _body(answer, settings.request_timeout)
    except Exception as error:
        raise _translate(error, what) from None
    finally:
        session.close()
    with reads_answer(what):
        series: Any = read_answer(body, what).get("timeSeries") or []
        return int(series[0]["points"][0]["value"]["int64Value"]) if series else 0


def _body(answer: Any, seconds: float) -> bytes:
    """The body, cut where `read_answer` refuses it.

    :raises requests.RequestException: it is not complete after this time.
    """
    body, until = bytearray(), monotonic() + seconds
    for part in answer.iter_content(_CHUNK):
        body += part
        if len(body) > LONGEST_ANSWER:
            break
        if monotonic() > until:
            raise requests.Timeout("the answer does not end")
    return bytes(body)


def _translate(error: Exception, what: str) -> BrokerError:
    if isinstance(error, requests.HTTPError) and error.response is not None:
        status = error.response.status_code
        if status in (401, 403):
            return NotAuthorized(
                f"{what}: {error}",
                native=error,
                advice="Grant this account the role roles/monitoring.viewer in the subscription's project",
            )
        return BackendError(f"{what}: {error}", native=error, retriable=status == 429 or status >= 500)
    if isinstance(error, requests.RequestException) or credentials.is_transient(error):
        return ConnectionFailed(
            f"{what}: {error}", native=error, advice="Check that this host can reach monitoring.googleapis.com"
        )
    return translate(error, what)
