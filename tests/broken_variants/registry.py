"""The list of broken variants, and how one is made of a broken part."""

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
    """:ivar healthy: promises that this variant still keeps, so that what is broken is one thing."""

    name: str
    broken: str
    promise: str
    harness: type[BrokenHarness]
    healthy: tuple[str, ...] = ("publishing.receipt-names-the-message",)


VARIANTS: list[Variant] = []
HEALTHY = "publishing.receipt-names-the-message"


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
