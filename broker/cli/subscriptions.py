"""`broker subscriptions` and `broker lag`: the subscriptions and groups of a topic."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from broker.cli.arguments import (
    TIME_OR_AGE,
    KnownTopic,
    SubscriptionName,
    TopicName,
    Yes,
    parse_name,
    parse_start,
)
from broker.cli.completion import complete_subscription
from broker.cli.errors import Exit, Failure
from broker.cli.rendering import native_rows
from broker.cli.session import AsJson, Session, command, new_app
from broker.driver.contract import Lag
from broker.errors import BrokerError

__all__ = ["app", "lag_app"]

app = new_app("subscriptions", "List, create, describe and delete subscriptions.")
lag_app = new_app("lag")


@command(app, "list")
async def list_subscriptions(session: Session, topic: TopicName, *, as_json: AsJson = False) -> None:
    """List the subscriptions and groups of a topic, and how far each is behind."""
    admin = session.bus.admin
    names = sorted(await admin.subscriptions(topic))
    found: list[tuple[str, Lag | None]] = []
    for name in names:
        try:
            found.append((name, await admin.lag(topic, name)))
        except BrokerError as error:
            # For instance deleted meanwhile; the others are still listed.
            session.report(error)
            found.append((name, None))
    rows = [(name, lag and lag.waiting, lag and lag.unsettled) for name, lag in found]
    session.table(
        [{"topic": topic, "subscription": name, "waiting": waiting, "unsettled": held} for name, waiting, held in rows],
        ("SUBSCRIPTION", "WAITING", "UNSETTLED"),
        rows,
        empty=_no_subscriptions(topic),
    )


@command(app, "create")
async def create(
    session: Session,
    topic: TopicName,
    subscription: SubscriptionName,
    *,
    start: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help=f"Where the subscription begins: earliest, latest, {TIME_OR_AGE}.",
        ),
    ] = "earliest",
    as_json: AsJson = False,
) -> None:
    """Create a subscription. An existing one keeps its position."""
    info = await session.bus.admin.ensure_subscription(topic, subscription, start=parse_start(start))
    session.answer(
        {"topic": info.topic, "subscription": info.name}, f"Subscription {info.name!r} of topic {info.topic!r} exists"
    )


@command(app, "describe")
async def describe(
    session: Session, topic: TopicName, subscription: SubscriptionName, *, as_json: AsJson = False
) -> None:
    """Show the settings and the state of a subscription."""
    info = await session.bus.admin.describe_subscription(topic, subscription)
    native = dict(info.native)
    rows: list[tuple[str, Any]] = [("topic", info.topic), ("name", info.name), *native_rows(native)]
    value = {"topic": info.topic, "subscription": info.name, "native": native}
    session.table(value, ("FIELD", "VALUE"), rows, empty="")


@command(app, "delete")
async def delete(
    session: Session, topic: TopicName, subscription: SubscriptionName, *, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Delete a subscription and its position."""
    admin = session.bus.admin
    if subscription not in await admin.subscriptions(topic):
        raise Failure(
            f"Topic {topic!r} has no subscription {subscription!r}",
            advice=f"List them with `broker subscriptions list {topic}`",
            code=Exit.NOT_FOUND,
        )
    await session.confirm(f"Delete subscription {subscription!r} of topic {topic!r}?", yes)
    await admin.delete_subscription(topic, subscription)
    session.answer(
        {"topic": topic, "deleted": subscription}, f"Deleted subscription {subscription!r} of topic {topic!r}"
    )


@command(lag_app, "lag")
async def lag(
    session: Session,
    topic: KnownTopic,
    subscription: Annotated[
        str | None,
        typer.Argument(
            metavar="SUBSCRIPTION",
            parser=parse_name,
            help="Name of a subscription or group; by default all of the topic.",
            show_default=False,
            autocompletion=complete_subscription,
        ),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show how far the subscriptions of a topic are behind."""
    admin = session.bus.admin
    names = [subscription] if subscription is not None else sorted(await admin.subscriptions(topic))
    lags = [(name, await admin.lag(topic, name)) for name in names]
    session.table(
        [_lag_json(topic, name, lag) for name, lag in lags],
        ("SUBSCRIPTION", "WAITING", "UNSETTLED", "PER PARTITION"),
        [(name, lag.waiting, lag.unsettled, _per_partition(lag)) for name, lag in lags],
        empty=_no_subscriptions(topic),
    )


def _no_subscriptions(topic: str) -> str:
    return f"Topic {topic!r} has no subscriptions"


def _lag_json(topic: str, name: str, lag: Lag) -> dict[str, Any]:
    return {
        "topic": topic,
        "subscription": name,
        "waiting": lag.waiting,
        "unsettled": lag.unsettled,
        "partitions": {str(partition): behind for partition, behind in sorted(lag.partitions.items())},
    }


def _per_partition(lag: Lag) -> str | None:
    return " ".join(f"{partition}:{behind}" for partition, behind in sorted(lag.partitions.items())) or None
