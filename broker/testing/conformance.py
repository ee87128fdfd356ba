"""`Conformance`, the class of all conformance tests, and the classes of the areas."""

from __future__ import annotations

from broker.testing.areas.admin import Administration
from broker.testing.areas.as_messages import AsMessages
from broker.testing.areas.blocking import Blocking
from broker.testing.areas.cancelling import Cancelling
from broker.testing.areas.closing import Closing
from broker.testing.areas.commits import Commits
from broker.testing.areas.dead_letters import DeadLetters
from broker.testing.areas.delivery import Delivery
from broker.testing.areas.errors import Errors
from broker.testing.areas.fidelity import Codecs, Fidelity
from broker.testing.areas.flow import Flow
from broker.testing.areas.groups import Groups
from broker.testing.areas.leases import Leases
from broker.testing.areas.limits import Limits
from broker.testing.areas.log_reader import LogReading
from broker.testing.areas.observing import Observing
from broker.testing.areas.order import Order
from broker.testing.areas.outcomes import Outcomes
from broker.testing.areas.publishing import Publishing
from broker.testing.areas.reconnect import Reconnecting
from broker.testing.areas.records import Records
from broker.testing.areas.retry import Retrying
from broker.testing.areas.retry_topics import RetryingOnTopics
from broker.testing.areas.settling import Settling
from broker.testing.areas.shapes import Shapes
from broker.testing.areas.transactions import Transactions

__all__ = [
    "AREAS",
    "Administration",
    "AsMessages",
    "Blocking",
    "Cancelling",
    "Closing",
    "Codecs",
    "Commits",
    "Conformance",
    "DeadLetters",
    "Delivery",
    "Errors",
    "Fidelity",
    "Flow",
    "Groups",
    "Leases",
    "Limits",
    "LogReading",
    "Observing",
    "Order",
    "Outcomes",
    "Publishing",
    "Reconnecting",
    "Records",
    "Retrying",
    "RetryingOnTopics",
    "Settling",
    "Shapes",
    "Transactions",
]


class Conformance(
    Publishing,
    Delivery,
    Settling,
    Shapes,
    Outcomes,
    Flow,
    Leases,
    Retrying,
    DeadLetters,
    Order,
    Closing,
    Cancelling,
    Fidelity,
    Limits,
    Codecs,
    Records,
    Commits,
    Groups,
    LogReading,
    Transactions,
    AsMessages,
    RetryingOnTopics,
    Administration,
    Reconnecting,
    Errors,
    Observing,
    Blocking,
):
    """All conformance tests; the test module of a backend subclasses this class."""


AREAS = Conformance.__bases__
"""The classes of the areas, in the order of the matrix."""
