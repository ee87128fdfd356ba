"""Rules of subscriptions: correlation filters and the common subset of SQL filters; anything else is refused.

The subset: comparisons (`= <> != < <= > >=`) of properties with texts, numbers and booleans, `IS [NOT] NULL`,
`[NOT] IN`, `[NOT] LIKE`, `EXISTS(name)`, `AND`, `OR`, `NOT` and parentheses. A comparison with a property that is not
there is unknown, as in SQL, and what is unknown does not match. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["Correlation", "FilterRefused", "Matches", "Subject", "parse_sql"]

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<number>-?\d+(?:\.\d+)?)|(?P<op><>|!=|<=|>=|[=<>(),])"
    r"|(?P<name>(?:(?:sys|user)\.)?(?:\[[^\]]+\]|\"[^\"]+\"|[A-Za-z_][\w-]*)))",
    re.IGNORECASE,
)
_KEYWORDS: Final = frozenset({"and", "or", "not", "is", "null", "in", "like", "exists", "true", "false", "escape"})


class FilterRefused(ValueError):
    """The double does not know this filter."""


class Subject(NamedTuple):
    """The properties of a message for filters; system properties by their SQL names, in lower case."""

    system: Mapping[str, Any]
    user: Mapping[str, Any]


Matches = Callable[[Subject], bool]
_Value = Callable[[Subject], Any]


class Correlation(NamedTuple):
    """Every field that is given must be equal."""

    system: Mapping[str, str]
    user: Mapping[str, Any]

    def __call__(self, subject: Subject) -> bool:
        return all(subject.system.get(name) == value for name, value in self.system.items()) and all(
            name in subject.user and str(subject.user[name]) == str(value) for name, value in self.user.items()
        )


def parse_sql(expression: str) -> Matches:
    """Compile an expression to a predicate.

    :raises FilterRefused: it is not in the subset.
    """
    if re.fullmatch(r"\s*1\s*=\s*1\s*", expression):
        return lambda _: True
    if re.fullmatch(r"\s*1\s*=\s*0\s*", expression):
        return lambda _: False
    parser = _Parser(expression)
    found = parser.either()
    parser.end()
    return lambda subject: found(subject) is True


class _Parser:
    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._tokens: list[tuple[str, str]] = []
        at = 0
        text = expression.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise FilterRefused(f"the double does not know this SQL filter at {text[at : at + 20]!r}")
            kind = match.lastgroup or ""
            word = match.group(kind)
            self._tokens.append(("keyword", word.lower()) if word.lower() in _KEYWORDS else (kind, word))
            at = match.end()
        self._at = 0

    def either(self) -> _Value:
        found = self._both()
        while self._take("keyword", "or"):
            found = _or(found, self._both())
        return found

    def end(self) -> None:
        if self._at < len(self._tokens):
            raise self._refused()

    def _both(self) -> _Value:
        found = self._one()
        while self._take("keyword", "and"):
            found = _and(found, self._one())
        return found

    def _one(self) -> _Value:
        if self._take("keyword", "not"):
            return _not(self._one())
        if self._take("op", "("):
            found = self.either()
            self._need("op", ")")
            return found
        if self._take("keyword", "exists"):
            self._need("op", "(")
            value = self._value()
            self._need("op", ")")
            return lambda subject: value(subject) is not None
        return self._comparison()

    def _comparison(self) -> _Value:
        left = self._value()
        if self._take("keyword", "is"):
            wanted = not self._take("keyword", "not")
            self._need("keyword", "null")
            return lambda subject: (left(subject) is None) is wanted
        negated = self._take("keyword", "not")
        if self._take("keyword", "in"):
            found = self._among(left)
        elif self._take("keyword", "like"):
            found = self._like(left)
        elif negated:
            raise self._refused()
        else:
            found = _compared(self._operator(), left, self._value())
        return _not(found) if negated else found

    def _among(self, left: _Value) -> _Value:
        self._need("op", "(")
        values = [self._value()]
        while self._take("op", ","):
            values.append(self._value())
        self._need("op", ")")
        return lambda subject: (
            None if (value := left(subject)) is None else any(value == each(subject) for each in values)
        )

    def _like(self, left: _Value) -> _Value:
        kind, word = self._next()
        if kind != "text":
            raise self._refused()
        parts = {"%": ".*", "_": "."}
        pattern = re.compile("".join(parts.get(each) or re.escape(each) for each in _unquoted(word)), re.DOTALL)
        return lambda subject: None if (value := left(subject)) is None else pattern.fullmatch(str(value)) is not None

    def _operator(self) -> str:
        kind, word = self._next()
        if kind != "op" or word in "(),":
            raise self._refused()
        return word

    def _value(self) -> _Value:
        kind, word = self._next()
        if kind == "text":
            text = _unquoted(word)
            return lambda _: text
        if kind == "number":
            number = float(word) if "." in word else int(word)
            return lambda _: number
        if kind == "keyword" and word in ("true", "false"):
            return lambda _: word == "true"
        if kind != "name":
            raise self._refused()
        system = word.lower().startswith("sys.")
        name = re.sub(r"^(?:sys|user)\.", "", word, flags=re.IGNORECASE).strip('[]"')
        if system:
            return lambda subject: subject.system.get(name.lower())
        return lambda subject: subject.user.get(name)

    def _next(self) -> tuple[str, str]:
        if self._at >= len(self._tokens):
            raise self._refused()
        self._at += 1
        return self._tokens[self._at - 1]

    def _take(self, kind: str, word: str) -> bool:
        found = self._tokens[self._at : self._at + 1] == [(kind, word)]
        self._at += found
        return found

    def _need(self, kind: str, word: str) -> None:
        if not self._take(kind, word):
            raise self._refused()

    def _refused(self) -> FilterRefused:
        return FilterRefused(f"the double does not know this SQL filter: {self._expression}")


def _unquoted(word: str) -> str:
    return word[1:-1].replace("''", "'")


def _compared(operator: str, left: _Value, right: _Value) -> _Value:
    def compare(subject: Subject) -> bool | None:
        one, other = left(subject), right(subject)
        if one is None or other is None:
            return None
        if operator == "=":
            return bool(one == other)
        if operator in ("<>", "!="):
            return bool(one != other)
        if isinstance(one, str) is not isinstance(other, str):
            return None
        if operator[0] == "<":
            return bool(one < other or (operator == "<=" and one == other))
        return bool(one > other or (operator == ">=" and one == other))

    return compare


def _and(one: _Value, other: _Value) -> _Value:
    def both(subject: Subject) -> bool | None:
        results = (one(subject), other(subject))
        return False if False in results else None if None in results else True

    return both


def _or(one: _Value, other: _Value) -> _Value:
    def either(subject: Subject) -> bool | None:
        results = (one(subject), other(subject))
        return True if True in results else None if None in results else False

    return either


def _not(value: _Value) -> _Value:
    def opposite(subject: Subject) -> bool | None:
        found = value(subject)
        return None if found is None else not found

    return opposite
