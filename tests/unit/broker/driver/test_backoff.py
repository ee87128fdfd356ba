"""Backoff has its own source of randomness."""

from __future__ import annotations

import random

from broker.consuming.retry.policy import Retry


def test_backoff_does_not_use_the_random_state_of_the_application() -> None:
    before = random.getstate()
    assert Retry(jitter=0.5).delay(1) != Retry(jitter=0.5).delay(1)
    assert random.getstate() == before
