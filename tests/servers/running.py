"""Runs setup programs of the tests. Blocking; for any thread."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["run_to_end"]


def run_to_end(
    command: Sequence[str],
    failure: str,
    *,
    seconds: float,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a program; its output is part of the error if it fails.

    :param failure: what is to be told then.
    :param seconds: how long it may take. Who has its output is waited for as well.
    :param folder: where it runs; by default here.
    :param variables: of the environment, beside ours.
    :raises RuntimeError: it fails, or does not end in time, when it is killed.
    """
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode("utf-8", "replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        raise RuntimeError(f"{failure} ({command[0]} did not end within {seconds:g} s): {said[-3000:]}") from None
    if done.returncode:
        raise RuntimeError(f"{failure} ({command[0]} ended with {done.returncode}): {done.stdout[-3000:]}")
