"""All broken variants; importing this module registers them."""

from __future__ import annotations

from tests.broken_variants import (
    broken_admin,
    broken_followers,
    broken_messages,
    broken_positions,
    broken_publishing,
    broken_servers,
    broken_tables,
)
from tests.broken_variants.registry import VARIANTS, Variant

__all__ = [
    "VARIANTS",
    "Variant",
    "broken_admin",
    "broken_followers",
    "broken_messages",
    "broken_positions",
    "broken_publishing",
    "broken_servers",
    "broken_tables",
]
