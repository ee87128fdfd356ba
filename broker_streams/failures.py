"""What happens to a message that fails: the policies of an edge, dead letters, and `StreamFailed`. Pure.

An input has two policies. `on_undecodable` is for a message that its codec cannot read, `on_error` for a callback that
raises. Each is one of

| policy | the message |
|---|---|
| `STOP` | stops the partition with `StreamFailed`, and is handled again after a restart; the default |
| `SKIP` | is logged, counted and passed over |
| `DeadLetter("topic")` | goes to a topic, with the reason, the error and its origin; `admin.redrive` moves it back |
| `Retrying(Retry(...), then=...)` | is handled again after a delay; `then` decides when the attempts are exhausted |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from broker import BrokerError, InvalidName, Limits, OutboundMessage, Retry
from broker.names import check_name

__all__ = [
    "SKIP",
    "STOP",
    "DeadLetter",
    "LastPolicy",
    "Policy",
    "Retrying",
    "Skip",
    "Stop",
    "StreamFailed",
    "dead_letter",
    "policy_mistakes",
    "policy_topics",
]

_LONGEST_TEXT: Final = 1024
"""Bytes of a reason or an error in a dead letter."""
_MOST_HEADERS: Final = 16_384
"""Bytes of a message's key and attributes beside which any broker has room for longer details than it reserves."""
_ENCODED: Final = 3
"""Times the bytes of a text that it takes at most on a broker, which may percent-encode it."""
_NO_LIMITS: Final = Limits()
_LETTER: Final = "dead-letter-"


@dataclass(frozen=True)
class Stop:
    """See `STOP`."""

    def __repr__(self) -> str:
        return "STOP"


@dataclass(frozen=True)
class Skip:
    """See `SKIP`."""

    def __repr__(self) -> str:
        return "SKIP"


STOP: Final = Stop()
"""The partition stops with `StreamFailed`."""
SKIP: Final = Skip()
"""The message is logged, counted and passed over."""


@dataclass(frozen=True)
class DeadLetter:
    """The message goes to a dead-letter topic, in the same checkpoint that passes it."""

    topic: str

    def __repr__(self) -> str:
        return f"DeadLetter({self.topic!r})"


LastPolicy = Stop | Skip | DeadLetter


@dataclass(frozen=True)
class Retrying:
    """The callback runs again after the delays of `retry`; the partition waits meanwhile, so that order is kept.

    :param retry: `max_attempts`, delays, the exceptions that are retried, and the `timeout` of an attempt. A processor
        counts no deliveries, so `max_deliveries` has to be None.
    :param then: the policy when the attempts are exhausted, or the exception is none that is retried.
    """

    retry: Retry
    then: LastPolicy = STOP

    def delay(self, error: BaseException, failures: int) -> float | None:
        """Seconds until the next attempt; None to give up.

        :param failures: number of failed attempts of this message, 1 or more.
        """
        if failures >= self.retry.max_attempts or not self.retry.retries(error):
            return None
        return self.retry.delay(failures)

    def __repr__(self) -> str:
        return f"Retrying({self.retry.max_attempts} attempts, then={self.then!r})"


Policy = LastPolicy | Retrying


