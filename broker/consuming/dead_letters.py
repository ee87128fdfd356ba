"""Writes dead letters: the original with the reason, the error and the origin, cut to the broker's limits.

The original stays unsettled, its lease renewed, until its letter is on the broker; the handler does not run again. A
failed write is repeated until it succeeds or the consumer closes.

A letter that the broker refuses is made smaller in steps (`SHAPES`). Any broker takes the last one, so that no message
of a foreign producer is too large to be given up. A letter that lacks a part of the original says so in
`dead-letter-cut`, is logged as an error, and is never redriven.

A broker without history drops a message for which no subscription exists. There, `LetterTopic` creates the redrive
subscription before the first letter, and again after the topic was deleted.

*Concurrency.* One event loop. *Cancellation.* A cancelled write leaves its outcome unknown.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum, auto
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from broker.capabilities import ConfirmedAck, Limits, MessageCapabilities
from broker.driver.concurrency import Backoff, pause
from broker.driver.contract import Backend, MessageSubscription
from broker.envelopes import DEAD_LETTER_PREFIX, Envelope, HasPlace, Place
from broker.errors import BackendError, BrokerError, InvalidMessage, NotFound, PublishError
from broker.hooks import DeadLetterFailed, Event, Hooks, logger, publishing_as
from broker.messages import Message
from broker.names import REDRIVE_SUBSCRIPTION
from broker.outbound import OutboundMessage
from broker.protocols import Topic
from broker.records import Record

__all__ = [
    "CUT",
    "SHAPES",
    "DeadLetterWriter",
    "LetterTopic",
    "LetterWriter",
    "MakeLetter",
    "Shape",
    "confirms",
    "describe",
    "log_dead_lettered",
    "make_dead_letter",
    "one_line",
    "placed",
]


V = TypeVar("V")

MakeLetter = Callable[[InvalidMessage | None], OutboundMessage]
"""Makes one shape of a letter; the argument is the refusal of the shape before."""

_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 30.0
_LONGEST_LINE: Final = 500


class LetterWriter:
    """Writes letters; repeats a failed write until `close`."""

    def __init__(self) -> None:
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Repeat no failed write from now on; a running one may still succeed."""
        self._closing.set()

    async def write(
        self,
        shapes: Sequence[MakeLetter],
        publish: Callable[[OutboundMessage], Awaitable[object]],
        failed: Callable[[BrokerError, float], None],
        *,
        stubborn: bool,
    ) -> OutboundMessage:
        """Return the letter when it is on the broker.

        :param shapes: the shapes of the letter, the largest first; each is made at most once.
        :param failed: called with each failure and the seconds until the next try.
        :param stubborn: try again also when all shapes were refused.
        :raises InvalidMessage: all shapes were refused.
        :raises BrokerError: a write failed, and `close` was called.
        """
        letters: dict[int, OutboundMessage] = {}
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        shape, refused = 0, None
        while True:
            try:
                # Each is made once: a second attempt has the id of the first, which may have been stored.
                if shape not in letters:
                    letters[shape] = _make(shapes[shape], refused)
                await publish(letters[shape])
            except Exception as raised:
                refused = _refusal(raised)
                shape += 1
                if refused is not None and shape < len(shapes):
                    continue
                if refused is not None and not stubborn:
                    raise refused from None
                shape = 0
                failure = raised if isinstance(raised, BrokerError) else BackendError(describe(raised), native=raised)
                if self._closing.is_set():
                    raise failure from None
                delay = backoff.next()
                failed(failure, delay)
                await pause(delay, self._closing)
            else:
                return letters[shape]


def _make(shape: MakeLetter, refused: InvalidMessage | None) -> OutboundMessage:
    """:raises InvalidMessage: this shape of the letter cannot be made of the original; a smaller one may be."""
    try:
        return shape(refused)
    except InvalidMessage:
        raise
    except Exception as error:
        raise InvalidMessage(f"The letter cannot be made: {describe(error)}", native=error) from error


