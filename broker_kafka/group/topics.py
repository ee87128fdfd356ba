"""Which topics a group consumer reads: names, and patterns of names with what they leave out.

A pattern is matched here, with Python's `re`, and the client is told names: the brokers' own patterns know no
exclusion, are another dialect in each group protocol, and may not be looked at by users without the right to. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from broker import ConfigurationError
from broker.driver import check_name
from broker_kafka.cluster.names import is_internal

__all__ = ["Subscription", "TopicPattern", "read_topics"]

Patterns = str | re.Pattern[str] | Sequence[str | re.Pattern[str]]


@dataclass(frozen=True, slots=True, init=False)
class TopicPattern:
    """All topics whose whole name matches one of `include` and none of `exclude`, those made later too.

    The brokers' own topics, whose names begin with two underscores, never match.

    :param include: regular expressions of Python, or one.
    :param exclude: likewise; what matches here is left out whatever `include` says.
    :raises ConfigurationError: one is no regular expression, or `include` is empty.
    """

    include: tuple[re.Pattern[str], ...] = field()
    exclude: tuple[re.Pattern[str], ...] = field()

    def __init__(self, include: Patterns = ".*", exclude: Patterns = ()) -> None:
        object.__setattr__(self, "include", _compile("include", include))
        object.__setattr__(self, "exclude", _compile("exclude", exclude))
        if not self.include:
            raise ConfigurationError("include of a TopicPattern is empty", advice="Leave it out to include all topics")

    def matches(self, topic: str) -> bool:
        """Whether a topic of this name is read."""
        if is_internal(topic) or any(each.fullmatch(topic) for each in self.exclude):
            return False
        return any(each.fullmatch(topic) for each in self.include)

    def __str__(self) -> str:
        text = "|".join(each.pattern for each in self.include)
        return f"{text} without {'|'.join(each.pattern for each in self.exclude)}" if self.exclude else text


@dataclass(frozen=True, slots=True)
class Subscription:
    """What `topics=` of a group consumer says.

    :ivar names: explicit topics, which no pattern leaves out.
    """

    names: tuple[str, ...]
    patterns: tuple[TopicPattern, ...]

    def matching(self, topics: Iterable[str]) -> list[str]:
        """The explicit ones, and those of `topics` that a pattern matches, sorted."""
        found = {topic for topic in topics if any(pattern.matches(topic) for pattern in self.patterns)}
        return sorted(found | set(self.names))

    def __str__(self) -> str:
        return ", ".join([*self.names, *map(str, self.patterns)])


def read_topics(topics: str | TopicPattern | Sequence[str | TopicPattern]) -> Subscription:
    """Check the argument.

    :raises ConfigurationError: it is neither names nor patterns, or empty.
    :raises InvalidName: a name is not portable.
    """
    entries = topics if isinstance(topics, Sequence) and not isinstance(topics, str) else [topics]
    if not entries:
        raise ConfigurationError("topics is empty", advice="Name a topic, or give a TopicPattern")
    names: list[str] = []
    patterns: list[TopicPattern] = []
    for entry in entries:
        if isinstance(entry, TopicPattern):
            patterns.append(entry)
            continue
        if isinstance(entry, str) and entry.startswith("^"):
            raise ConfigurationError(
                f"topics has {entry!r}, which looks like a pattern of librdkafka",
                advice=f"Give TopicPattern(include={entry!r})",
            )
        names.append(check_name(entry, "topic"))
    return Subscription(tuple(dict.fromkeys(names)), tuple(patterns))


def _compile(what: str, patterns: Patterns) -> tuple[re.Pattern[str], ...]:
    given = patterns if isinstance(patterns, Sequence) and not isinstance(patterns, str) else [patterns]
    compiled: list[re.Pattern[str]] = []
    for pattern in given:
        try:
            compiled.append(re.compile(pattern))
        except (re.error, TypeError) as error:
            raise ConfigurationError(
                f"{what} of a TopicPattern has {pattern!r}: {error}",
                advice="It takes regular expressions of Python, which the whole name must match",
            ) from error
    return tuple(compiled)
