"""The promises about order by key, on Pub/Sub's ordered subscriptions, which the emulator lacks.

On Google's pstest, which gives out one message of a key at a time, and by streams, because a pull there sleeps for half
a second when it finds nothing. Tests that hold several messages of a key, or need a snapshot, are not for it.
"""

from __future__ import annotations

import pytest

from broker.testing.case import ConformanceCase
from broker.testing.conformance import Order
from tests.conformance.pubsub_harness import PstestHarness

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("pstest")]


class TestPstest(ConformanceCase):
    harness_class = PstestHarness

    test_failed_head_is_retried_first = Order.test_failed_head_is_retried_first
    test_dead_letter_releases_followers = Order.test_dead_letter_releases_followers
    test_hot_key_stays_in_order = Order.test_hot_key_stays_in_order
    test_lost_lease_releases_followers = Order.test_lost_lease_releases_followers
    test_survives_a_close = Order.test_survives_a_close
    test_key_affinity_across_consumers = Order.test_key_affinity_across_consumers
