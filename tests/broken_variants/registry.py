"""`breaks` registers a broken part of a backend as a variant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from broker.bus import Bus
from broker.testing.faults import Wrapped
from tests.broken_variants.breaking import (
    BrokenAdmin,
    BrokenBackend,
    BrokenHarness,
    BrokenRecords,
    BrokenSource,
    BrokenTarget,
)


@dataclass(frozen=True)
class Variant:
    """A broken in-memory broker.

    :ivar healthy: promises that the variant still keeps, which shows that it breaks only one.
    """

    name: str
    broken: str
    promise: str
    harness: type[BrokenHarness]
    healthy: tuple[str, ...] = ("publishing.receipt-has-the-message-id",)


VARIANTS: list[Variant] = []
HEALTHY = "publishing.receipt-has-the-message-id"


def breaks(promise: str, *, healthy: str = HEALTHY) -> Callable[[type[Any]], type[Any]]:
    """Make a variant of a broken target, source, record source, backend, bus or harness."""

    def register(part: type[Any]) -> type[Any]:
        backend: type[BrokenBackend] = BrokenBackend
        fields: dict[str, Any] = {}
        if issubclass(part, BrokenHarness):
            harness: type[BrokenHarness] = part
        else:
            if issubclass(part, Bus):
                fields["bus_class"] = part
            elif issubclass(part, BrokenBackend):
                backend = part
            else:
                kind = {
                    BrokenAdmin: "admin_class",
                    BrokenTarget: "target_class",
                    BrokenSource: "source_class",
                    BrokenRecords: "records_class",
                    Wrapped: "transaction_class",
                }
                attribute = next(name for base, name in kind.items() if issubclass(part, base))
                backend = type(f"{part.__name__}Backend", (BrokenBackend,), {attribute: part})
            harness = type(f"{part.__name__}Harness", (BrokenHarness,), {"backend_class": backend, **fields})
        VARIANTS.append(
            Variant(
                _dashed(part.__name__), (part.__doc__ or "").strip(), promise, harness, (healthy,) if healthy else ()
            )
        )
        return part

    return register


def _dashed(name: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("-")
