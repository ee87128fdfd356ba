"""In-memory brokers on which checkpoints are written in different ways."""

from __future__ import annotations

from dataclasses import dataclass, replace

from broker import Capabilities
from broker_inmem import BrokerOptions

__all__ = ["Limited"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited(BrokerOptions):
    """A broker that lacks something."""

    transactions: bool = True
    atomic: bool = True
    tables: bool = True
    rows: int | None = None
    tells_partitions: bool = True

    def capabilities(self) -> Capabilities:
        able = BrokerOptions.capabilities(self)
        publish = replace(
            able.publish,
            transactions=self.transactions,
            tables=self.tables,
            atomic_tables=self.atomic,
            table_rows=self.rows,
            partition_of=self.tells_partitions,
        )
        return replace(able, publish=publish)
