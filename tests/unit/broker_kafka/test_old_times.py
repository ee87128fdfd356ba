"""Warnings of publish times that are older than the retention of their topic."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from time import time

import pytest

from broker.errors import NotAuthorized
from broker_kafka import old_times
from broker_kafka.old_times import OldPublishTimes

WEEK = timedelta(days=7)
DAY_MS = 86_400_000


@pytest.fixture
def warned() -> list[str]:
    return []


def days_ago(*days: float) -> list[int]:
    return [int(1000 * time() - each * DAY_MS) for each in days]


def watch(warned: list[str], retention: timedelta | None = WEEK) -> OldPublishTimes:
    async def read(topic: str) -> timedelta | None:
        return retention

    return OldPublishTimes(read, warned.append)


async def test_the_messages_older_than_the_retention_are_counted(warned: list[str]) -> None:
    times = watch(warned)
    times.published("orders", days_ago(1, 8, 6.9))
    times.published("orders", [1_577_836_800_000])
    times.published("fresh", days_ago(1))
    await times.close()
    (text,) = warned
    assert text.startswith(
        "2 messages were published to 'orders' with a publish time older than its retention of 7 days"
    )
    assert "the oldest 2020-01-01T00:00:00Z" in text
    assert "--publish-time-as" in text


async def test_one_warning_comes_soon_and_the_next_after_an_interval(
    warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_times, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(old_times, "_INTERVAL", 0.0)
    times = watch(warned)
    times.published("orders", days_ago(8))
    while not warned:
        await asyncio.sleep(0)
    assert warned[0].startswith("1 message was published to 'orders'")
    times.published("orders", days_ago(8, 9))
    await times.close()
    # Forgotten after a quiet interval, or not yet.
    assert warned[-1].split(" ", 1)[0] in ("2", "3")
    assert len(warned) == 2


async def test_topics_without_retention_by_these_times_cause_no_warning(warned: list[str]) -> None:
    times = watch(warned, None)
    times.published("compacted", days_ago(8))
    await times.close()

    async def refuse(topic: str) -> timedelta | None:
        raise NotAuthorized("No right to describe it")

    times = OldPublishTimes(refuse, warned.append)
    times.published("secret", days_ago(8))
    await times.close()
    assert warned == []
