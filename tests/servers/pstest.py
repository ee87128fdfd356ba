"""Google's `pstest`, a fake of Pub/Sub written apart from its emulator, as a second server for what that does not do.

It is a Go library; `pstest/main.go` serves it. Go is optional: where it, or a module of it, cannot be had, `missing`
says why. The program is built once into `$XDG_CACHE_HOME/anybroker` or `~/.cache/anybroker`, under a lock and by a
hash of its source; once it is there, Go is not asked for. A program that does not build fails.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.servers.kafka_jars import cache_root, locked
from tests.servers.pubsub import PubSubServer
from tests.servers.shared import Shared

__all__ = ["Missing", "make_server", "missing", "program", "shared_pstest"]

SOURCE = Path(__file__).with_name("pstest")
BUILD_SECONDS = 600.0
_FORGED = ("SECURITY ERROR", "checksum mismatch")


class Missing(Exception):
    """pstest cannot be built here; the text says what is missing."""


@cache
def program() -> Path:
    """The server's program, built if missing.

    :raises Missing: there is no Go, it is too old, or the modules cannot be had.
    :raises RuntimeError: it does not build, or a module is not the one that go.sum knows.
    """
    source = b"".join((SOURCE / name).read_bytes() for name in ("main.go", "go.mod", "go.sum"))
    place = cache_root() / f"pstest-{hashlib.sha256(source).hexdigest()[:12]}"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.with_suffix(".lock")):
            if not place.exists():
                _build(_find_go(), place)
    return place


@cache
def missing() -> str | None:
    """Why it cannot run here; None if it can."""
    try:
        program()
    except Missing as error:
        return str(error)
    return None


def make_server() -> PubSubServer:
    """A new server, not started."""
    return PubSubServer(lambda port: [str(program()), f"-port={port}"], "Serving on")


def shared_pstest() -> PubSubServer:
    """The server of this test process; skips the test if it cannot run."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    return _shared()


_shared = Shared.in_groups(make_server)


def _find_go() -> str:
    go = shutil.which("go")
    if go is None:
        raise Missing("Google's pstest needs Go, which is not on the PATH")
    wanted = re.search(r"^go (\d+)\.(\d+)", (SOURCE / "go.mod").read_text(), re.MULTILINE)
    # Without a go.mod it does not refuse.
    reported = _run([go, "version"], SOURCE.anchor).stdout
    found = re.search(r"go(\d+)\.(\d+)", reported)
    assert wanted is not None
    if found is None or tuple(map(int, found.groups())) < tuple(map(int, wanted.groups())):
        raise Missing(f"Google's pstest needs Go {'.'.join(wanted.groups())} or newer; {go} says {reported.strip()!r}")
    return go


def _build(go: str, place: Path) -> None:
    partial = place.with_name(f".{place.name}.partial")
    built = _run([go, "build", "-mod=readonly", "-trimpath", "-ldflags=-s -w", "-o", str(partial), "."], str(SOURCE))
    if built.returncode:
        # Every module of go.mod is needed; a failed download means that one is missing.
        had = _run([go, "mod", "download"], str(SOURCE))
        if had.returncode and not any(sign in had.stdout for sign in _FORGED):
            raise Missing(f"Google's pstest needs Go modules that cannot be had here: {had.stdout.strip()[-300:]}")
        raise RuntimeError(f"tests/servers/pstest does not build: {built.stdout[-3000:]}{had.stdout[-1000:]}")
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
