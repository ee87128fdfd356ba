"""How markers are packed into records: in their order, by partition, within bounds."""

from __future__ import annotations

from broker.errors import OperationTimeout
from broker_kafka.queue.markers.marker_producer import PlacedMarker, explain_marker_error, pack_records
from broker_kafka.queue.markers.wire import Kind, Marker, MessageId, read_markers, write_marker


def end(number: int, partition: int = 0) -> PlacedMarker:
    return PlacedMarker(partition, write_marker(Marker(kind=Kind.END, id=MessageId("orders", partition, number, "q"))))


def offsets_of(record: PlacedMarker) -> list[int]:
    return [marker.id.offset for marker, _ in read_markers(record.data) if marker is not None]


def test_markers_keep_the_order_of_their_partition() -> None:
    markers = [end(number, number % 2) for number in range(7)]
    records, places = pack_records(markers, 3)
    assert [(record.partition, offsets_of(record)) for record in records] == [(0, [0, 2, 4]), (1, [1, 3, 5]), (0, [6])]
    assert places == [0, 1, 0, 1, 0, 1, 2]


def test_a_single_marker_is_not_packed() -> None:
    markers = [end(1), end(2)]
    assert pack_records(markers[:1], 200) == (markers[:1], [0])
    assert pack_records(markers, 1) == (markers, [0, 1])


def test_a_large_marker_has_a_record_of_its_own() -> None:
    large = PlacedMarker(0, b"x" * 40_000)
    markers = [end(0), large, *[PlacedMarker(0, b"y" * 1000)] * 40, end(1)]
    records, places = pack_records(markers, 200)
    assert records[1] == large
    assert all(len(record.data) < 34_000 for record in records if record != large)
    assert places == sorted(places)


def test_a_whole_record_is_not_packed_with_others() -> None:
    whole = PlacedMarker(0, b"whole", whole=True)
    records, places = pack_records([end(0), end(1), end(2, 1), whole, end(3), end(4), end(5, 1)], 200)
    assert places == [0, 0, 1, 2, 3, 3, 1]
    assert records[2].data == b"whole"
    assert [offsets_of(record) for record in (records[0], records[1], records[3])] == [[0, 1], [2, 5], [3, 4]]


def test_the_error_of_an_unconfirmed_marker_advises_no_publish() -> None:
    error = OperationTimeout("Publishing to 'q.markers': no answer in time", advice="Publish it again")
    explained = explain_marker_error(error, "q.markers", 10)
    assert isinstance(explained, OperationTimeout)
    assert str(explained) == "No confirmation that markers were written: Publishing to 'q.markers': no answer in time"
    assert explained.retriable == error.retriable
