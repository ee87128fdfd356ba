"""The lag and the late rows of a query, computed from its progress. Pure."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from broker_spark.common.admission import backlog
from broker_spark.common.offsets import Offsets, TopicOffsets

__all__ = ["behind", "lag", "late_rows", "offsets_of"]


def lag(progress: Any) -> dict[str, dict[int, int]]:
    """How many offsets a query was behind the end of each topic's partitions when its last batch was planned.

    | case | what is counted |
    |---|---|
    | offsets have gaps | the upper bound of the rows |
    | offsets do not count rows | an approximation |
    | partitions of a topic share their offsets | in each partition, the rows of all |
    | a subscription | spooled and waiting messages, as partition 0 |
    | one topic twice in the plan, as in a self-join | once; twice with Spark's Kafka connector (no topic ids) |
    | different topics of one name | the sum |
    | a batch that an earlier run planned | nothing: Spark reports no end for it |

    :param progress: `query.lastProgress`, or an element of `query.recentProgress`.
    """
    found: dict[str, dict[int, int]] = {}
    for span in _spans(progress, None):
        known = found.setdefault(span.topic, {})
        for partition, place in span.ends.items():
            known[partition] = known.get(partition, 0) + max(0, place - span.starts[partition])
    return found


def behind(progress: Any, owners: Sequence[Hashable | None] | None = None) -> int:
    """The lag over all topics: the upper bound of the rows, each counted once, even if partitions share their offsets.

    :param owners: for each source of the progress, its reader; sources of one owner count once. None if unknown: the
        sources are then matched by their topic ids, if they have any.
    """
    return sum(
        backlog({span.topic: span.starts}, {span.topic: span.ends}, shared=span.shared)[span.topic]
        for span in _spans(progress, owners)
    )


def late_rows(progress: Any) -> int:
    """The rows that aggregates, joins and other state dropped in a batch, because they were behind the watermark.

    Spark counts the rows of an aggregate after it has combined those of a task by key.
    """
    return sum(int(each["numRowsDroppedByWatermark"]) for each in progress["stateOperators"])


@dataclass(frozen=True, slots=True)
class _Span:
    """The position and the end of a topic, by partition."""

    topic: str
    starts: Mapping[int, int]
    ends: Mapping[int, int]
    shared: bool


def _spans(progress: Any, owners: Sequence[Hashable | None] | None) -> Iterable[_Span]:
    """Each log once: Spark has a source for each branch of its plan, and their positions may differ for a moment."""
    sources: Sequence[Any] = progress["sources"] if progress else ()
    found: dict[Hashable, _Span] = {}
    for number, source in enumerate(sources):
        owner = owners[number] if owners is not None else None
        for identity, span in _of(source):
            key = ((number,) if identity is None else identity) if owner is None else (owner,)
            found[key, span.topic] = _both(found.get((key, span.topic)), span)
    return found.values()


def _of(source: Any) -> Iterator[tuple[Hashable | None, _Span]]:
    """The topics of one source, each with an identity that distinguishes topics of one name."""
    end = _plain(source["latestOffset"])
    spooled: Mapping[str, Any] | None = end.get("behind")
    if spooled is not None:
        # A subscription: spooled and waiting messages, without partitions.
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
    """The offsets that our source or Spark's Kafka connector reported; None for other sources, or before the first."""
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
