"""Fills a store up to a limit of the size of files: `python -m ... DIRECTORY KIND`. Ends with 0 if all is right."""

from __future__ import annotations

import resource
import sys

import pytest

from broker import StorageFailed
from broker_streams.stores.directory import StateDirectory
from tests.unit.broker_streams.stores.kinds import PERSISTENT

LIMIT = 3 << 20


def main(path: str, kind: str) -> None:
    factory = PERSISTENT[kind]
    with StateDirectory(path, "group") as directory:
        store = directory.open(factory, "table.0")
        store.write({"rows": {b"before": b"1"}}, {"batch": b"0"})
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, most))
        written = 0
        with pytest.raises(StorageFailed, match=path) as failed:
            for number in range(1, 100):
                rows = {b"%d %d" % (number, row): bytes((number,)) * 997 for row in range(200)}
                store.write({"rows": rows}, {"batch": b"%d" % number})
                written = number
        assert not failed.value.retriable
        assert failed.value.native is not None
        # All before is there, and nothing of the write that failed.
        assert store.meta("batch") == b"%d" % written
        assert store.count("rows") == 1 + 200 * written
        assert store.get("rows", b"before") == b"1"
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        if kind == "rocksdb":
            # It takes no more writes, not even those that it has in memory.
            with pytest.raises(StorageFailed):
                store.close()
            assert store.closed
            store = directory.open(factory, "table.0")
        store.write({"rows": {b"after": b"2"}}, {"batch": b"last"})
        store.close()
        store = directory.open(factory, "table.0")
        assert store.meta("batch") == b"last"
        assert store.count("rows") == 2 + 200 * written


if __name__ == "__main__":
    main(*sys.argv[1:])
