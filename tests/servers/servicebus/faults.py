"""Faults of the double: throttle, refuse, swallow answers, drop links and connections. Thread-safe.

Tests set it through the administration endpoint, `POST /$double/faults`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.servers.servicebus.entities import Refused

__all__ = ["Faults"]


class Faults:
    """The injected faults."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dropped = threading.Condition(self._lock)
        self._refusals: list[dict[str, Any]] = []
        self._drops: list[tuple[str, str]] = []
        self._swallowed: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        """The number of management operations by kind."""

    def add(self, fault: dict[str, Any]) -> None:
        """One of `{"refuse": "send|open|settle|<operation>", "times", "condition", "text", "code"}`,
        `{"drop": "connections"}`, `{"drop": "closed"}` with an AMQP close, `{"drop": "links", "address"}` and
        `{"swallow": operation, "times"}`. Returns after the drop."""
        with self._lock:
            if "refuse" in fault:
                self._refusals.append({"times": 1, **fault})
            elif "swallow" in fault:
                self._swallowed[fault["swallow"]] = int(fault.get("times", 1))
            else:
                self._drops.append((fault["drop"], fault.get("address", "")))
                self._dropped.wait_for(lambda: not self._drops)

    def clear(self) -> None:
        with self._lock:
            self._refusals.clear()
            self._swallowed.clear()
            self.requests.clear()

    def check(self, operation: str, address: str) -> None:
        """Fail if a fault says so.

        :raises Refused: a fault is pending.
        """
        with self._lock:
            self.requests[operation] = self.requests.get(operation, 0) + 1
            for fault in self._refusals:
                if fault["refuse"] == operation and fault.get("address", address).lower() == address.lower():
                    fault["times"] -= 1
                    if fault["times"] <= 0:
                        self._refusals.remove(fault)
                    raise Refused(fault["condition"], fault.get("text", "asked for"), int(fault.get("code", 500)))

    def swallows(self, operation: str) -> bool:
        """Whether to withhold the answer."""
        with self._lock:
            left = self._swallowed.get(operation, 0)
            if left > 0:
                self._swallowed[operation] = left - 1
            return left > 0

    def apply_drops(self, drop: Callable[[str, str], None]) -> None:
        """Call `drop` with the kind and address of each."""
        with self._lock:
            for kind, address in self._drops:
                drop(kind, address)
            self._drops.clear()
            self._dropped.notify_all()
