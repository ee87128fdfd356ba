"""`docs/guarantees.md` lists the promises of the kit."""

from __future__ import annotations

from pathlib import Path

from broker.testing.matrix import guarantees

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"


def test_the_page_lists_every_promise_of_the_kit() -> None:
    assert PAGE.read_text() == guarantees(), "run `make conformance`, which writes docs/guarantees.md"
