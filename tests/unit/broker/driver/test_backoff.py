"""Pauses have a chance of their own."""

from __future__ import annotations

import random

from broker.consuming.retry.policy import Retry


def test_pauses_leave_the_chance_of_the_application_alone() -> None:
    before = random.getstate()
    assert Retry(jitter=0.5).delay(1) != Retry(jitter=0.5).delay(1)
    assert random.getstate() == before
