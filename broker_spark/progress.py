"""The lag of a query, out of its progress. Pure."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from broker_spark.common.admission import backlog
from broker_spark.common.offsets import Offsets, TopicOffsets

__all__ = ["behind", "lag", "offsets_of"]


def lag(progress: Any) -> dict[str, dict[int, int]]:
    """How many offsets a query was behind the end of each topic's partitions when its last batch was planned.

    Offsets may have gaps, so these are rows at most, and about so many where offsets do not count rows; where the
    partitions of a topic share their offsets, each counts the rows of all. Of a subscription it is all that is spooled
    or waits, as partition 0. A topic that Spark's plan has twice, as in a join with itself, counts once, if it is told
    apart from others of its name: Spark's Kafka connector does not. What several sources are behind in different topics
    of one name is added up. A batch that an earlier run had planned tells nothing, since Spark does not ask then.

    :param progress: `query.lastProgress`, or an element of `query.recentProgress`.
    """
    found: dict[str, dict[int, int]] = {}
    for span in _spans(progress, None):
        known = found.setdefault(span.topic, {})
        for partition, place in span.ends.items():
            known[partition] = known.get(partition, 0) + max(0, place - span.starts[partition])
    return found


def behind(progress: Any, owners: Sequence[Hashable | None] | None = None) -> int:
    """The same of all topics: rows at most, each counted once, also where the partitions share their offsets.

    :param owners: of each source of the progress who reads by it; those of one owner count once. None where it is not
        known, and then the topics tell, if they can.
    """
    return sum(
        backlog({span.topic: span.starts}, {span.topic: span.ends}, shared=span.shared)[span.topic]
        for span in _spans(progress, owners)
    )


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a topic was read to, and where it ended, by partition."""

    topic: str
    starts: Mapping[int, int]
    ends: Mapping[int, int]
    shared: bool


def _spans(progress: Any, owners: Sequence[Hashable | None] | None) -> Iterable[_Span]:
    """Each log once: Spark has a source for each branch of its plan, and they may lie apart for a moment."""
    sources: Sequence[Any] = progress["sources"] if progress else ()
    found: dict[Hashable, _Span] = {}
    for number, source in enumerate(sources):
        owner = owners[number] if owners is not None else None
        for identity, span in _of(source):
            key = ((number,) if identity is None else identity) if owner is None else (owner,)
            found[key, span.topic] = _both(found.get((key, span.topic)), span)
    return found.values()


def _of(source: Any) -> Iterator[tuple[Hashable | None, _Span]]:
    """The topics of one source, and what tells each from others of its name."""
    end = _plain(source["latestOffset"])
    spooled: Mapping[str, Any] | None = end.get("behind")
    if spooled is not None:
        # Of a subscription: what is spooled and what waits, in no partition.
        for topic, rows in spooled.items():
            yield ("spool", end.get("spool")), _Span(topic, {0: 0}, {0: int(rows)}, shared=False)
        return
    read, heads = (offsets_of(source[name]) for name in ("endOffset", "latestOffset"))
    if read is None or heads is None:
        return
    for topic, head in heads.topics.items():
        if head.behind:
            identity = None if head.identity is None else (heads.backend, head.identity)
            yield identity, _Span(topic, dict.fromkeys(head.behind, 0), head.behind, shared=False)
            continue
        done: Mapping[int, int] = read.topics[topic].next if topic in read.topics else {}
        starts = {each: done.get(each, head.began.get(each, 0)) for each in head.next}
        identity = None if head.identity is None else (heads.backend, head.identity)
        yield identity, _Span(topic, starts, head.next, heads.shared)


def _both(one: _Span | None, other: _Span) -> _Span:
    """From the earlier start to the later end."""
    if one is None:
        return other
    return _Span(
        other.topic,
        {**one.starts, **{each: min(one.starts.get(each, place), place) for each, place in other.starts.items()}},
        {**one.ends, **{each: max(one.ends.get(each, place), place) for each, place in other.ends.items()}},
        other.shared,
    )


def offsets_of(given: Any) -> Offsets | None:
    """What a source of ours or Spark's Kafka connector said; None if it was another, or nothing yet."""
    plain = _plain(given)
    if "topics" in plain:
        return Offsets.from_json(plain)
    if not plain or not all(isinstance(places, dict) for places in plain.values()):
        return None
    return Offsets(
        "kafka",
        {
            topic: TopicOffsets(None, {int(partition): int(offset) for partition, offset in places.items()})
            for topic, places in plain.items()
        },
    )


def _plain(given: Any) -> Mapping[str, Any]:
    if isinstance(given, str):
        given = json.loads(given) if given.startswith("{") else None
    return cast("Mapping[str, Any]", given) if isinstance(given, dict) else {}
