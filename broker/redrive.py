"""List dead letters, and redrive them: publish each to the topic it came from.

*Subscription.* Redrives use the subscription `anybroker-redrive` of the dead-letter topic, and settle there the letters
that they moved. The first redrive creates it; on a broker without history the first consumer with this dead-letter
topic does, so that redrives see the letters since then. Listing shows the letters that the subscription has not
settled. Before the first redrive, listing reads the log if the broker has one, and creates nothing.

*Delivery.* A letter is published first and settled afterwards: an interruption may repeat messages and loses none.
Every subscription of the origin receives the message again. Its id is derived from the letter's id, so that a broker
with deduplication does not drop the message as a copy of the original, but does drop a repetition.

*Trust.* Whoever may write to a dead-letter topic may name any topic as the origin of a letter, and a redrive publishes
with the rights of its caller. So letters go back only to the topics that the caller names with `to`. Only a broker that
writes the letters itself knows their topics.

*Letters that stay.* Letters without an origin, letters of topics that are not in `to`, letters that lack a part of
their message, letters whose publish failed, and letters of messages that failed again during this redrive. The redrive
holds them unsettled and gives them back at its end; it ends early when it holds 10,000. It does not wait for letters
that another redrive holds, or held when it was killed: `Redriven.elsewhere` counts them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol, Unpack

from broker.capabilities import Capabilities
from broker.consuming.consumer import MessageConsumer
from broker.consuming.dead_letters import CUT, confirms, describe
from broker.consuming.options import MessageOptions
from broker.consuming.retry.policy import Retry
from broker.driver.contract import Backend
from broker.driver.optional import ReportsOrigins
from broker.envelopes import DEAD_LETTER_PREFIX, REDRIVEN_SUFFIX, Envelope
from broker.errors import (
    BackendError,
    BrokerError,
    ConfigurationError,
    InvalidMessage,
    PublishError,
    SubscriptionNotFound,
    Unsupported,
)
from broker.hooks import publishing_as
from broker.messages import Message
from broker.names import REDRIVE_SUBSCRIPTION, known_name
from broker.outbound import OutboundMessage
from broker.protocols import Topic
from broker.reading.log_reader import LogReaderFacade
from broker.records import Record

__all__ = ["DeadLetter", "Redriven", "dry_redrive", "list_dead_letters", "redrive", "redriven_message"]

_BATCH: Final = 500
_MOST_LEFT: Final = 10_000
_IDLE: Final = 1.0
_MOST_IDLE_ROUNDS: Final = 10
_DIGITS: Final = 40
"""Maximum length of a number in a letter, since any program may write letters."""
_SHOWN: Final = 200
"""Maximum length of a letter's text in an error."""


