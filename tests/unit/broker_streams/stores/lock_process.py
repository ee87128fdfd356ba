"""Holds the instance of a state directory until its input ends: `python -m ... DIRECTORY [INSTANCE]`."""

from __future__ import annotations

import sys

from broker_streams.stores.directory import StateDirectory


def main(path: str, instance: str | None = None) -> None:
    with StateDirectory(path, "group", instance) as directory:
        print(directory.instance, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
