"""Exactly once: a copy job whose workers are killed and whose only broker restarts, with every record counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.kafka_copying import copy_while_losing
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin

# Of a cluster `test_kafka_cluster` says it too.
pytestmark = pytest.mark.deep


async def test_copy_job_is_exactly_once_whatever_worker_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with KafkaServer() as server:
        # A broker that is killed alone forgets markers of transactions that are being committed, whoever writes them.
        await copy_while_losing(
            server.url,
            RawAdmin(server.bootstrap),
            lambda topic: server.restart(),
            copies=1,
            directory=tmp_path,
            capsys=capsys,
        )
