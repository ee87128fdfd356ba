"""`FileOffsetStore`: positions in a directory, one JSON file per group.

*Concurrency.* Any number of tasks, threads and processes of one machine may use a directory: each change holds a lock
on the group's file, for one read and one write of it. Not for network file systems without locks. *Failure.* A file is
replaced as a whole, and both it and its directory are synchronised to disk before a commit is answered: after a crash
there is the old or the new content, never half. A file that cannot be read is an error, never "no positions"; so is a
lock that another process, which stands still, does not give back in time.
*Cancellation.* At once while it waits for the lock, which needs no thread. A read or a write runs in a thread and goes
on; a cancelled write may have taken effect.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Annotated, Final
from urllib.parse import quote

import msgspec

from broker import BackendError, BrokerError, Closed, ConfigurationError, SettleError, TopicPartition
from broker.driver import check_seconds, refused
from broker_kafka.offsets import fencing
from broker_kafka.offsets.arguments import check_claim, check_commit, check_fetch, check_group, check_reset
from broker_kafka.offsets.fencing import UNCLAIMED, Entries, Entry
from broker_kafka.offsets.protocol import CommitResults, FetchResults, GroupMember, StoredOffset

__all__ = ["FileOffsetStore"]

_VERSION: Final = 1
_LONGEST_NAME: Final = 250
"""Characters of a group in the name of its file; file systems take 255 bytes, and `.json` and `.lock` need five."""
_SHOWN: Final = 100
"""Characters of a longer one that the name of its file begins with."""
_SHORTEST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.05
"""Seconds between two tries to get a lock."""


class _Line(msgspec.Struct, omit_defaults=True):
    topic: Annotated[str, msgspec.Meta(min_length=1)]
    partition: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    metadata: str = ""
    generation: int = UNCLAIMED
    member: str = ""
    topic_id: str = ""


class _Content(msgspec.Struct):
    version: int
    group: str
    positions: list[_Line]


class FileOffsetStore:
    """Implements `OffsetStore`.

    :param directory: made if it is missing.
    :param lock_timeout: seconds in which a change, by `claim`, `commit` or `reset`, has to get the lock of its group;
        a SettleError that names the lock's file is the answer otherwise.
    :raises ConfigurationError: the directory is no path or empty, cannot be made, or is a file; or the time is none
        above 0.
    """

    def __init__(self, directory: str | os.PathLike[str], *, lock_timeout: float = 10.0) -> None:
        check_seconds("lock_timeout", lock_timeout)
        try:
            self._directory = Path(directory)
        except TypeError:
            raise refused("directory", directory, "a path, as str or Path") from None
        if not os.fspath(directory) or "\0" in str(directory):
            raise refused("directory", directory, "a path that is not empty and has no NUL")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"The directory {str(directory)!r} cannot be used for offsets: {error.strerror}",
                native=error,
                advice="Name a directory that this process may write",
            ) from error
        self._lock_timeout = lock_timeout
        self._closed = False

    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> FetchResults:
        self._check()
        check_fetch(group, partitions)
        try:
            entries = await asyncio.to_thread(self._read, group)
        except (OSError, BackendError) as error:
            return dict.fromkeys(partitions, _unusable(self._path(group), error))
        return {partition: fencing.position_of(entries, partition) for partition in partitions}

    async def claim(
        self, owner: GroupMember, partitions: Sequence[TopicPartition], *, restarted: bool = False
    ) -> FetchResults:
        self._check()
        check_claim(owner, partitions)
        results: dict[TopicPartition, StoredOffset | BrokerError | None] = {}

        def change(entries: Entries) -> None:
            results.update(fencing.claim(entries, owner, partitions, restarted))

        error = await self._change(owner.group, change)
        return results if error is None else dict.fromkeys(partitions, error)

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        self._check()
        check_commit(owner, positions)
        results: dict[TopicPartition, BrokerError | None] = {}

        def change(entries: Entries) -> None:
            results.update(fencing.commit(entries, owner, positions, rewind))

        error = await self._change(owner.group, change)
        # Nothing was written, so what was refused for a reason of its own keeps that.
        return results if error is None else {partition: results.get(partition) or error for partition in positions}

    async def reset(self, group: str, positions: Mapping[TopicPartition, StoredOffset]) -> CommitResults:
        self._check()
        check_reset(group, positions)
        return dict.fromkeys(positions, await self._change(group, lambda entries: fencing.put_back(entries, positions)))

    async def stored(self, group: str) -> FetchResults:
        self._check()
        check_group(group)
        try:
            entries = await asyncio.to_thread(self._read, group)
        except (OSError, BackendError) as error:
            raise _unusable(self._path(group), error) from error
        return {partition: entry.position for partition, entry in sorted(entries.items()) if entry.offset is not None}

    async def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise Closed("The offset store is closed")

    def _path(self, group: str) -> Path:
        # A dot is quoted too, so that no group is called like a directory or a lock.
        name = quote(group, safe="").replace(".", "%2E")
        if len(name) > _LONGEST_NAME:
            # Nothing that is quoted has a plus, so that no other group has this name.
            name = f"{name[:_SHOWN]}+{sha256(group.encode()).hexdigest()}"
        return self._directory / f"{name}.json"

    async def _change(self, group: str, change: Callable[[Entries], None]) -> SettleError | None:
        deadline, pause = monotonic() + self._lock_timeout, _SHORTEST_PAUSE
        try:
            # Each try is short, so that whoever waits keeps no thread, and can be cancelled.
            while not await asyncio.to_thread(self._try_to_change, group, change):
                if monotonic() >= deadline:
                    return self._locked(group)
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
        except (OSError, BackendError) as error:
            return _unusable(self._path(group), error)
        return None

    def _try_to_change(self, group: str, change: Callable[[Entries], None]) -> bool:
        """False if somebody else has the lock."""
        with self._lock(group) as held:
            if held:
                entries = self._read(group)
                before = dict(entries)
                change(entries)
                if entries != before:
                    self._write(group, entries)
            return held

    @contextmanager
    def _lock(self, group: str) -> Generator[bool]:
        """Take the lock of a group if it is free; whether it was."""
        descriptor = os.open(self._lock_path(group), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def _lock_path(self, group: str) -> Path:
        # A file of its own, since the content is replaced and a lock stays with the file it was taken on.
        return self._path(group).with_suffix(".lock")

    def _locked(self, group: str) -> SettleError:
        return SettleError(
            f"The offsets of group {group!r} cannot be changed: others held the lock {str(self._lock_path(group))!r} "
            f"for {self._lock_timeout:g} s",
            retriable=True,
            advice="Resume or end the process that stands still with it, which `lslocks` names; or raise lock_timeout",
        )

    def _read(self, group: str) -> Entries:
        path = self._path(group)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return {}
        try:
            content = msgspec.json.decode(text, type=_Content)
        except msgspec.MsgspecError as error:
            raise BackendError(f"it is no file of offsets: {error}", native=error) from error
        if content.version != _VERSION or content.group != group:
            raise BackendError(
                f"it is of version {content.version} and group {content.group!r}, "
                f"not of version {_VERSION} and {group!r}"
            )
        entries: Entries = {}
        for line in content.positions:
            partition = TopicPartition(line.topic, line.partition)
            if partition in entries:
                raise BackendError(f"it tells twice of partition {line.partition} of topic {line.topic!r}")
            entries[partition] = Entry(line.offset, line.metadata, line.generation, line.member, line.topic_id)
        return entries

    def _write(self, group: str, entries: Mapping[TopicPartition, Entry]) -> None:
        lines = [_Line(*partition, *entry) for partition, entry in sorted(entries.items())]
        text = msgspec.json.format(msgspec.json.encode(_Content(_VERSION, group, lines)), indent=1)
        path = self._path(group)
        temporary = path.with_suffix(".new")
        with temporary.open("wb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unusable(path: Path, error: Exception) -> SettleError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return SettleError(
        f"The offsets in {str(path)!r} cannot be used: {reason}",
        native=error,
        retriable=isinstance(error, OSError),
        advice="Make the file readable and writable, or put back a copy of it",
    )
