"""Shows the last output of a pytest-xdist worker that died, and its signal: hooks for the controlling process.

What a worker writes goes to a file that pytest gives to its tests, and is lost with the worker; so is the signal. The
traceback that faulthandler writes is not enough: a thread of a client library that has blocked all signals ends the
process without one.
"""

from __future__ import annotations

import signal
import stat
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import pytest

__all__ = ["pytest_testnodedown", "pytest_testnodeready"]

_MOST: Final = 4_000
_files: Final[dict[Any, list[BinaryIO]]] = {}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node: Any) -> None:
    """Hold on to the files that the worker's tests write to, which have no names."""
    process = _process(node)
    if process is not None:
        files = _files[node] = []
        for path in sorted(Path(f"/proc/{process.pid}/fd").glob("*")):
            with suppress(OSError):
                found = path.stat()
                if stat.S_ISREG(found.st_mode) and not found.st_nlink:
                    files.append(path.open("rb"))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Print how a worker ended unexpectedly."""
    files = _files.pop(node, [])
    process = _process(node)
    if error and process is not None:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(10)
            print(f"\n[{node.gateway.id}] ended by {signal.Signals(-code).name if code < 0 else f'exit code {code}'}")  # noqa: T201
        for file in files:
            if said := file.read()[-_MOST:].decode(errors="replace").strip():
                print(f"[{node.gateway.id}] said last:\n{said}")  # noqa: T201
    for file in files:
        file.close()


def _process(node: Any) -> subprocess.Popen[bytes] | None:
    """The worker, if it is a child of this process."""
    return getattr(getattr(node.gateway, "_io", None), "popen", None)
