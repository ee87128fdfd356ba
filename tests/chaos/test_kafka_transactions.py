"""Exactly once: a copy job whose workers are killed and whose only broker restarts; every record is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.kafka_copying import copy_while_losing
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin

# `test_kafka_cluster` does the same on a cluster.
pytestmark = pytest.mark.deep


async def test_copy_job_is_exactly_once_when_workers_are_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with KafkaServer() as server:
        # A single broker that is killed forgets markers of transactions that are being committed, with any client.
        await copy_while_losing(
            server.url,
            RawAdmin(server.bootstrap),
            lambda topic: server.restart(),
            copies=1,
            directory=tmp_path,
            capsys=capsys,
        )
