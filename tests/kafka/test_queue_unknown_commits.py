"""Partitions of a queue that are revoked while a commit is in flight, and assigned again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import pytest

from broker.bus import connect
from broker.driver.contract import TopicPartition
from broker.errors import BrokerError, ConnectionFailed
from broker_kafka.fenced_writer import FencedWriter, OutgoingRecord, Positions
from broker_kafka.queue.consumer.queue_client import QueueClient
from broker_kafka.records import KafkaRecordSource
from tests.kafka.key_order import handed_over
from tests.servers.kafka import KafkaServer


@pytest.mark.deep
@pytest.mark.parametrize("transactions", [True, False])
async def test_a_message_committed_during_a_revocation_precedes_later_ones_of_its_key(
    kafka: KafkaServer, topic: str, group: str, monkeypatch: pytest.MonkeyPatch, transactions: bool
) -> None:
    clients: list[QueueClient] = []
    open_client, commit, write = QueueClient.open, KafkaRecordSource.commit_with_metadata, FencedWriter.write
    place = TopicPartition(topic, 0)
    goes = 2

    async def opened(client: QueueClient) -> None:
        clients.append(client)
        await open_client(client)

    def lose() -> bool:
        """As of a session that ended, whose next one reads on from what is committed."""
        nonlocal goes
        goes -= 1
        if goes >= 0:
            clients[0].lost([place])
            clients[0].assigned([place])
        return goes >= 0

    async def unanswered(
        source: KafkaRecordSource, positions: Mapping[TopicPartition, tuple[int, str]]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        results = await commit(source, positions)
        return dict.fromkeys(positions, ConnectionFailed("No answer")) if lose() else results

    async def written(
        writer: FencedWriter, entries: Sequence[OutgoingRecord], positions: Positions | None = None
    ) -> None:
        await write(writer, entries, positions)
        if positions is not None:
            lose()

    monkeypatch.setattr(QueueClient, "open", opened)
    monkeypatch.setattr(KafkaRecordSource, "commit_with_metadata", unanswered)
    monkeypatch.setattr(FencedWriter, "write", written)
    bodies = [b"%d" % number for number in range(6)]
    # One at a time is taken, so that what follows the first two is not of their commits.
    async with (
        connect(f"{kafka.url}?queue=markers&queue_transactions={str(transactions).lower()}") as bus,
        bus.messages(topic, subscription=group, ordered_by_key=True, max_outstanding=1) as inbox,
    ):
        handled = await handed_over(bus, topic, inbox, bodies)
    assert goes < 0
    assert handled == bodies


@pytest.mark.deep
async def test_a_later_commit_of_an_older_position_hides_no_newer_commit(
    kafka: KafkaServer, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[QueueClient] = []
    open_client, commit = QueueClient.open, KafkaRecordSource.commit_with_metadata
    place = TopicPartition(topic, 0)
    sent: list[int] = []

    async def opened(client: QueueClient) -> None:
        clients.append(client)
        await open_client(client)

    async def unanswered(
        source: KafkaRecordSource, positions: Mapping[TopicPartition, tuple[int, str]]
    ) -> Mapping[TopicPartition, BrokerError | None]:
        sent.append(positions[place][0])
        if len(sent) > 2:
            return await commit(source, positions)
        if len(sent) == 1:
            # The coordinator does not answer for so long that ownership is confirmed again.
            await commit(source, positions)
            vars(clients[0])["_known_at"] = -inf
        else:
            clients[0].lost([place])
            clients[0].assigned([place])
        return {place: ConnectionFailed("No answer")}

    monkeypatch.setattr(QueueClient, "open", opened)
    monkeypatch.setattr(KafkaRecordSource, "commit_with_metadata", unanswered)
    bodies = [b"%d" % number for number in range(4)]
    async with (
        connect(f"{kafka.url}?queue=markers&lease_seconds=2") as bus,
        bus.messages(topic, subscription=group, ordered_by_key=True, max_outstanding=1) as inbox,
    ):
        handled = await handed_over(bus, topic, inbox, bodies)
    assert sent[:2] == [1, 0]
    assert handled == bodies
