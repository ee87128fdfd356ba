"""The stream of a topic: its subjects and partitions, looked up once per topic and cached until forgotten.

Safe to share between tasks of one loop; concurrent lookups of one topic agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from broker import BackendError, TopicNotFound, Unsupported
from broker.driver import reads_answer
from broker_jetstream.connection import Connection
from broker_jetstream.names import (
    PARTITIONS_KEY,
    TOMBSTONE_KEY,
    partition_subject,
    row_subject,
    rows_filter,
    schedule_subject,
    stream_name,
    subject_filter,
)

__all__ = ["MOST_PARTITIONS", "Layout", "Layouts", "layout_of", "stored_message"]

MOST_PARTITIONS: Final = 1024


class Layout(NamedTuple):
    """The stream of a topic.

    :ivar ours: made by `ensure_topic`; a foreign stream has one partition.
    :ivar tombstone_seconds: of a compacted topic: when the server removes a tombstone; None for any other topic.
    """

    topic: str
    stream: str
    partitions: int
    ours: bool
    subjects: tuple[str, ...]
    scheduled: bool
    tombstone_seconds: int | None = None

    @property
    def compacted(self) -> bool:
        return self.tombstone_seconds is not None

    def row_subject(self, partition: int, key: bytes) -> bytes:
        """The subject of a key of a compacted topic."""
        return row_subject(self.stream, partition, key).encode()

    def subject(self, partition: int) -> bytes:
        """The subject of a partition.

        :raises Unsupported: a foreign stream with several subjects, or with wildcards.
        """
        if self.ours:
            return partition_subject(self.stream, partition).encode()
        if len(self.subjects) == 1 and not {"*", ">"} & set(self.subjects[0].split(".")):
            return self.subjects[0].encode()
        raise Unsupported(
            f"Stream {self.stream!r} has the subjects {', '.join(self.subjects) or 'of other streams'}; "
            "a topic publishes to one",
            advice="Publish to a stream with one subject without wildcards, or to a topic made by ensure_topic",
        )

    def schedule(self, token: str) -> bytes:
        """The subject of a scheduled message."""
        return schedule_subject(self.stream, token).encode()

    @property
    def filter(self) -> str | None:
        """The subjects of all messages; None if they are all subjects of the stream."""
        if self.compacted:
            return rows_filter(self.stream)
        return subject_filter(self.stream) if self.ours else None

    def partition_filter(self, partition: int) -> str:
        """The subjects of one partition's messages."""
        if self.compacted:
            return rows_filter(self.stream, partition)
        return partition_subject(self.stream, partition) if self.ours else ">"


@reads_answer("The configuration of a stream")
def layout_of(topic: str, config: Mapping[str, Any]) -> Layout:
    """The layout in a stream's configuration."""
    metadata: Mapping[str, str] = config.get("metadata") or {}
    partitions = metadata.get(PARTITIONS_KEY, "")
    ours = partitions.isdecimal()
    number = int(partitions) if ours else 1
    if not 1 <= number <= MOST_PARTITIONS or not isinstance(config["name"], str):
        raise ValueError("an impossible name or number of partitions")
    tombstones = metadata.get(TOMBSTONE_KEY, "")
    return Layout(
        topic,
        config["name"],
        number,
        ours,
        tuple(config.get("subjects") or ()),
        bool(config.get("allow_msg_schedules")),
        int(tombstones) if ours and tombstones.isdecimal() else None,
    )


class Layouts:
    """The layouts of a connection's topics."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._known: dict[str, Layout] = {}

    async def find(self, topic: str, *, fresh: bool = False) -> Layout:
        """The layout of a topic.

        :param fresh: ask the server even if the layout is cached.
        :raises TopicNotFound: there is no such stream.
        """
        known = self._known.get(topic)
        if known is not None and not fresh:
            return known
        info = await self.info(topic)
        with reads_answer(f"Topic {topic!r}"):
            found = self._known[topic] = layout_of(topic, info["config"])
        return found

    async def info(self, topic: str) -> dict[str, Any]:
        """STREAM.INFO of a topic.

        :raises TopicNotFound: there is none.
        """
        stream = stream_name(topic)
        try:
            return await self._connection.api(f"STREAM.INFO.{stream}", what=f"Topic {topic!r}")
        except TopicNotFound as error:
            self.forget(topic)
            # The address of an embedded server means nothing to the user.
            where = self._connection.settings.embedded_url or self._connection.server
            raise TopicNotFound(f"Topic {topic!r} does not exist on {where}", native=error.native) from None

    def forget(self, topic: str) -> None:
        """Look the topic up again at the next `find`."""
        self._known.pop(topic, None)

    async def exists(self, topic: str) -> bool:
        """Whether the server has the topic's stream now."""
        try:
            await self.info(topic)
        except TopicNotFound:
            return False
        return True


_NO_MESSAGE: Final = 10037


async def stored_message(
    connection: Connection, stream: str, wanted: Mapping[str, Any], *, what: str
) -> dict[str, Any] | None:
    """One message; None if none matches. Read from the leader: a replica that is behind may answer a direct get.

    :param wanted: such as `{"seq": 1, "next_by_subj": "orders.>"}` or `{"last_by_subj": …}`.
    :param what: for errors: "Topic 'orders'".
    :raises TopicNotFound: there is no such stream. :raises BrokerError: by what the server says.
    """
    try:
        answer = await connection.api(f"STREAM.MSG.GET.{stream}", wanted, what=what)
    except BackendError as error:
        if f"err_code {_NO_MESSAGE}" not in error.message:
            raise
        return None
    with reads_answer(what):
        found: dict[str, Any] = answer["message"]
        found["seq"] = int(found["seq"])
    return found
