"""The ids of rows, without Spark."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pyarrow
import pytest

from broker.errors import InvalidMessage
from broker_spark.sink import duplicate_ids as given_ids
from broker_spark.sink.duplicate_ids import IdCounter
from broker_spark.sink.rows import messages_of


def ids(given: IdCounter, batch: dict[str, list[str | None]], prefix: str | None = "query-7-0") -> list[str | None]:
    found = pyarrow.RecordBatch.from_pydict(batch)
    made = messages_of(found, topic="t", columns=list(batch), prefix=prefix, first_row=0, given=given)
    return [message.id for _, message in made]


def test_rows_that_share_an_id_are_not_dropped() -> None:
    batch: dict[str, list[str | None]] = {"value": ["a", "b", "a", "c", "d"], "id": ["mine", "mine", "mine", "", None]}
    given = IdCounter()
    first = ids(given, batch)
    # The first row keeps it, like a row copied from a topic.
    assert first[0] == "mine"
    assert len(set(first)) == 5
    # Nor in the next batch of the task; another attempt has the same ids.
    second = ids(given, batch)
    assert len({*first[:3], *second[:3]}) == 6
    again = IdCounter()
    assert (ids(again, batch), ids(again, batch)) == (first, second)


def test_column_ids_stay_unique_without_generated_ids() -> None:
    found = ids(IdCounter(), {"value": ["a", "b", "c"], "id": ["mine", "mine", None]}, prefix=None)
    assert found[0] == "mine" != found[1]
    assert found[2] is None


def test_every_id_of_a_long_task_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_ids, "_EXACT", 3)
    places = Random(7)
    task = [[f"{places.randrange(150)}" for _ in range(4)] for _ in range(300)]

    def times() -> list[int]:
        given = IdCounter()
        found: list[int] = []
        for batch in task:
            given.expect([*batch, None, ""])
            found += map(given.times, batch)
        assert len(given._blocks) > 1
        assert len(given._exact) < 3 + 4
        return found

    seen = Counter[str]()
    assert times() == [seen.update([each]) or seen[each] for batch in task for each in batch]
    assert times() == times()


def test_a_repeated_id_far_apart_becomes_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_ids, "_EXACT", 3)
    given = IdCounter()
    batches = (["mine", "mine", "other"], ["a", "b", "c"], ["mine", None, ""], ["d", "e", "f"], ["mine", "other"])
    found = [ids(given, {"value": ["same"] * len(batch), "id": [*batch]}) for batch in batches]
    row_hash = "dd4d7e46f54cef7e46ef3eafc3c25f28"
    assert found[0] == ["mine", f"mine-2-{row_hash}", "other"]
    assert found[2][0] == f"mine-3-{row_hash}"
    assert found[4] == [f"mine-4-{row_hash}", f"other-2-{row_hash}"]
    assert len({name for batch in found for name in batch}) == 14


def test_equal_rows_of_a_long_task_are_counted_whatever_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_ids, "_EXACT", 3)
    places = Random(11)
    rows = [f"{places.randrange(40)}" for _ in range(400)]

    def made() -> list[str | None]:
        seen = IdCounter()
        found: list[str | None] = []
        for at in range(0, len(rows), 4):
            batch = pyarrow.RecordBatch.from_pydict({"value": rows[at : at + 4]})
            every = messages_of(
                batch, topic="t", columns=["value"], prefix="w", first_row=at, given=IdCounter(), seen=seen
            )
            found += [message.id for _, message in every]
        assert len(seen._blocks) > 1
        return found

    first = made()
    assert len(set(first)) == len(rows)
    places.shuffle(rows)
    again = made()
    assert again != first
    assert set(again) == set(first)


def test_a_time_that_overflows_names_its_row() -> None:
    times = pyarrow.array([0, 253_402_300_800_000_000], pyarrow.timestamp("us", "UTC"))
    found = pyarrow.RecordBatch.from_arrays([pyarrow.array([b"a", b"b"]), times], ["value", "publish_time"])
    every = messages_of(found, topic="t", columns=found.column_names, prefix=None, first_row=40, given=IdCounter())
    with pytest.raises(InvalidMessage, match=r"^Row 41 of this task: column publish_time has a time that"):
        list(every)


FIRST = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = FIRST + timedelta(hours=1)


@pytest.mark.parametrize(
    "batch",
    [
        {"value": [None, b""], "key": [b"k", b"k"]},
        {"value": [b"v", b"v"], "key": [None, b""]},
        {"value": [b"c", b"b\x00c"], "key": [b"a\x00b", b"a"]},
        {"value": [b"v", b"v"], "deliver_at": [FIRST, SECOND]},
        {"value": [b"v", b"v"], "publish_time": [FIRST, SECOND]},
        {"value": [b"v", b"v"], "partition": [0, 1]},
    ],
    ids=["tombstone", "key", "borders", "deliver_at", "publish_time", "partition"],
)
@pytest.mark.parametrize("named", [True, False], ids=["writeId", "place"])
def test_different_rows_have_different_ids(batch: dict[str, list[Any]], named: bool) -> None:
    """A write repeated in another order would drop one of them as a duplicate of the other."""

    def made(order: list[int]) -> dict[int, str | None]:
        found = pyarrow.RecordBatch.from_pydict({name: [each[row] for row in order] for name, each in batch.items()})
        seen = IdCounter() if named else None
        every = messages_of(
            found, topic="t", columns=list(batch), prefix="w-0", first_row=0, given=IdCounter(), seen=seen
        )
        return {row: message.id for row, (_, message) in zip(order, every, strict=True)}

    there, back = made([0, 1]), made([1, 0])
    assert there[0] != back[1]
    assert there[1] != back[0]
    assert (there == back) is named


def test_ids_stay_the_same_across_versions() -> None:
    # A newer version may run a batch again, which must have the same ids. These are of the first version.
    batch: dict[str, list[str | None]] = {"key": [None, "", "k"], "value": ["v", None, "abc"]}
    assert ids(IdCounter(), batch) == [
        "query-7-0-0-14e4ce3903cd4d0f",
        "query-7-0-1-e5f8dc481aa03a33",
        "query-7-0-2-4fd6b7a372fb8e45",
    ]
    whole = pyarrow.RecordBatch.from_pydict(
        {
            **batch,
            "attributes": pyarrow.array([None, [("é", "x")], []], pyarrow.map_(pyarrow.string(), pyarrow.string())),
            "partition": pyarrow.array([None, 0, 2], pyarrow.int32()),
        }
    )
    made = messages_of(whole, topic="tòp", columns=whole.schema.names, prefix="p", first_row=0, given=IdCounter())
    assert [message.id for _, message in made] == [
        "p-0-94545ea722871550",
        "p-1-63f24df131a69c27",
        "p-2-8e537120428dd582",
    ]
