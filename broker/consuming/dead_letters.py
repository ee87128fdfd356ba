"""Writes dead letters: the full original with the reason, the error and the origin, cut to the broker's limits.

The original stays unsettled, its lease renewed, until its letter is on the broker; the handler does not run again. A
failed write is repeated until it succeeds or the consumer closes. A letter that the broker refuses is made smaller in
steps.

A broker without history drops a message for which no subscription exists. There, `LetterTopic` creates the redrive
subscription before the first letter, and again after the topic was deleted.

*Concurrency.* One event loop. *Cancellation.* A cancelled write leaves its outcome unknown.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from broker.capabilities import ConfirmedAck, Limits, MessageCapabilities
from broker.driver.concurrency import Backoff, pause
from broker.driver.contract import Backend, MessageSubscription
from broker.envelopes import DEAD_LETTER_PREFIX, Envelope, HasPlace, Place
from broker.errors import BackendError, BrokerError, InvalidMessage, NotFound, PublishError
from broker.hooks import DeadLetterFailed, Event, Hooks
from broker.messages import Message
from broker.names import REDRIVE_SUBSCRIPTION
from broker.outbound import OutboundMessage
from broker.protocols import Topic
from broker.records import Record

__all__ = ["DeadLetterWriter", "LetterTopic", "LetterWriter", "MakeLetter", "confirms", "describe", "make_dead_letter"]


MakeLetter = Callable[[InvalidMessage | None], OutboundMessage]
"""Makes one shape of a letter; the argument is the refusal of the shape before."""

_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 30.0


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
    ) -> None:
        """Return when the letter is on the broker.

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
                return


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


def _refusal(raised: Exception) -> InvalidMessage | None:
    """The error, if it refuses the letter itself, so that no repetition can succeed; otherwise None."""
    if isinstance(raised, PublishError):
        return next((outcome for outcome in raised.outcomes if isinstance(outcome, InvalidMessage)), None)
    return raised if isinstance(raised, InvalidMessage) else None


_LONGEST_TEXT: Final = 2048
_SHORT_TEXT: Final = 128
_SHORT_ROOM: Final = 1024
_NUMBERS: Final = frozenset({DEAD_LETTER_PREFIX + name for name in ("attempts", "partition", "offset")})
_SHAPES: Final = ((False, False), (True, False), (False, True), (True, True))
"""Whether a letter is brief, and whether it omits the original's attributes; in the order of trying."""


def make_dead_letter(
    original: Envelope,
    *,
    id: str,
    reason: str,
    error: BaseException | None,
    attempts: int | None,
    subscription: str,
    limits: Limits,
    brief: bool = False,
    refused: BrokerError | None = None,
) -> OutboundMessage:
    """The original with `dead-letter-*` attributes: reason, error, attempts, topic, subscription, id, time, and
    the original's partition and offset, if the broker reports them.

    What exceeds the broker's limits is cut, the least important first. Key, body and the original's attributes stay,
    unless the letter was refused with the attributes: then `dead-letter-cut` says why they are missing. `brief`
    shortens reason and error, and all added attributes to the room that brokers reserve for letters. The letter has
    an id of its own: a broker that deduplicates would drop the letter of a second subscription, or of a second
    failure after a redrive.
    """
    details = {
        "topic": original.topic,
        "cut": "" if refused is None else f"The attributes, with which it was refused: {refused.message}",
        "reason": reason,
        "error": "" if error is None else describe(error),
        "attempts": "" if attempts is None else str(attempts),
        "subscription": subscription,
        "id": id,
        "time": datetime.now(UTC).isoformat(),
        **_place(original),
    }
    added = {DEAD_LETTER_PREFIX + name: text for name, text in details.items() if text}
    if brief:
        added = _abridge(added, limits.letter_bytes or _SHORT_ROOM)
    kept = {} if refused else _own_attributes(original)
    return OutboundMessage(
        original.data,
        original.key,
        {**kept, **_cut(added, kept, original, limits)},
        id=f"{id[:100]}-{uuid.uuid4().hex}",
        publish_time=original.publish_time,
        native=None if refused else original.native,
    )


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

        def make(refused: InvalidMessage | None, *, brief: bool, bare: bool) -> OutboundMessage:
            return make_dead_letter(
                message,
                id=message.id,
                reason=reason,
                error=error,
                attempts=attempts,
                subscription=subscription,
                limits=self._limits,
                brief=brief,
                refused=refused if bare else None,
            )

        def failed(failure: BrokerError, pause: float) -> None:
            self._hooks.emit(DeadLetterFailed(message=message, target=self.target, error=failure, pause=pause))

        shapes = [partial(make, brief=brief, bare=bare) for brief, bare in _SHAPES]
        await self._writer.write(shapes, self._publish, failed, stubborn=True)


def _place(original: Envelope) -> dict[str, str]:
    """Partition and offset, as text."""
    place = None
    if isinstance(original, Record):
        place = Place(original.partition, original.offset)
    elif isinstance(original, Message) and isinstance(original.view, HasPlace):
        place = original.view.place(original.raw)
    return {} if place is None else {name: str(at) for name, at in place._asdict().items() if at is not None}


def _cut(added: Mapping[str, str], kept: Mapping[str, str], original: Envelope, limits: Limits) -> dict[str, str]:
    longest = min(_LONGEST_TEXT, limits.attribute_value or _LONGEST_TEXT)
    cut = {name: _shorten(text, longest) for name, text in added.items()}
    if limits.attributes is not None:
        excess = len(cut) + len(kept) - limits.attributes - limits.letter_attributes
        for name in list(reversed(cut))[: max(0, excess)]:
            del cut[name]
    if limits.message is not None:
        used = len(original.data or b"") + len(original.key or b"") + sum(_size(pair) for pair in kept.items())
        _fit(cut, limits.message + limits.letter_bytes - used)
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
        # A truncated number would be another number.
        whole = name in _NUMBERS
        text = "" if whole else _shorten(texts[name], max(0, len(texts[name].encode()) - excess))
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
