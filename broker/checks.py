"""What counts as a number where an option or a field takes one. Pure; for any value, never raises."""

from __future__ import annotations

import math
from typing import TypeGuard

__all__ = ["is_finite", "is_whole"]


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an int; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether it is an int or a float, and neither NaN nor infinite; a bool is none."""
    # Compared, since an int may be too large for the functions that take a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
