"""Which redelivered messages a spool recognizes, also those of earlier queries. Without Spark or a broker."""

from __future__ import annotations

import asyncio
import errno
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest

from broker.envelopes import Place
from broker.errors import ConfigurationError
from broker.messages import Message, MessageBatch
from broker_spark.common.files import Fill, LocalFiles
from broker_spark.common.options import SourceOptions
from broker_spark.spool.columns import identified_by_id, places_of, table_of, unseen_rows
from broker_spark.spool.receiver import DrainGoal, Receiver
from broker_spark.spool.segments import IDENTITY
from broker_spark.spool.spool import Spool

METADATA = {"backend": "jetstream", "subscription": "spark", "topics": ["orders"]}


def opened(directory: Path) -> Spool:
    return Spool.open(LocalFiles(str(directory)), str(directory), METADATA)


def rows(*identities: str) -> pyarrow.Table:
    table: Any = pyarrow
    return table.table({"value": [b"1"] * len(identities), IDENTITY: list(identities)})


def test_segments_read_already_need_no_new_columns(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for place in (1, 2):
        spool.record_acks(spool.add(rows(f"orders:{place}:9"), 10), [])
    spool.release()
    # The last committed batch stays until the next one, so there is always one.
    again = opened(tmp_path)
    assert (again.first, again.next) == (0, 2)
    again.check_columns(("value", "key"), 2)
    again.release()
    with pytest.raises(
        ConfigurationError, match=r"have no column 'key', only value\. Run the query with these columns"
    ):
        opened(tmp_path).check_columns(("value", "key"), 1)


def test_rows_of_earlier_queries_are_recognized_by_their_place(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for identities in (("orders:7:9", "refunds:3:9"), ("orders:2:9", "orders#an id")):
        spool.record_acks(spool.add(rows(*identities), 10), [])
    spool.release()
    again = opened(tmp_path)
    assert not again.doubtful
    assert again.load_earlier_rows() == {"orders": 7, "refunds": 3}
    assert again.load_earlier_rows() == {}
    assert again.known(pyarrow.array(["orders:2:9", "orders:8:9"]), late=True) == {"orders:2:9"}
    again.release()


@pytest.mark.parametrize("kept", [0, 4, 300])
def test_an_incomplete_file_of_doubts_is_named(tmp_path: Path, kept: int) -> None:
    spool = opened(tmp_path)
    spool.record_acks(spool.add(rows("orders:1:9"), 10), ["orders:1:9"])
    spool.release()
    (file,) = (tmp_path / "doubts").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    expected = rf"^doubts/{file.name} of the spool {tmp_path} is incomplete: .*\. Restore it from a copy; or delete it"
    with pytest.raises(ConfigurationError, match=expected):
        opened(tmp_path)
    file.write_bytes(whole)
    again = opened(tmp_path)
    assert again.doubtful
    again.release()


def test_a_query_whose_release_cannot_be_written_still_releases_its_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(files: LocalFiles, name: str, fill: Fill) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", name)

    spool = opened(tmp_path)
    spool.record_acks(spool.add(rows("orders:1:9"), 10), [])
    with monkeypatch.context() as full:
        full.setattr(LocalFiles, "write", no_room)
        spool.release()
    assert f"The spool {tmp_path} could not be released, and is owned by this process" in caplog.text
    assert "No space left on device: 'owners/" in caplog.text
    again = opened(tmp_path)
    assert (again.first, again.next) == (0, 1)
    # Its ack is not recorded.
    assert again.known(pyarrow.array(["orders:1:9"]), late=False) == {"orders:1:9"}
    again.release()


class _View:
    """A view of messages whose raw object is their id, place and attempt."""

    def id(self, raw: Any, /) -> str:
        return raw[0]

    def place(self, raw: Any, /) -> Place | None:
        return raw[1]

    def delivery_attempt(self, raw: Any, /) -> int | None:
        return raw[2]

    def broker_time(self, raw: Any, /) -> datetime | None:
        return raw[3]


def message(id: str, place: Place | None, attempt: int = 1, second: int = 9) -> Message[bytes]:
    view: Any = _View()
    return Message("orders", id.encode(), (id, place, attempt, datetime.fromtimestamp(second, UTC)), view)


def test_two_messages_with_one_id_are_both_kept() -> None:
    by_id = [message("1", None), message("1", None), message("1", None, 2), message("2", None), message("3", None, 2)]
    names = ["orders#1", "orders#1", "orders#1", "orders#2", "orders#3"]
    assert table_of(by_id, ["value"], None).column(IDENTITY).to_pylist() == names
    everyone = identified_by_id(places_of(by_id))
    assert unseen_rows(by_id, names, set(), everyone) == [0, 1, 3, 4]
    # A first delivery was not written before, even if its id was.
    assert unseen_rows(by_id, names, {"orders#2", "orders#3"}, everyone) == [0, 1, 3]
    # A place in the log belongs to one message.
    assert identified_by_id(None) == frozenset()
    assert unseen_rows(by_id, names, set(), frozenset()) == [0, 3, 4]


def test_a_message_is_recognized_by_its_place_and_not_by_its_id(tmp_path: Path) -> None:
    """As on Kafka, Pulsar and Service Bus, also after a query that was killed before an ack was recorded."""
    options = {"url": "kafka://127.0.0.1:1", "topic": "orders", "subscription": "spark", "columns": "value,offset"}
    source = SourceOptions.parse({**options, "spool": str(tmp_path)})
    spool = opened(tmp_path)
    first = [message("a", Place(0, 7)), message("a", Place(1, 7)), message("b", Place(None, 7))]
    names, number, repeated = Receiver(source, spool)._write(first)
    assert names.to_pylist() == ["orders@0-7", "orders@1-7", "orders@7@9.0"]
    assert repeated == set()
    assert [each.rows for each in spool.between(0, 1)] == [3]
    spool.release()
    again = opened(tmp_path)
    receiver = Receiver(source, again)
    # A redelivery, another message of that id, and the first message of a recreated subscription.
    come = [message("a", Place(0, 7), 2), message("a", Place(0, 8)), message("b", Place(None, 7), second=10)]
    names, number, repeated = receiver._write(come)
    assert repeated == {"orders@0-7"}
    assert [each.rows for each in again.between(1, 2)] == [2]
    again.record_acks(number, [])
    again.forget_doubts(repeated)
    # The broker forgot its ack.
    names, number, repeated = receiver._write([message("a", Place(0, 8), 2)])
    assert (number, repeated) == (None, {"orders@0-8"})
    again.release()


def test_a_queue_does_not_count_as_empty_while_nothing_was_received(tmp_path: Path) -> None:
    given = {"url": "nats://127.0.0.1:4222", "topic": "orders", "subscription": "spark", "columns": "value"}
    options = SourceOptions.parse({**given, "spool": str(tmp_path), "aheadRows": "1"})
    spool = opened(tmp_path)
    receiver = Receiver(options, spool)
    receiver.drain()
    # The first of two requests returns nothing yet.
    answers = [MessageBatch[bytes]([]), MessageBatch([message("1", Place(0, 0))])]

    async def next_batch(most: int, timeout: float) -> MessageBatch[bytes]:
        return answers.pop(0)

    async def fill() -> None:
        receiver._being_written = 1
        consumer: Any = SimpleNamespace(next_batch=next_batch)
        filling = asyncio.create_task(receiver._fill(consumer, DrainGoal(1, 0.05, None)))
        await asyncio.sleep(0.1)
        receiver._being_written = 0
        receiver._room.set()
        await filling

    asyncio.run(fill())
    assert spool.next == 1
    spool.release()
