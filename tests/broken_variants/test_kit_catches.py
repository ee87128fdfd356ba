"""Every deliberately broken broker fails the test of the promise that it breaks, and only that."""

from __future__ import annotations

import pytest

from broker.testing.conformance import check
from tests.broken_variants.breaking import BrokenHarness
from tests.broken_variants.variants import VARIANTS, Variant


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
async def test_a_variant_breaks_its_promise_only(variant: Variant, request: pytest.FixtureRequest) -> None:
    BrokenHarness.slips.clear()
    outcomes = await check(variant.harness, [variant.promise, *variant.healthy])
    assert BrokenHarness.slips == []
    assert outcomes[variant.promise].status == "broken", f"Not caught: {variant.broken}"
    for promise in variant.healthy:
        assert outcomes[promise].status == "kept", f"The variant breaks more than it says: {outcomes[promise].detail}"
    request.node.user_properties.append(("broken_variant", (variant.name, variant.broken, variant.promise)))


def test_variants_are_many_and_distinct() -> None:
    assert len(VARIANTS) >= 15
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
