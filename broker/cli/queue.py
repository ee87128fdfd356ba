"""`broker queue` and `broker tracker`: queues whose leases the application tracks, such as queues on Kafka.

`inspect`, `peek` and `lag` only read. `purge` asks first, and fails while the queue has consumers or trackers. The
tracker runs until Ctrl-C or SIGTERM; then it commits, leaves its group and exits with 130 or 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from broker.cli import dead, subscriptions
from broker.cli.arguments import Listen, SubscriptionName, Yes, parse_address
from broker.cli.completion import complete_topic
from broker.cli.output import escaped, json_line, show_table
from broker.cli.rendering import attribute_pairs, bytes_field, cut, printable
from broker.cli.session import AsJson, Session, command, new_app
from broker.driver.queue_tracking import PurgedQueue, QueuedMessage, TracksQueues
from broker.errors import Unsupported
from broker.exposition import Histogram, Series, prometheus_text
from broker.hooks import Event, PartitionsAssigned, PartitionsLost, PartitionsRevoked
from broker.probes import Page, ProbeServer, probe

__all__ = ["app", "tracker_app", "tracker_pages"]

app = new_app("queue", "Inspect, redrive and purge queues with tracked leases.")
tracker_app = new_app("tracker")

CUT = 60
"""Maximum length of a body in a table."""

_UNKNOWN = "?"
"""The topic of a message whose markers name none."""
_PREFIX: Final = "anybroker_queue_"


@command(app, "inspect")
async def inspect(session: Session, subscription: SubscriptionName, *, as_json: AsJson = False) -> None:
    """List delivered messages that are not settled.

    The oldest message comes first.
    """
    leases = await _queues(session).open_leases(subscription)
    session.table(
        [asdict(lease) for lease in leases],
        ("MESSAGE", "STATE", "ATTEMPT", "AGE", "DUE IN", "HOLDER", "REASON"),
        [
            (
                f"{escaped(lease.topic) or _UNKNOWN}[{lease.partition}] {lease.offset}",
                lease.state,
                lease.attempt,
                f"{lease.age:.1f} s",
                f"{lease.due_in:.1f} s",
                escaped(lease.holder) or None,
                escaped(lease.reason) or None,
            )
            for lease in leases
        ],
        empty=f"Queue {subscription!r} has no unsettled messages",
    )


@command(app, "peek")
async def peek(
    session: Session,
    subscription: SubscriptionName,
    *,
    count: Annotated[
        int, typer.Option("--limit", "-n", metavar="COUNT", min=1, help="Show at most this many messages.")
    ] = 10,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten bodies and attributes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show messages of a queue without taking them.

    Delivered messages come first, the oldest at the top, then messages that no consumer has taken.
    """
    found = await _queues(session).queued_messages(subscription, count)
    if as_json:
        await session.out.write(b"".join(json_line(_message_json(message)) for message in found))
        return
    limit = None if full else CUT
    columns = ("MESSAGE", "STATE", "ATTEMPT", "DUE IN", "KEY", "DATA", "ATTRIBUTES")
    if not show_table(columns, [_message_row(message, limit) for message in found]):
        session.note(f"Queue {subscription!r} is empty")


command(app, "redrive")(dead.redrive)
command(app, "lag")(subscriptions.lag)


@command(app, "purge")
async def purge(
    session: Session,
    subscription: SubscriptionName,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show how many messages would be dropped; drop none.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Drop all messages of a queue that are not settled.

    Stop its consumers and trackers first. Other subscriptions keep their messages.
    """
    queues = _queues(session)
    if dry_run:
        found = await queues.purge_queue(subscription, dry_run=True)
        session.answer(_purge_json(subscription, found, dry_run), f"{_counts(found)} would be dropped")
        return
    if not yes:
        found = await queues.purge_queue(subscription, dry_run=True)
        await session.confirm(f"Drop {_counts(found)} of queue {subscription!r}?", yes)
    dropped = await queues.purge_queue(subscription)
    session.answer(_purge_json(subscription, dropped, dry_run), f"Dropped {_counts(dropped)}")


@command(tracker_app, "tracker")
async def tracker(
    session: Session,
    subscription: SubscriptionName,
    *,
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            "-t",
            metavar="TOPIC",
            help="A topic of the messages; may be repeated.",
            autocompletion=complete_topic,
        ),
    ] = None,
    unnamed: Annotated[
        str,
        typer.Option(
            metavar="TOPIC",
            help="The topic of messages whose markers name none, as those of kafka-mq-go.",
            autocompletion=complete_topic,
        ),
    ] = "",
    listen: Listen = None,
    as_json: AsJson = False,
) -> None:
    """Redeliver messages of a queue when leases end.

    Runs until it is interrupted. Several trackers of a subscription share the work.
    """
    address = None if listen is None else parse_address(listen)
    session.serves = True
    session.bus.hooks.listen(lambda event: _report_partitions(session, event))
    found = _queues(session).queue_tracker(subscription, topics=topic or (), unnamed=unnamed)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(found.close)
        if address is not None:
            # Before open, so that an address in use does not leave a new marker topic behind.
            server = await stack.enter_async_context(
                ProbeServer(*address, tracker_pages(subscription, found.trouble, found.metrics))
            )
            session.note(f"Health and metrics are at {server.url}")
        await found.open()
        session.note(f"Tracking {subscription!r}")
        await found.wait()


def _queues(session: Session) -> TracksQueues:
    backend = session.bus.backend
    if not isinstance(backend, TracksQueues):
        raise Unsupported(
            f"Backend {session.bus.capabilities.backend!r} has no queues that need a tracker",
            advice="Its broker tracks the leases",
        )
    return backend


def tracker_pages(
    subscription: str, trouble: Callable[[], str], metrics: Callable[[], Mapping[str, float | Histogram]]
) -> dict[str, Page]:
    """The pages of a tracker.

    :param trouble: returns the reason why the tracker is unhealthy; empty if it is healthy.
    :param metrics: returns the metrics by name.
    """

    def text() -> tuple[int, str]:
        found: dict[str, float | Histogram] = {**metrics(), "up": 0 if trouble() else 1}
        return 200, prometheus_text(
            {Series.of(_PREFIX + name, subscription=subscription): value for name, value in found.items()}
        )

    return {"/health": probe(trouble), "/metrics": text}


def _report_partitions(session: Session, event: Event) -> None:
    if isinstance(event, PartitionsAssigned | PartitionsRevoked | PartitionsLost):
        numbers = ", ".join(str(partition) for _, partition in event.current)
        session.note(f"broker: tracks partitions {numbers}" if numbers else "broker: tracks no partition")


def _message_json(message: QueuedMessage) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "state": message.state,
        "attempt": message.attempt,
        "due_in": message.due_in,
        "id": message.id,
        **bytes_field("key", message.key),
        **bytes_field("data", message.data),
        "attributes": dict(message.attributes),
    }


def _message_row(message: QueuedMessage, limit: int | None) -> list[object]:
    return [
        f"{escaped(message.topic) or _UNKNOWN}[{message.partition}] {message.offset}",
        message.state,
        message.attempt,
        None if message.due_in is None else f"{message.due_in:.1f} s",
        printable(message.key, limit),
        printable(message.data, limit),
        cut(attribute_pairs(message.attributes), limit) or None,
    ]


def _purge_json(subscription: str, purged: PurgedQueue, dry_run: bool) -> dict[str, Any]:
    return {"subscription": subscription, "open": purged.open, "ready": purged.ready, "dry_run": dry_run}


def _counts(purged: PurgedQueue) -> str:
    return f"{purged.open} open and {purged.ready} ready messages"
