"""Why a message was not published, told for that message. Pure functions, safe from any thread.

Delivery reports: what the client's callbacks do for the messages of a call, and which message a report is of.

*Receipts.* A page has a ready-made callback for each of its places, so every report finds its own message whatever
order reports come in, and a message costs no closure of its own: pages are used again and again. *Without receipts* a
tally counts, with one callback for all; a failure finds its message by key and body, which is exact, because only
messages that are a key and a body and nothing else are counted so.

All of it but `complete_calls` lives in the producer's thread. A callback never raises.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from broker import (
    BackendError,
    BrokerError,
    ConnectionFailed,
    InvalidMessage,
    MessageTooLarge,
    NotAuthorized,
    OperationTimeout,
    OutboundMessage,
    Receipt,
    TopicNotFound,
)
from broker_kafka.errors import translate

__all__ = [
    "PAGE",
    "TOO_LARGE",
    "UNREPORTED",
    "Outcome",
    "Page",
    "PublishCall",
    "Reports",
    "Tally",
    "batch_too_large",
    "complete_calls",
    "explain_purged",
    "not_sent",
    "publish_error",
    "refused_error",
    "unknown_outcome",
]


_PARTITION: Final = "Give one of the topic's partitions, or None for the key to decide"
_TIMED_OUT: Final = (
    "It may be on the broker all the same: publish it again where twice does no harm, or raise message_timeout_ms"
)
TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
"""The broker refused a batch: one of its messages is too large for the topic, or all together are."""


def publish_error(error: KafkaError, topic: str, message: OutboundMessage, trouble: KafkaError | None) -> BrokerError:
    """What the client said of one message.

    :param trouble: what it said of the connection since it last delivered something.
    """
    what = f"Publishing to {topic!r}"
    code = error.code()
    native = KafkaException(error)
    if code == KafkaError._DESTROY or (code == KafkaError._UNKNOWN_PARTITION and message.partition is None):
        return TopicNotFound(f"{what}: the topic was deleted meanwhile", native=native)
    if code == KafkaError._UNKNOWN_PARTITION:
        return InvalidMessage(
            f"{what}: partition is {message.partition}, and the topic has none of that number",
            native=native,
            advice=_PARTITION,
        )
    if code == KafkaError._MSG_TIMED_OUT:
        detail = "" if trouble is None else f"; {trouble.str()}"
        return OperationTimeout(f"{what}: no answer in time{detail}", native=native, advice=_TIMED_OUT)
    if code == KafkaError._INVALID_DIFFERENT_RECORD:
        return BackendError(
            f"{what}: the broker refused another message of its batch, and all of the batch with it",
            retriable=True,
            native=native,
            advice="Publish it again",
        )
    if code in TOO_LARGE:
        size = len(message.data or b"") + len(message.key or b"")
        return MessageTooLarge(
            f"{what}: {error.str().rstrip('.')}: body and key have {size} bytes",
            native=native,
            advice="Raise max.message.bytes of the topic and message_max_bytes here, or send less in one message",
        )
    if code == KafkaError._QUEUE_FULL:
        # Told of an empty queue only; librdkafka counts bodies, and neither keys nor attributes.
        size = len(message.data or b"")
        return MessageTooLarge(
            f"{what}: its body of {size} bytes is larger than all that a producer may hold",
            native=native,
            advice=f"Raise queue_buffering_max_kbytes to {-(-size // 1024)} or more, or send less in one message",
        )
    if code == KafkaError._PURGE_QUEUE:
        return ConnectionFailed(f"{what}: it was not sent", native=native)
    if code == KafkaError._PURGE_INFLIGHT:
        return unknown_outcome(topic)
    return translate(error, what)


def refused_error(error: BaseException, topic: str, message: OutboundMessage) -> BrokerError:
    """The client did not take it, and gave no code."""
    if isinstance(error, OverflowError) and message.partition is not None:
        return InvalidMessage(
            f"Publishing to {topic!r}: partition is {message.partition}, and a topic has at most 2**31 of them",
            native=error,
            advice=_PARTITION,
        )
    return translate(error, f"Publishing to {topic!r}")


def batch_too_large(error: KafkaError, topic: str) -> BrokerError:
    """One of a batch that was refused, and is not sent again; which of them are too large nobody tells."""
    return BackendError(
        f"Publishing to {topic!r}: its batch was too large for the topic, by this message, another or all together",
        native=KafkaException(error),
        advice="Set batch_size to the topic's max.message.bytes or less, and only what is too large by itself fails",
    )


def not_sent(topic: str, seconds: float, trouble: KafkaError | None) -> BrokerError:
    """The client could not be given it in time."""
    detail = "" if trouble is None else f"; {trouble.str()}"
    return ConnectionFailed(f"Publishing to {topic!r}: it could not be sent within {seconds:g} s{detail}")


def explain_purged(
    outcomes: Sequence[Receipt | BrokerError | None], topic: str, refused: KafkaError | None
) -> Sequence[Receipt | BrokerError | None]:
    """Outcomes in a transaction; the client drops what it holds when brokers refuse one of its topics, without a word.

    :param refused: what they said then.
    """
    why = None if refused is None else translate(refused, f"Publishing to {topic!r}")
    if not isinstance(why, NotAuthorized):
        return outcomes
    return [why if isinstance(outcome, ConnectionFailed) else outcome for outcome in outcomes]


def unknown_outcome(topic: str) -> BrokerError:
    """The client ended before it told."""
    return OperationTimeout(f"Publishing to {topic!r}: the producer ended while it was sent; its fate is unknown")


PAGE: Final = 1000
"""Messages of a page that is used again."""
_SMALL: Final = 50
"""Fewer messages than these get a page of their own size, which is thrown away."""
_KEPT: Final = 50

UNREPORTED: Final = object()
"""The outcome of a message that has none yet."""

_numbers = count()

Outcome = Receipt | BrokerError | None
_Full = Callable[["Page | Tally", "PublishCall", int], None]


class PublishCall:
    """One call to publish on its way through the producer's thread.

    :ivar outcomes: one entry per message; KafkaErrors, and UNREPORTED where a receipt is to be, until the call is over.
    :ivar next: the first message that was not given to the client yet.
    :ivar failed: whether an outcome is a failure.
    :ivar left: messages that have no outcome yet.
    :ivar number: grows with each call that is made.
    :ivar placed: whether each of its messages is a key, a body and a partition, and nothing else; without receipts.
    :param refused: is told of each failure, with the topic.
    """

    __slots__ = (
        "_places",
        "_refused",
        "deadline",
        "failed",
        "left",
        "looked_up",
        "messages",
        "next",
        "number",
        "outcomes",
        "placed",
        "receipts",
        "topic",
        "waiter",
    )

    def __init__(
        self,
        topic: str,
        messages: Sequence[OutboundMessage],
        waiter: asyncio.Future[list[Outcome]] | None,
        *,
        receipts: bool,
        deadline: float,
        refused: Callable[[str, KafkaError | BrokerError], object] | None = None,
    ) -> None:
        self.topic = topic
        self.messages = messages
        self.receipts = receipts
        self.placed = False
        self.waiter = waiter
        self.deadline = deadline
        self.outcomes: list[Any] = [UNREPORTED if receipts else None] * len(messages)
        self.next = 0
        self.failed = False
        self.left = len(messages)
        self.looked_up = False
        self.number = next(_numbers)
        self._refused = refused
        self._places: dict[tuple[bytes | None, bytes | None], deque[int]] | None = None

    def following(self, most: int) -> Sequence[OutboundMessage]:
        """The messages to be given to the client next, at most so many; placed ones only as far as they are of one
        partition."""
        run = self.messages[self.next : self.next + most]
        if not self.placed:
            return run
        return list(takewhile(lambda each: each.partition == run[0].partition, run))

    def fail(self, index: int, error: KafkaError | BrokerError) -> None:
        """A message failed; `left` is not changed."""
        self.failed = True
        self.outcomes[index] = error
        if self._refused is not None:
            self._refused(self.topic, error)

    def fail_next(self, error: BrokerError) -> None:
        """The client did not take the next message."""
        self.fail(self.next, error)
        self.next += 1
        self.left -= 1

    def fail_rest(self, reason: BrokerError) -> None:
        """The client was not given the next message, nor those after it."""
        self.failed = True
        rest = len(self.messages) - self.next
        self.outcomes[self.next :] = [reason] * rest
        self.next += rest
        self.left -= rest

    def fail_unreported(self, reason: Callable[[str], BrokerError]) -> None:
        """The client is gone, and tells no more of what it was given; `reason` makes the error of a topic."""
        self.failed = True
        for index in range(self.next):
            if self.outcomes[index] is UNREPORTED or self.outcomes[index] is None:
                self.outcomes[index] = reason(self.topic)
        self.left = len(self.messages) - self.next

    def fail_like(self, key: bytes | None, data: bytes | None, error: KafkaError) -> None:
        """A plain message of this key and body failed; of several alike the first that has not."""
        places = self._places
        if places is None:
            places = self._places = {}
            for index, message in enumerate(self.messages):
                if message.plain or self.placed:
                    places.setdefault((message.key, message.data), deque()).append(index)
        alike = places.get((key, data))
        if alike:
            self.fail(alike.popleft(), error)
            return
        # It cannot be; but a failure must be told, if need be of more messages than have failed.
        for index, outcome in enumerate(self.outcomes):
            if outcome is None:
                self.fail(index, error)


class Page:
    """Callbacks for so many messages with receipts.

    :ivar reports: one callback per place.
    :ivar begin: takes the call and the index of its message at the first place.
    :ivar expect: takes the number of messages that the client has accepted; call it before the next poll.
    """

    __slots__ = ("begin", "expect", "reports")

    begin: Callable[[PublishCall, int], None]
    expect: Callable[[int], None]
    reports: Sequence[partial[None]]

    def __init__(self, size: int, full: _Full) -> None:
        # Closures and not methods: this runs once per message, and cells are the cheapest state there is.
        call: PublishCall
        outcomes: list[Any] = []
        messages: Sequence[OutboundMessage] = ()
        receipts = False
        prefix = ""
        first = accepted = left = 0
        known = -1

        def begin(its_call: PublishCall, its_first: int) -> None:
            nonlocal call, outcomes, messages, receipts, first, known
            call, outcomes, messages = its_call, its_call.outcomes, its_call.messages
            receipts, first, known = its_call.receipts, its_first, -1

        def expect(number: int) -> None:
            nonlocal accepted, left
            accepted = left = number

        def report(place: int, error: KafkaError | None, message: Any) -> None:
            nonlocal left, known, prefix
            index = first + place
            if error is not None:
                call.fail(index, error)
            elif receipts:
                partition, offset = message.partition(), message.offset()
                if partition != known:
                    # Reports come by partition, and most of an id is the same for all of one.
                    known, prefix = partition, f"{call.topic}:{partition}:"
                identity = messages[index].id or f"{prefix}{offset}"
                outcomes[index] = Receipt(identity, partition, offset, False, message.timestamp()[1])
            left -= 1
            if not left:
                full(self, call, accepted)

        self.begin, self.expect = begin, expect
        self.reports = [partial(report, place) for place in range(size)]

    def place_of(self, report: partial[None]) -> int:
        """The place that a callback is for."""
        return report.args[0]


class Tally:
    """One callback for any number of plain messages of a call without receipts.

    :ivar report: the callback.
    :ivar expect: as of a page.
    """

    __slots__ = ("expect", "report")

    expect: Callable[[int], None]
    report: Callable[[KafkaError | None, Any], None]

    def __init__(self, call: PublishCall, full: _Full) -> None:
        accepted = left = 0

        def expect(number: int) -> None:
            nonlocal accepted, left
            accepted = left = number

        def report(error: KafkaError | None, message: Any) -> None:
            nonlocal left
            if error is not None:
                call.fail_like(message.key(), message.value(), error)
            left -= 1
            if not left:
                full(self, call, accepted)

        self.expect, self.report = expect, report


class Reports:
    """What one client has accepted and not reported.

    :param ended: called with a call when all of its messages have their outcomes.
    """

    def __init__(self, ended: Callable[[PublishCall], None]) -> None:
        self._ended = ended
        self._free: list[Page] = []
        self._open: dict[Page | Tally, PublishCall] = {}
        self.missing = 0
        """Messages that the client has accepted and not reported."""

    def page(self, call: PublishCall, wanted: int) -> Page:
        """A page for the next messages of a call."""
        if wanted < _SMALL:
            page = Page(wanted, self._full)
        else:
            page = self._free.pop() if self._free else Page(PAGE, self._full)
        page.begin(call, call.next)
        return page

    def tally(self, call: PublishCall) -> Tally:
        """A tally for the next messages of a call."""
        return Tally(call, self._full)

    def accepted(self, page: Page | Tally, call: PublishCall, number: int) -> None:
        """The client has taken so many; the page is written."""
        if number:
            page.expect(number)
            self._open[page] = call
            self.missing += number
        else:
            self._put_back(page)

    def waits_for(self, topic: str) -> bool:
        """Whether the client has messages of this topic that it has not reported."""
        return any(call.topic == topic for call in self._open.values())

    def abandon(self) -> list[PublishCall]:
        """The client will report nothing more: forget it, and return the calls that still miss a report.

        Which of their messages miss theirs is only known of calls with receipts.
        """
        calls = list(dict.fromkeys(self._open.values()))
        self._open = {}
        self._free = []
        self.missing = 0
        return calls

    def _full(self, page: Page | Tally, call: PublishCall, number: int) -> None:
        if self._open.pop(page, None) is None:
            return
        self.missing -= number
        self._put_back(page)
        call.left -= number
        if not call.left:
            self._ended(call)

    def _put_back(self, page: Page | Tally) -> None:
        if isinstance(page, Page) and len(page.reports) == PAGE and len(self._free) < _KEPT:
            self._free.append(page)


def complete_calls(calls: Sequence[PublishCall]) -> None:
    """Give those who wait for these calls their outcomes; on the loop."""
    for call in calls:
        if call.waiter is not None and not call.waiter.done():
            call.waiter.set_result(call.outcomes)
