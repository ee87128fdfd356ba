"""Publish calls in the producer's thread: their delivery reports, and the error of each message that failed.

*Reports with receipts.* A `Page` has one reusable callback for each of its places, so that a report finds its message
in any order and no message costs a closure. *Reports without receipts.* A `Tally` counts with one callback. A failed
message is found by its key and body, which is exact because only plain messages are tallied.

Everything but `complete_calls` runs in the producer's thread. A callback never raises.
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
from broker_kafka.client.thread import Command
from broker_kafka.errors import translate

__all__ = [
    "PAGE",
    "TOO_LARGE",
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
    "rejected_error",
]


PAGE: Final = 1000
"""Messages of a page that is reused."""
_SMALL: Final = 50
"""Fewer messages than these get a page of their own size, which is not reused."""
_FREE_PAGES: Final = 50

_UNREPORTED: Final = object()
"""The outcome of a message without a report."""

_numbers = count()

Outcome = Receipt | BrokerError | None
_Full = Callable[["Page | Tally", "PublishCall", int], None]


class PublishCall(Command):
    """A call to publish; also the command that brings it to the producer's thread.

    :ivar outcomes: one per message; a KafkaError is translated when the call is complete, _UNREPORTED is replaced by a
        Receipt or an error.
    :ivar next: index of the first message that was not produced yet.
    :ivar failed: whether any outcome is an error.
    :ivar left: messages without an outcome.
    :ivar number: rises from call to call.
    :ivar placed: each message is a key, a body and a partition, and nothing else; without receipts.
    :param on_error: called with the topic and the error of each failed message.
    """

    __slots__ = (
        "_by_content",
        "_on_error",
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
    )

    def __init__(
        self,
        topic: str,
        messages: Sequence[OutboundMessage],
        waiter: asyncio.Future[list[Outcome]] | None,
        *,
        receipts: bool,
        deadline: float,
        placed: bool = False,
        on_error: Callable[[str, KafkaError | BrokerError], object] | None = None,
    ) -> None:
        self.waiter = waiter
        self.topic = topic
        self.messages = messages
        self.receipts = receipts
        self.placed = placed
        self.deadline = deadline
        self.outcomes: list[Any] = [_UNREPORTED if receipts else None] * len(messages)
        self.next = 0
        self.failed = False
        self.left = len(messages)
        self.looked_up = False
        self.number = next(_numbers)
        self._on_error = on_error
        self._by_content: dict[tuple[bytes | None, bytes | None], deque[int]] | None = None

    def following(self, most: int) -> Sequence[OutboundMessage]:
        """The next messages to produce, at most `most`; placed messages of one partition only."""
        run = self.messages[self.next : self.next + most]
        if not self.placed:
            return run
        return list(takewhile(lambda each: each.partition == run[0].partition, run))

    def fail(self, index: int, error: KafkaError | BrokerError) -> None:
        """Set the error of a message; `left` is not changed."""
        self.failed = True
        self.outcomes[index] = error
        if self._on_error is not None:
            self._on_error(self.topic, error)

    def fail_next(self, error: BrokerError) -> None:
        """Set the error of the next message, which the client did not accept."""
        self.fail(self.next, error)
        self.next += 1
        self.left -= 1

    def fail_rest(self, reason: BrokerError) -> None:
        """Set the error of every message that was not produced."""
        self.failed = True
        rest = len(self.messages) - self.next
        self.outcomes[self.next :] = [reason] * rest
        self.next += rest
        self.left -= rest

    def fail_unreported(self) -> None:
        """Set the error of every produced message without a report: the client is closed."""
        self.failed = True
        for index in range(self.next):
            if self.outcomes[index] is _UNREPORTED or self.outcomes[index] is None:
                self.outcomes[index] = _unknown_outcome(self.topic)
        self.left = len(self.messages) - self.next

    def fail_like(self, key: bytes | None, data: bytes | None, error: KafkaError) -> None:
        """Set the error of a tallied message with this key and body; of several, the first without an error."""
        places = self._by_content
        if places is None:
            places = self._by_content = {}
            for index, message in enumerate(self.messages):
                if message.plain or self.placed:
                    places.setdefault((message.key, message.data), deque()).append(index)
        alike = places.get((key, data))
        if alike:
            self.fail(alike.popleft(), error)
            return
        # Not reached; but a failure must be reported, even on more messages than have failed.
        for index, outcome in enumerate(self.outcomes):
            if outcome is None:
                self.fail(index, error)


class Page:
    """Delivery callbacks for the messages of a call from `call.next` on.

    :ivar reports: one callback per place.
    :ivar begin: reuse the page for the next messages of this call.
    :ivar expect: set the number of messages that the client accepted; call it before the next poll.
    :param full: called when every accepted message was reported.
    """

    __slots__ = ("begin", "expect", "reports")

    begin: Callable[[PublishCall], None]
    expect: Callable[[int], None]
    reports: Sequence[partial[None]]

    def __init__(self, size: int, call: PublishCall, full: _Full) -> None:
        # Closures instead of methods: `report` runs once per message, and cells are the cheapest state.
        outcomes, messages, receipts = call.outcomes, call.messages, call.receipts
        first = call.next
        prefix = ""
        accepted = left = 0
        known = -1

        def begin(next_call: PublishCall) -> None:
            nonlocal call, outcomes, messages, receipts, first, known
            call, outcomes, messages = next_call, next_call.outcomes, next_call.messages
            receipts, first, known = next_call.receipts, next_call.next, -1

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
                    # Reports come by partition, and share most of the id.
                    known, prefix = partition, f"{call.topic}:{partition}:"
                identity = messages[index].id or f"{prefix}{offset}"
                outcomes[index] = Receipt(identity, partition, offset, False, message.timestamp()[1])
            left -= 1
            if not left:
                full(self, call, accepted)

        self.begin, self.expect = begin, expect
        self.reports = [partial(report, place) for place in range(size)]

    def place_of(self, report: partial[None]) -> int:
        """The place of a callback."""
        return report.args[0]


class Tally:
    """The delivery callback of plain messages without receipts.

    :ivar expect: as of `Page`.
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
    """The messages that a client has accepted and not reported.

    :param on_complete: called with a call when each of its messages has an outcome.
    """

    def __init__(self, on_complete: Callable[[PublishCall], None]) -> None:
        self._on_complete = on_complete
        self._free: list[Page] = []
        self._open: dict[Page | Tally, PublishCall] = {}
        self.missing = 0
        """How many there are."""

    def page(self, call: PublishCall, wanted: int) -> Page:
        """A page for the next messages of a call."""
        if wanted < _SMALL:
            return Page(wanted, call, self._full)
        if not self._free:
            return Page(PAGE, call, self._full)
        page = self._free.pop()
        page.begin(call)
        return page

    def tally(self, call: PublishCall) -> Tally:
        """A tally for the next messages of a call."""
        return Tally(call, self._full)

    def accepted(self, page: Page | Tally, call: PublishCall, number: int) -> None:
        """The client has accepted this many messages of the page."""
        if number:
            page.expect(number)
            self._open[page] = call
            self.missing += number
        else:
            self._put_back(page)

    def awaits(self, topic: str) -> bool:
        """Whether a message of this topic is not reported yet."""
        return any(call.topic == topic for call in self._open.values())

    def abandon(self) -> list[PublishCall]:
        """Forget a client that will report nothing more; return the calls with missing reports."""
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
            self._on_complete(call)

    def _put_back(self, page: Page | Tally) -> None:
        if isinstance(page, Page) and len(page.reports) == PAGE and len(self._free) < _FREE_PAGES:
            self._free.append(page)


