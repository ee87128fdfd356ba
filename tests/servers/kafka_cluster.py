"""A cluster of several real brokers, for tests that lose a leader. Blocking, like `KafkaServer`.

Every broker is a member of the controllers' quorum too; topics have a copy on up to three of them and are written to
while a majority of these is there. Brokers have an index, from 0; Kafka's node id is the index plus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Self

from tests.servers.kafka import KafkaServer, make_id
from tests.servers.kafka_client import SECONDS, RawAdmin, wait_for
from tests.servers.server_process import Servers

__all__ = ["KafkaCluster"]


class KafkaCluster(Servers):
    """`size` brokers; each can be stopped, killed, paused and restarted through `cluster[index]`."""

    def __init__(self, size: int = 3, options: Mapping[str, str] | None = None) -> None:
        cluster_id = make_id()
        self.brokers = [KafkaServer(options, node=node, cluster_id=cluster_id) for node in range(1, size + 1)]
        voters = {broker.node: broker.ports["CONTROLLER"] for broker in self.brokers}
        for broker in self.brokers:
            broker.voters = voters

    def __getitem__(self, index: int) -> KafkaServer:
        return self.brokers[index]

    def __len__(self) -> int:
        return len(self.brokers)

    @property
    def bootstrap(self) -> str:
        """The `bootstrap.servers` of a raw client."""
        return ",".join(broker.bootstrap for broker in self.brokers)

    @property
    def url(self) -> str:
        return f"kafka://{self.bootstrap}"

    @cached_property
    def admin(self) -> RawAdmin:
        """A raw client of all brokers."""
        return RawAdmin(self.bootstrap)

    def start(self) -> Self:
        """Start all stopped brokers, and wait until each serves clients."""
        # A controller needs a majority, so all are started before the first wait.
        started = [broker.start(wait=False) for broker in self.brokers if not broker.running]
        for broker in started:
            broker.wait_until_started()
        return self

    def leader(self, topic: str, partition: int = 0) -> int:
        """The index of the broker that leads the partition; -1 while none does."""
        found = self.admin.leader(topic, partition)
        return found - 1 if found > 0 else -1

    def wait_for_new_leader(self, topic: str, old: int, partition: int = 0) -> int:
        """Wait for another leader than `old`; return its index."""
        admin = self.admin

        def another() -> int:
            node = admin.leader(topic, partition)
            return node if node not in (-1, old + 1) else 0

        # If the controller is lost as well, there are two elections in turn.
        return wait_for(another, 2 * SECONDS) - 1

    def wait_until_whole(self, topic: str) -> None:
        """Wait until all replicas of the topic are in sync, so that any one broker may be lost."""
        admin = self.admin

        def whole() -> bool:
            found = admin.client.list_topics(topic).topics[topic].partitions.values()
            return all(len(each.isrs) == len(each.replicas) for each in found)

        wait_for(whole, 4 * SECONDS)

    def close(self) -> None:
        """Kill all brokers and remove their data."""
        for broker in self.brokers:
            broker.close()
