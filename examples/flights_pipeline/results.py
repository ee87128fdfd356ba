"""Reads the output of the pipelines, topics and files, without Spark. Changes nothing.

A topic is written at least once: a message whose id was seen before is a copy and is skipped. The last message of a key
counts; all messages of a key are in one partition.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import pyarrow
from pyarrow import dataset

import broker
from examples.flights_pipeline.pipelines import joined_files
from examples.flights_pipeline.schemas import AircraftFigures, CarrierHour
from examples.flights_pipeline.topics import AIRCRAFT, DEAD, HOURS
from examples.flights_pipeline.transforms import JOINED

__all__ = ["Letter", "Results", "read_results"]

S = TypeVar("S")

Letter = tuple[str, bytes | None]
"""The reason of a dead letter, and its value."""


@dataclass(slots=True)
class Results:
    """The output.

    :ivar joined: a row per flight, from the files.
    :ivar hours: by carrier and hour.
    :ivar aircraft: by aircraft.
    :ivar letters: dead letters by the id of the original message.
    :ivar messages: number of messages in the topics.
    :ivar copies: messages whose id was seen before.
    :ivar letters_again: second dead letters of a message, with another id.
    """

    joined: pyarrow.Table
    hours: dict[tuple[str, str], CarrierHour] = field(default_factory=dict[tuple[str, str], CarrierHour])
    aircraft: dict[str, AircraftFigures] = field(default_factory=dict[str, AircraftFigures])
    letters: dict[str, Letter] = field(default_factory=dict[str, Letter])
    messages: int = 0
    copies: int = 0
    letters_again: int = 0


async def read_results(bus: broker.Bus, directory: Path) -> Results:
    """Read the whole output."""
    files = cast("Any", dataset).dataset(joined_files(directory), format="parquet")
    found = Results(files.to_table(columns=list(JOINED)))
    for hour in (await _last(bus, HOURS, CarrierHour, found)).values():
        found.hours[hour.carrier, hour.hour] = hour
    for figures in (await _last(bus, AIRCRAFT, AircraftFigures, found)).values():
        found.aircraft[figures.aircraft] = figures
    async for record in _new(bus, DEAD, found):
        letter = record.attributes["dead-letter-id"]
        found.letters_again += letter in found.letters
        found.letters[letter] = (record.attributes["dead-letter-reason"], record.data)
    return found


async def _last(bus: broker.Bus, topic: str, kind: type[S], found: Results) -> dict[bytes | None, S]:
    """The last payload of each key."""
    bodies = {record.key: record.data async for record in _new(bus, topic, found)}
    decoder = msgspec.json.Decoder(kind)
    return {key: decoder.decode(data or b"") for key, data in bodies.items()}


async def _new(bus: broker.Bus, topic: str, found: Results) -> AsyncIterator[broker.Record[bytes]]:
    """The records of a topic without copies, in order within a partition."""
    for partition in await bus.log.partitions(topic):
        ids: set[str] = set()
        async for batch in bus.log.read(topic, partition):
            for record in batch:
                found.messages += 1
                if record.id in ids:
                    found.copies += 1
                else:
                    ids.add(record.id)
                    yield record
