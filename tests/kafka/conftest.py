"""The broker that the tests of one process share, and topics of a test's own."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import cache

import pytest

from tests.servers.kafka import KafkaServer, shared_server
from tests.servers.kafka_client import RawAdmin

MakeTopic = Callable[..., str]


@cache
def _shared_admin() -> RawAdmin:
    return RawAdmin(shared_server().bootstrap)


@pytest.fixture
def kafka() -> KafkaServer:
    """The shared broker: not to be stopped; tests that stop one start their own."""
    return shared_server()


@pytest.fixture
def admin(kafka: KafkaServer) -> RawAdmin:
    return _shared_admin()


@pytest.fixture
def make_topic(admin: RawAdmin) -> MakeTopic:
    """`make_topic(partitions=3, config={"retention.ms": "1000"})` gives the name of a new topic."""
    return admin.make_topic


@pytest.fixture
def topic(admin: RawAdmin) -> str:
    """A new topic with one partition."""
    return admin.make_topic()


@pytest.fixture
def group() -> str:
    """A group's name that nobody used."""
    return f"group-{uuid.uuid4().hex[:12]}"
