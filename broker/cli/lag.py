"""`broker lag`: how far behind the subscriptions and groups of a topic are. Reads only."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from broker.cli.session import AsJson, Session, command, new_app
from broker.cli.topics import KnownTopic, parse_name
from broker.driver.contract import Lag

__all__ = ["app"]

app = new_app("lag")


@command(app, "lag")
async def lag(
    session: Session,
    topic: KnownTopic,
    subscription: Annotated[
        str | None,
        typer.Argument(
            metavar="SUBSCRIPTION",
            parser=parse_name,
            help="One subscription or group; all of the topic's without it.",
            show_default=False,
        ),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show how far behind each subscription is."""
    admin = session.bus.admin
    names = [subscription] if subscription is not None else sorted(await admin.subscriptions(topic))
    lags = [(name, await admin.lag(topic, name)) for name in names]
    session.table(
        [lag_json(topic, name, lag) for name, lag in lags],
        ("SUBSCRIPTION", "WAITING", "UNSETTLED", "PER PARTITION"),
        [(name, lag.waiting, lag.unsettled, _partitions(lag)) for name, lag in lags],
        empty=f"Topic {topic!r} has no subscriptions",
    )


def lag_json(topic: str, name: str, lag: Lag) -> dict[str, Any]:
    """The stable fields of a lag."""
    return {
        "topic": topic,
        "subscription": name,
        "waiting": lag.waiting,
        "unsettled": lag.unsettled,
        "partitions": {str(partition): behind for partition, behind in sorted(lag.partitions.items())},
    }


def _partitions(lag: Lag) -> str | None:
    return " ".join(f"{partition}:{behind}" for partition, behind in sorted(lag.partitions.items())) or None
