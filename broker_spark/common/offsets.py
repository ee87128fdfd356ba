"""The offsets of a source in Spark's checkpoint, as JSON. Refuses what another source wrote. Pure.

    {"source": "broker-log", "version": 1, "backend": "kafka", "topics": {"orders":
        {"identity": "5kd…", "next": {"0": 17, "1": 9}, "began": {"1": 0}}}}

`next` is the next offset to read. `began` is the first offset of partitions that are new in this batch (in the first
batch, of all), so that a batch which is run again reads the same. `initial` marks the start of a query without a batch,
which Spark does not store and requests again. `shared` means that the partitions of a topic share their offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, cast

from broker.errors import ConfigurationError
from broker.names import NativeName, known_name
from broker_spark.common.json_state import check_source
from broker_spark.common.options import NATIVE, topic_name

__all__ = ["ADVICE", "GONE", "LOG_SOURCE", "Offsets", "TopicOffsets"]

LOG_SOURCE: Final = "broker-log"
_VERSION: Final = 1
ADVICE: Final = "Give this query a checkpointLocation of its own"
GONE: Final = (
    "It was deleted, and its offsets mean nothing in another topic of its name: create it again, or read other topics, "
    "and give this query a checkpointLocation of its own"
)
"""The advice where a topic of a checkpoint is missing."""


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """How far a topic was read.

    :ivar next: the next offset of each partition.
    :ivar began: the first offset of partitions that are new in these offsets.
    :ivar behind: about how many unread rows lie before the end of a log whose offsets do not count rows.
    """

    identity: str | None
    next: Mapping[int, int]
    began: Mapping[int, int] = field(default_factory=dict[int, int])
    behind: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True)
class Offsets:
    """How far a source was read.

    :ivar initial: nothing was read; these offsets are the start of the first batch.
    :ivar shared: the partitions of a topic share their offsets.
    """

    backend: str
    topics: Mapping[str, TopicOffsets]
    initial: bool = False
    shared: bool = False

    def to_json(self) -> dict[str, Any]:
        """The object that Spark keeps."""
        return {
            "source": LOG_SOURCE,
            "version": _VERSION,
            "backend": self.backend,
            **({"initial": True} if self.initial else {}),
            **({"shared": True} if self.shared else {}),
            "topics": {
                _written(name): {
                    "identity": topic.identity,
                    "next": _numbered(topic.next),
                    **({"began": _numbered(topic.began)} if topic.began else {}),
                    **({"behind": _numbered(topic.behind)} if topic.behind else {}),
                }
                for name, topic in sorted(self.topics.items())
            },
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Offsets:
        """Parse what Spark kept.

        :raises ConfigurationError: another kind of source or another version wrote it, or it is incomplete.
        """
        check_source(given, LOG_SOURCE, _VERSION, ADVICE)
        try:
            topics = cast("Mapping[str, Mapping[str, Any]]", given["topics"])
            return cls(
                str(given["backend"]),
                {
                    _read(name): TopicOffsets(
                        topic["identity"],
                        _plain(topic["next"]),
                        _plain(topic.get("began", {})),
                        _plain(topic.get("behind", {})),
                    )
                    for name, topic in topics.items()
                },
                bool(given.get("initial")),
                bool(given.get("shared")),
            )
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            missing = f": {error} is missing" if isinstance(error, KeyError) else ": a value is not a number"
            raise ConfigurationError(
                f"The positions in the checkpoint are incomplete{missing}",
                advice="Restore the checkpoint from a copy, or give this query a new checkpointLocation",
            ) from error

    def check(self, backend: str, topics: Mapping[str, str | None], *, named: bool) -> None:
        """Check that these are offsets of the topics that are read.

        :param topics: the identities of the existing topics.
        :param named: the topics were given by name, not by a pattern.
        :raises ConfigurationError: the offsets are of another backend or topic, or a topic was recreated.
        """
        if backend != self.backend:
            _refuse(f"The checkpoint is of a query on {self.backend}, and this one reads {backend}")
        for name, kept in self.topics.items():
            if name not in topics:
                _refuse(
                    f"The checkpoint is of a query on topic {name!r}, and this one reads {', '.join(topics)}"
                    if named
                    else f"Topic {name!r} of the checkpoint does not exist any more, or does not match topicPattern"
                )
            identity = topics[name]
            if kept.identity is not None and identity is not None and kept.identity != identity:
                _refuse(
                    f"Topic {name!r} was deleted and recreated, or is that of another broker, since the checkpoint was "
                    f"written: its offsets mean other records ({kept.identity} then, {identity} now)"
                )


def _refuse(reason: str) -> NoReturn:
    raise ConfigurationError(reason, advice=ADVICE)


def _written(name: str) -> str:
    """A name as option `topic` takes it; JSON knows no native names."""
    return f"{NATIVE}{name}" if isinstance(name, NativeName) else name


def _read(text: str) -> str:
    return topic_name(text) if text.startswith(NATIVE) else known_name(text)


def _numbered(positions: Mapping[int, int]) -> dict[str, int]:
    return {str(partition): position for partition, position in sorted(positions.items())}


def _plain(positions: Mapping[str, int]) -> dict[int, int]:
    return {int(partition): int(position) for partition, position in positions.items()}
