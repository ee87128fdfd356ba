"""Decodes the records of one consumer in their place, and buries the ones that cannot be decoded.

*Concurrency.* One event loop; decoding is synchronous, at most one dead letter is on its way. *Cancellation.* The write
of a dead letter belongs to the consumer: a cancelled caller does not stop it; losing its partition, or a close, does.
*Failure.* A failed write is repeated with growing pauses and `DeadLetterFailed` events; meanwhile nothing behind the
record is handed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Any

from broker.consuming.dead_letters import DeadLetterWriter
from broker.driver.assignments import Assignments
from broker.driver.contract import Backend, PublishTarget, TopicPartition
from broker.driver.record_messages import message_of
from broker.errors import BrokerError, DecodeError
from broker.hooks import DeadLettered, Hooks
from broker.outbound import OutboundMessage
from broker.protocols import Codec
from broker.reading.record_fetcher import RecordFetcher
from broker.records import Record, undecodable

__all__ = ["RecordDecoder", "open_decoder"]


class RecordDecoder:
    """:param on_decode_error: 'raise', or the topic of the dead letters."""

    def __init__(
        self,
        codec: Codec[Any],
        on_decode_error: str,
        *,
        backend: Backend,
        group: str,
        fetcher: RecordFetcher,
        assignments: Assignments,
        hooks: Hooks,
    ) -> None:
        self._decode = codec.decode
        self._target_name = on_decode_error
        self._backend = backend
        self._group = group
        self._fetcher = fetcher
        self._assignments = assignments
        self._hooks = hooks
        self._target: PublishTarget | None = None
        self._poison: Record[Any] | None = None
        self._burying: asyncio.Task[None] | None = None

    def decode_next(self, record: Record[Any]) -> bool:
        """Decode the record at the head of the buffer; False if it is being buried.

        :raises DecodeError: it cannot be decoded, and there is no dead-letter topic. It was taken out, and counts as
            handed over.
        """
        try:
            record.decoded = self._decode(record.data)
        except Exception as error:
            failure = undecodable(record, error, "give on_decode_error= a dead-letter topic")
            if self._target_name == "raise":
                self._assignments.hand_over_one(self._fetcher.buffer.pop_one(), None)
                raise failure from error
            if self._poison is not record:
                self.stop()
                self._poison = record
                self._burying = asyncio.get_running_loop().create_task(self._bury(record, failure), name="broker-bury")
            return False
        return True

    def decode_following(self, records: list[Record[Any]]) -> None:
        """Decode all but the first, which is decoded; put back the first that fails, and what follows it."""
        decode = self._decode
        done = 1
        try:
            for record in records[1:]:
                record.decoded = decode(record.data)
                done += 1
        except Exception:
            self._fetcher.buffer.put_back(records[done:])
            del records[done:]

    async def buried(self, timeout: float | None) -> None:
        """Wait, at most `timeout` seconds, until the record at the head of the buffer is out of the way."""
        task = self._burying
        if task is not None:
            await asyncio.wait((task,), timeout=timeout)
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self._poison = None
                raise error

    def forget(self, partitions: Container[tuple[str, int]]) -> None:
        """These partitions went away, or were set to another position."""
        if self._poison is not None and (self._poison.topic, self._poison.partition) in partitions:
            self.stop()

    def stop(self) -> None:
        """Give up the dead letter that is being written, if any; its record is read again."""
        self._poison = None
        if self._burying is not None:
            self._burying.cancel()

    async def close(self) -> None:
        """Stop, and release the dead-letter topic."""
        self.stop()
        if self._burying is not None:
            await asyncio.wait((self._burying,))
        if self._target is not None:
            await self._target.close()

    async def _bury(self, record: Record[Any], error: DecodeError) -> None:
        target = self._target or self._backend.publish_target(self._target_name)
        self._target = target

        async def put(letter: OutboundMessage) -> None:
            outcome = (await target.publish((letter,)))[0]
            if isinstance(outcome, BrokerError):
                raise outcome

        message = message_of(record)
        limits = self._backend.capabilities.publish.limits
        writer = DeadLetterWriter(self._target_name, put, limits, self._hooks)
        reason = f"cannot be decoded: {error.native}"
        await writer.write(message, reason=reason, error=error, attempts=None, subscription=self._group)
        self._poison = None
        if self._fetcher.buffer.discard(record):
            assigned = self._assignments.get(TopicPartition(record.topic, record.partition))
            if assigned is not None:
                assigned.skip(record.offset)
        if self._hooks.listening:
            self._hooks.emit(DeadLettered(message=message, target=self._target_name, reason=reason))


async def open_decoder(
    codec: Codec[Any] | None,
    on_decode_error: str,
    *,
    backend: Backend,
    group: str,
    fetcher: RecordFetcher,
    assignments: Assignments,
    hooks: Hooks,
) -> RecordDecoder | None:
    """The decoder of a consumer that is about to join; None without a codec.

    :raises TopicNotFound: the topic of the dead letters does not exist.
    """
    if on_decode_error != "raise":
        # That letters cannot be written is better known before the first record is read.
        await backend.admin().describe_topic(on_decode_error)
    if codec is None:
        return None
    return RecordDecoder(
        codec, on_decode_error, backend=backend, group=group, fetcher=fetcher, assignments=assignments, hooks=hooks
    )
