"""`broker subscriptions`: the subscriptions and groups of a topic. Nothing is retried."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from broker.cli.exits import Exit, Failure
from broker.cli.rendering import native_rows
from broker.cli.session import AsJson, Session, command, new_app
from broker.cli.times import parse_start
from broker.cli.topics import TopicName, Yes
from broker.driver.contract import Lag
from broker.errors import BrokerError

__all__ = ["app"]

app = new_app("subscriptions", "List, create, describe and delete subscriptions and groups.")

SubscriptionName = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="The subscription's or group's name.", show_default=False)
]


@command(app, "list")
async def list_subscriptions(session: Session, topic: TopicName, *, as_json: AsJson = False) -> None:
    """Show the subscriptions of a topic and how far behind each is."""
    admin = session.bus.admin
    names = sorted(await admin.subscriptions(topic))
    found: list[tuple[str, Lag | None]] = []
    for name in names:
        try:
            found.append((name, await admin.lag(topic, name)))
        except BrokerError as error:
            # One that was deleted meanwhile, or of which the broker tells nothing, does not hide the others.
            session.report(error)
            found.append((name, None))
    rows = [(name, lag and lag.waiting, lag and lag.unsettled) for name, lag in found]
    session.table(
        [{"topic": topic, "subscription": name, "waiting": waiting, "unsettled": held} for name, waiting, held in rows],
        ("SUBSCRIPTION", "WAITING", "UNSETTLED"),
        rows,
        empty=f"Topic {topic!r} has no subscriptions",
    )


@command(app, "create")
async def create(
    session: Session,
    topic: TopicName,
    subscription: SubscriptionName,
    *,
    start: Annotated[
        str, typer.Option(metavar="WHERE", help="earliest, latest, or a time such as 2030-01-31T12:00:00Z.")
    ] = "earliest",
    as_json: AsJson = False,
) -> None:
    """Create a subscription, or leave it as it is if it exists."""
    info = await session.bus.admin.ensure_subscription(topic, subscription, start=parse_start(start))
    session.answer(
        {"topic": info.topic, "subscription": info.name}, f"Subscription {info.name!r} of topic {info.topic!r} is there"
    )


@command(app, "describe")
async def describe(
    session: Session, topic: TopicName, subscription: SubscriptionName, *, as_json: AsJson = False
) -> None:
    """Show what the broker says of a subscription."""
    info = await session.bus.admin.describe_subscription(topic, subscription)
    native = dict(info.native)
    rows: list[tuple[str, Any]] = [
        ("topic", info.topic),
        ("name", info.name),
        *native_rows(native),
    ]
    value = {"topic": info.topic, "subscription": info.name, "native": native}
    session.table(value, ("FIELD", "VALUE"), rows, empty="")


@command(app, "delete")
async def delete(
    session: Session, topic: TopicName, subscription: SubscriptionName, *, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Delete a subscription: what it has not handled is not delivered to it any more."""
    admin = session.bus.admin
    if subscription not in await admin.subscriptions(topic):
        raise Failure(
            f"Topic {topic!r} has no subscription {subscription!r}",
            advice=f"See `broker subscriptions list {topic}`",
            code=Exit.NOT_FOUND,
        )
    await session.confirm(f"Delete subscription {subscription!r} of topic {topic!r}?", yes)
    await admin.delete_subscription(topic, subscription)
    session.answer(
        {"topic": topic, "deleted": subscription}, f"Deleted subscription {subscription!r} of topic {topic!r}"
    )
