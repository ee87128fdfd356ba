"""Parses the group metadata of confluent-kafka. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from broker import ConfigurationError

__all__ = ["GroupMetadata", "parse_group_metadata"]

_MAGIC: Final = b"CGMDv2:"


class GroupMetadata(NamedTuple):
    """:ivar generation: of the group; with KIP-848 the member epoch."""

    group: str
    generation: int
    member: str


def parse_group_metadata(metadata: bytes) -> GroupMetadata:
    """Read what `Consumer.consumer_group_metadata()` returns.

    :raises ConfigurationError: the metadata is not in the format of librdkafka 2.16.
    """
    parts = metadata[len(_MAGIC) + 4 :].split(b"\0")
    if not metadata.startswith(_MAGIC) or len(parts) < 3:
        raise ConfigurationError(
            f"Not the group metadata of a consumer: {metadata[:40]!r}",
            advice="Pass the result of consumer_group_metadata() unchanged",
        )
    generation = int.from_bytes(metadata[len(_MAGIC) : len(_MAGIC) + 4], "little", signed=True)
    return GroupMetadata(parts[0].decode(), generation, parts[1].decode())
