"""`Retry`, the retry policy, and `Attempts`, the failures of each message so far. Pure: no I/O, no clock, no loop."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from broker.checks import is_finite, is_whole
from broker.driver.concurrency import jitter
from broker.errors import InvalidSetting
from broker.messages import Message

__all__ = ["DROP", "Attempts", "Drop", "Retry"]

_TRACKED: Final = 100_000
_LONG_ID: Final = 64
"""Longer ids count by their hashes: a foreign producer may choose ids of a megabyte."""


class Drop:
    """As `dead_letter=DROP`: exhausted and rejected messages are acknowledged and gone."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "DROP"


DROP: Final = Drop()


@dataclass(frozen=True, slots=True)
class Retry:
    """What happens when a handler raises: exponential backoff with jitter, then the dead letters.

    The n-th failure waits `initial * multiplier ** (n - 1)` seconds, at most `maximum`, times a random factor of
    1 ± `jitter`.

    :param max_attempts: number of failures after which a message is given up. Each consumer counts in memory, so a
        message that several processes handle may fail more often, up to `max_deliveries`.
    :param on: exceptions that are retried; others give up at once.
    :param never: exceptions that give up at once even if `on` names them.
    :param timeout: seconds that a handler may run; then it is cancelled, which counts as a failure.
    :param max_deliveries: number of deliveries after which a message is given up, even if no handler failed, such as a
        message that kills the process. Releases do not count, except those of other processes on a broker that counts
        them (`capabilities.messages.release_keeps_attempt` is False); nor do deliveries to this process whose lease
        ended before a handler got the message. None is ten times `max_attempts`.
    """

    max_attempts: int = 5
    initial: float = 0.5
    multiplier: float = 2.0
    maximum: float = 60.0
    jitter: float = 0.2
    on: tuple[type[Exception], ...] = (Exception,)
    never: tuple[type[Exception], ...] = ()
    timeout: float | None = None
    max_deliveries: int | None = None

    def __post_init__(self) -> None:
        attempts = self.max_attempts
        _require(is_whole(attempts) and attempts >= 1, "max_attempts", attempts, "an int of 1 or more")
        _require(is_finite(self.initial) and self.initial >= 0, "initial", self.initial, "seconds, 0 or more")
        _require(is_finite(self.multiplier) and self.multiplier >= 1, "multiplier", self.multiplier, "1 or more")
        _require(
            is_finite(self.maximum) and self.maximum >= self.initial, "maximum", self.maximum, "at least `initial`"
        )
        _require(is_finite(self.jitter) and 0 <= self.jitter < 1, "jitter", self.jitter, "at least 0 and below 1")
        _require(
            self.timeout is None or (is_finite(self.timeout) and self.timeout > 0),
            "timeout",
            self.timeout,
            "seconds above 0, or None",
        )
        deliveries = self.max_deliveries
        _require(
            deliveries is None or (is_whole(deliveries) and deliveries >= attempts),
            "max_deliveries",
            deliveries,
            "an int of at least `max_attempts`, or None",
        )
        for field, kinds in (("on", self.on), ("never", self.never)):
            _require(_are_exceptions(kinds), field, kinds, "a tuple of exception classes, such as (OSError,)")

    @property
    def delivery_bound(self) -> int:
        """The number of deliveries after which a message is given up."""
        return 10 * self.max_attempts if self.max_deliveries is None else self.max_deliveries

    @property
    def longest(self) -> float:
        """The longest delay of the policy, in seconds."""
        return self.maximum * (1 + self.jitter)

    def retries(self, error: BaseException) -> bool:
        """Whether this error is retried."""
        return isinstance(error, self.on) and not isinstance(error, self.never)

    def delay(self, failures: int) -> float:
        """The delay in seconds after this many failures, 1 or more."""
        try:
            backoff = min(self.maximum, self.initial * self.multiplier ** (failures - 1))
        except OverflowError:
            backoff = self.maximum
        return backoff * jitter.uniform(1 - self.jitter, 1 + self.jitter)


class Attempts:
    """Counts the failures and releases of each message in this consumer; the oldest counts are forgotten first.

    Topic and id identify a message: topics may use the same ids.
    """

    __slots__ = ("_failures", "_given_up", "_releases")

    def __init__(self) -> None:
        self._failures: _Counts = OrderedDict()
        self._releases: _Counts = OrderedDict()
        self._given_up: _Counts = OrderedDict()

    def failed(self, message: Message[Any]) -> int:
        """Count a failure; return the new count."""
        return _count(self._failures, message)

    def failures(self, message: Message[Any]) -> int:
        return self._failures.get(_name(message), 0)

    def released(self, message: Message[Any]) -> None:
        """Count a release, whose delivery was no attempt."""
        _count(self._releases, message)

    def releases(self, message: Message[Any]) -> int:
        return self._releases.get(_name(message), 0)

    def given_up(self, message: Message[Any]) -> int:
        """Count that a message was given up and has no dead-letter topic; return the new count."""
        return _count(self._given_up, message)

    def was_given_up(self, message: Message[Any]) -> bool:
        return _name(message) in self._given_up

    def forget(self, message: Message[Any]) -> None:
        """Forget the counts of a settled message."""
        name = _name(message)
        self._failures.pop(name, None)
        self._releases.pop(name, None)
        self._given_up.pop(name, None)

    def __bool__(self) -> bool:
        return bool(self._failures or self._releases or self._given_up)


_Name = tuple[str, str | bytes]
_Counts = OrderedDict[_Name, int]


def _name(message: Message[Any]) -> _Name:
    """Topic, and id or hash. A hash is bytes, so that no id passes for one."""
    name = message.id
    if len(name) <= _LONG_ID:
        return message.topic, name
    return message.topic, blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _count(counts: _Counts, message: Message[Any]) -> int:
    name = _name(message)
    count = counts.pop(name, 0) + 1
    counts[name] = count
    if len(counts) > _TRACKED:
        counts.popitem(last=False)
    return count


def _are_exceptions(kinds: object) -> bool:
    return isinstance(kinds, tuple) and all(
        isinstance(kind, type) and issubclass(kind, BaseException)
        for kind in kinds  # pyright: ignore[reportUnknownVariableType]
    )


def _require(holds: bool, field: str, value: object, wanted: str) -> None:
    if not holds:
        raise InvalidSetting(f"Retry.{field} is {value!r}", advice=f"It takes {wanted}")
