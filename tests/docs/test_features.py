"""README's table of features × backends matches the capabilities."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from broker.capabilities import Capabilities, ConfirmedAck, LeaseMode, MessageCapabilities, RecordCapabilities
from broker.hooks import Hooks
from broker.registry import create_backend

README = Path(__file__).parents[2] / "README.md"
PART = re.compile(r"(<!-- features -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL)

BACKENDS: Final[Mapping[str, str]] = {
    "inmem": "inmem:",
    "JetStream": "nats://localhost",
    "Kafka": "kafka://localhost",
    "Pub/Sub": "pubsub://project",
    "Pulsar": "pulsar://localhost",
    "Service Bus": "servicebus://policy:key@namespace",
}


def of_messages(tell: Callable[[MessageCapabilities], bool | str]) -> Callable[[Capabilities], bool | str]:
    return lambda found: found.messages is not None and tell(found.messages)


def of_records(tell: Callable[[RecordCapabilities], bool | str]) -> Callable[[Capabilities], bool | str]:
    return lambda found: found.records is not None and tell(found.records)


FEATURES: Final[Mapping[str, Callable[[Capabilities], bool | str]]] = {
    "messages, settled one by one": of_messages(lambda _: True),
    "a subscription's messages are shared": of_messages(
        lambda m: "one by one" if m.shared_by_message else "by partition"
    ),
    "leases": of_messages(
        lambda m: {LeaseMode.NONE: "none", LeaseMode.CLIENT: "by the client"}.get(m.lease, "renewed")
    ),
    "confirmed ack": of_messages(
        lambda m: "on demand" if m.confirmed_ack is ConfirmedAck.OPTIONAL else m.confirmed_ack.value
    ),
    "deliveries are counted": of_messages(lambda m: m.delivery_attempt),
    "the broker keeps a delayed nack": of_messages(lambda m: m.native_delay > 0),
    "retry topics": of_messages(lambda m: m.retry_topics),
    "order per key over processes": of_messages(lambda m: m.key_affinity),
    "a new subscription gets what was there before": of_messages(lambda m: m.history),
    "records of a log, in groups": of_records(lambda r: r.groups),
    "partitions move between members": of_records(lambda r: r.rebalance),
    "read the log from an offset or a time": of_records(lambda r: r.log_reader and r.position_at),
    "groups listed, reset, deleted": of_records(lambda r: r.group_admin),
    "transactions": lambda found: found.publish.transactions,
    "a repeated id is dropped": lambda found: found.publish.deduplication,
    "delivery at a time (`deliver_at`)": lambda found: found.publish.deliver_at,
    "expiry (`ttl`)": lambda found: found.publish.ttl,
    "tombstones": lambda found: found.publish.tombstones,
    "survives a restart of the server": lambda found: found.durable,
}


def table() -> str:
    found = [create_backend(url, Hooks()).capabilities for url in BACKENDS.values()]
    rows = [
        f"| {name} | {' | '.join(cell(tell(capabilities)) for capabilities in found)} |"
        for name, tell in FEATURES.items()
    ]
    return "\n".join([f"| | {' | '.join(BACKENDS)} |", "|---" * (len(BACKENDS) + 1) + "|", *rows]) + "\n"


def cell(value: bool | str) -> str:
    return value if isinstance(value, str) else "✓" if value else "–"


def test_the_features_of_each_backend() -> None:
    text = README.read_text(encoding="utf-8")
    assert PART.search(text)
    wanted = PART.sub(lambda match: match[1] + table() + match[3], text)
    if os.environ.get("UPDATE_DOCS"):
        README.write_text(wanted, encoding="utf-8")
    else:
        assert text == wanted, "README.md is out of date: run UPDATE_DOCS=1 make docs"
