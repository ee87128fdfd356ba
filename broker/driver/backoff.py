"""The chance in pauses, apart from that of the application, which may have seeded `random` or count on its state."""

from __future__ import annotations

from random import Random
from typing import Final

__all__ = ["jitter"]

jitter: Final = Random()
"""Safe from any thread."""
