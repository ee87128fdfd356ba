"""The balance of a queue with markers: what became of every message, from its topics and from its workers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from tests.chaos.kafka_queue_records import Copy, Delivery, Life, Place, Said, overlaps, read_deliveries

__all__ = ["NOT_HANDED_OVER", "Books"]

NOT_HANDED_OVER: Final = "its holder committed it too late to hand it over"


class Books:
    """The balance of one run.

    :param sent: numbers with a receipt.
    :param unsure: numbers whose publish failed.
    :param away: from when to when the broker was restarted.
    :ivar problems: what may not be.
    """

    def __init__(
        self,
        copies: dict[Place, Copy],
        lives: Sequence[Life],
        letters: Iterable[int],
        *,
        sent: set[int],
        unsure: set[int],
        away: Sequence[tuple[float, float]],
    ) -> None:
        deliveries = read_deliveries(lives)
        self._lives = {life.name: life for life in lives}
        self._copies = copies
        self._letters = Counter(letters)
        self._away = away
        self.problems: list[str] = []
        self.settled: Counter[str] = Counter()
        self.again: Counter[str] = Counter()
        """Why copies were sent again."""
        self.twice: Counter[str] = Counter()
        """Why what was handled was handled again."""
        self.memory = 0
        """Deliveries from the memory of a worker, after a nack."""
        self.attempts: Counter[int] = Counter()
        """Of the deliveries."""
        self.deliveries = len(deliveries)
        self.handled = sum(each.handled for each in deliveries)
        for delivery in deliveries:
            self.attempts[delivery.attempt] += 1
            copies[delivery.place].deliveries.append(delivery)
        messages: defaultdict[int, list[Copy]] = defaultdict(list)
        for copy in copies.values():
            messages[copy.number].append(copy)
        self.messages = len(messages)
        self.copies = len(copies)
        for number in sent - messages.keys():
            self._wrong(number, "has a receipt and is not in the topic")
        for number in messages.keys() - sent - unsure:
            self._wrong(number, "is in the topic and was not sent")
        for number, those in messages.items():
            those.sort(key=lambda copy: (copy.attempts, copy.time))
            self._check(number, those)

    def _wrong(self, number: int, what: str) -> None:
        self.problems.append(f"message {number} {what}")

    def _check(self, number: int, copies: list[Copy]) -> None:
        settled: list[Copy] = []
        for copy in copies:
            tracked = copy.ends(tracked=True)
            if len(tracked) > 1:
                self._wrong(number, f"has {len(tracked)} ENDs of trackers at {copy.place}")
            if tracked:
                self._check_again(copy, tracked[0])
            elif copy.ends(tracked=False):
                settled.append(copy)
            for delivery in copy.deliveries:
                self._check_delivery(copy, delivery)
        following = sum(bool(copy.ends(tracked=True)) for copy in copies)
        if following != len(copies) - 1:
            self._wrong(number, f"was sent {len(copies)} times, and trackers ended {following} of these")
        for former, copy in pairwise(copies):
            if copy.attempts not in former.counted:
                self._wrong(number, f"counts {copy.attempts} at {copy.place}, not {former.counted} of {former.place}")
        if len(settled) != 1:
            self._wrong(number, f"was settled {len(settled)} times")
            self.settled["lost, or left open" if not settled else "settled twice"] += 1
            return
        self._check_settled(number, settled[0], [each for copy in copies for each in copy.deliveries])

    def _check_delivery(self, copy: Copy, delivery: Delivery) -> None:
        # Those before it in the same process ended with a nack that its memory kept.
        before = sum(
            each.nacked and each.worker is delivery.worker and each.attempt < delivery.attempt
            for each in copy.deliveries
        )
        if delivery.attempt != copy.attempts + 1 + before:
            self._wrong(copy.number, f"was delivered as attempt {delivery.attempt} of {copy.attempts} + {before} + 1")
        if before:
            self.memory += 1
        if delivery.handled and "settled" in delivery.steps and len(copy.deliveries) == 1:
            end = copy.first_end
            if end is None or end.tracked:
                self._wrong(copy.number, f"was settled at {copy.place}, and came again all the same")

    def _check_again(self, copy: Copy, end: Said) -> None:
        if copy.early > 0:
            self._wrong(copy.number, f"was sent again {copy.early:.3f} s before its time at {copy.place}")
        why = self._why_again(copy, end)
        self.again[why] += 1
        if why.startswith("not explained"):
            self._wrong(copy.number, f"was sent again, {why}, from {copy.place}")

    def _why_again(self, copy: Copy, end: Said) -> str:
        start = copy.last_start
        if start is None:
            return "not explained: without a START"
        if (release := copy.release) is not None:
            last = max((each for each in copy.deliveries), key=lambda each: each.attempt, default=None)
            if last is not None and last.nacked:
                return "nacked"
            if release.marker.attempt == (last.attempt if last is not None else start.marker.attempt):
                return "held for longer than max_lease"
            return "given back untried"
        mine = [each for each in copy.deliveries if each.worker.name == start.holder]
        life = self._lives.get(start.holder)
        if life is None:
            return "not explained: nobody holds it"
        if life.died is not None and life.died <= end.time:
            return "its holder died" if mine else "its holder died, before it was handed over"
        if life.stood_still(start.time, end.time):
            return "its holder stood still"
        if overlaps(self._away, start.time, end.time):
            return "the broker was away"
        if copy.place in life.lost or any("lost" in each.steps for each in mine):
            return "its holder was told that it lost it"
        if any(step.startswith("failed") for each in mine for step in each.steps):
            return "its holder was told that its END may not be written"
        if not mine:
            # It was committed while its group changed hands, or its commit was answered after the lease.
            return NOT_HANDED_OVER
        return "not explained: its holder was well"

    def _check_settled(self, number: int, copy: Copy, deliveries: list[Delivery]) -> None:
        settling = [each for each in copy.deliveries if each.handled]
        if not settling:
            self._wrong(number, f"was ended at {copy.place} by nobody who handled it")
            return
        told = [each for each in settling if "settled" in each.steps] or settling
        how = "rejected" if "rejects" in told[0].steps else "acked"
        self.settled[how] += 1
        if "settled" not in told[0].steps:
            self.settled[f"of these, their END is there and {self._untold(told[0])}"] += 1
        rejections = sum("rejects" in each.steps for each in deliveries)
        letters = self._letters[number]
        if letters > rejections or (how == "rejected" and not letters):
            self._wrong(number, f"has {letters} dead letters and was rejected {rejections} times")
        if letters > (how == "rejected"):
            self.settled["dead letters besides, of what came again"] += letters - (how == "rejected")
        for delivery in deliveries:
            if delivery.handled and delivery is not told[0]:
                why = self._why_twice(delivery)
                self.twice[why] += 1
                if why.startswith("not explained"):
                    self._wrong(number, f"was handled twice, {why}: {delivery.steps} at {delivery.place}")

    def _untold(self, delivery: Delivery) -> str:
        failed = [step for step in delivery.steps if step.startswith("failed")]
        if "lost" in delivery.steps:
            return "it was told as lost"
        if failed:
            return f"it was told as {failed[0].partition(':')[2]}"
        return (
            "its worker left before it was told" if "leaves" in delivery.steps else "its worker died before it was told"
        )

    def _why_twice(self, delivery: Delivery) -> str:
        steps, life = delivery.steps, delivery.worker
        if "lost" in steps:
            if life.stood_still(delivery.begun, delivery.over):
                return "its holder stood still, lost it and went on"
            return "its holder lost it and went on"
        if life.died is not None and "settled" not in steps:
            return "its holder died before its END"
        if "leaves" in steps:
            return "its holder left before its END"
        if any(step.startswith("failed") for step in steps):
            return "the answer to its END was lost"
        if self._started_by_a_sleeper(delivery):
            return "another stood still between its START and its commit"
        return "not explained"

    def _started_by_a_sleeper(self, delivery: Delivery) -> bool:
        """Whether one who stood still shortly before started the same copy."""
        starts = [(self._lives.get(said.holder), said.time) for said in self._copies[delivery.place].said]
        return any(life and life is not delivery.worker and life.stood_still(at - 2.0, at) for life, at in starts)

    def table(self) -> str:
        """The balance as lines."""
        lines = [
            f"{'messages':<56}{self.messages:>8}",
            f"{'deliveries':<56}{self.deliveries:>8}",
            f"{'  of these, from the memory of a worker':<56}{self.memory:>8}",
            *self._part("settled", self.settled),
            *self._part(f"sent again: {self.copies - self.messages}", self.again),
            *self._part("handled again", self.twice),
            *self._part("deliveries by attempt", Counter({str(n): self.attempts[n] for n in sorted(self.attempts)})),
            f"{'problems':<56}{len(self.problems):>8}",
        ]
        return "\n".join(lines)

    def _part(self, title: str, counts: Counter[str]) -> list[str]:
        return [title, *(f"    {what:<52}{count:>8}" for what, count in counts.items())]