def complete_calls(calls: Sequence[PublishCall]) -> None:
    """Complete the futures of these calls. Runs on the loop."""
    for call in calls:
        if call.waiter is not None and not call.waiter.done():
            call.waiter.set_result(call.outcomes)


# -- errors -------------------------------------------------------------------------------------------------

_PARTITION: Final = "Give one of the topic's partitions, or None for the key to decide"
_TIMED_OUT: Final = (
    "The message may be on the broker: publish it again if a duplicate does no harm, or raise message_timeout_ms"
)
TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
"""The broker rejected a batch: one of its messages, or the batch itself, is too large for the topic."""


def publish_error(error: KafkaError, topic: str, message: OutboundMessage, trouble: KafkaError | None) -> BrokerError:
    """Translate the delivery error of a message.

    :param trouble: the client's last connection error since its last delivery.
    """
    what = f"Publishing to {topic!r}"
    code = error.code()
    native = KafkaException(error)
    if code == KafkaError._DESTROY or (code == KafkaError._UNKNOWN_PARTITION and message.partition is None):
        return TopicNotFound(f"{what}: the topic was deleted", native=native)
    if code == KafkaError._UNKNOWN_PARTITION:
        return InvalidMessage(
            f"{what}: partition is {message.partition}, which the topic does not have",
            native=native,
            advice=_PARTITION,
        )
    if code == KafkaError._MSG_TIMED_OUT:
        detail = "" if trouble is None else f"; {trouble.str()}"
        return OperationTimeout(f"{what}: no answer in time{detail}", native=native, advice=_TIMED_OUT)
    if code == KafkaError._INVALID_DIFFERENT_RECORD:
        return BackendError(
            f"{what}: the broker rejected another message of the batch, and the whole batch with it",
            retriable=True,
            native=native,
            advice="Publish it again",
        )
    if code in TOO_LARGE:
        size = len(message.data or b"") + len(message.key or b"")
        return MessageTooLarge(
            f"{what}: {error.str().rstrip('.')}: the key and body have {size} bytes",
            native=native,
            advice="Raise the topic's max.message.bytes and the setting message_max_bytes, or publish smaller messages",
        )
    if code == KafkaError._QUEUE_FULL:
        # Reaches this point only if the queue was empty. librdkafka counts bodies, but neither keys nor attributes.
        size = len(message.data or b"")
        return MessageTooLarge(
            f"{what}: the body has {size} bytes, and the queue of the producer holds less",
            native=native,
            advice=f"Raise queue_buffering_max_kbytes to {-(-size // 1024)} or more, or publish smaller messages",
        )
    if code == KafkaError._PURGE_QUEUE:
        return ConnectionFailed(f"{what}: the message was not sent", native=native)
    if code == KafkaError._PURGE_INFLIGHT:
        return _unknown_outcome(topic)
    return translate(error, what)


