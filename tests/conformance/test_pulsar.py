"""The conformance kit on the Pulsar backend and a real standalone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker.testing.conformance import Conformance
from tests.conformance.pulsar_harness import PulsarHarness, end_wired

# In one process, which then starts one broker, and ends it when they are over.
pytestmark = pytest.mark.xdist_group("pulsar-conformance")


@pytest.fixture(scope="module", autouse=True)
def broker_of_the_module() -> Iterator[None]:
    yield
    end_wired()


class TestPulsar(Conformance):
    harness_class = PulsarHarness
