"""Tells pytest to rewrite the kit's assertions, so that they explain themselves; imported before any of them is."""

from __future__ import annotations

from typing import Final

import pytest

__all__ = ["REWRITTEN"]

REWRITTEN: Final = ("broker.testing.areas", "broker.testing.waiting")
"""The modules whose failed assertions show their values."""

pytest.register_assert_rewrite(*REWRITTEN)
