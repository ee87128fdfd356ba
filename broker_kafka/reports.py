"""Delivery reports, counted page by page: what the client's callback does for each message that was produced.

A page is a run of messages of one call, and has a ready-made callback for each of its places. So every report finds its
own message exactly, whatever order reports come in, and a message costs no closure of its own: pages are used again and
again. All of it lives in the producer's thread. A callback never raises, because the client would turn that
into an error of somebody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError

from broker.errors import BrokerError
from broker.outbound import OutboundMessage
from broker.receipts import Receipt

__all__ = ["PAGE", "UNREPORTED", "Outcome", "Page", "Pages", "PublishCall", "Report"]

PAGE: Final = 500
"""Messages of a page that is used again."""
_SMALL: Final = 50
"""Fewer messages than these get a page of their own size, which is thrown away."""
_KEPT: Final = 100

UNREPORTED: Final = object()
"""The outcome of a message that has none yet."""

Report = Callable[[KafkaError | None, Any], None]
Outcome = Receipt | BrokerError | None


class PublishCall:
    """One call to publish on its way through the producer's thread.

    :ivar outcomes: one entry per message; UNREPORTED and KafkaErrors until the call is over.
    :ivar next: the first message that was not given to the client yet.
    :ivar failed: whether an outcome is a failure.
    :ivar left: messages that have no outcome yet.
    """

    __slots__ = (
        "deadline",
        "failed",
        "left",
        "looked_up",
        "messages",
        "next",
        "outcomes",
        "receipts",
        "topic",
        "waiter",
    )

    def __init__(
        self,
        topic: str,
        messages: Sequence[OutboundMessage],
        waiter: asyncio.Future[list[Outcome]],
        *,
        receipts: bool,
        deadline: float,
    ) -> None:
        self.topic = topic
        self.messages = messages
        self.receipts = receipts
        self.waiter = waiter
        self.deadline = deadline
        self.outcomes: list[Any] = [UNREPORTED] * len(messages)
        self.next = 0
        self.left = len(messages)
        self.failed = False
        self.looked_up = False


class Page:
    """Callbacks for so many messages.

    :ivar reports: one callback per place.
    :ivar begin: takes the call and the index of its message at the first place.
    :ivar expect: takes the number of messages that the client has accepted; call it before the next poll.
    """

    __slots__ = ("begin", "expect", "reports")

    begin: Callable[[PublishCall, int], None]
    expect: Callable[[int], None]
    reports: Sequence[Report]

    def __init__(self, size: int, full: Callable[[Page, PublishCall, int], None]) -> None:
        # Closures and not methods: this runs once per message, and cells are the cheapest state there is.
        call: PublishCall
        outcomes: list[Any] = []
        messages: Sequence[OutboundMessage] = ()
        receipts = False
        topic = ""
        first = accepted = left = 0

        def begin(its_call: PublishCall, its_first: int) -> None:
            nonlocal call, outcomes, messages, receipts, topic, first
            call, outcomes, messages = its_call, its_call.outcomes, its_call.messages
            receipts, topic, first = its_call.receipts, its_call.topic, its_first

        def expect(number: int) -> None:
            nonlocal accepted, left
            accepted = left = number

        def report(place: int, error: KafkaError | None, message: Any) -> None:
            nonlocal left
            if error is not None:
                outcomes[first + place] = error
                call.failed = True
            elif receipts:
                index = first + place
                partition, offset = message.partition(), message.offset()
                outcomes[index] = Receipt(
                    messages[index].id or f"{topic}:{partition}:{offset}",
                    partition,
                    offset,
                    False,
                    message.timestamp()[1],
                )
            else:
                outcomes[first + place] = None
            left -= 1
            if not left:
                full(self, call, accepted)

        self.begin, self.expect = begin, expect
        self.reports = [partial(report, place) for place in range(size)]


class Pages:
    """The pages of one client.

    :param ended: called with a call when all of its messages have their outcomes.
    """

    def __init__(self, ended: Callable[[PublishCall], None]) -> None:
        self._ended = ended
        self._free: list[Page] = []
        self._open: dict[Page, PublishCall] = {}
        self.unreported = 0
        """Messages that the client has accepted and not reported."""

    def take(self, call: PublishCall, wanted: int) -> tuple[Page, int]:
        """A page for the next messages of a call, and how many of the wanted ones go on it."""
        if wanted < _SMALL:
            page = Page(wanted, self._full)
        else:
            page = self._free.pop() if self._free else Page(PAGE, self._full)
        page.begin(call, call.next)
        return page, min(wanted, PAGE)

    def accepted(self, page: Page, call: PublishCall, number: int) -> None:
        """The client has taken so many; the page is written."""
        if not number:
            self._put_back(page)
            return
        page.expect(number)
        self._open[page] = call
        self.unreported += number

    def abandon(self) -> list[PublishCall]:
        """The client will report nothing more: forget it, and return the calls that still miss a report."""
        calls = list(dict.fromkeys(self._open.values()))
        self._open = {}
        self._free = []
        self.unreported = 0
        return calls

    def _full(self, page: Page, call: PublishCall, number: int) -> None:
        if self._open.pop(page, None) is None:
            return
        self.unreported -= number
        self._put_back(page)
        call.left -= number
        if not call.left:
            self._ended(call)

    def _put_back(self, page: Page) -> None:
        if len(page.reports) == PAGE and len(self._free) < _KEPT:
            self._free.append(page)
