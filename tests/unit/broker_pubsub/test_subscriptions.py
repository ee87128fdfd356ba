"""Subscriptions that outlived their topic."""

from __future__ import annotations

from typing import Any

from broker_pubsub.names import Names
from broker_pubsub.protocol import Method, Methods, Subscription
from broker_pubsub.settings import PubSubSettings
from broker_pubsub.subscriptions import ensure


class Service:
    """A connection to a service with one subscription, whose topic was deleted and created again."""

    def __init__(self) -> None:
        self.settings = PubSubSettings(project="my-project")
        self.names = Names("my-project")
        self.subscription: Any = Subscription(
            name=self.names.subscription("orders", "billing"), topic="_deleted-topic_"
        )
        self.calls: list[Method] = []

    async def call(self, method: Method, request: Any, *_: Any, **__: Any) -> Any:
        self.calls.append(method)
        if method is Methods.CREATE_SUBSCRIPTION:
            self.subscription = request
        return self.subscription


async def test_a_subscription_of_a_deleted_topic_is_recreated() -> None:
    """Otherwise its consumers would wait for messages for ever."""
    service: Any = Service()
    found = await ensure(service, "orders", "billing", "latest", {})
    assert found.topic == service.names.topic("orders")
    assert service.calls == [Methods.GET_SUBSCRIPTION, Methods.DELETE_SUBSCRIPTION, Methods.CREATE_SUBSCRIPTION]
