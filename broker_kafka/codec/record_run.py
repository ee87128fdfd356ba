"""Runs of records of one partition, as confluent-kafka returned them; Record objects are made on access. Pure.

Nothing here costs more per record than one call of C code: records are read by the million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice, repeat, takewhile
from typing import Any, Final, cast

from confluent_kafka import Message as NativeRecord

from broker import Record
from broker.driver import UNSET
from broker_kafka.codec.headers import RECORD_VIEW

__all__ = ["NativeRun", "runs_of"]

_Getter = Callable[[Any], Any]

_topic: Final = cast("_Getter", NativeRecord.topic)
_partition: Final = cast("_Getter", NativeRecord.partition)
_offset: Final = cast("_Getter", NativeRecord.offset)
_key: Final = cast("_Getter", NativeRecord.key)
_value: Final = cast("_Getter", NativeRecord.value)
_error: Final = cast("_Getter", NativeRecord.error)


class NativeRun:
    """Implements `broker.records.RecordRun`. A part of a split may be empty."""

    __slots__ = ("_all", "_begin", "_end", "_size", "partition", "topic")

    def __init__(
        self,
        topic: str,
        partition: int,
        messages: Sequence[NativeRecord],
        begin: int = 0,
        end: int | None = None,
        size: int | None = None,
    ) -> None:
        self.topic = topic
        self.partition = partition
        # A part shares the list of the whole run, so that a split costs no more than its smaller side.
        self._all = messages
        self._begin = begin
        self._end = len(messages) if end is None else end
        self._size = size

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def size(self) -> int:
        if self._size is None:
            self._size = sum(map(len, self.messages))
        return self._size

    @property
    def messages(self) -> Sequence[NativeRecord]:
        return self._all if len(self) == len(self._all) else self._all[self._begin : self._end]

    @property
    def last(self) -> int:
        return _offset(self._all[self._end - 1])

    @property
    def offsets(self) -> Iterable[int]:
        """The offset of each record. They rise, so that the first and the last show whether any is missing."""
        if not len(self):
            return range(0)
        begin, end = _offset(self._all[self._begin]), self.last + 1
        return range(begin, end) if end - begin == len(self) else map(_offset, self.messages)

    def split(self, count: int) -> tuple[NativeRun, NativeRun]:
        begin, middle, end = self._begin, self._begin + count, self._end
        if 2 * count <= len(self):
            first = sum(map(len, self._all[begin:middle]))
        else:
            first = self.size - sum(map(len, self._all[middle:end]))
        return (
            NativeRun(self.topic, self.partition, self._all, begin, middle, first),
            NativeRun(self.topic, self.partition, self._all, middle, end, self.size - first),
        )

    def within(self, size: int) -> int:
        """How many of the first records have at most `size` bytes together."""
        fitting = takewhile(size.__ge__, accumulate(map(len, islice(self._all, self._begin, self._end))))
        return sum([1 for _ in fitting])

    def make(self, owner: Any, generation: int) -> list[Record[Any]]:
        messages = self.messages
        data = list(map(_value, messages))
        return list(
            map(
                Record,
                repeat(self.topic),
                repeat(self.partition),
                self.offsets,
                map(_key, messages),
                data,
                messages,
                repeat(RECORD_VIEW),
                map(len, messages),
                repeat(owner),
                repeat(UNSET),
                repeat(generation),
            )
        )

    def values(self, name: str) -> Iterable[Any] | None:
        values = _VALUES.get(name)
        return None if values is None else values(self)

    def column(self, name: str) -> Sequence[Any] | None:
        times = _TIMES.get(name)
        if times is not None:
            return times(self.messages)
        values = self.values(name)
        return values if values is None or isinstance(values, range) else list(values)


_VALUES: Final[Mapping[str, Callable[[NativeRun], Iterable[Any]]]] = {
    "topic": lambda run: repeat(run.topic, len(run)),
    "partition": lambda run: repeat(run.partition, len(run)),
    "offset": lambda run: run.offsets,
    "id": lambda run: map(RECORD_VIEW.id, run.messages),
    "key": lambda run: map(_key, run.messages),
    "data": lambda run: map(_value, run.messages),
    "attributes": lambda run: RECORD_VIEW.attributes_of(run.messages),
    "publish_time": lambda run: RECORD_VIEW.publish_times_of(run.messages),
    "broker_time": lambda run: map(RECORD_VIEW.broker_time, run.messages),
    "publish_time_ms": lambda run: RECORD_VIEW.publish_times_ms(run.messages),
    "broker_time_ms": lambda run: RECORD_VIEW.broker_times_ms(run.messages),
}

_TIMES: Final[Mapping[str, Callable[[Sequence[NativeRecord]], Sequence[Any]]]] = {
    "publish_time": RECORD_VIEW.publish_times,
    "broker_time": RECORD_VIEW.broker_times,
}


def runs_of(
    messages: Sequence[NativeRecord], only_topic: str | None = None, sole: tuple[str, int] | None = None
) -> list[NativeRun]:
    """The records among the messages of a consumer; the others are errors.

    :param only_topic: the topic of every record, if there is only one.
    :param sole: the partition of every record, if there is only one; saves a check of each.
    """
    if any(map(_error, messages)):
        messages = [message for message in messages if message.error() is None]
    if not messages:
        return []
    first, last = messages[0], messages[-1]
    topic, partition = _topic(first), _partition(first)
    if sole is not None and sole == (topic, partition) == (_topic(last), _partition(last)):
        return [NativeRun(topic, partition, messages)]
    count = len(messages)
    if list(map(_partition, messages)).count(partition) == count and (
        topic == only_topic or list(map(_topic, messages)).count(topic) == count
    ):
        return [NativeRun(topic, partition, messages)]
    return list(_split(messages))


def _split(messages: Sequence[NativeRecord]) -> Iterator[NativeRun]:
    places = list(zip(map(_topic, messages), map(_partition, messages), strict=True))
    begin = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[begin]:
            yield NativeRun(*places[begin], messages[begin:end])
            begin = end