def describe(error: BaseException) -> str:
    """The type and the text of an error; its `__str__` may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which has no text"


def one_line(text: str) -> str:
    """A text from outside as a part of one line of the log."""
    line = " ".join(text[: 2 * _LONGEST_LINE].split())
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} …"


def _refusal(raised: Exception) -> InvalidMessage | None:
    """The error, if it refuses the letter itself, so that no repetition can succeed; otherwise None."""
    if isinstance(raised, PublishError):
        return next((outcome for outcome in raised.outcomes if isinstance(outcome, InvalidMessage)), None)
    return raised if isinstance(raised, InvalidMessage) else None


CUT: Final = f"{DEAD_LETTER_PREFIX}cut"
"""The attribute of a letter that lacks a part of the original: which part, and why."""

_LONGEST_TEXT: Final = 2048
_SHORT_TEXT: Final = 128
_SHORT_ROOM: Final = 1024
_LONGEST_ID: Final = 100
_LONGEST_KEY: Final = 16_384
"""A longer key is left out of a cut letter, where the backend has no limit for keys."""
_WHOLE: Final = frozenset(
    {DEAD_LETTER_PREFIX + name for name in ("topic", "attempts", "partition", "offset", "key-bytes", "data-bytes")}
)
"""These are complete or absent: a truncated number or topic would be another one."""


class _Content(Enum):
    """How much of key and body a letter has."""

    WHOLE = auto()
    FITTING = auto()
    """What every message of this backend may have."""
    NONE = auto()


class Shape(NamedTuple):
    """One way to make a letter.

    :ivar brief: reason and error are short, and all details fit into the room that the backend reserves for letters.
    :ivar attributes: the letter has the attributes of the original.
    """

    brief: bool
    attributes: bool
    content: _Content


SHAPES: Final = (
    Shape(brief=False, attributes=True, content=_Content.WHOLE),
    Shape(brief=True, attributes=True, content=_Content.WHOLE),
    Shape(brief=False, attributes=False, content=_Content.WHOLE),
    Shape(brief=True, attributes=False, content=_Content.WHOLE),
    Shape(brief=True, attributes=False, content=_Content.FITTING),
    Shape(brief=True, attributes=False, content=_Content.NONE),
)
"""In the order of trying."""


def make_dead_letter(
    original: Envelope,
    *,
    id: str,
    reason: str,
    error: BaseException | None,
    attempts: int | None,
    subscription: str,
    limits: Limits,
    shape: Shape = SHAPES[0],
    refused: BrokerError | None = None,
) -> OutboundMessage:
    """The original with `dead-letter-*` attributes: reason, error, attempts, topic, subscription, id, time, and
    the original's partition and offset, if the broker reports them.

    Details that exceed the broker's limits are cut, the least important first. A letter without a part of the original
    has `dead-letter-cut`, and the sizes of the original's key and body if they are not whole. The letter has an id of
    its own: a broker that deduplicates would drop the letter of a second subscription, or of a second failure after a
    redrive.

    :param refused: the refusal of the shape before.
    """
    whole_key = _readable(original, "key", bytes)
    key, data = _content(whole_key, original.data, shape.content, limits)
    missing = {
        "attributes": not shape.attributes,
        "key": key != whole_key,
        "end of the body" if data else "body": data != original.data,
    }
    lacks = ", ".join(part for part, is_missing in missing.items() if is_missing)
    details = {
        "topic": original.topic,
        "cut": lacks and f"Without {lacks}: {'' if refused is None else refused.message}",
        "key-bytes": "" if key == whole_key else str(len(whole_key or b"")),
        "data-bytes": "" if data == original.data else str(len(original.data or b"")),
        "reason": reason,
        "error": "" if error is None else describe(error),
        "attempts": "" if attempts is None else str(attempts),
        **_place(original),
        "subscription": subscription,
        "id": id,
        "time": datetime.now(UTC).isoformat(),
    }
    longest = min(_LONGEST_TEXT, limits.attribute_value or _LONGEST_TEXT)
    added = {DEAD_LETTER_PREFIX + name: _shorten(text, longest) for name, text in details.items() if text}
    if shape.brief:
        added = _abridge(added, limits.letter_bytes or _SHORT_ROOM)
    kept = _own_attributes(original) if shape.attributes else {}
    # Without `native`, Kafka's retention would go by the old time.
    published = _readable(original, "publish_time", datetime) if shape.attributes else None
    used = len(key or b"") + len(data or b"") + sum(_size(pair) for pair in kept.items())
    return OutboundMessage(
        data,
        key,
        {**kept, **_cut(added, len(kept), used, limits)},
        id=f"{_shorten(id, _LONGEST_ID)}-{uuid.uuid4().hex}",
        publish_time=None if published is None or published.tzinfo is None else published,
        native=original.native if shape.attributes else None,
    )


def _readable(original: Envelope, field: str, kind: type[V]) -> V | None:
    """A field of the original; None if its view cannot read it: the body must go to the dead letters all the same."""
    try:
        found = getattr(original, field)
    except Exception:
        return None
    return found if isinstance(found, kind) else None


def _content(
    key: bytes | None, data: bytes | None, content: _Content, limits: Limits
) -> tuple[bytes | None, bytes | None]:
    """Key and body of a letter."""
    if content is _Content.WHOLE:
        return key, data
    if content is _Content.NONE:
        # A tombstone stays one.
        return None, data and b""
    if key is not None and len(key) > (limits.key or _LONGEST_KEY):
        key = None
    known = [limit for limit in (limits.body, limits.message) if limit is not None]
    if data is not None and known:
        reserved = len(key or b"") + (0 if limits.letter_bytes else _SHORT_ROOM)
        data = data[: max(0, min(known) - reserved)]
    return key, data


def _own_attributes(original: Envelope) -> dict[str, str]:
    """Without those of an earlier letter: the original may come from a dead-letter topic, or from a forger."""
    return {name: text for name, text in original.attributes.items() if not name.startswith(DEAD_LETTER_PREFIX)}


class DeadLetterWriter:
    """Writes the dead letters of one consumer.

    :param publish: puts one message on the dead-letter topic, or raises.
    """

    def __init__(
        self,
        target: str,
        publish: Callable[[OutboundMessage], Awaitable[object]],
        limits: Limits,
        hooks: Hooks,
    ) -> None:
        self.target = target
        self._publish = publish
        self._limits = limits
        self._hooks = hooks
        self._writer = LetterWriter()

    def close(self) -> None:
        """Repeat no failed write from now on; a running one may still succeed."""
        self._writer.close()

    async def write(
        self,
        message: Message[Any],
        *,
        reason: str,
        error: BaseException | None,
        attempts: int | None,
        subscription: str,
    ) -> None:
        """Return when the letter is on the broker; failed writes are repeated until `close`.

        :raises BrokerError: the write failed, and the writer is closed.
        """

        def make(refused: InvalidMessage | None, *, shape: Shape) -> OutboundMessage:
            return make_dead_letter(
                message,
                id=message.id,
                reason=reason,
                error=error,
                attempts=attempts,
                subscription=subscription,
                limits=self._limits,
                shape=shape,
                refused=refused,
            )

        def failed(failure: BrokerError, pause: float) -> None:
            logger.warning(
                "The dead letter of %s was not written to %r, again in %.2f s: %s",
                placed(message),
                self.target,
                pause,
                one_line(failure.message),
            )
            self._hooks.emit(DeadLetterFailed(message=message, target=self.target, error=failure, pause=pause))

        shapes = [partial(make, shape=shape) for shape in SHAPES]
        letter = await self._writer.write(shapes, self._publish, failed, stubborn=True)
        if CUT in letter.attributes:
            logger.error(
                "The dead letter in %r of message %s lacks a part of it, and no redrive moves it: %s",
                self.target,
                _origin(letter.attributes),
                letter.attributes[CUT],
            )


def log_dead_lettered(message: Message[Any], target: str | None, subscription: str, reason: str) -> None:
    """Log that a subscription dead-lettered a message, or dropped it if `target` is None."""
    what = f"dropped {placed(message)}" if target is None else f"dead-lettered {placed(message)} to {target!r}"
    logger.warning("Subscription %r has %s: %s", subscription, what, one_line(reason))


def _origin(attributes: Mapping[str, str]) -> str:
    """The origin of a letter, for the log."""
    names = ("topic", "partition", "offset", "id")
    found = {name: attributes[DEAD_LETTER_PREFIX + name] for name in names if DEAD_LETTER_PREFIX + name in attributes}
    return ", ".join(f"{name} {text!r}" for name, text in found.items())


def _place(original: Envelope) -> dict[str, str]:
    """Partition and offset, as text."""
    place = _place_of(original)
    return {} if place is None else {name: str(at) for name, at in place._asdict().items() if at is not None}


def _place_of(original: Envelope) -> Place | None:
    if isinstance(original, Record):
        return Place(original.partition, original.offset)
    if isinstance(original, Message) and isinstance(original.view, HasPlace):
        try:
            return original.view.place(original.raw)
        except Exception:
            return None
    return None


def placed(message: Message[Any]) -> str:
    """A message for the log: its id and its topic, with the partition and the offset that the broker reports."""
    place = _place_of(message)
    if place is None:
        return f"message {message.id!r} of {message.topic!r}"
    partition = "" if place.partition is None else f"[{place.partition}]"
    return f"message {message.id!r} of {message.topic!r}{partition}@{place.offset}"


def _cut(added: dict[str, str], kept: int, used: int, limits: Limits) -> dict[str, str]:
    """The details that fit beside so many attributes and bytes of the original."""
    cut = dict(added)
    if limits.attributes is not None:
        excess = len(cut) + kept - limits.attributes - limits.letter_attributes
        for name in list(reversed(cut))[: max(0, excess)]:
            del cut[name]
    if limits.message is not None:
        # Another client's message may exceed our limit and not the broker's, which decides about its letter.
        _fit(cut, limits.letter_bytes + max(0, limits.message - used))
    return cut


def _abridge(added: Mapping[str, str], room: int) -> dict[str, str]:
    long = {DEAD_LETTER_PREFIX + name for name in ("cut", "reason", "error")}
    brief = {name: _shorten(text, _SHORT_TEXT) if name in long else text for name, text in added.items()}
    _fit(brief, room)
    return brief


def _fit(texts: dict[str, str], room: int) -> None:
    """Shorten the last texts first, until all fit into `room` bytes."""
    for name in reversed(list(texts)):
        excess = sum(_size(pair) for pair in texts.items()) - room
        if excess <= 0:
            break
        text = "" if name in _WHOLE else _shorten(texts[name], max(0, len(texts[name].encode()) - excess))
        if text:
            texts[name] = text
        else:
            del texts[name]


def _size(pair: tuple[str, str]) -> int:
    return len(pair[0].encode()) + len(pair[1].encode())


def _shorten(text: str, size: int) -> str:
    encoded = text.encode(errors="replace")
    return encoded.decode() if len(encoded) <= size else encoded[:size].decode(errors="ignore")


class LetterTopic:
    """One dead-letter topic, for one consumer; used on one event loop."""

    def __init__(self, backend: Backend, topic: Callable[[str], Topic[bytes]], name: str) -> None:
        """:param topic: `bus.topic`; called for each letter, because the application may close its topics."""
        self._backend = backend
        self._topic = topic
        self._name = name
        messages = backend.capabilities.messages
        self._forgets = messages is not None and not messages.history
        self._retained = False

    async def open(self) -> None:
        """Check that letters can be written, before the first message is handled.

        :raises NotFound: the topic does not exist.
        :raises BrokerError: the check failed.
        """
        await self._backend.admin().describe_topic(self._name)
        await self._ensure_retained()

    async def publish(self, letter: OutboundMessage) -> None:
        """Return when the letter is on the broker, and a subscription retains it.

        :raises BrokerError: the letter is not on the broker, or its outcome is unknown.
        """
        await self._ensure_retained()
        try:
            with publishing_as("dead_letter"):
                await self._topic(self._name).publish(letter)
        except NotFound:
            self._retained = False
            raise

    async def _ensure_retained(self) -> None:
        if self._retained or not self._forgets:
            return
        if REDRIVE_SUBSCRIPTION not in await self._backend.admin().list_subscriptions(self._name):
            # The same options as a redrive uses: a broker may fix them at creation.
            subscription = MessageSubscription(
                topic=self._name,
                subscription=REDRIVE_SUBSCRIPTION,
                confirm_acks=confirms(self._backend.capabilities.messages),
                max_outstanding=1,
            )
            source = await self._backend.subscribe(subscription, _NoListener())
            await source.close()
        self._retained = True


class _NoListener:
    """A SourceListener for a source that fetches nothing."""

    def lost(self, messages: Sequence[Message[Any]]) -> None: ...

    def expired(self, messages: Sequence[Message[Any]]) -> None: ...

    def event(self, event: Event) -> None: ...


def confirms(family: MessageCapabilities | None) -> bool:
    """Whether a redrive has its acks confirmed."""
    return family is not None and family.confirmed_ack is not ConfirmedAck.NEVER
