"""Reads the group metadata that the client library hands out. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from broker import ConfigurationError

__all__ = ["GroupMetadata", "parse_group_metadata"]

_MAGIC: Final = b"CGMDv2:"


class GroupMetadata(NamedTuple):
    """:ivar generation: of the group, or the member's epoch in the KIP-848 protocol."""

    group: str
    generation: int
    member: str


def parse_group_metadata(metadata: bytes) -> GroupMetadata:
    """Read what `Consumer.consumer_group_metadata()` returns.

    :raises ConfigurationError: it is not in the form that this version of the library writes.
    """
    parts = metadata[len(_MAGIC) + 4 :].split(b"\0")
    if not metadata.startswith(_MAGIC) or len(parts) < 3:
        raise ConfigurationError(
            f"Not the group metadata of a consumer: {metadata[:40]!r}",
            advice="Give what consumer_group_metadata() returns, unchanged",
        )
    generation = int.from_bytes(metadata[len(_MAGIC) : len(_MAGIC) + 4], "little", signed=True)
    return GroupMetadata(parts[0].decode(), generation, parts[1].decode())
