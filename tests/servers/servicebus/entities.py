"""Queues, subscriptions and their dead-letter queues: messages, locks and sessions. No I/O but the journal's.

Not thread-safe: everything is done under the lock of the namespace. Times are those of the wall clock.
"""

from __future__ import annotations

import heapq
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from tests.servers.servicebus.journal import Journal
from tests.servers.servicebus.sections import Sections, int_, long_, text_, timestamp_

__all__ = ["DEAD_LETTERS", "Entity", "Held", "Refused", "Session"]

DEAD_LETTERS: Final = "/$deadletterqueue"
_STATES: Final = {"active": 0, "locked": 0, "deferred": 1, "scheduled": 2}

now = time.time


class Refused(Exception):
    """A refused request, with the protocol's condition and status."""

    def __init__(self, condition: str, text: str, code: int = 400) -> None:
        super().__init__(text)
        self.condition = condition
        self.code = code


class Held:
    """One message in one entity."""

    __slots__ = (
        "count",
        "description",
        "due",
        "enqueued",
        "expires",
        "holder",
        "message_id",
        "raw",
        "reason",
        "sections",
        "sequence",
        "session",
        "source",
        "state",
        "token",
        "until",
    )

    def __init__(self, sequence: int, raw: bytes, *, message_id: str | None, session: str | None) -> None:
        self.sequence = sequence
        self.raw = raw
        self.sections = Sections(raw)
        self.message_id = message_id
        self.session = session
        self.enqueued = now()
        self.due = 0.0
        self.expires: float | None = None
        self.count = 0
        self.state = "active"
        self.token: str | None = None
        self.until = 0.0
        self.holder: object = None
        self.reason: str | None = None
        self.description: str | None = None
        self.source: str | None = None

    def encode(self) -> bytes:
        """The message in the form that a consumer receives."""
        annotations = {
            "x-opt-sequence-number": long_(self.sequence),
            "x-opt-enqueue-sequence-number": long_(self.sequence),
            "x-opt-enqueued-time": timestamp_(self.enqueued),
            "x-opt-message-state": int_(_STATES[self.state]),
        }
        if self.until:
            annotations["x-opt-locked-until"] = timestamp_(self.until)
        if self.source:
            annotations["x-opt-deadletter-source"] = text_(self.source)
        application: dict[str, str] = {}
        if self.reason is not None:
            application["DeadLetterReason"] = self.reason
        if self.description is not None:
            application["DeadLetterErrorDescription"] = self.description
        ttl = None if self.expires is None else max(0, int((self.expires - self.enqueued) * 1000))
        return self.sections.encode(
            count=max(0, self.count - 1), ttl=ttl, annotations=annotations, application=application
        )

    def snapshot(self) -> tuple[Any, ...]:
        """The state for the journal."""
        return (
            self.sequence, self.raw, self.message_id, self.session, self.enqueued, self.due, self.expires,
            self.count, "active" if self.state == "locked" else self.state, self.reason, self.description, self.source,
        )  # fmt: skip

    @classmethod
    def restore(cls, kept: tuple[Any, ...]) -> Held:
        sequence, raw, message_id, session, *rest = kept
        held = cls(sequence, raw, message_id=message_id, session=session)
        (
            held.enqueued, held.due, held.expires, held.count, held.state, held.reason, held.description, held.source,
        ) = rest  # fmt: skip
        return held


class Session:
    """One session of an entity."""

    __slots__ = ("holder", "ready", "state", "until")

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.state: bytes | None = None
        self.holder: object = None
        self.until = 0.0


