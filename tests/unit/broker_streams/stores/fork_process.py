"""Forks while it holds a state directory, releases that, and takes it again while the child lives."""

from __future__ import annotations

import os
import sys

from broker_streams.stores.directory import StateDirectory


def main(path: str) -> None:
    directory = StateDirectory(path, "group", "a")
    started, has_started = os.pipe()
    end, to_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(to_end)
        os.write(has_started, b"x")
        os.read(end, 1)
        os._exit(0)
    try:
        os.read(started, 1)
        directory.close()
        StateDirectory(path, "group", "a").close()
    finally:
        os.close(to_end)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