def rejected_error(error: BaseException, topic: str, message: OutboundMessage) -> BrokerError:
    """The error of a message that the client rejected without a Kafka error code."""
    if isinstance(error, OverflowError) and message.partition is not None:
        return InvalidMessage(
            f"Publishing to {topic!r}: partition is {message.partition}, and a topic has at most 2**31 partitions",
            native=error,
            advice=_PARTITION,
        )
    return translate(error, f"Publishing to {topic!r}")


def batch_too_large(error: KafkaError, topic: str) -> BrokerError:
    """The error of each message of a batch that is not split; the broker does not report which one is too large."""
    return BackendError(
        f"Publishing to {topic!r}: the batch of this message was too large for the topic",
        native=KafkaException(error),
        advice="Set batch_size to the topic's max.message.bytes or less; then only too large messages fail",
    )


def not_sent(topic: str, seconds: float, trouble: KafkaError | None) -> BrokerError:
    """The error of a message that could not be handed to the client in time."""
    detail = "" if trouble is None else f"; {trouble.str()}"
    return ConnectionFailed(f"Publishing to {topic!r}: the message could not be sent within {seconds:g} s{detail}")


def explain_purged(
    outcomes: Sequence[Receipt | BrokerError | None], topic: str, refused: KafkaError | None
) -> Sequence[Receipt | BrokerError | None]:
    """The outcomes of a transaction, with the error that made the client purge its queue.

    :param refused: the brokers' error for a topic of the transaction, which the client does not put in its reports.
    """
    error = None if refused is None else translate(refused, f"Publishing to {topic!r}")
    if not isinstance(error, NotAuthorized):
        return outcomes
    return [error if isinstance(outcome, ConnectionFailed) else outcome for outcome in outcomes]


def _unknown_outcome(topic: str) -> BrokerError:
    """The error of a message whose client closed before it reported."""
    return OperationTimeout(
        f"Publishing to {topic!r}: the producer closed before the broker answered; the message may be on the broker"
    )
