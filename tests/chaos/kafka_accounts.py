"""Accounts of every record: published, on the broker, and read. For one event loop; reading the broker blocks.

Records are numbers, each published once. The broker's log is read without the SDK.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Any

import pytest

import broker
from broker.errors import BrokerError, PublishError
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from tests.servers.kafka_client import read_all

__all__ = ["Account"]

KEYS = 17


class Account:
    """The account of one topic.

    :ivar receipts: the place of each number with a receipt.
    :ivar failed: numbers whose publish failed.
    :ivar read: what a consumer received, in order: partition, offset, number.
    """

    def __init__(self, topic: str, partitions: int) -> None:
        self.topic = topic
        self.partitions = partitions
        self.receipts: dict[int, tuple[int | None, int | None]] = {}
        self.failed: dict[int, BrokerError] = {}
        self.read: dict[str, list[tuple[int, int, int]]] = {}
        self._next = 0

    def batch(self, size: int, writer: int = 0) -> tuple[int, list[OutboundMessage]]:
        """New messages with keys of this writer only, and the number of the first."""
        first = self._next
        self._next += size
        numbers = range(first, first + size)
        return first, [OutboundMessage(b"%d" % n, b"%d" % (n % KEYS + KEYS * writer)) for n in numbers]

    async def publish(self, bus: broker.Bus, size: int, writer: int = 0) -> None:
        """Publish a batch and note the outcome of each message."""
        first, messages = self.batch(size, writer)
        try:
            outcomes: Any = await bus.topic(self.topic).publish_batch(messages)
        except PublishError as error:
            outcomes = error.outcomes
        except BrokerError as error:
            outcomes = [error] * size  # the same of all
        for number, outcome in enumerate(outcomes, first):
            if isinstance(outcome, Receipt):
                self.receipts[number] = outcome.partition, outcome.offset
            else:
                self.failed[number] = outcome

    async def publish_until(
        self, bus: broker.Bus, stopped: asyncio.Event, size: int = 50, pause: float = 0.02, *, writers: int = 1
    ) -> None:
        """Publish batch after batch, in concurrent calls."""

        async def publish(writer: int) -> None:
            while not stopped.is_set():
                await self.publish(bus, size, writer)
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopped.wait(), pause)

        await asyncio.gather(*map(publish, range(writers)))

    def book(self, reader: str, record: broker.Record[Any] | broker.Message[Any]) -> None:
        """Note that a consumer received this record, or a message made of one."""
        if isinstance(record, broker.Record):
            partition, offset = record.partition, record.offset
        else:
            partition, offset = record.native.partition(), record.native.offset()
        self.read.setdefault(reader, []).append((partition, offset, int(record.data or b"-1")))

    def seen_all(self, reader: str, written: dict[int, tuple[int, int]]) -> bool:
        return {number for _, _, number in self.read.get(reader, ())} >= written.keys()

    def written(self, bootstrap: str) -> dict[int, tuple[int, int]]:
        """Where the broker has each number.

        :raises AssertionError: a number is there twice, out of order by key, or not at the place of its receipt.
        """
        places: dict[int, tuple[int, int]] = {}
        twice: list[int] = []
        for partition in range(self.partitions):
            last: dict[bytes | str | None, int] = {}
            for message in read_all(bootstrap, self.topic, partition):
                number = int(message.value() or b"-1")
                if number in places:
                    twice.append(number)
                places[number] = partition, message.offset() or 0
                key = message.key()
                assert number > last.get(key, -1), f"{number} of key {key!r} comes after {last[key]}"
                last[key] = number
        assert not twice, f"the broker has {twice[:10]} twice"
        wrong = {number: place for number, place in self.receipts.items() if places.get(number) != place}
        assert not wrong, f"receipts name other places than the broker: {dict(list(wrong.items())[:5])}"
        return places

    def say(
        self,
        capsys: pytest.CaptureFixture[str],
        what: str,
        written: dict[int, tuple[int, int]],
        *,
        shared: bool = False,
    ) -> None:
        """Print the balance; `shared` if the readers are members of one group."""
        summary = f"{what}: {self._next} records tried, {len(self.receipts)} with a receipt, {len(self.failed)} refused"
        unknown = sum(number in written for number in self.failed)
        summary += f" ({unknown} of these on the broker all the same), {len(written)} on the broker"
        all_read = [entry for entries in self.read.values() for entry in entries]
        if shared:
            summary += f"; {', '.join(f'{name} read {len(entries)}' for name, entries in self.read.items())}"
        for reader, entries in {"all together": all_read}.items() if shared else self.read.items():
            missing = len(written.keys() - {number for _, _, number in entries})
            summary += f"; {reader} read {len(entries)}, missing {missing}, again {len(entries) - len(set(entries))}"
        with capsys.disabled():
            sys.stdout.write(f"\n{summary}\n")

    def check(self, reader: str, written: dict[int, tuple[int, int]], *, torn: bool = False) -> None:
        """Check that exactly the records of the log were read, at their places.

        Within a partition, first reads are in order.

        :param torn: the broker may have lost the end of its log and written other records at the same offsets.
        """
        entries = self.read.get(reader, [])
        assert {number: (partition, offset) for partition, offset, number in entries} == written
        if torn:
            return
        highest: dict[int, int] = {}
        seen: set[tuple[int, int, int]] = set()
        for entry in entries:
            partition, offset, _ = entry
            if entry not in seen:
                assert offset > highest.get(partition, -1), f"{reader}: offset {offset} of {partition} came too late"
                highest[partition] = offset
            seen.add(entry)
