"""What of a member's commit is sent: a broker takes the commit of every present member, for whatever partition."""

from __future__ import annotations

from confluent_kafka import TopicPartition as NativePartition

from broker.errors import LeaseLost
from broker.spi import TopicPartition
from broker_kafka.commits import split_owned


def test_what_is_not_ours_is_told_apart_from_the_rest() -> None:
    offsets = [NativePartition("orders", 0, 5), NativePartition("orders", 1, 6)]
    ours, refused = split_owned(offsets, {("orders", 0)})
    assert ours == offsets[:1]
    assert [*refused] == [TopicPartition("orders", 1)]
    assert isinstance(refused[TopicPartition("orders", 1)], LeaseLost)
