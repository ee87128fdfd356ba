"""The lease of a spool: one query owns it. Blocking; one caller at a time.

An owner is a file `owners/<epoch>-<token>.json` that only its owner writes; the highest name owns the spool. A query
that takes over writes a higher name first and reads the segments after that; an owner checks that it still is the owner
between writing a segment and acking it. So either the new owner counts a segment, or the old owner acks nothing.

An owner on this machine is dead when its process is. An owner on another machine is dead after `DEAD_AFTER_SECONDS`
without a heartbeat.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from broker.errors import BrokerError, ConfigurationError
from broker.hooks import logger
from broker_spark.common.files import Files

__all__ = ["DEAD_AFTER_SECONDS", "HEARTBEAT_SECONDS", "OWNERS", "Lease", "Owner"]

HEARTBEAT_SECONDS: Final = 5.0
"""Seconds between heartbeats."""
DEAD_AFTER_SECONDS: Final = 30.0
"""Seconds without a heartbeat after which an owner on another machine is dead."""
LOCAL_WAIT_SECONDS: Final = 5.0
"""Seconds to wait for an owner on this machine, such as a query that was just stopped."""
_POLL_SECONDS: Final = 0.2
OWNERS: Final = "owners"

_mine: Final[set[str]] = set()
"""The tokens of owners in this process."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The contents of an owner's file.

    :ivar machine: identifies machine, boot and container.
    :ivar started: the start of the process in clock ticks since boot; 0 if unknown.
    :ivar beat: the number of heartbeats.
    :ivar acked: segments below this number are acked.
    :ivar epochs: the first segment and the token of each owner that has segments; None until the owner has read them.
    :ivar released: the owner released the spool.
    """

    epoch: int
    token: str
    host: str
    machine: str
    pid: int
    started: int
    since: str
    beat: int = 0
    acked: int = 0
    epochs: list[list[Any]] | None = field(default=None)
    released: bool = False

    @property
    def name(self) -> str:
        """The name of the file; the highest one owns."""
        return f"{self.epoch:08d}-{self.token}.json"

    @property
    def shown(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Lease:
    """Made by `claim`.

    :ivar before: the last owner that read its segments; None if there was none.
    """

    def __init__(self, files: Files, place: str, mine: Owner) -> None:
        self._files = files
        self._place = place
        self._mine = mine
        self._is_written = False
        self.before: Owner | None = None

    @classmethod
    def claim(cls, files: Files, place: str) -> Lease:
        """Claim the spool once the previous owner is dead.

        :raises ConfigurationError: a living query owns it.
        """
        found = _newest(files)
        if found is not None and not _is_dead(files, found):
            raise ConfigurationError(
                f"The spool {place} belongs to another query: {found.shown}",
                advice="Stop that query, or give this one a spool and a subscription of its own; a query cannot join a "
                "subscription with itself",
            )
        mine = Owner(
            (found.epoch if found else 0) + 1,
            uuid.uuid4().hex[:12],
            socket.gethostname(),
            _machine(),
            os.getpid(),
            _started(os.getpid()),
            datetime.now(UTC).isoformat(timespec="seconds"),
        )
        _mine.add(mine.token)
        lease = cls(files, place, mine)
        lease._write()
        lease.check()
        # Includes owners that came in between. An owner that did not read the segments wrote none.
        owners = (_read(files, name) for name in sorted(files.names(OWNERS), reverse=True) if name < mine.name)
        lease.before = next((owner for owner in owners if owner is not None and owner.epochs is not None), None)
        return lease

    @property
    def token(self) -> str:
        return self._mine.token

    @property
    def acked(self) -> int:
        """Segments below this number are recorded as acked."""
        return self._mine.acked

    @property
    def epochs(self) -> list[list[Any]]:
        return self._mine.epochs or []

    def begin(self, epochs: list[list[Any]], acked: int) -> None:
        """Record the state that was read, and delete the files of previous owners."""
        self._mine = replace(self._mine, epochs=epochs, acked=acked)
        self._write()
        for name in self._files.names(OWNERS):
            if name < self._mine.name:
                self._files.delete(f"{OWNERS}/{name}")
        self._files.sweep(OWNERS, below=self._mine.name)

    def beat(self, *, acked: int | None = None, epochs: list[list[Any]] | None = None) -> None:
        """Write a heartbeat, with changes."""
        mine = self._mine
        self._mine = replace(
            mine,
            beat=mine.beat + 1,
            acked=mine.acked if acked is None else acked,
            epochs=mine.epochs if epochs is None else epochs,
        )
        self._write()

    def check(self) -> None:
        """:raises ConfigurationError: another query took over the spool, or it was removed."""
        names = self._files.names(OWNERS)
        if not names or names[-1] == self._mine.name:
            if names:
                return
            raise ConfigurationError(
                "The spool was removed while a query used it", advice="Stop the query before you remove its spool"
            )
        other = _read(self._files, names[-1])
        raise ConfigurationError(
            f"Another query took over this spool: {other.shown if other else names[-1]}",
            advice="One query owns a spool; stop one of them, or give it a spool and a subscription of its own",
        )

    def release(self, *, acked: int | None = None) -> None:
        """Let the next owner claim the spool at once.

        Never raises. A failed write is logged; then only this process can claim the spool at once.
        """
        mine = self._mine
        _mine.discard(mine.token)
        self._mine = replace(mine, acked=mine.acked if acked is None else acked, released=True)
        try:
            self._write()
        except (BrokerError, OSError) as error:
            text = "The spool %s could not be released, and is owned by this process until it ends: %s"
            logger.warning(text, self._place, error)

    def _write(self) -> None:
        text = json.dumps(asdict(self._mine)).encode()
        try:
            self._files.write(f"{OWNERS}/{self._mine.name}", lambda file: file.write(text))
        except FileNotFoundError:
            # A new owner deletes incomplete files. Or the directory cannot be created at all.
            if self._is_written or self._files.names(OWNERS):
                self.check()
            raise
        self._is_written = True


def _newest(files: Files) -> Owner | None:
    for name in reversed(files.names(OWNERS)):
        owner = _read(files, name)
        if owner is not None:
            return owner
    return None


def _read(files: Files, name: str) -> Owner | None:
    try:
        return Owner(**json.loads(files.read(f"{OWNERS}/{name}")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        # Its owner may be alive, so the file must not be ignored.
        raise ConfigurationError(
            f"The spool's file {OWNERS}/{name} is incomplete: {error}",
            advice="Start again: another process may be writing it. Delete it if no query uses the spool",
        ) from error


def _is_dead(files: Files, owner: Owner) -> bool:
    """Whether the owner is dead or released the spool. Waits `LOCAL_WAIT_SECONDS` or `DEAD_AFTER_SECONDS` at most."""
    here = owner.machine == _machine()
    deadline = time.monotonic() + (LOCAL_WAIT_SECONDS if here else DEAD_AFTER_SECONDS)
    name = owner.name
    while True:
        now = _read(files, name)
        if now is None or now.released:
            return True
        if here and not _runs(now):
            return True
        if not here and now.beat != owner.beat:
            return False
        if time.monotonic() >= deadline:
            return not here
        time.sleep(_POLL_SECONDS)


def _runs(owner: Owner) -> bool:
    if owner.pid == os.getpid():
        return owner.token in _mine
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not owner.started or owner.started == _started(owner.pid)


def _started(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if unknown, -1 if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    # A zombie is dead.
    return -1 if fields[0] in {"Z", "X"} else int(fields[19])


def _machine() -> str:
    parts = [socket.gethostname()]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: str(Path("/proc/self/ns/pid").readlink()),
    ):
        try:
            parts.append(read())
        except OSError:
            parts.append("")
    return " ".join(parts)
