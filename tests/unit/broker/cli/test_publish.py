"""`broker publish` on a topic that answers late: the right line, and the right counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.cli.message_input import Item
from broker.cli.publish import _Publishing
from broker.cli.session import Options, Session
from broker.errors import BackendError
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from tests.unit.broker.consuming.warp import in_jumping_time


class LateTopic:
    """A topic of which each message is answered once all are enqueued."""

    name = "orders"

    def __init__(self, *outcomes: Receipt | BackendError) -> None:
        self._outcomes = outcomes
        self._futures: list[asyncio.Future[Receipt]] = []

    async def enqueue(self, message: OutboundMessage) -> asyncio.Future[Receipt]:
        self._futures.append(asyncio.get_running_loop().create_future())
        if len(self._futures) == len(self._outcomes):
            asyncio.get_running_loop().call_soon(self._answer)
        return self._futures[-1]

    def _answer(self) -> None:
        for future, outcome in zip(self._futures, self._outcomes, strict=True):
            if isinstance(outcome, Receipt):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)


STORED = Receipt("id")


@pytest.mark.parametrize(
    ("outcomes", "reported", "summary"),
    [
        (
            [BackendError("No"), BackendError("no"), BackendError("no"), BackendError("no")],
            "Line 1: No",
            "Published 0 messages to 'orders', 4 not published; stopped at line 1, when lines up to 4 were under way.",
        ),
        (
            [STORED, BackendError("No"), STORED, BackendError("no")],
            "Line 2: No",
            "Published 2 messages to 'orders', 2 not published; stopped at line 2, when lines up to 4 were under way.",
        ),
        (
            [STORED, BackendError("No")],
            "Line 2: No",
            "Published 1 message to 'orders', 1 not published; stopped at line 2.",
        ),
    ],
)
async def test_the_run_stops_at_the_first_line_that_failed(outcomes, reported, summary, capsys):
    topic: Any = LateTopic(*outcomes)
    work = _Publishing(Session(Options()), topic, "line", keep_going=False)

    async def items():
        for number in range(1, len(outcomes) + 1):
            yield Item(number, OutboundMessage(b""))

    await work.run(items(), lambda _: None)
    work.summarize()
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"broker: {reported}"
    assert last == f"{summary} Use --keep-going to continue after errors"


@in_jumping_time
async def test_messages_are_published_at_the_rate():
    times: list[float] = []

    class Stored:
        name = "orders"

        async def enqueue(self, message: OutboundMessage) -> asyncio.Future[Receipt]:
            times.append(round(asyncio.get_running_loop().time(), 3))
            receipt = asyncio.get_running_loop().create_future()
            receipt.set_result(STORED)
            return receipt

    async def items():
        for number in range(1, 6):
            yield Item(number, OutboundMessage(b""))

    topic: Any = Stored()
    await _Publishing(Session(Options()), topic, "line", keep_going=False, rate=2.0).run(items(), lambda _: None)
    assert times == [0, 0.5, 1, 1.5, 2]
