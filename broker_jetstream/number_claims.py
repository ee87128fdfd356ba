"""`NumberClaims`: the numbers of a copartitioned group that one member owns, agreed with the others. No I/O, no clock.

The server pins a partition only when it delivers a record, so it cannot say who owns an empty one. The members agree
before they read:

- A member *asks* for a free number: it announces the number with term 0, and waits until it has received everything
  that was announced before.
- Of members that ask for the same number, the one with the lowest id goes on; a member that hears of an owner gives up.
  Since of two announcements at least one is received in time by the other side, at most one of them becomes the owner.
- An owner announces a term, which is higher than every earlier one of that number. If two own a number nevertheless,
  because one was frozen or cut off and the others took it for gone, the later term wins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

__all__ = ["ASKED", "NumberClaims"]

ASKED: Final = 0
"""The term of a number that is asked for."""

Terms = Mapping[int, int]
"""By number, the term of a claim."""


class NumberClaims:
    """The claims of one member.

    :param me: the id of the member.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self._terms: dict[int, int] = {}
        self._highest: dict[int, int] = {}

    @property
    def terms(self) -> Terms:
        """What this member claims."""
        return self._terms

    @property
    def asked(self) -> list[int]:
        """The numbers that this member asks for."""
        return sorted(number for number, term in self._terms.items() if term == ASKED)

    def ask(self, number: int) -> None:
        """Ask for an unclaimed number."""
        self._terms.setdefault(number, ASKED)

    def drop(self, number: int) -> None:
        """Give a number up."""
        self._terms.pop(number, None)

    def clear(self) -> None:
        """Give all numbers up."""
        self._terms.clear()

    def settle(self, others: Mapping[str, Terms], now: int, unsure: Collection[int] = ()) -> list[int]:
        """Decide on what was asked for; returns the numbers that this member owns from now on.

        Call it when all that was announced before the announcement of what is asked for was received.

        :param others: the claims of each other member.
        :param now: the clock, for terms above those of owners that this member never heard of.
        :param unsure: numbers that a silent member may own; they stay asked for.
        """
        self._hear(others)
        owned: list[int] = []
        for number in self.asked:
            rivals = {name: terms[number] for name, terms in others.items() if number in terms}
            if any(term != ASKED or name < self._me for name, term in rivals.items()):
                self.drop(number)
            elif not rivals and number not in unsure:
                self._terms[number] = self._highest[number] = max(self._highest.get(number, ASKED) + 1, now)
                owned.append(number)
        return owned

    def overtaken(self, others: Mapping[str, Terms]) -> list[int]:
        """The owned numbers that another member owns since."""
        self._hear(others)
        return sorted(
            number
            for number, term in self._terms.items()
            if term != ASKED
            and any(
                number in terms and terms[number] != ASKED and (-terms[number], name) < (-term, self._me)
                for name, terms in others.items()
            )
        )

    def _hear(self, others: Mapping[str, Terms]) -> None:
        for terms in others.values():
            for number, term in terms.items():
                self._highest[number] = max(self._highest.get(number, ASKED), term)
