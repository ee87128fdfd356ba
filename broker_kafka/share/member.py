"""`ShareMember`: the thread that owns one share consumer of confluent-kafka, which is one member of a share group.

librdkafka's rules make the shape. A poll gives what a producer has sent together, and the next poll is refused until
every message of it is acknowledged; so a member has one batch at a time, and its slowest message holds it up. A poll
that gave nothing leaves a request with the broker, which may be answered at any time: a member that was asked to fetch
polls on until it has something, or what comes would wait unseen while its lock runs out. An ack is answered for all
messages of a partition together: what may be refused is never sent along with what may not.

*Concurrency.* As `OwnerThread`. *Failure.* What passes goes to `host.failed`; a fatal error ends the thread.
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
_WATCH_MILLISECONDS: Final = 100

_FOREIGN: Final = (
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
"""What librdkafka takes for other consumers, and refuses for this one."""

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
"""The broker says that the messages are not this member's any more."""


class Acknowledgement(NamedTuple):
    """What is to become of one record."""

    partition: int
    offset: int
    kind: AcknowledgeType


class MemberHost(Protocol):
    """Whom a member works for; called on the loop."""

    def arrived(self, member: ShareMember, records: Sequence[NativeRecord], since: float) -> None:
        """These are ours, since the `lease_time` `since` at the earliest; the next come when all are settled."""
        ...

    def joined(self, member: ShareMember) -> None:
        """The member has been given partitions."""
        ...

    def failed(self, member: ShareMember, error: BrokerError) -> None: ...


class ShareMember(OwnerThread[ShareConsumer]):
    """One member of a group, for one topic.

    :param config: as `member_config` makes it.
    :param watches: whether `host.joined` is to be told; it costs the client statistics for as long as it lives.
    :param timeout: seconds to wait for the answer to an ack.
    """

    def __init__(
        self, config: Mapping[str, Any], host: MemberHost, *, topic: str, name: str, watches: bool, timeout: float
    ) -> None:
        # The library keeps a share consumer's handle elsewhere, so none is held.
        super().__init__(name, Rebootstrapper(config))
        self._config = dict(config)
        if watches:
            self._config |= {"statistics.interval.ms": _WATCH_MILLISECONDS, "stats_cb": self._look}
        self._watching = watches
        self._host = host
        self._topic = topic
        self._timeout = timeout
        self._wanted = False
        self._since = 0.0
        """When nothing was there yet: this thread may stand still after that, with messages on their way."""

    # -- for the loop --------------------------------------------------------------------------------------

    def want(self) -> None:
        """Fetch one batch; all of the last are settled. :raises BrokerError: as `tell`."""
        self.submit(self._begin)

    async def settle(self, acknowledgements: Sequence[Acknowledgement]) -> list[BrokerError | None]:
        """Acknowledge these, and wait for the broker; one entry each. LeaseLost: it comes again."""
        return await self.call(lambda client: self._settle(client, acknowledgements))

    def give_up(self, records: Sequence[tuple[int, int]]) -> None:
        """Release these, of which the broker may know already; nothing else is sent along."""
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
        if not self._wanted:
            self._serve(client, _IDLE)
            return
        since, self._since = self._since, lease_time()
        try:
            messages = list(client.poll(_POLL))
        except KafkaException as error:
            told = translate(error, f"Fetching from topic {self._topic!r}")
            if error.args[0].fatal():
                raise told from error
            self._post(self._host.failed, self, told)
            self._serve(client, _AFTER_ERROR)
            return
        records = [message for message in messages if message.error() is None]
        for message in messages:
            if (failure := message.error()) is not None:
                logger.warning(
                    "%s: record %s of partition %s cannot be read, and is not ours: %s",
                    self._name,
                    message.offset(),
                    message.partition(),
                    failure,
                )
        if records:
            self._wanted = False
            self._post(self._host.arrived, self, records, since)

    def _shut(self, client: ShareConsumer) -> None:
        client.close()

    def _begin(self, _: ShareConsumer) -> None:
        self._wanted = True
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
            # Whatever a client refuses the call for: else the batch of these messages would never be done.
            failure = error
        for partition, indices in sent.items():
            error = answers.get(partition, failure or _Unanswered()) if partition not in answers else answers[partition]
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
            f"Messages of {self._topic!r}[{partition}] were acknowledged, and the broker's answer was {error}",
            native=error,
            advice="They may come again when their lock ends",
        )

    def _lost(self, partition: int, error: BaseException) -> LeaseLost:
        return LeaseLost(
            f"Messages of {self._topic!r}[{partition}] are not this consumer's any more: {error}", native=error
        )

    def _look(self, text: str) -> None:
        """Statistics, by a callback within a poll: whether this member takes part."""
        if not self._watching:
            return
        told = json.loads(text)
        if told.get("cgrp", {}).get("assignment_size", 0) > 0:
            self._watching = False
            self._post(self._host.joined, self)


class _Unanswered(BackendError):
    """No answer names the partition."""

    def __init__(self) -> None:
        super().__init__("none", retriable=True)


def member_config(config: Mapping[str, Any], group: str, most: int) -> dict[str, Any]:
    """The configuration of a member's client.

    :param config: of a consumer.
    :param most: about the most records of a batch; what a producer has sent together is not divided.
    """
    kept = {name: value for name, value in config.items() if name not in _FOREIGN}
    return kept | {"group.id": group, "share.acknowledgement.mode": "explicit", "max.poll.records": most}
