"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says more of what else the machine does than of the code; speed is measured in benchmarks/.
settings.register_profile("anybroker", deadline=None)
settings.load_profile("anybroker")
