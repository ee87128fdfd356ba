"""An engine with a store in memory and a clock that stands still, for tests of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from broker import Json, Text
from broker_streams import keys
from broker_streams.checkpoint import Checkpoint
from broker_streams.context import Context, Incoming
from broker_streams.engine import Effects, PartitionEngine
from broker_streams.graph import Group, Input
from broker_streams.stores.memory import Memory

IN = "in-topic"


class Table(dict[bytes, bytes]):
    """A table that is joined or looked up, or fails."""

    error: Exception | None = None

    def get(self, key: bytes) -> bytes | None:  # type: ignore[override]
        if self.error is not None:
            raise self.error
        return super().get(key)


class Rig:
    """The engine of a partition, and what its checkpoints have written.

    :ivar outputs: topic, key, data and id of what was published.
    """

    def __init__(self, group: Group, *, partition: int = 0, **options: Any) -> None:
        self.group = group
        self.partition = partition
        self.options = options
        self.time = 1_000_000.0
        self.slept: list[float] = []
        self.store = Memory().open(None, "rig")
        self.saved: bytes | None = None
        self.published: list[tuple[str, Any]] = []
        self.counts: dict[str, int] = {}
        self.next_offsets: dict[str, int] = {}
        self.engine = self.open()

    def open(self) -> PartitionEngine:
        return PartitionEngine(
            self.group,
            self.partition,
            self.store,
            checkpoint=None if self.saved is None else Checkpoint.unpack(self.saved),
            now=lambda: self.time,
            sleep=self._sleep,
            **self.options,
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds
        await asyncio.sleep(0)

    def message(
        self,
        key: str | None,
        value: Any,
        *,
        topic: str = IN,
        at: int | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> Incoming:
        """The next message of a topic; a value that is not bytes or None is encoded as JSON."""
        offset = self.next_offsets.get(topic, 0)
        self.next_offsets[topic] = offset + 1
        data = value if value is None or isinstance(value, bytes) else Json().encode(value)
        return Incoming(topic, offset, None if key is None else keys.encode(key), data, at, attributes)

    def send(self, key: str | None, value: Any = 1, **options: Any) -> None:
        """Let the engine handle one message."""
        self.handle([self.message(key, value, **options)])

    def handle(self, messages: Sequence[Incoming]) -> int:
        """Handle messages without an event loop, as a runner may if nothing waits."""
        return drive(self.engine.handle(messages))

    def advance(self, seconds: float) -> None:
        self.time += seconds
        drive(self.engine.advance())

    def checkpoint(self) -> Effects:
        """Take a checkpoint, and write it."""
        effects = self.engine.take()
        self.write(effects)
        return effects

    def write(self, effects: Effects) -> None:
        self.store.write({keys.ROWS: effects.rows, keys.DUE: effects.due})
        self.saved = effects.checkpoint.pack()
        self.published += effects.outputs
        for what, count in effects.counts.items():
            self.counts[what] = self.counts.get(what, 0) + count
        self.engine.settled(effects)

    def restart(self) -> None:
        """Lose everything since the last checkpoint, in another process."""
        self.engine = self.open()

    def rows(self) -> dict[str, Any]:
        """The rows of the store, decoded as JSON."""
        return {
            keys.decode(key): Json().decode(data)
            for key, data in self.store.items(keys.ROWS)
            if not keys.is_reserved(key)
        }

    def agendas(self) -> dict[bytes, bytes]:
        return {key: data for key, data in self.store.items(keys.ROWS) if keys.user_key(key) is not None}

    def due(self) -> list[bytes]:
        return [key for key, _ in self.store.items(keys.DUE)]

    def values(self, topic: str) -> list[Any]:
        """What was published to a topic, decoded as JSON."""
        return [
            None if message.data is None else Json().decode(message.data)
            for to, message in self.published
            if to == topic
        ]

    def ids(self) -> list[str]:
        return [message.id for _, message in self.published]


def drive(coroutine: Any) -> Any:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError("The engine waits")


def group_of(callback: Callable[[Context, Any], Any], *edges: Any, name: str = "group", **options: Any) -> Group:
    """A group with one input of JSON."""
    return Group(name, Input(IN, options.pop("codec", Json()), callback, **options), *edges)


def text_input(topic: str, callback: Callable[[Context, Any], Any], **options: Any) -> Input[Any]:
    return Input(topic, Text(), callback, **options)
