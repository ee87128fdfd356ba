"""The page of guarantees is what the kit holds today."""

from __future__ import annotations

from pathlib import Path

from broker.testing.guarantees import page

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"


def test_the_page_lists_every_promise_of_the_kit() -> None:
    assert PAGE.read_text() == page(), "run `make conformance`, which writes docs/guarantees.md anew"
