"""`TopicPattern`: topics by regular expressions instead of names. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from broker.errors import ConfigurationError

__all__ = ["TopicPattern"]

_INTERNAL: Final = "__"
"""Topics of the brokers begin so."""

Patterns = str | re.Pattern[str] | Sequence[str | re.Pattern[str]]


@dataclass(frozen=True, slots=True, init=False)
class TopicPattern:
    r"""All topics whose whole name matches one of `include` and none of `exclude`, also those created later.

    `TopicPattern(r"orders\..*", exclude=r".*\.dead")`. Topics of the brokers themselves, whose names begin with two
    underscores, never match.

    :param include: regular expressions of Python, or one.
    :param exclude: the same; a topic that matches is left out, whatever `include` says.
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
        if topic.startswith(_INTERNAL) or any(each.fullmatch(topic) for each in self.exclude):
            return False
        return any(each.fullmatch(topic) for each in self.include)

    def __str__(self) -> str:
        text = "|".join(each.pattern for each in self.include)
        return f"{text} without {'|'.join(each.pattern for each in self.exclude)}" if self.exclude else text


def _compile(what: str, patterns: Patterns) -> tuple[re.Pattern[str], ...]:
    given = patterns if isinstance(patterns, Sequence) and not isinstance(patterns, str) else [patterns]
    compiled: list[re.Pattern[str]] = []
    for pattern in given:
        try:
            compiled.append(re.compile(pattern))
        except (re.error, TypeError) as error:
            raise ConfigurationError(
                f"{what} of a TopicPattern has {pattern!r}: {error}",
                advice="Give regular expressions of Python, which match the whole name",
            ) from error
    return tuple(compiled)
