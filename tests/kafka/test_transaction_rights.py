"""Transactions of a user without some rights: the error names the missing right, and the publisher continues."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from confluent_kafka.admin import ResourceType  # pyright: ignore[reportPrivateImportUsage]
from pydantic import SecretStr

import broker
from broker.bus import Bus
from broker.errors import NotAuthorized, PublishError
from broker_kafka.settings import KafkaSettings
from tests.servers.kafka_security import USERS, SecureBroker

pytestmark = pytest.mark.xdist_group("kafka-transaction-rights")


@pytest.fixture(scope="module")
def secure() -> Iterator[SecureBroker]:
    with SecureBroker() as broker:
        yield broker


@pytest.fixture
async def ann(secure: SecureBroker) -> AsyncIterator[Bus]:
    settings = KafkaSettings(
        servers=(secure.server.address("SCRAM_512"),),
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="ann",
        sasl_password=SecretStr(USERS["ann"]),
    )
    async with broker.connect(settings) as bus:
        yield bus


@pytest.mark.deep
async def test_the_advice_names_the_missing_right(secure: SecureBroker, ann: Bus, group: str) -> None:
    topic = secure.admin.make_topic()
    for resource in (ResourceType.TRANSACTIONAL_ID, ResourceType.GROUP):
        secure.restrict(group, "bob", resource)
    with pytest.raises(NotAuthorized) as caught:
        async with ann.transactional_publisher(group):
            pass
    assert "on the transactional id" in caught.value.advice
    with pytest.raises(NotAuthorized) as caught:
        await ann.admin.lag(topic, group)
    assert "on the group" in caught.value.advice


@pytest.mark.deep
@pytest.mark.parametrize("first", [True, False])
async def test_a_transaction_without_write_permission(secure: SecureBroker, ann: Bus, group: str, first: bool) -> None:
    forbidden, allowed = secure.admin.make_topic(), secure.admin.make_topic()
    secure.forbid_writing(forbidden, "ann")
    async with ann.transactional_publisher(group) as publisher:
        with pytest.raises(NotAuthorized, match=f"{forbidden}.*Topic authorization failed"):
            async with publisher.transaction() as tx:
                if not first:
                    await tx.publish(allowed, b"undone")
                await tx.publish(forbidden, b"x")
        with pytest.raises(PublishError) as caught:
            async with publisher.transaction() as tx:
                await tx.publish_batch(forbidden, [b"1", b"2"])
        assert all(isinstance(outcome, NotAuthorized) for outcome in caught.value.outcomes)
        async with publisher.transaction() as tx:
            await tx.publish(allowed, b"done")
    async with ann.records(allowed, group=f"{group}-readers") as log:
        record = await log.next_record(timeout=60)
    assert record is not None
    assert record.data == b"done"
