"""Apps for the tests of `broker run`. Their topics are named after the variable APP_TEST."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from broker import Bus, OutboundPayload
from broker.app import App, Context

NAME = os.environ.get("APP_TEST", "shop")


@dataclass
class Order:
    number: int


@dataclass
class Invoice:
    number: int
    worker: int


async def bill(order: Order, context: Context) -> OutboundPayload[Invoice]:
    """Bills an order. The broker drops a second invoice of an order that is delivered again."""
    await asyncio.sleep(0.002)
    return OutboundPayload(Invoice(order.number, os.getpid()), id=f"invoice-{order.number}")


def billing() -> App:
    app = App("billing")
    app.handle(f"{NAME}-orders", bill, into=f"{NAME}-invoices", concurrency=4, dead_letter=f"{NAME}-dead")
    return app


def idle() -> App:
    app = App("billing")
    app.handle(f"{NAME}-orders", bill, into=f"{NAME}-invoices", stop_when_idle=0.2)
    return app


async def take_long(order: Order) -> None:
    """Ends when the file exists that the variable APP_UNTIL names."""
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    while not Path(os.environ["APP_UNTIL"]).exists():  # noqa: ASYNC240 - a test makes it
        await asyncio.sleep(0.02)
    sys.stdout.write("ended\n")
    sys.stdout.flush()


def slow() -> App:
    app = App("billing")
    app.handle(f"{NAME}-orders", take_long)
    return app


def two() -> App:
    app = billing()
    app.handle(f"{NAME}-missing", take_long, subscription="others")
    return app


@asynccontextmanager
async def no_database(bus: Bus) -> AsyncGenerator[None]:
    raise ConnectionError("no database")
    yield


def failing() -> App:
    app = App("billing", lifespan=no_database)
    app.handle(f"{NAME}-orders", take_long)
    return app


def wrong() -> App:
    app = App("billing")
    app.handle(f"{NAME}-orders", lambda order: None)
    return app
