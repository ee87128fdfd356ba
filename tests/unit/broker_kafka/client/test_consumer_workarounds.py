"""A loss of partitions is explained by a suspension of the process only if there was one."""

from __future__ import annotations

from typing import Any

import pytest

from broker_kafka.client import consumer_workarounds
from broker_kafka.client.consumer_workarounds import SuspensionWatch

CLASSIC = {"group.id": "audit", "session.timeout.ms": 10_000}
CONSUMER = {"group.id": "audit", "group.protocol": "consumer"}


class Member:
    """One with a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
        self.now = 100.0
        self.warnings: list[str] = []
        monkeypatch.setattr(consumer_workarounds, "monotonic", lambda: self.now)
        self.watched = SuspensionWatch(config, self.warnings.append)

    def turn_after(self, seconds: float) -> None:
        self.now += seconds
        self.watched.tick()


def test_a_loss_after_a_suspension_is_reported_once(monkeypatch: pytest.MonkeyPatch):
    member = Member(monkeypatch, CLASSIC)
    member.turn_after(0.1)
    member.turn_after(12.5)
    member.turn_after(0.1)
    member.watched.explain_loss()
    member.watched.explain_loss()
    (text,) = member.warnings
    assert text.startswith("This member of group 'audit' lost its partitions: its process was suspended for 12.5 s")
    assert "session_timeout_ms is 10000" in text
    assert "raise session_timeout_ms" in text


def test_the_poll_that_reports_the_loss_may_be_the_suspended_one(monkeypatch: pytest.MonkeyPatch):
    member = Member(monkeypatch, CLASSIC)
    member.turn_after(0.1)
    member.now += 11
    member.watched.explain_loss()
    assert len(member.warnings) == 1


def test_a_session_counts_from_the_last_heartbeat(monkeypatch: pytest.MonkeyPatch):
    member = Member(monkeypatch, CLASSIC)
    member.turn_after(8)
    member.watched.explain_loss()
    assert "suspended for 8.0 s" in member.warnings[0]


def test_with_kip_848_the_brokers_setting_is_named(monkeypatch: pytest.MonkeyPatch):
    member = Member(monkeypatch, CONSUMER)
    member.turn_after(50)
    member.watched.explain_loss()
    assert "group.consumer.session.timeout.ms" in member.warnings[0]


def test_other_losses_are_not_explained_by_a_suspension(monkeypatch: pytest.MonkeyPatch):
    member = Member(monkeypatch, CLASSIC)
    member.turn_after(6.5)  # shorter than a session that had a heartbeat right before
    member.watched.explain_loss()
    with member.watched.excluded():
        member.now += 30  # a wait that is excluded
    member.watched.explain_loss()
    member.turn_after(12)
    for _ in range(200):
        member.turn_after(0.1)
    member.watched.explain_loss()  # long ago
    assert member.warnings == []
