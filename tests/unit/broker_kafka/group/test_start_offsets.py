"""The warning about a group that waits long for its positions."""

from __future__ import annotations

import asyncio

import pytest

from broker.driver.contract import TopicPartition
from broker.testing.waiting import let_pass
from broker_kafka.group import start_offsets
from broker_kafka.group.start_offsets import warn_if_slow


async def test_a_long_wait_for_positions_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(start_offsets, "_SLOW_SECONDS", 0.01)
    reported = asyncio.Event()

    def warn(text: str) -> None:
        warned.append(text)
        reported.set()

    with warn_if_slow("billing", [TopicPartition("orders", 1)], warn):
        await asyncio.wait_for(reported.wait(), 60)
    assert len(warned) == 1
    assert "Group 'billing' waits for its positions on [('orders', 1)]" in warned[0]
    assert "transaction_timeout_ms" in warned[0]


async def test_a_short_wait_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(start_offsets, "_SLOW_SECONDS", 0.01)
    with warn_if_slow("billing", [TopicPartition("orders", 1)], warned.append):
        pass
    await let_pass(0.05)
    assert warned == []
