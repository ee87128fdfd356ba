"""`broker tracker`: watches the leases of a queue in a process of its own. Any number may run.

It runs until Ctrl-C or SIGTERM; then it commits, leaves its group and ends with 130 or 143.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Annotated

import typer

from broker.cli.exits import Exit, Failure
from broker.cli.health import HealthServer
from broker.cli.session import AsJson, Session, command, new_app
from broker.driver.queue_tracking import TracksQueues
from broker.errors import Unsupported
from broker.hooks import PartitionsAssigned, PartitionsLost, PartitionsRevoked

__all__ = ["Subscription", "app", "queues_of"]

app = new_app("tracker")

Subscription = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="The subscription's name.", show_default=False)
]


@command(app, "tracker")
async def tracker(
    session: Session,
    subscription: Subscription,
    *,
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", "-t", metavar="TOPIC", help="A topic of its messages; may be given again."),
    ] = None,
    unnamed: Annotated[
        str, typer.Option(metavar="TOPIC", help="The topic of messages whose markers name none: kafka-mq-go's.")
    ] = "",
    listen: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Serve /health and /metrics here; port 0 takes any that is free."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send the messages of a subscription again whose leases end."""
    door = None if listen is None else _door(listen)
    session.bus.hooks.listen(lambda event: _tell(session, event))
    found = queues_of(session).queue_tracker(subscription, topics=topic or (), unnamed=unnamed)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(found.close)
        if door is not None:
            # First: what cannot be used here must not leave a new marker topic behind.
            server = await stack.enter_async_context(HealthServer(*door, subscription, found.trouble, found.metrics))
            session.note(f"Health and metrics are at {server.url}")
        await found.open()
        session.note(f"Tracking {subscription!r}")
        await found.wait()


def queues_of(session: Session) -> TracksQueues:
    """The backend, as what has queues to track.

    :raises Unsupported: it has none.
    """
    backend = session.bus.backend
    if not isinstance(backend, TracksQueues):
        raise Unsupported(
            f"Backend {session.bus.capabilities.backend!r} has no queues that need a tracker",
            advice="Its broker watches the leases itself",
        )
    return backend


def _door(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65_536):
        raise Failure(f"--listen is {text!r}", advice="Give a port, at most 65535, or HOST:PORT", code=Exit.USAGE)
    return host or "127.0.0.1", int(port)


def _tell(session: Session, event: object) -> None:
    match event:
        case PartitionsAssigned(current=current) | PartitionsRevoked(current=current) | PartitionsLost(current=current):
            numbers = ", ".join(str(partition) for _, partition in current)
            session.note(f"broker: tracks partitions {numbers}" if numbers else "broker: tracks no partition")
        case _:
            return
