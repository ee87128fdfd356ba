"""Times and options beyond the range of the server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from broker.errors import InvalidMessage, InvalidSetting
from broker.outbound import OutboundMessage
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.times import server_time
from tests.jetstream.support import make_topic, publish, receive, subscribe

EAST, WEST = timezone(timedelta(hours=14)), timezone(timedelta(hours=-12))
FAR = [
    datetime(2263, 1, 1, tzinfo=UTC),
    datetime(9999, 1, 1, tzinfo=UTC),
    datetime.max.replace(tzinfo=UTC),
    datetime.max.replace(tzinfo=WEST),
]
LONG_AGO = [datetime(999, 1, 1, tzinfo=UTC), datetime.min.replace(tzinfo=UTC), datetime.min.replace(tzinfo=EAST)]


@pytest.mark.parametrize("moment", FAR)
async def test_times_beyond_the_servers_range_are_refused(
    backend: JetStreamBackend, topic: str, moment: datetime
) -> None:
    await make_topic(backend, topic)
    (outcome,) = await backend.publish_target(topic).publish([OutboundMessage(b"v", deliver_at=moment)])
    assert isinstance(outcome, InvalidMessage)
    assert "deliver_at" in str(outcome)
    (outcome,) = await backend.publish_target(topic).publish([OutboundMessage(b"v", ttl=1e30)])
    assert isinstance(outcome, InvalidMessage)
    assert "ttl" in str(outcome)


@pytest.mark.parametrize(("moment", "found"), [*((at, 2) for at in FAR), *((at, 1) for at in LONG_AGO)])
async def test_positions_at_distant_times(backend: JetStreamBackend, topic: str, moment: datetime, found: int) -> None:
    await make_topic(backend, topic)
    await publish(backend, topic, OutboundMessage(b"v"))
    assert await backend.log_reader().position_at(topic, moment) == {0: found}


async def test_a_subscription_from_a_distant_past_gets_every_message(backend: JetStreamBackend, topic: str) -> None:
    await make_topic(backend, topic)
    await publish(backend, topic, OutboundMessage(b"v"))
    for number, moment in enumerate(LONG_AGO):
        source = await subscribe(backend, topic, f"sub-{number}", start=moment)
        assert [message.data for message in await receive(source, 1)] == [b"v"]
        await source.close()


def test_a_moment_is_written_in_utc() -> None:
    assert server_time(datetime(2026, 1, 2, 3, 4, 5, 6, EAST)) == "2026-01-01T13:04:05.000006Z"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("storage", "tape"),
        ("storage", 1),
        ("discard", "x"),
        ("compression", "zip"),
        ("max_messages", "x"),
        ("max_messages", 0),
        ("max_bytes", True),
        ("max_message_size", 2**63),
        ("replicas", 6),
        ("deduplication_window", "soon"),
        ("deduplication_window", -1),
    ],
)
async def test_an_invalid_option_is_named(backend: JetStreamBackend, topic: str, option: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match=option):
        await backend.admin().ensure_topic(topic, partitions=None, retention=None, options={option: value})


@pytest.mark.parametrize("retention", [timedelta.max, timedelta(0), timedelta(seconds=-1)])
async def test_an_invalid_retention_is_named(backend: JetStreamBackend, topic: str, retention: timedelta) -> None:
    with pytest.raises(InvalidSetting, match="retention"):
        await backend.admin().ensure_topic(topic, partitions=None, retention=retention, options={})
