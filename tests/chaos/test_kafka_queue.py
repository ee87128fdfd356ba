"""Workers of a queue with markers die, freeze, leave and join, the broker restarts: each message is settled once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.chaos.kafka_queue_accounts import NOT_HANDED_OVER
from tests.chaos.kafka_queue_running import SHORT, QueueRun
from tests.servers.kafka import KafkaServer

pytestmark = [pytest.mark.chaos, pytest.mark.xdist_group("kafka-chaos-queue")]


async def test_every_message_is_settled_once_while_workers_die(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with KafkaServer() as server:
        run = QueueRun(server, tmp_path, seed=20261122, plan=SHORT, seconds=18.0, least=400)
        books = await run.run()
    with capsys.disabled():
        sys.stdout.write(f"\n{run.say(books)}\n")
    assert not books.problems, "\n".join(books.problems)
    # It costs an attempt, and is the exception.
    assert books.again[NOT_HANDED_OVER] < books.messages / 10
    # Else nothing was shown.
    assert books.messages >= 400
    assert books.settled["rejected"] > 0
    assert books.again["nacked"] > 0
    assert books.again["its holder died"] + books.again["its holder died, before it was handed over"] > 0
