"""Every call of an admin, for servers whose answers are wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime

from broker.driver import AdminSpi

__all__ = ["admin_calls"]


def admin_calls(admin: AdminSpi, start: datetime) -> list[Callable[[], Awaitable[object]]]:
    return [
        lambda: admin.ensure_topic("orders", partitions=1, retention=None, options={}),
        lambda: admin.delete_topic("orders"),
        admin.list_topics,
        lambda: admin.describe_topic("orders"),
        lambda: admin.purge("orders"),
        lambda: admin.ensure_subscription("orders", "billing", start=start, options={}),
        lambda: admin.delete_subscription("orders", "billing"),
        lambda: admin.list_subscriptions("orders"),
        lambda: admin.describe_subscription("orders", "billing"),
        lambda: admin.lag("orders", "billing"),
    ]
