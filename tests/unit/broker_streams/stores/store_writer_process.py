"""Writes batches until it is killed: `python -m ... DIRECTORY KIND`. Says when each begins and when it is written.

Each batch writes the same 300 rows with its number, adds a row of its own and deletes that of the batch before it.
"""

from __future__ import annotations

import sys
from itertools import count

from broker_streams.stores.directory import StateDirectory
from tests.unit.broker_streams.stores.kinds import PERSISTENT

ROWS = 300


def main(directory: str, kind: str, durable: str) -> None:
    store = StateDirectory(directory, "group", "only").open(PERSISTENT[kind], "table.0")
    first = int(store.meta("batch") or b"0") + 1
    for number in count(first):
        text = b"%d" % number
        rows: dict[bytes, bytes | None] = dict.fromkeys((b"row %d" % row for row in range(ROWS)), text + b" " * 500)
        rows[b"only of " + text] = text
        rows[b"only of %d" % (number - 1)] = None
        print("begin", number, flush=True)
        store.write({"rows": rows, "due": {b"k" * 600: text}}, {"batch": text}, durable=durable == "durable")
        print("done", number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
