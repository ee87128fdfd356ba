"""`broker topics`: list, create, describe, delete and purge topics. A few calls each; nothing is retried."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from broker.cli.exits import Exit, Failure
from broker.cli.rendering import native_rows
from broker.cli.session import AsJson, Session, command, new_app
from broker.cli.times import parse_duration
from broker.driver.contract import TopicInfo
from broker.errors import InvalidName
from broker.names import known_name

__all__ = ["KnownTopic", "app", "parse_name"]

app = new_app("topics", "List, create, describe, delete and purge topics.")


def parse_name(text: str) -> str:
    """The name of something that exists already, as `known_name`.

    :raises Failure: no broker can have it.
    """
    try:
        return known_name(text)
    except InvalidName as error:
        raise Failure(f"{text!r} is no name: {error.message}", advice=error.advice, code=Exit.USAGE) from None


TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.", show_default=False)]
KnownTopic = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC", parser=parse_name, help="The topic's name, or the broker's own.", show_default=False
    ),
]
"""For what makes nothing: a broker has topics of others, too."""
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@command(app, "list")
async def list_topics(session: Session, *, as_json: AsJson = False) -> None:
    """Show every topic with its partitions and messages."""
    admin = session.bus.admin
    infos = [await admin.describe_topic(name) for name in sorted(await admin.topics())]
    session.table(
        [topic_json(info) for info in infos],
        ("TOPIC", "PARTITIONS", "MESSAGES", "BYTES"),
        [(info.name, info.partitions, info.messages, info.bytes) for info in infos],
        empty="There are no topics; create one with `broker topics create NAME`",
    )


@command(app, "create")
async def create(
    session: Session,
    topic: TopicName,
    *,
    partitions: Annotated[
        int | None, typer.Option(help="How many partitions, where the broker has them.", min=1)
    ] = None,
    retention: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long messages are kept, such as 90s, 12h or 7d.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a topic, or leave it as it is if it exists."""
    info = await session.bus.admin.ensure_topic(
        topic, partitions=partitions, retention=None if retention is None else parse_duration(retention)
    )
    session.answer(topic_json(info), f"Topic {info.name!r} is there")


@command(app, "describe")
async def describe(session: Session, topic: KnownTopic, *, as_json: AsJson = False) -> None:
    """Show what the broker says of a topic and its subscriptions."""
    admin = session.bus.admin
    info = await admin.describe_topic(topic)
    names = sorted(await admin.subscriptions(topic))
    rows: list[tuple[str, Any]] = [
        ("name", info.name),
        ("partitions", info.partitions),
        ("messages", info.messages),
        ("bytes", info.bytes),
        ("subscriptions", ", ".join(names) or None),
        *native_rows(info.native),
    ]
    value = {**topic_json(info), "subscriptions": names, "native": dict(info.native)}
    session.table(value, ("FIELD", "VALUE"), rows, empty="")


@command(app, "delete")
async def delete(session: Session, topic: KnownTopic, *, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a topic with its messages and subscriptions."""
    admin = session.bus.admin
    info = await admin.describe_topic(topic)
    held = "all its messages" if info.messages is None else f"its {info.messages} messages"
    await session.confirm(f"Delete topic {topic!r} with {held}?", yes)
    await admin.delete_topic(topic)
    session.answer({"deleted": topic}, f"Deleted topic {topic!r}")


@command(app, "purge")
async def purge(session: Session, topic: KnownTopic, *, yes: Yes = False, as_json: AsJson = False) -> None:
    """Remove all messages of a topic; its subscriptions stay."""
    await session.confirm(f"Remove all messages of topic {topic!r}?", yes)
    count = await session.bus.admin.purge(topic)
    told = "" if count is None else f" of {count} messages"
    session.answer({"purged": topic, "messages": count}, f"Purged topic {topic!r}{told}")


def topic_json(info: TopicInfo) -> dict[str, Any]:
    """The stable fields of a topic."""
    fields = asdict(info)
    del fields["native"]
    return fields
