"""Completes names of topics and subscriptions in a shell.

Asks the broker that the command line names, for `SECONDS` at most. Without an answer nothing is offered, and nothing is
printed. Other programs choose names, and a shell runs `$(…)` in a word that it completed: only names without such
characters are offered.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import typer

from broker.admin import AdminFacade
from broker.cli.session import Options

__all__ = ["complete_subscription", "complete_topic"]

SECONDS: Final = 3.0
_HARMLESS: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:-]*")


def complete_topic(ctx: typer.Context, incomplete: str) -> list[str]:
    """The topics of the broker."""
    return _offered(ctx, incomplete, lambda admin: admin.topics())


def complete_subscription(ctx: typer.Context, incomplete: str) -> list[str]:
    """The subscriptions and groups of the topics on the command line."""
    # Behind an option that has no value yet, the words that are no options are not assigned.
    given = ctx.params.get("topic") or ctx.args[:1]
    topics: Iterable[str] = (given,) if isinstance(given, str) else given

    async def find(admin: AdminFacade) -> list[str]:
        return [name for topic in topics for name in await admin.subscriptions(topic)]

    return _offered(ctx, incomplete, find) if topics else []


def _offered(ctx: typer.Context, incomplete: str, find: Callable[[AdminFacade], Awaitable[list[str]]]) -> list[str]:
    # A warning would appear in the line that is being typed.
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        names = asyncio.run(_ask(_options(ctx), find))
    except Exception:
        return []
    return sorted({name for name in names if name.startswith(incomplete) and _HARMLESS.fullmatch(name)})


async def _ask(options: Options, find: Callable[[AdminFacade], Awaitable[list[str]]]) -> list[str]:
    from broker.bus import connect

    async with asyncio.timeout(SECONDS), connect(options.settings()) as bus:
        return await find(bus.admin)


def _options(ctx: typer.Context) -> Options:
    """The global options, of the command or before its name."""
    options = Options()
    context: Any = ctx
    while context is not None:
        options.url = options.url or context.params.get("url")
        options.config = options.config or context.params.get("config")
        context = context.parent
    return options
