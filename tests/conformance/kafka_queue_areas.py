"""The areas of the kit that run on Kafka's other queue engines; `offsets` runs all of them."""

from __future__ import annotations

from broker.testing.conformance import (
    Administration,
    Blocking,
    Cancelling,
    Closing,
    DeadLetters,
    Delivery,
    Errors,
    Fidelity,
    Flow,
    Leases,
    Limits,
    Observing,
    Order,
    Outcomes,
    Publishing,
    Reconnecting,
    Retrying,
    Settling,
    Shapes,
    Transactions,
)

__all__ = ["MarkerAreas", "ShareAreas"]


class ShareAreas(
    Delivery,
    Settling,
    Shapes,
    Outcomes,
    Flow,
    Leases,
    Retrying,
    DeadLetters,
    Closing,
    Cancelling,
    Administration,
    Reconnecting,
    Errors,
    Observing,
    Blocking,
):
    """The Message family, as far as share groups support it."""


class MarkerAreas(ShareAreas, Order, Fidelity, Limits):
    """The Message family, for every marker format."""

    # The other promises of publishing do not depend on how messages are settled.
    test_scheduled_is_not_early = Publishing.test_scheduled_is_not_early
    # No other engine has acks in transactions.
    test_acks_are_atomic = Transactions.test_acks_are_atomic