class StreamFailed(BrokerError):
    """A message failed, and the policy of its edge is to stop.

    :ivar topic: where the message is; empty for a timer, a visit or a closing window.
    :ivar offset: its offset; -1 likewise.
    """

    default_advice = "Mend the callback or the message and restart, or give the edge another policy (on_error=)"

    def __init__(
        self,
        message: str,
        *,
        topic: str = "",
        partition: int = -1,
        offset: int = -1,
        key: str | None = None,
        retriable: bool | None = None,
        native: BaseException | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(message, retriable=retriable, native=native, advice=advice)
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.key = key


def dead_letter(
    *,
    topic: str,
    partition: int,
    offset: int,
    key: bytes | None,
    data: bytes | None,
    attributes: Mapping[str, str],
    group: str,
    reason: str,
    error: BaseException | None = None,
    attempts: int | None = None,
    id: str,
    timestamp: datetime | None = None,
    publish_time: datetime | None = None,
    limits: Limits = _NO_LIMITS,
) -> OutboundMessage:
    """The letter of a message, as the other consumers of `broker` write it: `bus.admin.redrive` moves it back.

    Reason and error are cut so that the letter fits where its message did.

    :param id: of the letter, the same when the message is handled again.
    :param timestamp: when the message failed; by default the time of the machine.
    :param publish_time: of the message, which it has again when it is moved back.
    :param limits: of the broker.
    """
    details = {
        "topic": topic,
        "reason": _shorten(reason, _LONGEST_TEXT),
        "error": "" if error is None else _shorten(describe(error), _LONGEST_TEXT),
        "attempts": "" if attempts is None else str(attempts),
        "partition": str(partition),
        "offset": str(offset),
        "subscription": group,
        "id": f"{topic}:{partition}:{offset}",
        "time": (timestamp or datetime.now(UTC)).isoformat(),
    }
    # An earlier letter's details would pass for those of this one.
    kept = {name: text for name, text in attributes.items() if not name.startswith(_LETTER)}
    added = {_LETTER + name: text for name, text in details.items() if text}
    if (largest := limits.message) is not None:
        headers = len(key or b"") + _size(kept)
        free = 0 if headers > _MOST_HEADERS else max(0, largest - len(data or b"") - _ENCODED * headers)
        _fit(added, limits.letter_bytes + free // _ENCODED)
    return OutboundMessage(data, key, {**kept, **added}, id=id, publish_time=publish_time)


def policy_mistakes(name: str, policy: object) -> Iterator[str]:
    """What is wrong with a policy, each as a sentence.

    :param name: of the option, "on_error" or "on_undecodable".
    """
    if isinstance(policy, Retrying):
        if name == "on_undecodable":
            yield f"{name} is {policy!r}: the same bytes fail again. Take STOP, SKIP or DeadLetter(topic)"
        if not isinstance(policy.retry, Retry):
            yield f"{name} retries by {policy.retry!r}. Retrying takes a broker.Retry"
        elif policy.retry.max_deliveries is not None:
            yield f"{name} has max_deliveries={policy.retry.max_deliveries}: a processor counts none. Leave it out"
        if isinstance(policy.then, Retrying):
            yield f"{name} has a Retrying in then=. Take STOP, SKIP or DeadLetter(topic)"
            return
        policy, name = policy.then, f"then= of {name}"
    if isinstance(policy, DeadLetter):
        try:
            check_name(policy.topic, "dead-letter topic")
        except InvalidName as error:
            yield f"{name}: {error}"
    elif not isinstance(policy, Stop | Skip):
        hint = ". For a Retry take Retrying(retry)" if isinstance(policy, Retry) else ""
        yield f"{name} is {policy!r}. It takes STOP, SKIP, DeadLetter(topic) or Retrying(Retry(...)){hint}"


def policy_topics(*policies: Any) -> set[str]:
    """The dead-letter topics of policies."""
    last = [each.then if isinstance(each, Retrying) else each for each in policies]
    return {each.topic for each in last if isinstance(each, DeadLetter) and isinstance(each.topic, str)}


def describe(error: BaseException) -> str:
    """The type and the text of an error; its `__str__` may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which has no text"


def _fit(details: dict[str, str], room: int) -> None:
    """Shorten the error, then the reason, until all details fit into `room` bytes."""
    for name in (f"{_LETTER}error", f"{_LETTER}reason"):
        excess = _size(details) - room
        if excess > 0 and name in details:
            details[name] = _shorten(details[name], max(0, len(details[name].encode()) - excess))


def _size(texts: Mapping[str, str]) -> int:
    """Bytes of all names and values."""
    return sum(len(text.encode(errors="replace")) for pair in texts.items() for text in pair)


def _shorten(text: str, size: int) -> str:
    """The text in at most so many bytes of UTF-8."""
    # A lone surrogate, as in a key that is not UTF-8, cannot be sent.
    encoded = text.encode(errors="replace")
    if len(encoded) <= size:
        return encoded.decode()
    end = "…" if size >= 3 else ""
    return encoded[: size - len(end.encode())].decode(errors="ignore") + end