@dataclass(slots=True)
class Redriven:
    """The result of a redrive, or what a dry run expects of one.

    :ivar moved: letters published to the topic they came from.
    :ivar by_topic: the number of moved letters by topic.
    :ivar skipped: messages without an origin, which stay.
    :ivar failed: letters that could not be published, may not be, lack a part of their message, or failed again during
        the redrive; they stay.
    :ivar not_allowed: the number of letters that failed because `to` does not name their topic, by topic.
    :ivar errors: the last error by topic.
    :ivar repeatable: moved letters whose ack was not confirmed; a later redrive may move them again.
    :ivar elsewhere: letters that another redrive holds, or held when it was killed; they are redelivered when their
        leases end. 0 if the broker does not report them, or if `limit` was reached.
    """

    moved: int = 0
    by_topic: dict[str, int] = field(default_factory=dict[str, int])
    skipped: int = 0
    failed: int = 0
    not_allowed: dict[str, int] = field(default_factory=dict[str, int])
    errors: dict[str, BrokerError] = field(default_factory=dict[str, BrokerError])
    repeatable: int = 0
    elsewhere: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A dead letter: the original message, and why it failed. None for fields that the letter lacks.

    :ivar topic: the topic of the original message.
    :ivar subscription: the subscription whose consumer gave up the message.
    :ivar attempts: number of deliveries.
    :ivar partition: the original partition.
    :ivar offset: the original offset.
    :ivar id: the id of the original message.
    :ivar time: when the letter was written, UTC.
    :ivar cut: which part of the original the letter lacks, and why; None if it lacks nothing. A redrive leaves such a
        letter where it is.
    :ivar key_bytes: the size of the original key, if the letter lacks it.
    :ivar data_bytes: the size of the original body, if the letter lacks its end or all of it.
    :ivar attributes: the attributes of the original message.
    """

    topic: str | None
    subscription: str | None
    reason: str | None
    error: str | None
    attempts: int | None
    partition: int | None
    offset: int | None
    id: str | None
    time: datetime | None
    cut: str | None
    key_bytes: int | None
    data_bytes: int | None
    key: bytes | None
    data: bytes | None
    attributes: Mapping[str, str]

    @classmethod
    def from_envelope(cls, letter: Envelope) -> DeadLetter:
        """Read a letter. Missing and malformed fields become None."""
        attributes = letter.attributes
        texts = {
            name: attributes.get(DEAD_LETTER_PREFIX + name)
            for name in ("topic", "subscription", "reason", "error", "id", "cut")
        }
        return cls(
            **texts,
            attempts=_number(attributes, "attempts"),
            partition=_number(attributes, "partition"),
            offset=_number(attributes, "offset"),
            time=_time(attributes.get(f"{DEAD_LETTER_PREFIX}time")),
            key_bytes=_number(attributes, "key-bytes"),
            data_bytes=_number(attributes, "data-bytes"),
            key=letter.key,
            data=letter.data,
            attributes=_own_attributes(attributes),
        )


def redriven_message(letter: Message[Any]) -> OutboundMessage:
    """The original message of a letter, to be published again with a new id."""
    original_id = letter.attributes.get(f"{DEAD_LETTER_PREFIX}id") or letter.id
    stem = REDRIVEN_SUFFIX.sub("", original_id)[:80]
    digest = hashlib.blake2s(letter.id.encode(), digest_size=8).hexdigest()
    return OutboundMessage(
        letter.data,
        letter.key,
        _own_attributes(letter.attributes),
        id=f"{stem}-r{digest}",
        publish_time=letter.publish_time,
        native=letter.native,
    )


class RedriveBus(Protocol):
    """The part of the bus that a redrive uses."""

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def log(self) -> LogReaderFacade: ...
    def topic(self, name: str) -> Topic[bytes]: ...
    def messages(
        self, topics: str, *, subscription: str, **options: Unpack[MessageOptions]
    ) -> MessageConsumer[bytes]: ...


async def redrive(
    bus: RedriveBus,
    dead_letter_topic: str,
    *,
    to: Sequence[str] | None,
    limit: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> Redriven:
    """Move letters until there are none, or `limit` were moved.

    :raises ConfigurationError: `to` is None, and the broker does not know the topics of the letters.
    """
    allowed = _allowed(bus, dead_letter_topic, to)
    if allowed is None:
        raise ConfigurationError(
            f"A redrive of {dead_letter_topic!r} has no `to`, and {bus.capabilities.backend} does not know which "
            "topics its letters come from",
            advice="Name the topics that letters may go back to; a dry run counts the letters of each topic",
        )
    run = _Run(bus, allowed)
    async with _letters(bus, dead_letter_topic) as letters:
        while (limit is None or run.report.moved < limit) and len(run.left) < _MOST_LEFT:
            most = _BATCH if limit is None else min(_BATCH, limit - run.report.moved)
            batch = await _next_letters(bus, letters, dead_letter_topic, most, held=len(run.left))
            if not batch:
                run.report.elsewhere = await _elsewhere(bus, dead_letter_topic, held=len(run.left))
                break
            await run.move(batch)
            if progress is not None:
                progress(run.report.moved)
    return run.report


async def dry_redrive(
    bus: RedriveBus, dead_letter_topic: str, *, to: Sequence[str] | None, limit: int | None = None
) -> Redriven:
    """Count the letters that a redrive would move, and those that would stay; looks at 10,000 letters at most.

    :param to: None allows all topics, unless the broker knows those of the letters.
    """
    run = _Run(bus, _allowed(bus, dead_letter_topic, to))
    report, seen = run.report, 0
    async with aclosing(_each_letter(bus, dead_letter_topic)) as letters:
        async for letter in letters:
            origin = run.origin_of(letter)
            if origin is not None:
                run.count(origin, 1)
            seen += 1
            if seen == _MOST_LEFT or report.moved == limit:
                break
    return report


def _allowed(bus: RedriveBus, topic: str, to: Sequence[str] | None) -> dict[str, str] | None:
    """The topics that letters may go back to, by their names in letters; None if they are unknown."""
    if to is not None:
        return {str(name): name for name in to}
    admin = bus.backend.admin()
    origins = admin.dead_letter_origins(topic) if isinstance(admin, ReportsOrigins) else None
    return None if origins is None else {origin: known_name(origin) for origin in origins}


async def list_dead_letters(bus: RedriveBus, dead_letter_topic: str, *, limit: int) -> list[DeadLetter]:
    """The oldest `limit` letters that a redrive would move; nothing is settled or moved."""
    if await _reads_log(bus, dead_letter_topic):
        return [DeadLetter.from_envelope(record) for record in await _read_log(bus, dead_letter_topic, limit)]
    return [DeadLetter.from_envelope(letter) async for letter in _hold_letters(bus, dead_letter_topic, limit)]


async def _each_letter(bus: RedriveBus, topic: str) -> AsyncGenerator[Envelope]:
    """Letters that a redrive would move; nothing is settled or moved."""
    if await _reads_log(bus, topic):
        for partition in await bus.log.partitions(topic):
            async for records in bus.log.read(topic, partition, max_records=_BATCH):
                for record in records:
                    yield record
        return
    async with aclosing(_hold_letters(bus, topic, _MOST_LEFT)) as letters:
        async for letter in letters:
            yield letter


async def _hold_letters(bus: RedriveBus, topic: str, limit: int) -> AsyncGenerator[Message[bytes]]:
    """At most `limit` letters through the subscription of redrives; all are released at the end."""
    held = 0
    async with _letters(bus, topic) as letters:
        while held < limit:
            batch = await _next_letters(bus, letters, topic, min(limit - held, _BATCH), held=held)
            if not batch:
                break
            held += len(batch)
            for letter in batch:
                yield letter


async def _reads_log(bus: RedriveBus, topic: str) -> bool:
    """Whether letters are listed from the log: before the first redrive, which creates its subscription."""
    records = bus.capabilities.records
    return records is not None and records.log_reader and not await _redriven_before(bus, topic)


async def _redriven_before(bus: RedriveBus, topic: str) -> bool:
    """Whether the topic has the subscription of redrives."""
    family, admin = bus.capabilities.messages, bus.backend.admin()
    if family is None or family.subscription_admin:
        return REDRIVE_SUBSCRIPTION in await admin.list_subscriptions(topic)
    try:
        await admin.describe_subscription(topic, REDRIVE_SUBSCRIPTION)
    except SubscriptionNotFound:
        return False
    return True


class _Run:
    """A running redrive.

    :param allowed: the topics that letters may go back to, by their names in letters; None is any.
    """

    def __init__(self, bus: RedriveBus, allowed: Mapping[str, str] | None) -> None:
        self.report = Redriven()
        self.left: list[Message[bytes]] = []
        self._bus = bus
        self._allowed = allowed
        self._moved_ids: set[str] = set()
        self._closed_origins: set[str] = set()

    async def move(self, batch: Sequence[Message[bytes]]) -> None:
        by_origin: dict[str, list[Message[bytes]]] = {}
        for letter in batch:
            origin = self.origin_of(letter)
            if origin is None:
                self.left.append(letter)
            elif origin in self._closed_origins or letter.attributes.get(f"{DEAD_LETTER_PREFIX}id") in self._moved_ids:
                self._leave(letter)
            else:
                by_origin.setdefault(origin, []).append(letter)
        for origin, letters in by_origin.items():
            await self._publish(origin, letters)

    def origin_of(self, letter: Envelope) -> str | None:
        """The topic that the letter may go back to; otherwise None, and the letter is counted."""
        origin = letter.attributes.get(f"{DEAD_LETTER_PREFIX}topic")
        if not origin:
            self.report.skipped += 1
            return None
        if self._allowed is not None and origin not in self._allowed:
            self.report.failed += 1
            self.report.not_allowed[origin] = self.report.not_allowed.get(origin, 0) + 1
            return None
        if CUT in letter.attributes:
            self.report.failed += 1
            if self._allowed is not None:
                # Otherwise any program could fill the report with topics.
                self.report.errors[origin] = _incomplete(letter)
            return None
        return origin

    def count(self, origin: str, moved: int) -> None:
        self.report.moved += moved
        self.report.by_topic[origin] = self.report.by_topic.get(origin, 0) + moved

    def _originals(self, origin: str, letters: list[Message[bytes]]) -> dict[int, OutboundMessage]:
        """The message of each letter, by index. A letter that is none, such as a forged one, is left."""
        found: dict[int, OutboundMessage] = {}
        for index, letter in enumerate(letters):
            try:
                found[index] = redriven_message(letter)
            except Exception as raised:
                error = raised if isinstance(raised, BrokerError) else BackendError(describe(raised), native=raised)
                self.report.errors[origin] = error
                self._leave(letter)
        return found

    async def _publish(self, origin: str, all_letters: list[Message[bytes]]) -> None:
        assert self._allowed is not None
        originals = self._originals(origin, all_letters)
        messages = list(originals.values())
        letters = [all_letters[index] for index in originals]
        if not letters:
            return
        try:
            topic = self._bus.topic(self._allowed[origin])
            with publishing_as("redrive"):
                outcomes: Sequence[object] = await topic.publish_batch(messages)
        except PublishError as error:
            outcomes = error.outcomes
        except BrokerError as error:
            self._closed_origins.add(origin)
            outcomes = [error] * len(letters)
        moved: list[Message[bytes]] = []
        for letter, message, outcome in zip(letters, messages, outcomes, strict=True):
            if isinstance(outcome, BrokerError):
                self.report.errors[origin] = outcome
                self._leave(letter)
            else:
                moved.append(letter)
                self._moved_ids.add(message.id or "")
        if moved:
            self.count(origin, len(moved))
            answers = await asyncio.gather(*(letter.ack() for letter in moved), return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BrokerError):
                    self.report.repeatable += 1
                elif answer is not None:
                    raise answer

    def _leave(self, letter: Message[bytes]) -> None:
        self.report.failed += 1
        self.left.append(letter)


def _letters(bus: RedriveBus, topic: str) -> MessageConsumer[bytes]:
    family = bus.capabilities.messages
    if family is None:
        raise Unsupported(
            f"{bus.capabilities.backend} has no Message family, which a redrive needs",
            advice="Read the dead-letter topic with bus.records(...)",
        )
    return bus.messages(
        topic,
        subscription=REDRIVE_SUBSCRIPTION,
        # Listing delivers and releases letters any number of times; they must not be dead-lettered for that.
        retry=Retry(max_deliveries=1_000_000),
        confirm_acks=confirms(family),
        max_outstanding=_MOST_LEFT + 2 * _BATCH,
        prefetch=_BATCH,
    )


async def _next_letters(
    bus: RedriveBus, letters: MessageConsumer[bytes], topic: str, most: int, *, held: int
) -> Sequence[Message[bytes]]:
    """The next letters; none if the broker has only the `held` ones, or delivers nothing for 10 s."""
    for idle in range(_MOST_IDLE_ROUNDS):
        if await _is_drained(bus, topic, held=held, idle=idle > 0):
            break
        batch = await letters.next_batch(most, timeout=_IDLE)
        if batch:
            return batch
    return ()


async def _is_drained(bus: RedriveBus, topic: str, *, held: int, idle: bool) -> bool:
    try:
        lag = await bus.backend.admin().lag(topic, REDRIVE_SUBSCRIPTION)
    except BrokerError:
        return idle
    if lag.unsettled is None:
        # Without `unsettled`, `waiting` includes the held letters.
        return lag.waiting <= held
    # Unsettled letters that are not held may be in the consumer's buffer, or with another redrive.
    return lag.waiting == 0 and (idle or lag.unsettled == held)


async def _elsewhere(bus: RedriveBus, topic: str, *, held: int) -> int:
    """The number of letters on the broker that this redrive does not hold."""
    try:
        lag = await bus.backend.admin().lag(topic, REDRIVE_SUBSCRIPTION)
    except BrokerError:
        return 0
    return max(0, lag.waiting + (lag.unsettled or 0) - held)


async def _read_log(bus: RedriveBus, topic: str, limit: int) -> list[Record[bytes]]:
    found: list[Record[bytes]] = []
    for partition in await bus.log.partitions(topic):
        room = limit
        async for batch in bus.log.read(topic, partition, max_records=min(limit, _BATCH)):
            found += batch[:room]
            room -= len(batch)
            if room <= 0:
                break
    found.sort(key=_age)
    return found[:limit]


def _age(record: Record[bytes]) -> tuple[float, int, int]:
    time = record.broker_time or record.publish_time
    return (time.timestamp() if time else 0.0, record.partition, record.offset)


def _incomplete(letter: Envelope) -> InvalidMessage:
    found = DeadLetter.from_envelope(letter)
    known = {"partition": found.partition, "offset": found.offset}
    place = "".join(f", {name} {number}" for name, number in known.items() if number is not None)
    return InvalidMessage(
        f"The letter of message {(found.id or '')[:_SHOWN]!r}{place} lacks a part of it: {(found.cut or '')[:_SHOWN]}",
        advice="Publish the original again, while its topic has it, and ack the letter",
    )


def _own_attributes(attributes: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in attributes.items() if not name.startswith(DEAD_LETTER_PREFIX)}


def _number(attributes: Mapping[str, str], name: str) -> int | None:
    text = attributes.get(DEAD_LETTER_PREFIX + name, "")
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else None


def _time(text: str | None) -> datetime | None:
    try:
        time = datetime.fromisoformat(text) if text else None
        # Another timezone may put the time outside of what a datetime can be in UTC.
        return time if time is None else time.replace(tzinfo=time.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
