"""`ShareMember`: the thread that owns one share consumer of confluent-kafka, which is one member of a share group.

librdkafka sets the rules. A poll returns what a producer sent together, and the next poll is refused until every
message of it is acknowledged: a member has one batch at a time, and its slowest message holds it up. A poll without
messages leaves a request with the broker that may be answered at any time: after a fetch, the member polls until it
has messages, or they would wait unseen until their locks expire. Acks of one partition are answered together: an ack
that may be refused is never sent with others.

*Concurrency.* As `OwnerThread`. *Failure.* Retriable errors go to `host.failed`; a fatal one ends the thread.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from confluent_kafka import AcknowledgeType, IllegalStateException, KafkaError, KafkaException, ShareConsumer
from confluent_kafka import Message as NativeRecord

from broker import BackendError, BrokerError, LeaseLost, SettleError
from broker.driver import lease_time, logger
from broker_kafka.client.rebootstrap import Rebootstrapper
from broker_kafka.client.thread import OwnerThread
from broker_kafka.config.oauth import with_oauth_token
from broker_kafka.errors import configuration_error, kafka_error, translate

__all__ = ["Acknowledgement", "MemberHost", "ShareMember", "member_config"]

_POLL: Final = 0.1
_IDLE: Final = 1.0
_AFTER_ERROR: Final = 0.1
_STATISTICS_MS: Final = 100

_REFUSED_PROPERTIES: Final = (
    "enable.partition.eof",
    "fetch.error.backoff.ms",
    "fetch.queue.backoff.ms",
    "group.instance.id",
    "group.protocol",
    "group.remote.assignor",
    "heartbeat.interval.ms",
    "isolation.level",
    "partition.assignment.strategy",
    "queued.max.messages.kbytes",
    "queued.min.messages",
    "session.timeout.ms",
)
"""Properties that librdkafka takes for other consumers, and refuses for share consumers."""

_LOST: Final = frozenset(
    {
        KafkaError.INVALID_RECORD_STATE,
        KafkaError.INVALID_SHARE_SESSION_EPOCH,
        KafkaError.SHARE_SESSION_NOT_FOUND,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
)
"""Errors that mean the messages are not this member's any more."""


class Acknowledgement(NamedTuple):
    """The acknowledgement of one record."""

    partition: int
    offset: int
    kind: AcknowledgeType


class MemberHost(Protocol):
    """The owner of a member; called on the loop."""

    def arrived(self, member: ShareMember, records: Sequence[NativeRecord], since: float) -> None:
        """A batch, leased from the `lease_time` `since` at the earliest; the next follows when it is settled."""
        ...

    def joined(self, member: ShareMember) -> None:
        """The member has been given partitions."""
        ...

    def failed(self, member: ShareMember, error: BrokerError) -> None: ...


