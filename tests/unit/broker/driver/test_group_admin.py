"""Groups through the facade: which arguments are checked, and which backends are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.admin import AdminFacade
from broker.capabilities import Capabilities, RecordCapabilities
from broker.driver.contract import TopicPartition
from broker.driver.group_admin import GroupInfo, GroupReset, PositionChange
from broker.errors import ConfigurationError, InvalidName, Unsupported
from broker.redrive import RedriveBus

CAPABLE = Capabilities(backend="scripted", publish=cast("Any", None), records=RecordCapabilities(group_admin=True))


class ScriptedGroups:
    def __init__(self) -> None:
        self.resets: list[tuple[str, GroupReset, bool]] = []
        self.deleted: list[str] = []

    async def list_groups(self) -> Sequence[GroupInfo]:
        return [GroupInfo(name="right"), GroupInfo(name="left")]

    async def describe_group(self, name: str) -> GroupInfo:
        return GroupInfo(name=name)

    async def reset_group(self, name: str, reset: GroupReset, *, dry_run: bool) -> Sequence[PositionChange]:
        self.resets.append((name, reset, dry_run))
        return (PositionChange(partition=TopicPartition("orders", 0), before=1, after=2),)

    async def delete_group(self, name: str) -> None:
        self.deleted.append(name)


def facade(spi: object, capabilities: Capabilities = CAPABLE) -> AdminFacade:
    bus = SimpleNamespace(backend=SimpleNamespace(admin=lambda: spi), capabilities=capabilities)
    return AdminFacade(cast("RedriveBus", bus))


async def test_calls_reach_the_backend():
    spi = ScriptedGroups()
    admin = facade(spi)
    assert [group.name for group in await admin.groups()] == ["left", "right"]
    assert (await admin.describe_group("billing")).name == "billing"
    (change,) = await admin.reset_group("billing", to=7, topics=["orders"], partitions=[0], dry_run=True)
    assert (change.before, change.after) == (1, 2)
    await admin.reset_group("billing", shift=-3)
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    await admin.reset_group("billing", to=moment)
    await admin.delete_group("billing")
    assert spi.resets == [
        ("billing", GroupReset(to=7, topics=("orders",), partitions=(0,)), True),
        ("billing", GroupReset(shift=-3), False),
        ("billing", GroupReset(to=moment), False),
    ]
    assert spi.deleted == ["billing"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "exactly one"),
        ({"to": "latest", "shift": 1}, "exactly one"),
        ({"to": -1}, "to is -1"),
        ({"to": True}, "to is True"),
        ({"to": "tomorrow"}, "to is 'tomorrow'.*an offset"),
        ({"to": datetime(2030, 1, 1)}, "no timezone"),  # noqa: DTZ001 - that is the point
        ({"shift": 1.5}, "shift is 1.5"),
        ({"to": 1, "partitions": [-1]}, "partitions contains -1"),
        ({"to": 1, "partitions": 0}, "partitions is 0.*a list of partitions"),
        ({"to": 1, "topics": "orders"}, "topics is 'orders'.*a list of topics"),
    ],
)
async def test_an_invalid_reset_is_refused(values: Any, text: str):
    spi = ScriptedGroups()
    with pytest.raises(ConfigurationError, match=text):
        await facade(spi).reset_group("billing", **values)
    assert spi.resets == []


async def test_names_are_checked():
    admin = facade(ScriptedGroups())
    for call in (
        admin.describe_group("b c"),
        admin.delete_group(""),
        admin.reset_group("b c", to="latest"),
        admin.reset_group("billing", to="latest", topics=["b c"]),
    ):
        with pytest.raises(InvalidName):
            await call


async def test_a_backend_without_group_administration_raises():
    incapable = replace(CAPABLE, records=RecordCapabilities())
    without = replace(CAPABLE, records=None)
    for admin in (facade(ScriptedGroups(), incapable), facade(object()), facade(ScriptedGroups(), without)):
        for call in (admin.groups(), admin.describe_group("billing"), admin.delete_group("billing")):
            with pytest.raises(Unsupported, match="scripted has no group administration"):
                await call
