"""A message broker in memory, for unit tests and experiments.

It has leases, redelivery, delivery attempts, a partitioned log with groups, rebalancing, offsets and transactions, a
manual clock, and fault injection. Connect to `inmem:` or `inmem://name`, or pass `InmemSettings(broker=Broker(...))` to
`broker.connect`. It ends with its process.

Names are imported on first use, so pytest starts without the broker if no test needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from broker_inmem.clock import Clock, ManualClock, SystemClock
    from broker_inmem.faults import Faults
    from broker_inmem.options import BrokerOptions
    from broker_inmem.server import Broker
    from broker_inmem.settings import InmemSettings

__all__ = ["Broker", "BrokerOptions", "Clock", "Faults", "InmemSettings", "ManualClock", "SystemClock"]

_HOMES: Final = {
    "Broker": "server",
    "BrokerOptions": "options",
    "Clock": "clock",
    "Faults": "faults",
    "InmemSettings": "settings",
    "ManualClock": "clock",
    "SystemClock": "clock",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