class ShareMember(OwnerThread[ShareConsumer]):
    """One member of a group, for one topic.

    :param config: as `member_config` makes it.
    :param reports_joined: whether to call `host.joined`; costs client statistics for the life of the member.
    :param timeout: seconds to wait for the answer to an ack.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        host: MemberHost,
        *,
        topic: str,
        name: str,
        reports_joined: bool,
        timeout: float,
    ) -> None:
        # A share consumer has no handle that a rebootstrap could use.
        super().__init__(name, Rebootstrapper(config))
        self._config = dict(config)
        if reports_joined:
            self._config |= {"statistics.interval.ms": _STATISTICS_MS, "stats_cb": self._read_statistics}
        self._reports_joined = reports_joined
        self._host = host
        self._topic = topic
        self._timeout = timeout
        self._fetching = False
        self._since = 0.0
        """When the last poll without messages began: leases may start right after, even if this thread is suspended."""

    # -- for the loop --------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Fetch one batch; the last one must be settled. :raises BrokerError: as `OwnerThread.submit`."""
        self.submit(self._begin_fetch)

    async def settle(self, acknowledgements: Sequence[Acknowledgement]) -> list[BrokerError | None]:
        """Acknowledge these and wait for the broker; one result each. LeaseLost: the message is redelivered."""
        return await self.call(lambda client: self._settle(client, acknowledgements))

    def release(self, records: Sequence[tuple[int, int]]) -> None:
        """Release these in a request of their own; the broker may have released them already."""
        releases = [Acknowledgement(*record, AcknowledgeType.RELEASE) for record in records]
        self.submit(lambda client: self._settle(client, releases))

    def _crashed(self, error: BrokerError) -> None:
        self._host.failed(self, error)

    # -- the thread ----------------------------------------------------------------------------------------

    def _open(self) -> ShareConsumer:
        try:
            client = ShareConsumer(with_oauth_token(self._config))
            client.subscribe([self._topic])
        except (KafkaException, ValueError, TypeError, RuntimeError) as error:
            raise configuration_error(error, "Making a share consumer", self._config) from error
        return client

    def _turn(self, client: ShareConsumer) -> None:
        if not self._fetching:
            self._serve(client, _IDLE)
            return
        since, self._since = self._since, lease_time()
        try:
            messages = list(client.poll(_POLL))
        except KafkaException as error:
            failure = translate(error, f"Fetching from topic {self._topic!r}")
            if error.args[0].fatal():
                raise failure from error
            self._post(self._host.failed, self, failure)
            self._serve(client, _AFTER_ERROR)
            return
        records = [message for message in messages if message.error() is None]
        for message in messages:
            if (failure := message.error()) is not None:
                logger.warning(
                    "%s: record %s of partition %s cannot be read, and is skipped: %s",
                    self._name,
                    message.offset(),
                    message.partition(),
                    failure,
                )
        if records:
            self._fetching = False
            self._post(self._host.arrived, self, records, since)

    def _shut(self, client: ShareConsumer) -> None:
        client.close()

    def _begin_fetch(self, _: ShareConsumer) -> None:
        self._fetching = True
        self._since = lease_time()

    def _settle(self, client: ShareConsumer, acknowledgements: Sequence[Acknowledgement]) -> list[BrokerError | None]:
        results: list[BrokerError | None] = [None] * len(acknowledgements)
        sent: defaultdict[int, list[int]] = defaultdict(list)
        for index, (partition, offset, kind) in enumerate(acknowledgements):
            try:
                client.acknowledge_offset(self._topic, partition, offset, kind)
            except IllegalStateException as error:
                results[index] = self._lost(partition, error)
            except (KafkaException, RuntimeError) as error:
                results[index] = self._refused(partition, error)
            else:
                sent[partition].append(index)
        if not sent:
            return results
        answers: dict[int, BaseException | None] = {}
        failure: BaseException | None = None
        try:
            answers = {each.partition: error for each, error in client.commit_sync(self._timeout).items()}
        except (KafkaException, RuntimeError) as error:
            # Whatever the error: the batch must count as settled, or the member would never fetch again.
            failure = error
        for partition, indices in sent.items():
            error = answers[partition] if partition in answers else failure or _Unanswered()
            if error is not None:
                refused = self._refused(partition, error)
                for index in indices:
                    results[index] = refused
        return results

    def _refused(self, partition: int, error: BaseException) -> BrokerError:
        found = kafka_error(error)
        if found is not None and found.code() in _LOST:
            return self._lost(partition, error)
        return SettleError(
            f"The broker answered the acks of {self._topic!r}[{partition}] with an error: {error}",
            native=error,
            advice="The messages may be redelivered when their lock ends",
        )

    def _lost(self, partition: int, error: BaseException) -> LeaseLost:
        return LeaseLost(
            f"Messages of {self._topic!r}[{partition}] are not this consumer's any more: {error}", native=error
        )

    def _read_statistics(self, text: str) -> None:
        """The callback of statistics, called within a poll: whether this member has partitions."""
        if not self._reports_joined:
            return
        if json.loads(text).get("cgrp", {}).get("assignment_size", 0) > 0:
            self._reports_joined = False
            self._post(self._host.joined, self)


class _Unanswered(BackendError):
    """The answer does not name the partition."""

    def __init__(self) -> None:
        super().__init__("none", retriable=True)


def member_config(config: Mapping[str, Any], group: str, max_batch: int) -> dict[str, Any]:
    """The configuration of a member's client.

    :param config: of a consumer.
    :param max_batch: records of a batch, about; what a producer sent together is not divided.
    """
    kept = {name: value for name, value in config.items() if name not in _REFUSED_PROPERTIES}
    return kept | {"group.id": group, "share.acknowledgement.mode": "explicit", "max.poll.records": max_batch}
