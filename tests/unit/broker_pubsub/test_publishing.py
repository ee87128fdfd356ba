"""Requests are split by the service's limits, which no emulator checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from broker.outbound import OutboundMessage
from broker_pubsub.codec import encode
from broker_pubsub.protocol import PublishRequest
from broker_pubsub.publishing import MAX_MESSAGES, MAX_REQUEST, group_by_key, split_by_size


def _encoded(messages: Iterable[OutboundMessage]) -> Sequence[object]:
    request = PublishRequest()
    for message in messages:
        encode(message, request.messages.add(), ordering=True)
    return request.messages


def test_a_request_has_at_most_a_thousand_messages():
    encoded = _encoded([OutboundMessage(b"x")] * 2500)
    assert [len(piece) for piece in split_by_size(encoded, range(2500))] == [1000, 1000, 500]


def test_a_request_has_at_most_ten_megabytes():
    sizes = [9_000_000, 900_000, 200_000, 9_987_000, 5, *[100_000] * 120]
    encoded = _encoded(OutboundMessage(bytes(size)) for size in sizes)
    pieces = split_by_size(encoded, range(len(encoded)))
    assert [index for piece in pieces for index in piece] == list(range(len(encoded)))
    for piece in pieces:
        request = PublishRequest(topic=f"projects/p/topics/{'t' * 255}", messages=[encoded[i] for i in piece])
        assert request.ByteSize() <= MAX_REQUEST
        assert len(piece) <= MAX_MESSAGES
    assert list(pieces[0]) == [0, 1]


def test_messages_are_grouped_by_key():
    keys = [b"a", None, b"b", b"a", b"", b"\xff"]
    encoded = _encoded(OutboundMessage(b"x", key) for key in keys)
    found = group_by_key(encoded, range(len(encoded)))
    assert found["a"] == [0, 3]
    assert found[""] == [1]
    assert len(found) == 5
