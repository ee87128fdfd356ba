"""Who owns a spool. Blocking; one caller at a time.

An owner is a file of its own, `owners/<epoch>-<token>.json`, which nobody else writes; the highest name owns. Who takes
over writes a higher one and looks at the segments only then, and an owner makes sure that it still is one between the
write of a segment and its ack. So one that was taken for dead and wakes up either had its segment counted, or acks
nothing.

A dead owner is known at once if it was a process of this machine; else it has to be silent for `SILENCE` seconds.
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

__all__ = ["BEAT", "SILENCE", "Lease", "Owner"]

BEAT: Final = 5.0
"""Seconds between signs of life."""
SILENCE: Final = 30.0
"""Seconds without one after which an owner on another machine is dead."""
PATIENCE: Final = 5.0
"""Seconds that an owner on this machine gets to end, as a query that was just stopped does."""
_GLANCE: Final = 0.2
_DIRECTORY: Final = "owners"

_mine: Final[set[str]] = set()
"""The tokens of owners in this process."""


@dataclass(frozen=True, slots=True)
class Owner:
    """What an owner says of itself.

    :ivar machine: another one on each machine, after each boot, and in each container.
    :ivar started: when its process did, in the machine's own count; 0 where nobody tells.
    :ivar beat: grows with each sign of life.
    :ivar acked: segments below this number are acked.
    :ivar epochs: the first segment and the token of each owner, as far back as there are segments; None until it knows.
    :ivar released: it ended orderly.
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
        """Of its file; the highest owns."""
        return f"{self.epoch:08d}-{self.token}.json"

    @property
    def shown(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Lease:
    """Made by `claim`.

    :ivar before: the last owner that knew what it had; None if there was none.
    """

    def __init__(self, files: Files, place: str, mine: Owner) -> None:
        self._files = files
        self._place = place
        self._mine = mine
        self._there = False
        self.before: Owner | None = None

    @classmethod
    def claim(cls, files: Files, place: str) -> Lease:
        """Own the spool, once the owner before is dead.

        :raises ConfigurationError: a living query owns it.
        """
        found = _newest(files)
        if found is not None and not _is_dead(files, found):
            raise ConfigurationError(
                f"The spool {place} belongs to another query: {found.shown}",
                advice="Stop that query, or give this one a spool and a subscription of its own; a query that joins a "
                "queue with itself reads it twice, which cannot be",
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
        # One that came between counts too; one that never knew what it had wrote nothing.
        owners = (_read(files, name) for name in sorted(files.names(_DIRECTORY), reverse=True) if name < mine.name)
        lease.before = next((owner for owner in owners if owner is not None and owner.epochs is not None), None)
        return lease

    @property
    def token(self) -> str:
        return self._mine.token

    @property
    def acked(self) -> int:
        """What is on record."""
        return self._mine.acked

    @property
    def epochs(self) -> list[list[Any]]:
        return self._mine.epochs or []

    def begin(self, epochs: list[list[Any]], acked: int) -> None:
        """Say what there is; owners before are not needed any more."""
        self._mine = replace(self._mine, epochs=epochs, acked=acked)
        self._write()
        for name in self._files.names(_DIRECTORY):
            if name < self._mine.name:
                self._files.delete(f"{_DIRECTORY}/{name}")
        self._files.sweep(_DIRECTORY, below=self._mine.name)

    def beat(self, *, acked: int | None = None, epochs: list[list[Any]] | None = None) -> None:
        """Give a sign of life, with what is new."""
        mine = self._mine
        self._mine = replace(
            mine,
            beat=mine.beat + 1,
            acked=mine.acked if acked is None else acked,
            epochs=mine.epochs if epochs is None else epochs,
        )
        self._write()

    def check(self) -> None:
        """Make sure that nobody took over.

        :raises ConfigurationError: somebody did.
        """
        names = self._files.names(_DIRECTORY)
        if not names or names[-1] == self._mine.name:
            if names:
                return
            raise ConfigurationError(
                "The spool was removed while a query used it", advice="Stop a query before its spool is removed"
            )
        other = _read(self._files, names[-1])
        raise ConfigurationError(
            f"Another query took over this spool: {other.shown if other else names[-1]}",
            advice="One query owns a spool; stop one of them, or give it a spool and a subscription of its own",
        )

    def release(self, *, acked: int | None = None) -> None:
        """Let the next one have it at once, with what is new.

        Never raises. Where it cannot be written that is warned of, and the next one in this process has it even so.
        """
        mine = self._mine
        _mine.discard(mine.token)
        self._mine = replace(mine, acked=mine.acked if acked is None else acked, released=True)
        try:
            self._write()
        except (BrokerError, OSError) as error:
            told = "The spool %s has no word of its query's end, and belongs to this process until that ends: %s"
            logger.warning(told, self._place, error)

    def _write(self) -> None:
        text = json.dumps(asdict(self._mine)).encode()
        try:
            self._files.write(f"{_DIRECTORY}/{self._mine.name}", lambda file: file.write(text))
        except FileNotFoundError:
            # Who took over sweeps away what is half written; or there never was a place to write to.
            if self._there or self._files.names(_DIRECTORY):
                self.check()
            raise
        self._there = True


def _newest(files: Files) -> Owner | None:
    for name in reversed(files.names(_DIRECTORY)):
        owner = _read(files, name)
        if owner is not None:
            return owner
    return None


def _read(files: Files, name: str) -> Owner | None:
    try:
        return Owner(**json.loads(files.read(f"{_DIRECTORY}/{name}")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        # Not for nobody: who wrote it may live.
        raise ConfigurationError(
            f"The spool's file {_DIRECTORY}/{name} is incomplete: {error}",
            advice="Start again, as it may be written just now; remove it if no query uses the spool",
        ) from error


def _is_dead(files: Files, owner: Owner) -> bool:
    """Whether it is gone, or goes while it is watched."""
    here = owner.machine == _machine()
    deadline = time.monotonic() + (PATIENCE if here else SILENCE)
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
        time.sleep(_GLANCE)


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
    """The same for a process as long as it lives; 0 where nobody tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    # A zombie only waits to be buried.
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
