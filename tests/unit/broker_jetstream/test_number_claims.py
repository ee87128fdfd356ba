"""Members of a copartitioned group never own a number together, in whatever order their announcements arrive."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping

import pytest

from broker_jetstream.membership import plan
from broker_jetstream.number_claims import ASKED, NumberClaims

NUMBERS = 4


class Member:
    """A member as `records` drives it: announce, receive all that was announced before, decide."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.claims = NumberClaims(name)
        self.others: dict[str, Mapping[int, int]] = {}
        self.inbox: deque[tuple[str, Mapping[int, int] | None]] = deque()
        """Announcements: None is a farewell, or, of the member itself, its mark."""
        self.marked = False
        self.waiting = False
        self.gone = False

    @property
    def owned(self) -> set[int]:
        return {number for number, term in self.claims.terms.items() if term != ASKED}


class Group:
    """A server that passes each announcement on to the members one after the other, and members that take turns."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.members: dict[str, Member] = {}
        self.passing: dict[str, deque[tuple[str, str, Mapping[int, int] | None]]] = {}
        """By sender: receiver, sender and content of what the server has not passed on yet."""
        self.now = 0

    def live(self) -> list[Member]:
        return [member for member in self.members.values() if not member.gone]

    def announce(self, member: Member, *, bye: bool = False) -> None:
        content = None if bye else dict(member.claims.terms)
        receivers = [other.name for other in self.live() if other is not member]
        self.random.shuffle(receivers)
        self.passing[member.name].extend((name, member.name, content) for name in receivers)

    def mark(self, member: Member) -> None:
        self.passing[member.name].append((member.name, member.name, None))

    def join(self) -> None:
        member = Member(f"{self.random.randrange(1000):03}-{len(self.members)}")
        self.members[member.name] = member
        self.passing[member.name] = deque()
        # The new member waits for the answers to its hello.
        while any(self.passing.values()):
            self.pass_on()
        for other in self.live():
            if other is not member:
                member.others[other.name] = dict(other.claims.terms)
                other.others[member.name] = {}

    def leave(self, member: Member) -> None:
        member.claims.clear()
        self.announce(member, bye=True)
        member.gone = True

    def pass_on(self) -> None:
        senders = [sender for sender, messages in self.passing.items() if messages]
        if senders:
            receiver, sender, content = self.passing[self.random.choice(senders)].popleft()
            self.members[receiver].inbox.append((sender, content))

    def receive(self, member: Member) -> None:
        if member.inbox:
            sender, content = member.inbox.popleft()
            if sender == member.name:
                member.marked = True
            elif content is None:
                member.others.pop(sender, None)
            else:
                member.others[sender] = content

    def turn(self, member: Member) -> None:
        """One step of the ticker."""
        claims = member.claims
        if member.waiting:
            if member.marked:
                member.waiting = member.marked = False
                self.now += 1
                claims.settle(member.others, self.now)
                self.announce(member)
            return
        for number in claims.overtaken(member.others):
            claims.drop(number)
        step = plan(member.name, claims.terms, member.others, NUMBERS, "salt")
        for number in step.release:
            claims.drop(number)
        for number in step.claim:
            claims.ask(number)
        if step.release or step.claim or claims.asked:
            self.announce(member)
        if claims.asked:
            self.mark(member)
            member.waiting = True

    def act(self) -> None:
        member = self.random.choice(self.live())
        actions: list[Callable[[], None]] = [self.pass_on, lambda: self.receive(member), lambda: self.turn(member)]
        self.random.choice(actions)()

    def settle(self) -> None:
        """Let everything that was announced arrive, until nobody has anything to do."""
        for _ in range(10_000):
            self.act()
            if self.shared():
                return
        raise AssertionError(f"The members do not agree: { {m.name: dict(m.claims.terms) for m in self.live()} }")

    def shared(self) -> bool:
        shares = [len(member.owned) for member in self.live()]
        return sum(shares) == NUMBERS and max(shares) - min(shares) <= 1

    def owners(self, number: int) -> list[str]:
        return [member.name for member in self.live() if number in member.owned]


@pytest.mark.parametrize("seed", range(200))
def test_no_number_has_two_owners_and_each_gets_one(seed: int) -> None:
    group = Group(seed)
    for _ in range(group.random.randint(1, 3)):
        group.join()
    for _ in range(20):
        for _ in range(group.random.randint(0, 40)):
            group.act()
            assert all(len(group.owners(number)) <= 1 for number in range(NUMBERS))
        # Members leave and join at once.
        if len(group.live()) > 1 and group.random.random() < 0.5:
            group.leave(group.random.choice(group.live()))
        if len(group.live()) < 4 and group.random.random() < 0.5:
            group.join()
    group.settle()
    assert all(len(group.owners(number)) == 1 for number in range(NUMBERS))


def settled(me: str, number: int, now: int, **others: Mapping[int, int]) -> NumberClaims:
    claims = NumberClaims(me)
    claims.ask(number)
    claims.settle(others, now)
    return claims


def test_of_two_that_ask_the_lower_id_waits_and_the_higher_gives_up() -> None:
    lower, higher = settled("a", 0, 7, b={0: ASKED}), settled("b", 0, 7, a={0: ASKED})
    assert (lower.asked, dict(higher.terms)) == ([0], {})
    assert lower.settle({"b": {}}, 7) == [0]
    assert lower.terms == {0: 7}


def test_an_owner_keeps_its_number_whatever_its_id() -> None:
    assert dict(settled("a", 0, 7, b={0: 3}).terms) == {}
    owner = settled("b", 0, 7)
    assert owner.overtaken({"a": {0: ASKED}}) == []


def test_who_took_the_number_of_a_frozen_member_keeps_it() -> None:
    frozen = settled("a", 0, 7)
    newer = settled("b", 0, 8)
    assert frozen.overtaken({"b": newer.terms}) == [0]
    assert newer.overtaken({"a": frozen.terms}) == []


def test_a_term_is_above_those_heard_although_the_clock_is_behind() -> None:
    claims = settled("b", 0, 7, c={0: 100})
    claims.ask(0)
    assert claims.settle({}, 8) == [0]
    assert claims.terms == {0: 101}


def test_of_equal_terms_the_lower_id_keeps_the_number() -> None:
    assert settled("a", 0, 7).overtaken({"b": {0: 7}}) == []
    assert settled("b", 0, 7).overtaken({"a": {0: 7}}) == [0]


def test_a_number_that_a_silent_member_may_own_stays_asked_for() -> None:
    claims = NumberClaims("a")
    claims.ask(0)
    assert claims.settle({}, 7, unsure={0}) == []
    assert claims.asked == [0]
    assert claims.settle({}, 7) == [0]
