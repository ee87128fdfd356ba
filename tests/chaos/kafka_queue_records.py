"""What the topics of a queue with markers hold, and what its workers wrote, as values to count with.

A message has one record for each time that it was sent, here a copy. What a topic holds is read to its end as it is
now; blocking. Times are seconds since 1970, of the brokers' logs and of the workers, on one machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Final, NamedTuple, cast

from confluent_kafka import Message

from broker_kafka.queue.markers.marker_topic import marker_topic_name
from broker_kafka.queue.markers.redelivery import attempts_of
from broker_kafka.queue.markers.wire import Kind, Marker, read_content, read_markers
from tests.servers.kafka_client import RawAdmin, read_all

__all__ = ["Copy", "Delivery", "Life", "Place", "Said", "overlaps", "read_copies", "read_deliveries", "read_ended"]


_LAST_MOMENT: Final = 0.25
"""Seconds before the end of a lease in which a tracker may or may not apply a marker. A holder counts its lease from
before the START was written, and loses it unless the answer came by then; a broker gives a record its time before any
reader sees it."""


class Place(NamedTuple):
    partition: int
    offset: int


class Said(NamedTuple):
    """A marker of one copy.

    :ivar holder: the worker of a START.
    :ivar tracked: whether a tracker wrote it.
    """

    marker: Marker
    time: float
    holder: str
    tracked: bool


@dataclass(slots=True, eq=False)
class Copy:
    """:ivar attempts: how many deliveries its header counts.
    :ivar said: its markers, in their order.
    """

    number: int
    place: Place
    attempts: int
    time: float
    said: list[Said] = field(default_factory=list[Said])
    deliveries: list[Delivery] = field(default_factory=list["Delivery"])

    def ends(self, *, tracked: bool) -> list[Said]:
        return [said for said in self.said if said.marker.kind is Kind.END and said.tracked is tracked]

    @property
    def first_end(self) -> Said | None:
        return next((said for said in self.said if said.marker.kind is Kind.END), None)

    @property
    def last_start(self) -> Said | None:
        return next((said for said in reversed(self.said) if said.marker.kind is Kind.START), None)

    @property
    def release(self) -> Said | None:
        """The first marker before the END by which its holder gave it back."""
        for said in self.said:
            if said.marker.kind is Kind.END:
                return None
            if said.marker.kind is Kind.KEEPALIVE and said.marker.released:
                return said
        return None

    @property
    def counted(self) -> set[int]:
        """How many deliveries a copy that follows may count."""
        counts: set[int] = set()
        for said in self.said:
            marker = said.marker
            if marker.kind is Kind.START:
                counts = {marker.attempt or 1}
            elif marker.kind is Kind.END:
                break
            elif marker.attempt is not None:
                # With a late marker the message may have been sent already, with the count of earlier markers.
                late = said.time > self._deadline(said) - (0.0 if marker.released else _LAST_MOMENT)
                counts = {*counts, marker.attempt} if late else {marker.attempt}
                if marker.released:
                    break
        return counts

    @property
    def early(self) -> float:
        """Seconds of its lease, or of the delay asked for, that were left when it was sent again."""
        end = self.first_end
        return self._deadline(end) - end.time if end is not None and end.tracked else 0.0

    def _deadline(self, until: Said) -> float:
        """When it was due to be sent again at the earliest, by what was said before."""
        deadline, released = 0.0, False
        for said in self.said:
            marker = said.marker
            if said is until:
                break
            if marker.kind is Kind.START:
                if marker.renews is not None:
                    continue  # it repeats what is known
                released = marker.released
                deadline = said.time + marker.after_ms / 1000
            elif (released and not marker.released) or said.time > deadline:
                # Who gave a message back cannot keep it, and what comes too late changes nothing for a tracker that
                # has sent the message.
                continue
            else:
                released = marker.released
                moved = said.time + marker.after_ms / 1000
                deadline = moved if said.time <= deadline - _LAST_MOMENT else min(deadline, moved)
        return deadline


@dataclass(slots=True, eq=False)
class Delivery:
    """:ivar steps: what its worker wrote of it, and when."""

    worker: Life
    number: int
    place: Place
    attempt: int
    steps: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def handled(self) -> bool:
        """Whether the work was done, and settling it was begun."""
        return "acks" in self.steps or "rejects" in self.steps

    @property
    def nacked(self) -> bool:
        return "nacks" in self.steps

    @property
    def begun(self) -> float:
        return self.steps["got"]

    @property
    def over(self) -> float:
        return max(self.steps.values())


@dataclass(slots=True, eq=False)
class Life:
    """A worker process, from its start to its end.

    :ivar died: when it was killed, or crashed; None if it did not.
    :ivar stills: from when to when it was frozen, or blocked itself.
    :ivar lost: what was reported lost to it, whether a handler had it or not.
    """

    name: str
    path: Path
    died: float | None = None
    stills: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    lost: set[Place] = field(default_factory=set[Place])

    def stood_still(self, begin: float, end: float) -> bool:
        return overlaps(self.stills, begin, end)


def overlaps(spans: Iterable[tuple[float, float]], begin: float, end: float) -> bool:
    return any(first <= end and last >= begin for first, last in spans)


def read_deliveries(lives: Sequence[Life]) -> list[Delivery]:
    """What the workers wrote; notes in their lives when they blocked themselves, and when they crashed."""
    found: list[Delivery] = []
    for life in lives:
        mine: dict[Place, Delivery] = {}
        for line in life.path.read_text().splitlines(keepends=True):
            if not line.endswith("\n") or line.startswith("ready"):
                continue
            step, number, place, attempt, time = line.split()
            at = Place(*map(int, place.split(":")))
            if step == "expires":
                life.lost.add(at)
                continue
            if step == "got":
                mine[at] = Delivery(life, int(number), at, int(attempt))
                found.append(mine[at])
            elif step == "crashes":
                life.died = float(time)
            elif step == "unblocks":
                life.stills.append((mine[at].steps["blocks"], float(time)))
            mine[at].steps[step] = float(time)
        # One that was killed while it blocked itself never said that it went on.
        unended = [each.steps for each in mine.values() if "unblocks" not in each.steps]
        life.stills += [(steps["blocks"], life.died or inf) for steps in unended if "blocks" in steps]
    return found


def read_ended(bootstrap: str, topic: str, partition: int = 0) -> list[Message]:
    """What the partition holds when no transaction is open in it any more.

    :raises AssertionError: one stays open, which would hide what was written after its beginning.
    """
    RawAdmin(bootstrap).wait_for_markers(topic, partition)
    return read_all(bootstrap, topic, partition)


def read_copies(bootstrap: str, topic: str, subscription: str, partitions: int) -> dict[Place, Copy]:
    """All records of the topic, with the markers of each."""
    copies: dict[Place, Copy] = {}
    for partition in range(partitions):
        for record in read_ended(bootstrap, topic, partition):
            place = Place(partition, record.offset() or 0)
            headers = cast("list[tuple[str, bytes | None]]", record.headers() or [])
            copies[place] = Copy(int(record.value() or b""), place, attempts_of(tuple(headers)), _time(record))
    for partition in range(partitions):
        for record in read_ended(bootstrap, marker_topic_name(subscription), partition):
            for marker, data in read_markers(record.value()):
                assert marker is not None, f"not a marker: {data!r}"
                holder = ""
                if marker.kind is Kind.START:
                    holder = read_content(data).holder.partition("@")[0]
                said = Said(marker, _time(record), holder, record.key() is None)
                for each in marker.ids():
                    if each.offset >= 0:
                        copies[Place(each.partition, each.offset)].said.append(said)
    return copies


def _time(record: Message) -> float:
    return record.timestamp()[1] / 1000
