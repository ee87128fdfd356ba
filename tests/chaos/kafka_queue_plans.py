"""What is done to a queue's chaos run, and when: seconds from the begin, and the fault. Pure."""

from __future__ import annotations

import random
from itertools import cycle
from typing import Final

__all__ = ["HALF_A_MINUTE", "MINUTE", "long_plan"]

MINUTE: Final = (
    (3.0, "kill"),
    (6.0, "freeze"),
    (9.0, "kill tracker"),
    (12.0, "blink"),
    (15.0, "kill"),
    (18.0, "freeze tracker"),
    (21.0, "restart"),
    (30.0, "kill"),
    (32.0, "join"),
    (34.0, "freeze"),
    (38.0, "kill broker"),
    (47.0, "kill"),
    (49.0, "leave"),
    (51.0, "kill tracker"),
    (53.0, "blink"),
    (55.0, "freeze tracker"),
    (58.0, "kill"),
)
"""Of a run that is part of the deep tests: every fault of a long one, about as often as in a minute of it."""

HALF_A_MINUTE: Final = (
    (2.0, "kill"),
    (4.0, "freeze"),
    (6.0, "kill tracker"),
    (8.0, "blink"),
    (9.0, "freeze tracker"),
    (11.0, "restart"),
    (17.0, "join"),
    (18.0, "leave"),
    (20.0, "kill broker"),
    (27.0, "kill"),
)
"""Every fault of a long run once, and what is most often twice: of a run beside many others."""

_FAULTS: Final = {"kill": 4, "freeze": 2, "blink": 2, "join": 1, "leave": 1, "kill tracker": 2, "freeze tracker": 2}
"""What happens at random, and how often."""


def long_plan(seconds: float, seed: int) -> list[tuple[float, str]]:
    """Faults at random, and every minute and a half the broker is restarted, orderly or after SIGKILL by turns."""
    dice = random.Random(seed)
    plan: list[tuple[float, str]] = []
    at, restart = 3.0, 60.0
    restarts = cycle(("restart", "kill broker"))
    while at < seconds:
        if at > restart:
            plan.append((at, next(restarts)))
            restart += 90.0
            at += 8.0
        else:
            plan.append((at, dice.choices(list(_FAULTS), list(_FAULTS.values()))[0]))
            at += dice.uniform(2.0, 6.0)
    return plan
