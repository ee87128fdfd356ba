"""Programs in Go beside the tests, for what only a library of Go can show.

Go is optional: where it, or a module of a program, cannot be had, `missing` says why. A program is built once into
`$XDG_CACHE_HOME/anybroker` or `~/.cache/anybroker`, under a lock and by a hash of its source; once it is there, Go is
not asked for. A program that does not build fails.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from functools import cached_property
from pathlib import Path
from typing import Final

from tests.servers.kafka_jars import cache_root, locked

__all__ = ["GoProgram", "Missing"]

BUILD_SECONDS = 600.0
_FORGED = ("SECURITY ERROR", "checksum mismatch")


class Missing(Exception):
    """A program cannot be built here; the text says what is missing."""


class GoProgram:
    """A program with `main.go`, `go.mod` and `go.sum` in a directory beside this file.

    :param directory: its name, and that of the program in the cache.
    :param title: what needs Go, for messages.
    """

    def __init__(self, directory: str, title: str) -> None:
        self.source: Final = Path(__file__).with_name(directory)
        self.title: Final = title

    def path(self) -> Path:
        """The program, built if missing.

        :raises Missing: there is no Go, it is too old, or the modules cannot be had.
        :raises RuntimeError: it does not build, or a module is not the one that go.sum knows.
        """
        source = b"".join((self.source / name).read_bytes() for name in ("main.go", "go.mod", "go.sum"))
        place = cache_root() / f"{self.source.name}-{hashlib.sha256(source).hexdigest()[:12]}"
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            with locked(place.with_suffix(".lock")):
                if not place.exists():
                    self._build(self._find_go(), place)
        return place

    @cached_property
    def missing(self) -> str | None:
        """Why it cannot run here; None if it can."""
        try:
            self.path()
        except Missing as error:
            return str(error)
        return None

    def _find_go(self) -> str:
        go = shutil.which("go")
        if go is None:
            raise Missing(f"{self.title} needs Go, which is not on the PATH")
        wanted = re.search(r"^go (\d+)\.(\d+)", (self.source / "go.mod").read_text(), re.MULTILINE)
        # Without a go.mod it does not refuse.
        reported = _run([go, "version"], self.source.anchor).stdout
        found = re.search(r"go(\d+)\.(\d+)", reported)
        assert wanted is not None
        if found is None or tuple(map(int, found.groups())) < tuple(map(int, wanted.groups())):
            newest = ".".join(wanted.groups())
            raise Missing(f"{self.title} needs Go {newest} or newer; {go} says {reported.strip()!r}")
        return go

    def _build(self, go: str, place: Path) -> None:
        partial = place.with_name(f".{place.name}.partial")
        command = [go, "build", "-mod=readonly", "-trimpath", "-ldflags=-s -w", "-o", str(partial), "."]
        built = _run(command, str(self.source))
        if built.returncode:
            # Every module of go.mod is needed; a failed download means that one is missing.
            had = _run([go, "mod", "download"], str(self.source))
            if had.returncode and not any(sign in had.stdout for sign in _FORGED):
                raise Missing(f"{self.title} needs Go modules that cannot be had here: {had.stdout.strip()[-300:]}")
            raise RuntimeError(f"{self.source} does not build: {built.stdout[-3000:]}{had.stdout[-1000:]}")
        partial.rename(place)


def _run(command: list[str], directory: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=directory,
        # No C compiler, no other version of Go, no Go workspace of the user.
        env={**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off", "GOFLAGS": "-buildvcs=false"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
