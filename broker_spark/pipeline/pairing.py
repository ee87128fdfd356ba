"""Tells which source of a pipeline each position of its stream is of, since Spark keeps them without names.

Spark has a position for each branch of its plan, so a source may have several. Blocking: a broker is asked only where
two sources read topics of the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from broker.errors import BrokerError
from broker_spark.connections import bus_of
from broker_spark.offsets import Offsets
from broker_spark.options import SourceOptions
from broker_spark.pipeline.definition import Pipeline
from broker_spark.topics import identity_of

__all__ = ["paired"]


def paired(pipeline: Pipeline, positions: Iterable[Offsets | None]) -> list[str | None]:
    """The name of the source that each is of; None of a subscription, and where there is none any more."""
    sources = {name: each for name in pipeline.sources if (each := pipeline.parsed_options(name)).subscription is None}
    left = list(sources)
    names: list[str | None] = []
    for found in positions:
        if found is None:
            names.append(None)
            continue
        told = any(each.identity is not None for each in found.topics.values())
        fitting = [name for name, each in sources.items() if _reads(each, found)]
        if not told:
            fitting = [name for name in left if name in fitting] or fitting
        chosen = fitting[0] if fitting else None
        if len(fitting) > 1:
            chosen = next((name for name in fitting if _is_of(found, sources[name])), chosen)
        left = [name for name in left if name != chosen]
        names.append(chosen)
    return names


def _reads(options: SourceOptions, found: Offsets) -> bool:
    """Whether a source reads these topics, by their names."""
    if options.pattern is not None:
        return all(re.fullmatch(options.pattern, topic) for topic in found.topics)
    return set(found.topics) <= set(options.topics)


def _is_of(found: Offsets, options: SourceOptions) -> bool:
    """Whether positions are of these very topics, as far as their broker and they tell."""
    try:
        bus = bus_of(options.url)
        return bus.capabilities.backend == found.backend and all(
            kept.identity in {None, identity_of(bus, topic)} for topic, kept in found.topics.items()
        )
    except BrokerError:
        return False
