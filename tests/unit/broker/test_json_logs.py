"""Logs as JSON: the identity of the handled message, and never its body."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

import broker
from broker.json_logs import JsonFormatter, name_messages
from broker.testing.harness import unique


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger whose lines a test reads."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger(unique("json"))
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield logger, written
    logger.removeHandler(handler)


def lines(written: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_a_record_is_one_line(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    logger.info("billed %s\nand more", "ä", extra={"customer": 7, "odd": object})
    (line,) = lines(written)
    assert (line["level"], line["logger"], line["text"], line["customer"]) == (
        "INFO",
        logger.name,
        "billed ä\nand more",
        7,
    )
    assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    assert line.keys() == {"time", "level", "logger", "text", "customer", "odd"}


def test_an_error_has_its_traceback(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    try:
        raise ValueError("too strong")
    except ValueError:
        logger.exception("failed")
    (line,) = lines(written)
    assert line["error"].endswith("ValueError: too strong")


async def test_the_handled_message_is_named_and_its_body_is_not(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    async with broker.connect(f"inmem://{unique('logs')}") as bus:
        await bus.admin.ensure_topic("orders")
        undo = name_messages(bus)
        await bus.topic("orders").publish(b"a secret", id="order-1", attributes={"token": "a secret"})

        async def handle(message: broker.Message) -> None:
            logger.info("billed")

        async with bus.messages("orders", subscription="billing", stop_when_idle=0.1) as inbox:
            await inbox.receive(handle)
        undo()
        logger.info("over")
    billed, over = lines(written)
    assert billed["message"] == {"topic": "orders", "subscription": "billing", "id": "order-1", "attempt": 1}
    assert "message" not in over
    assert "secret" not in written.getvalue()


async def test_the_current_span_is_named(log: tuple[logging.Logger, io.StringIO]) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    logger, written = log
    with TracerProvider().get_tracer("test").start_as_current_span("work") as span:
        logger.info("billed")
    (line,) = lines(written)
    context = span.get_span_context()
    assert (int(line["trace"], 16), int(line["span"], 16)) == (context.trace_id, context.span_id)
