"""Pages name everything that they are the reference of: events and interceptors, and the defaults of `Retry`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

import broker
from broker import hooks
from broker.admin import AdminFacade
from broker.consuming.options import MessageOptions
from broker.reading.options import RecordOptions
from tests.docs.test_docs import ROOT, blocks

OBSERVING = ROOT / "docs" / "observing.md"
CONSUMING = ROOT / "docs" / "consuming.md"
INTERCEPTORS = ("around_publishing", "around_handling", "around_batch")
"""The methods of `Hooks` that take a function, besides `listen`."""


def events() -> set[str]:
    return {
        name
        for name in hooks.__all__
        if isinstance(kind := getattr(hooks, name), type) and issubclass(kind, hooks.Event) and kind is not hooks.Event
    }


def code(page: Path) -> str:
    return "\n".join(block.code for block in blocks(page) if block.language == "python")


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the tables below a heading."""
    part = re.split(r"^#+ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (found,) = [each for each in part if each.startswith(f"{heading}\n")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found.splitlines() if line[:1] == "|"]


def test_every_event_is_described_and_has_an_example() -> None:
    described = {name for row in rows(OBSERVING, "Events") for name in re.findall(r"`(\w+)`", row[0])}
    assert described == events()
    missing = {name for name in events() if not re.search(rf"\bhooks\.{name}\b", code(OBSERVING))}
    assert not missing, "these have no example"


def test_every_interceptor_is_described_and_has_an_example() -> None:
    known = {name for name in vars(hooks.Hooks) if name in INTERCEPTORS or name.startswith(("on_", "around_"))}
    described = {name for row in rows(OBSERVING, "Interceptors") for name in re.findall(r"`(\w+)\(", row[0])}
    assert known == described == set(INTERCEPTORS)
    assert all(f"hooks.{name}(" in code(OBSERVING) for name in known)


def test_the_defaults_of_retry() -> None:
    shown = {match[1]: row[1] for row in rows(CONSUMING, "Retry") if (match := re.fullmatch(r"`(\w+)`", row[0]))}
    assert list(shown) == [field.name for field in fields(broker.Retry)]
    for field in fields(broker.Retry):
        text = shown[field.name].strip("`")
        value = (Exception,) if text == "(Exception,)" else ast.literal_eval(text)
        assert (field.name, value) == (field.name, field.default)


@pytest.mark.parametrize(
    ("page", "make", "options"),
    [
        (CONSUMING, broker.Bus.messages, MessageOptions),
        (ROOT / "docs" / "records.md", broker.Bus.records, RecordOptions),
    ],
)
def test_every_option_of_a_consumer_is_described(page: Path, make: Callable[..., object], options: type) -> None:
    known = {name for name, option in signature(make).parameters.items() if option.kind is option.KEYWORD_ONLY}
    assert known >= set(options.__annotations__)
    described = set(re.findall(r"`(\w+)`", page.read_text(encoding="utf-8")))
    assert not known - described - {"group"}


def test_every_call_of_the_administration_is_described() -> None:
    known = {name for name in vars(AdminFacade) if not name.startswith("_")}
    described = {
        name
        for row in rows(ROOT / "docs" / "administration.md", "Administration")
        for name in re.findall(r"`(\w+)\(", row[0])
    }
    assert described == known


def test_every_way_to_run_a_service_has_an_example() -> None:
    for name in ("broker.run(", "broker.serve(", "broker.blocking.run(", "ProbeServer("):
        assert name in code(ROOT / "docs" / "running.md")
