"""`commit_positions`: positions of the application's own."""

from __future__ import annotations

import re
from typing import Any

import pytest

from broker.errors import ConfigurationError, LeaseLost, OffsetOutOfRange, Unsupported
from broker.hooks import PositionReset
from tests.unit.broker.reading.record_bench import P0, P1, bench


async def test_positions_between_the_committed_and_the_handed_over_are_committed() -> None:
    async with bench(0, 1) as b:
        b.source.append(*range(10))
        b.source.append(*range(10), partition=1)
        await b.buffered(20)
        await b.consumer.next_batch()
        await b.consumer.commit_positions({P0: 3, ("orders", 1): 10})
        assert b.source.stored == {P0: 3, P1: 10}
        await b.consumer.commit_positions({P0: 4})
        await b.consumer.commit_positions({P0: 4, P1: 10})
        assert b.source.stored == {P0: 4, P1: 10}
        assert b.source.commits == [{P0: 3, P1: 10}, {P0: 4}], "what is committed is not committed again"
        await b.consumer.commit()
        assert b.source.stored == {P0: 10, P1: 10}


async def test_a_position_beyond_what_was_handed_over_is_refused() -> None:
    async with bench(0, 1) as b:
        b.source.append(*range(10))
        await b.buffered(10)
        await b.consumer.next_batch(4)
        text = "Position 5 of 'orders'[0] lies beyond what was handed over since its assignment, which ends at 4"
        with pytest.raises(OffsetOutOfRange, match=re.escape(text)):
            await b.consumer.commit_positions({P0: 5})
        with pytest.raises(OffsetOutOfRange, match="of which nothing was"):
            await b.consumer.commit_positions({P0: 4, P1: 1})
        assert b.source.stored == {}, "nothing is committed"
        await b.consumer.seek({P0: 7})
        await b.consumer.commit_positions({P0: 7})
        assert b.source.stored == {P0: 7}, "a seek asks for it"


async def test_a_position_below_the_committed_one_is_refused() -> None:
    async with bench() as b:
        b.source.append(*range(10))
        await b.buffered(10)
        await b.consumer.next_batch()
        await b.consumer.commit_positions({P0: 6})
        with pytest.raises(OffsetOutOfRange, match=r"Position 3 .* lies below the committed one, 6"):
            await b.consumer.commit_positions({P0: 3})
        await b.consumer.seek({P0: 2})
        with pytest.raises(OffsetOutOfRange, match=r"lies below the committed one, 2"):
            await b.consumer.commit_positions({P0: 1})
        await b.consumer.next_batch(2, timeout=60)
        await b.consumer.commit_positions({P0: 3})
        assert b.source.stored == {P0: 3}
        with pytest.raises(OffsetOutOfRange, match=r"lies below the committed one, 3"):
            await b.consumer.commit_positions({P0: 2})


async def test_what_a_former_owner_committed_counts() -> None:
    async with bench(0, 1) as b:
        b.source.stored[P0] = 5
        b.source.append(*range(10))
        await b.buffered(10)
        await b.consumer.next_batch()
        with pytest.raises(OffsetOutOfRange, match=r"lies below the committed one, 5"):
            await b.consumer.commit_positions({P0: 4})
        await b.consumer.commit_positions({P0: 5})
        await b.consumer.commit_positions({P0: 6})
        assert b.source.stored == {P0: 6}


@pytest.mark.parametrize("stored", [0, 5])
async def test_before_the_first_record_only_the_committed_position_can_be_committed(stored: int) -> None:
    async with bench() as b:
        b.source.stored[P0] = stored
        await b.consumer.commit_positions({P0: stored})
        with pytest.raises(OffsetOutOfRange, match=rf"lies beyond what was handed over .* which ends at {stored}"):
            await b.consumer.commit_positions({P0: stored + 1})
        assert b.source.stored == {P0: stored}


async def test_a_new_assignment_begins_anew() -> None:
    async with bench() as b:
        b.source.append(*range(10))
        await b.buffered(10)
        await b.consumer.next_batch()
        b.source.lose(0)
        with pytest.raises(LeaseLost, match=r"Partition 0 of topic 'orders' is not assigned"):
            await b.consumer.commit_positions({P0: 4})
        b.source.assign(0)
        with pytest.raises(OffsetOutOfRange, match="since its assignment"):
            await b.consumer.commit_positions({P0: 4})
        assert b.source.stored == {}


async def test_the_others_are_committed_if_one_is_not_assigned() -> None:
    async with bench() as b:
        b.source.append(*range(4))
        await b.buffered(4)
        await b.consumer.next_batch()
        with pytest.raises(LeaseLost, match=r"Partition 7"):
            await b.consumer.commit_positions({P0: 2, ("orders", 7): 1})
        assert b.source.stored == {P0: 2}


async def test_after_a_reset_lower_positions_are_committed() -> None:
    async with bench() as b:
        b.source.append(*range(10))
        await b.buffered(10)
        await b.consumer.next_batch()
        await b.consumer.commit_positions({P0: 6})
        b.source.listener.event(PositionReset(partition=P0, position=6, to=1, policy="earliest"))
        await b.consumer.commit_positions({P0: 1})
        assert b.source.stored == {P0: 1}


@pytest.mark.parametrize("positions", [5, None, [P0], {P0: None}, {P0: -1}, {P0: "3"}, {"orders": 3}, {P0: True}])
async def test_what_is_no_position_is_refused(positions: Any) -> None:
    async with bench() as b:
        with pytest.raises(ConfigurationError, match=r"position|partition"):
            await b.consumer.commit_positions(positions)


async def test_an_open_transaction_commits_the_positions() -> None:
    async with bench() as b:
        b.consumer.member.enter_transaction()
        with pytest.raises(Unsupported, match="transaction"):
            await b.consumer.commit_positions({P0: 0})
