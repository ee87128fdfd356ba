"""The kinds of store, for tests that all of them pass."""

from __future__ import annotations

from typing import Final

import pytest

from broker_streams.stores.lmdb import Lmdb
from broker_streams.stores.memory import Memory
from broker_streams.stores.rocksdb import RocksDb
from broker_streams.stores.sqlite import Sqlite
from broker_streams.stores.store import StoreFactory

PERSISTENT: Final[dict[str, StoreFactory]] = {"lmdb": Lmdb(), "sqlite": Sqlite(), "rocksdb": RocksDb()}
ALL: Final[dict[str, StoreFactory]] = {"memory": Memory(), **PERSISTENT}

every_kind: Final = pytest.mark.parametrize("factory", ALL.values(), ids=ALL)
every_persistent_kind: Final = pytest.mark.parametrize("factory", PERSISTENT.values(), ids=PERSISTENT)