class Entity:
    """A queue, a subscription, or the dead-letter queue of either."""

    def __init__(
        self,
        path: str,
        properties: dict[str, Any],
        journal: Journal,
        dead_letter: Callable[[Entity, Held], None],
        changed: Callable[[Entity], None],
    ) -> None:
        self.path = path
        self.properties = properties
        self.items: dict[int, Held] = {}
        self.sessions: dict[str, Session] = {}
        self.by_token: dict[str, Held] = {}
        self.deleted = False
        self._ready: list[int] = []
        self._later: list[tuple[float, int]] = []
        self._journal = journal
        self._dead_letter = dead_letter
        self._changed = changed

    @property
    def lock_seconds(self) -> float:
        return float(self.properties["lock_duration"])

    @property
    def max_deliveries(self) -> int:
        return int(self.properties["max_delivery_count"])

    @property
    def with_sessions(self) -> bool:
        return bool(self.properties["requires_session"])

    # Sends and deliveries.

    def put(self, held: Held, *, journal: bool = True) -> None:
        self.items[held.sequence] = held
        if journal:
            self._journal.add("put", self.path, held.snapshot())
        if held.state == "scheduled":
            heapq.heappush(self._later, (held.due, held.sequence))
        elif held.state == "active":
            self._is_ready(held)
        if held.expires is not None:
            heapq.heappush(self._later, (held.expires, held.sequence))

    def remove(self, held: Held) -> None:
        self._unlock(held)
        if self.items.pop(held.sequence, None) is not None:
            self._journal.add("gone", self.path, held.sequence)

    def next_ready(self, session: str | None = None) -> Held | None:
        """The oldest message that may be delivered, without removing it."""
        heap = self._ready if session is None else self._session(session).ready
        while heap:
            held = self.items.get(heap[0])
            if held is not None and held.state == "active":
                return held
            heapq.heappop(heap)
        return None

    def lock(self, held: Held, holder: object) -> str:
        """Lock it for a consumer; returns its token."""
        held.count += 1
        held.state = "locked"
        # A token has 16 bytes, here ASCII, since proton takes only text as a tag.
        held.token = secrets.token_hex(8)
        held.until = now() + self.lock_seconds
        held.holder = holder
        self.by_token[held.token] = held
        heapq.heappush(self._later, (held.until, held.sequence))
        return held.token

    def take(self, held: Held) -> None:
        """Deliver and delete it."""
        held.count += 1
        self.remove(held)

    def find(self, token: str) -> Held:
        """The message that the token locks.

        :raises Refused: the lock has ended.
        """
        held = self.by_token.get(token)
        if held is None or held.until <= now():
            raise Refused("com.microsoft:message-lock-lost", "The lock supplied is invalid, or it has expired.", 410)
        if held.session is not None and self.with_sessions and self.sessions[held.session].holder is not held.holder:
            raise Refused("com.microsoft:session-lock-lost", "The session lock has expired.", 410)
        return held

    # Settling.

    def complete(self, held: Held) -> None:
        self.remove(held)

    def abandon(self, held: Held, *, counted: bool = True) -> None:
        self._unlock(held)
        if not counted:
            held.count -= 1
        self._journal.add("count", self.path, held.sequence, held.count)
        if held.count >= self.max_deliveries:
            self.reject(
                held,
                "MaxDeliveryCountExceeded",
                f"Message could not be consumed after {self.max_deliveries} delivery attempts.",
            )
        elif held.state != "deferred":
            self._is_ready(held)

    def defer(self, held: Held) -> None:
        self._unlock(held)
        held.state = "deferred"
        self._journal.add("state", self.path, held.sequence, "deferred")

    def reject(self, held: Held, reason: str | None, description: str | None) -> None:
        self._unlock(held)
        if self.path.lower().endswith(DEAD_LETTERS):
            self._is_ready(held)
            return
        self.items.pop(held.sequence, None)
        self._journal.add("gone", self.path, held.sequence)
        held.reason, held.description, held.source = reason, description, self.path
        held.state, held.expires = "active", None
        self._dead_letter(self, held)

    def renew(self, held: Held) -> float:
        held.until = now() + self.lock_seconds
        heapq.heappush(self._later, (held.until, held.sequence))
        return held.until

    # Sessions.

    def _session(self, name: str) -> Session:
        return self.sessions.setdefault(name, Session())

    def accept(self, name: str | None, holder: object) -> str | None:
        """Lock a session, the first free one with messages if none is named; None if there is none.

        :raises Refused: another receiver has it.
        """
        if name is None:
            for found, session in self.sessions.items():
                if session.holder is None and self.next_ready(found) is not None:
                    return self.accept(found, holder)
            return None
        session = self._session(name)
        if session.holder is not None:
            raise Refused("com.microsoft:session-cannot-be-locked", f"Session {name!r} is locked by another.", 409)
        session.holder = holder
        session.until = now() + self.lock_seconds
        return name

    def renew_session(self, name: str) -> float:
        session = self._session(name)
        if session.holder is None:
            raise Refused("com.microsoft:session-lock-lost", "The session lock has expired.", 410)
        session.until = now() + self.lock_seconds
        for held in self.by_token.values():
            if held.session == name:
                held.until = session.until
                heapq.heappush(self._later, (held.until, held.sequence))
        return session.until

    def release_session(self, name: str) -> None:
        """Release a session whose consumer is gone, with its messages."""
        session = self._session(name)
        session.holder = None
        for held in [held for held in self.by_token.values() if held.session == name]:
            self.abandon(held)
        self._changed(self)

    def set_session_state(self, name: str, state: bytes | None) -> None:
        self._session(name).state = state
        self._journal.add("session", self.path, name, state)

    # Time.

    def tick(self) -> Iterator[str]:
        """Apply all that is due; returns the sessions whose locks have ended."""
        moment = now()
        while self._later and self._later[0][0] <= moment:
            _, sequence = heapq.heappop(self._later)
            held = self.items.get(sequence)
            if held is None:
                continue
            if held.state == "scheduled" and held.due <= moment:
                held.state, held.enqueued = "active", moment
                self._is_ready(held)
            elif held.state == "locked" and held.until <= moment:
                self.abandon(held)
            elif held.expires is not None and held.expires <= moment and held.state in ("active", "deferred"):
                self._expire(held)
            elif held.expires is not None and held.expires <= moment:
                heapq.heappush(self._later, (held.until + 0.001, sequence))
        for name, session in list(self.sessions.items()):
            if session.holder is not None and session.until <= moment:
                yield name

    def _expire(self, held: Held) -> None:
        if self.properties["dead_lettering_on_message_expiration"]:
            self.reject(held, "TTLExpiredException", "The message expired and was dead lettered.")
        else:
            self.remove(held)

    def _unlock(self, held: Held) -> None:
        if held.token is not None:
            self.by_token.pop(held.token, None)
        held.token, held.holder, held.until = None, None, 0.0
        if held.state == "locked":
            held.state = "active"

    def _is_ready(self, held: Held) -> None:
        heap = self._session(held.session).ready if self.with_sessions and held.session is not None else self._ready
        heapq.heappush(heap, held.sequence)
        self._changed(self)

    def counts(self) -> dict[str, int]:
        """The number of messages by state."""
        found = dict.fromkeys(_STATES, 0)
        for held in self.items.values():
            found[held.state] += 1
        return found
