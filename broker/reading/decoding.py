"""Decodes the records of one consumer in place, and dead-letters those that cannot be decoded.

*Concurrency.* One event loop; decoding is synchronous, and at most one dead letter is being written. *Cancellation.* A
cancelled caller does not stop the write of a dead letter; a close, or the loss of its partition, does. *Failure.* A
failed write is repeated with growing pauses and `DeadLetterFailed` events; meanwhile nothing behind the record is
handed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import suppress
from typing import Any, Final

from broker.codecs.envelopes import Preparation, decoder_of, preparation_of
from broker.consuming.dead_letters import DeadLetterWriter, describe, log_dead_lettered
from broker.driver.assignments import Assignments
from broker.driver.concurrency import Backoff
from broker.driver.contract import Backend, PublishTarget, TopicPartition
from broker.driver.record_messages import message_of
from broker.envelopes import UNSET
from broker.errors import BrokerError, DecodeError
from broker.hooks import DeadLettered, Hooks, Warned, logger
from broker.outbound import OutboundMessage
from broker.protocols import AnyCodec
from broker.reading.record_fetcher import RecordFetcher
from broker.records import Record, undecodable

__all__ = ["RecordDecoder", "open_decoder"]


_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 10.0
_PREPARED: Final = object()
"""What `decoded` is between `prepare` and `unpack` of the codec."""


class RecordDecoder:
    """Decodes what leaves the buffer.

    :param on_decode_error: 'raise', or the topic of the dead letters.
    """

    def __init__(
        self,
        codec: AnyCodec[Any],
        on_decode_error: str,
        *,
        backend: Backend,
        group: str,
        fetcher: RecordFetcher,
        assignments: Assignments,
        hooks: Hooks,
    ) -> None:
        self._decode, self._takes_records = decoder_of(codec)
        self._target_name = on_decode_error
        self._backend = backend
        self._group = group
        self._fetcher = fetcher
        self._assignments = assignments
        self._hooks = hooks
        self._prepare = preparation_of(codec)
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._preparing: asyncio.Task[None] | None = None
        self._target: PublishTarget | None = None
        self._poison: Record[Any] | None = None
        self._writing: asyncio.Task[None] | None = None

    def decode_next(self, record: Record[Any]) -> bool:
        """Decode the record at the head of the buffer; False if it is being prepared or dead-lettered.

        :raises DecodeError: it cannot be decoded, and there is no dead-letter topic. It has left the buffer, and counts
            as handed over.
        """
        if self._prepare is not None and record.decoded is UNSET:
            if self._preparing is None or self._preparing.done():
                self._preparing = asyncio.get_running_loop().create_task(
                    self._prepare_buffered(self._prepare), name="broker-codec-prepare"
                )
            return False
        try:
            record.decoded = self._decode(record if self._takes_records else record.data)
        except Exception as error:
            failure = undecodable(record, error, "give on_decode_error= a dead-letter topic")
            if self._target_name == "raise":
                self._assignments.hand_over_one(self._fetcher.buffer.pop_one(), None)
                raise failure from error
            if self._poison is not record:
                self.stop()
                self._poison = record
                self._writing = asyncio.get_running_loop().create_task(
                    self._dead_letter(record, failure), name="broker-dead-letter"
                )
            return False
        return True

    def decode_following(self, records: list[Record[Any]]) -> None:
        """Decode all but the first, which is decoded; put back the first that fails or is unprepared, and the rest."""
        decode, takes_records, prepared = self._decode, self._takes_records, self._prepare is None
        done = 1
        # The error is met again, and told, when its record is at the head.
        with suppress(Exception):
            for record in records[1:]:
                if not prepared and record.decoded is UNSET:
                    break
                record.decoded = decode(record if takes_records else record.data)
                done += 1
        if done < len(records):
            self._fetcher.buffer.put_back(records[done:])
            del records[done:]

    async def _prepare_buffered(self, prepare: Preparation) -> None:
        """Have the codec prepare what is in the buffer; if the codec fails, pause."""
        records = [record for record in self._fetcher.buffer.records() if record.decoded is UNSET]
        try:
            await prepare(records)
        except Exception as error:
            delay = self._backoff.next()
            text = (
                f"Nothing is handed over to group {self._group!r}: the codec failed to prepare {len(records)} records, "
                f"next try in {delay:.2f} s: {describe(error)}"
            )
            logger.warning(text)
            self._hooks.emit(Warned(text=text))
            await asyncio.sleep(delay)
            return
        self._backoff.reset()
        for record in records:
            record.decoded = _PREPARED

    async def head_changed(self, timeout: float | None) -> None:
        """Wait, at most `timeout` seconds, until the record at the head of the buffer is prepared or dead-lettered."""
        if self._preparing is not None and not self._preparing.done():
            await asyncio.wait((self._preparing,), timeout=timeout)
            return
        task = self._writing
        if task is not None:
            await asyncio.wait((task,), timeout=timeout)
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self._poison = None
                raise error

    def forget(self, partitions: Container[tuple[str, int]]) -> None:
        """These partitions were lost or revoked, or the consumer seeks in them."""
        if self._poison is not None and (self._poison.topic, self._poison.partition) in partitions:
            self.stop()

    def stop(self) -> None:
        """Give up the dead letter that is being written, if any; its record is read again."""
        self._poison = None
        if self._writing is not None:
            self._writing.cancel()

    async def close(self) -> None:
        """Stop, and release the dead-letter topic."""
        self.stop()
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.wait((self._preparing,))
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        if self._target is not None:
            await self._target.close()

    async def _dead_letter(self, record: Record[Any], error: DecodeError) -> None:
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
        log_dead_lettered(message, self._target_name, self._group, reason)
        if self._hooks.listening:
            self._hooks.emit(DeadLettered(message=message, target=self._target_name, reason=reason))


async def open_decoder(
    codec: AnyCodec[Any] | None,
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
        # Fail now if the topic is missing, and not at the first undecodable record.
        await backend.admin().describe_topic(on_decode_error)
    if codec is None:
        return None
    return RecordDecoder(
        codec, on_decode_error, backend=backend, group=group, fetcher=fetcher, assignments=assignments, hooks=hooks
    )
