"""`promise` and `requires`: decorators that attach a promise and required capabilities to a conformance test.

They only attach data, so that the tests run under pytest, `broker.testing.conformance.check` and other tools.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from broker.capabilities import Capabilities, ConfirmedAck, LeaseMode

if TYPE_CHECKING:
    from broker.testing.harness import Harness

__all__ = ["Promise", "missing_capability", "promise", "promises_of", "requires"]

P = ParamSpec("P")
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise of `anybroker`.

    :ivar name: `area.short-name`, the row of the matrix.
    :ivar text: the promise, in one sentence.
    """

    name: str
    text: str


def promise(
    name: str, text: str, *, seconds: float = 120.0
) -> Callable[[Callable[Concatenate[S, P], Awaitable[None]]], Callable[Concatenate[S, P], Awaitable[None]]]:
    """Attach a promise to a test.

    :param seconds: timeout of the test.
    """

    def decorate(test: Callable[Concatenate[S, P], Awaitable[None]]) -> Callable[Concatenate[S, P], Awaitable[None]]:
        @functools.wraps(test)
        async def within(self: S, *args: P.args, **kwargs: P.kwargs) -> None:
            async with asyncio.timeout(seconds):
                await test(self, *args, **kwargs)

        vars(within)["__promise__"] = Promise(name, text)
        return within

    return decorate


def requires(*capabilities: str) -> Callable[[F], F]:
    """Run the test only if the backend and its harness have all of these capabilities.

    :param capabilities: dotted names of `Capabilities` (`messages.key_affinity`, `publish.limits.body`, or a whole
        family: `records`), harness operations (`harness.restart`), values (`messages.lease=renew`), or alternatives
        (`records|messages.ordered_delivery`).
    """

    def decorate(test: F) -> F:
        vars(test)["__requires__"] = capabilities
        return test

    return decorate


def promises_of(case: type) -> Iterator[tuple[str, Promise]]:
    """The tests of a conformance class and their promises, sorted by promise."""
    found: list[tuple[str, Promise]] = []
    for name in dir(case):
        declared = getattr(getattr(case, name), "__promise__", None)
        if name.startswith("test_") and isinstance(declared, Promise):
            found.append((name, declared))
    return iter(sorted(found, key=lambda item: (item[1].name, item[0])))


def missing_capability(test: object, capabilities: Capabilities, harness: Harness) -> str | None:
    """The first required capability that is missing, or None."""
    for wanted in cast("tuple[str, ...]", getattr(test, "__requires__", ())):
        if not any(_has(alternative, capabilities, harness) for alternative in wanted.split("|")):
            return wanted.replace("|", " or ")
    return None


def _has(wanted: str, capabilities: Capabilities, harness: Harness) -> bool:
    if wanted.startswith("harness."):
        return harness.can(wanted.removeprefix("harness."))
    path, _, exactly = wanted.partition("=")
    value: object = capabilities
    for part in path.split("."):
        value = getattr(value, part, None)
    if exactly:
        return value == exactly
    return bool(value) and value not in (LeaseMode.NONE, LeaseMode.FIXED, ConfirmedAck.NEVER)
