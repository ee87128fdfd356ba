"""A message broker in memory, for unit tests and for trying things out: a real one, not a recorder.

It has leases, redelivery, attempts, a partitioned log with groups, rebalancing, offsets and transactions, a
clock that can be turned by hand, and faults on demand. Connect by `inmem:` or `inmem://name`, or give
`InmemSettings(broker=Broker(...))` to `broker.connect`. It lives and dies with its process.
"""

from broker_inmem.clock import Clock, ManualClock, SystemClock
from broker_inmem.faults import Faults
from broker_inmem.options import BrokerOptions
from broker_inmem.server import Broker
from broker_inmem.settings import InmemSettings

__all__ = ["Broker", "BrokerOptions", "Clock", "Faults", "InmemSettings", "ManualClock", "SystemClock"]
