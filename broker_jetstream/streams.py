"""How a topic lies in its stream: subjects and partitions. Looked up once per topic and kept until told otherwise.

Safe to share between tasks of one loop; two lookups of one topic may run at once and agree.

MERGED broker_jetstream.streams: What a stream holds, by the word of its leader: a direct get may be answered by a replica that is behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from broker import BackendError, TopicNotFound, Unsupported
from broker_jetstream.connection import Connection
from broker_jetstream.names import PARTITIONS_KEY, partition_subject, schedule_subject, stream_name, subject_filter

__all__ = ["Layout", "Layouts", "layout_of", "stored_message"]


class Layout(NamedTuple):
    """Where the messages of a topic are.

    :ivar ours: it was made as a topic; else it is a stream of somebody else's, which has one partition.
    """

    topic: str
    stream: str
    partitions: int
    ours: bool
    subjects: tuple[str, ...]
    scheduled: bool

    def subject(self, partition: int) -> bytes:
        """Where to publish to a partition.

        :raises Unsupported: the stream is a foreign one that does not say where.
        """
        if self.ours:
            return partition_subject(self.stream, partition).encode()
        if len(self.subjects) == 1 and not {"*", ">"} & set(self.subjects[0].split(".")):
            return self.subjects[0].encode()
        raise Unsupported(
            f"Stream {self.stream!r} takes the subjects {', '.join(self.subjects) or 'of other streams'}, "
            "and a topic has only one name",
            advice="Publish to a stream with one subject without wildcards, or to a topic made by ensure_topic",
        )

    def schedule(self, token: str) -> bytes:
        """Where to put a message that waits for its time."""
        return schedule_subject(self.stream, token).encode()

    @property
    def filter(self) -> str | None:
        """The subjects of all messages; None where it is all that the stream has."""
        return subject_filter(self.stream) if self.ours else None

    def partition_filter(self, partition: int) -> str:
        """The subjects of one partition's messages."""
        return partition_subject(self.stream, partition) if self.ours else ">"


def layout_of(topic: str, config: Mapping[str, Any]) -> Layout:
    """The layout that a stream's configuration says."""
    metadata: Mapping[str, str] = config.get("metadata") or {}
    partitions = metadata.get(PARTITIONS_KEY, "")
    ours = partitions.isdecimal()
    return Layout(
        topic,
        config["name"],
        int(partitions) if ours else 1,
        ours,
        tuple(config.get("subjects") or ()),
        bool(config.get("allow_msg_schedules")),
    )


class Layouts:
    """The layouts of a connection's topics."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._known: dict[str, Layout] = {}

    async def find(self, topic: str, *, fresh: bool = False) -> Layout:
        """The layout of a topic.

        :param fresh: ask the server even if it is known.
        :raises TopicNotFound: there is no such stream.
        """
        known = self._known.get(topic)
        if known is not None and not fresh:
            return known
        info = await self.info(topic)
        found = self._known[topic] = layout_of(topic, info["config"])
        return found

    async def info(self, topic: str) -> dict[str, Any]:
        """What the server says of a topic's stream.

        :raises TopicNotFound: there is none.
        """
        stream = stream_name(topic)
        try:
            return await self._connection.api(f"STREAM.INFO.{stream}", what=f"Topic {topic!r}")
        except TopicNotFound as error:
            self.forget(topic)
            # The address of a server that is ours is nobody's to know.
            where = self._connection.settings.private or self._connection.server
            raise TopicNotFound(f"Topic {topic!r} does not exist on {where}", native=error.native) from None

    def forget(self, topic: str) -> None:
        """The topic changed or is gone."""
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
    """One message as the API shows it; None if the stream has none such.

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
    found: dict[str, Any] = answer["message"]
    return found
