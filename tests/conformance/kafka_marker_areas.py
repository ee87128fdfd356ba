"""What of the conformance kit is run over a Kafka queue with markers, however these are written."""

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

__all__ = ["MarkerAreas"]


class MarkerAreas(
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
    Administration,
    Reconnecting,
    Errors,
    Observing,
    Blocking,
):
    """The Message family."""

    # What else publishing promises does not depend on how messages are settled.
    test_scheduled_is_not_early = Publishing.test_scheduled_is_not_early
    # No other engine has acks in transactions.
    test_acks_ride_along = Transactions.test_acks_ride_along
