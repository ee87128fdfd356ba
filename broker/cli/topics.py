"""`broker topics`: list, create, describe, delete and purge topics."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer

from broker.cli.arguments import KnownTopic, TopicName, Yes, parse_duration
from broker.cli.rendering import native_rows
from broker.cli.session import AsJson, Session, command, new_app
from broker.driver.contract import TopicInfo
from broker.errors import TopicNotFound

__all__ = ["app"]

app = new_app("topics", "List, create, describe, delete and purge topics.")


@command(app, "list")
async def list_topics(session: Session, *, as_json: AsJson = False) -> None:
    """List all topics, with the number of partitions and messages."""
    admin = session.bus.admin
    infos: list[TopicInfo] = []
    for name in sorted(await admin.topics()):
        # Others may delete it meanwhile.
        with suppress(TopicNotFound):
            infos.append(await admin.describe_topic(name))
    session.table(
        [_topic_json(info) for info in infos],
        ("TOPIC", "PARTITIONS", "MESSAGES", "BYTES"),
        [(info.name, info.partitions, info.messages, info.bytes) for info in infos],
        empty="There are no topics. Create one with `broker topics create NAME`",
    )


@command(app, "create")
async def create(
    session: Session,
    topic: TopicName,
    *,
    partitions: Annotated[
        int | None,
        typer.Option(metavar="COUNT", help="Number of partitions; an existing topic can only gain partitions.", min=1),
    ] = None,
    retention: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long the broker keeps messages, such as 90s, 12h or 7d."),
    ] = None,
    compacted: Annotated[
        bool, typer.Option("--compacted", help="Keep the last value of each key instead of all messages for a time.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create a topic, or change an existing one to the given options."""
    info = await session.bus.admin.ensure_topic(
        topic,
        partitions=partitions,
        retention=None if retention is None else parse_duration(retention),
        compacted=compacted or None,
    )
    session.answer(_topic_json(info), f"Topic {info.name!r} exists")


@command(app, "describe")
async def describe(session: Session, topic: KnownTopic, *, as_json: AsJson = False) -> None:
    """Show the settings, size and subscriptions of a topic."""
    admin = session.bus.admin
    info = await admin.describe_topic(topic)
    names = sorted(await admin.subscriptions(topic))
    rows: list[tuple[str, Any]] = [
        ("name", info.name),
        ("partitions", info.partitions),
        ("messages", info.messages),
        ("bytes", info.bytes),
        ("compacted", info.compacted),
        ("subscriptions", ", ".join(names) or None),
        *native_rows(info.native),
    ]
    value = {**_topic_json(info), "subscriptions": names, "native": dict(info.native)}
    session.table(value, ("FIELD", "VALUE"), rows, empty="")


@command(app, "delete")
async def delete(session: Session, topic: KnownTopic, *, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a topic, its messages and its subscriptions."""
    admin = session.bus.admin
    info = await admin.describe_topic(topic)
    held = "all its messages" if info.messages is None else f"its {info.messages} messages"
    await session.confirm(f"Delete topic {topic!r} with {held}?", yes)
    await admin.delete_topic(topic)
    session.answer({"deleted": topic}, f"Deleted topic {topic!r}")


@command(app, "purge")
async def purge(session: Session, topic: KnownTopic, *, yes: Yes = False, as_json: AsJson = False) -> None:
    """Remove all messages of a topic. Its subscriptions stay."""
    await session.confirm(f"Remove all messages of topic {topic!r}?", yes)
    count = await session.bus.admin.purge(topic)
    removed = "" if count is None else f": {count} messages removed"
    session.answer({"purged": topic, "messages": count}, f"Purged topic {topic!r}{removed}")


def _topic_json(info: TopicInfo) -> dict[str, Any]:
    fields = asdict(info)
    del fields["native"]
    return fields
