"""`ConformanceCase`: the base class of all conformance tests, with a harness for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import ClassVar, cast

import pytest
import pytest_asyncio

from broker.testing.harness import Harness
from broker.testing.promises import Promise, missing_capability

__all__ = ["ConformanceCase"]


class ConformanceCase:
    """Subclass an area, or `broker.testing.conformance.Conformance` for all areas, and set `harness_class`.

    If the harness needs fixtures, such as the address of a server, override the fixture `make_harness` instead.
    """

    harness_class: ClassVar[type[Harness] | None] = None
    pytestmark = pytest.mark.asyncio

    @pytest.fixture
    def make_harness(self) -> Harness:
        """A new harness, not started."""
        assert self.harness_class is not None, "Set harness_class, or override the fixture make_harness"
        return self.harness_class()

    @pytest_asyncio.fixture
    async def harness(self, request: pytest.FixtureRequest, make_harness: Harness) -> AsyncIterator[Harness]:
        """The started harness of a test. Skips the test if the backend lacks a required capability."""
        test: object = request.function
        declared = getattr(test, "__promise__", None)
        node = cast("pytest.Item", request.node)  # pyright: ignore[reportUnknownMemberType]
        assert isinstance(declared, Promise), f"{node.name} has no @promise"
        if make_harness.in_matrix:
            node.user_properties.append(("conformance", (make_harness.name, declared.name)))
        try:
            await make_harness.start()
            missing = missing_capability(test, (await make_harness.bus()).capabilities, make_harness)
            if missing is not None:
                pytest.skip(f"needs capability {missing}")
            yield make_harness
        finally:
            await make_harness.stop()
