"""Answers of JetStream's API that lack fields, or have others in their place."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import pytest

from broker.errors import BrokerError
from broker.hooks import Hooks
from broker_jetstream.admin import JetStreamAdmin
from broker_jetstream.connection import Connection
from broker_jetstream.log_reader import JetStreamLogReader
from broker_jetstream.settings import JetStreamSettings
from broker_jetstream.streams import Layouts
from tests.security.admin_calls import admin_calls

WRONG: tuple[object, ...] = (
    {},
    {"config": 5, "state": 5, "streams": 5, "consumers": 5, "total": "x", "purged": "y", "message": 5},
    {"config": {}, "state": {"messages": "x"}, "streams": [5], "consumers": [5], "total": 1, "purged": []},
    {"config": {"name": 5, "metadata": 5, "subjects": 5}, "message": {"seq": "x", "data": 5, "time": 5}},
    {"config": {"name": "s"}, "consumers": ["billing"], "name": 5, "num_pending": "x", "total": 1},
    {"config": {"name": "s"}, "consumers": ["billing"], "name": "+a+b", "num_pending": 10**400, "total": 1},
    {"config": {"name": "s", "ack_wait": "x", "max_deliver": []}, "state": [], "created": 5, "delivered": 5},
    {"config": {"name": "s", "metadata": {"anybroker-partitions": "9" * 5000}}, "state": {"first_seq": "x"}},
)


class Answering(Connection):
    """A connection whose server answers every request alike."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(JetStreamSettings(request_timeout=0.2), Hooks())
        self._answer = answer

    async def request(self, subject: str, data: bytes = b"", timeout: float | None = None) -> tuple[bytes, bytes]:
        return b"", self._answer


def calls(connection: Connection) -> list[Callable[[], Awaitable[object]]]:
    layouts = Layouts(connection)
    admin, log = JetStreamAdmin(connection, layouts), JetStreamLogReader(connection, layouts)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return [
        *admin_calls(admin, start),
        lambda: admin.ensure_subscription("orders", "billing", start="latest", options={}),
        lambda: log.partitions("orders"),
        lambda: log.bounds("orders"),
        lambda: log.position_at("orders", start),
    ]


@pytest.mark.parametrize("body", WRONG, ids=lambda body: repr(body)[:60])
async def test_a_wrong_answer_is_a_broker_error(body: object) -> None:
    connection = Answering(json.dumps(body).encode())
    wrong: list[str] = []
    for number, call in enumerate(calls(connection)):
        try:
            await call()
        except BrokerError:
            continue
        except Exception as error:
            wrong.append(f"call {number}: {error!r}")
    assert not wrong
