"""Pub/Sub's protocol as raw protobuf classes and method paths: half the cost of the client's wrapped ones.

The messages are those of google-cloud-pubsub without their wrappers; the paths are the public names of the gRPC
services. Only data; safe from any thread.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.field_mask_pb2 import FieldMask
from google.pubsub_v1 import types as _types

__all__ = [
    "AcknowledgeRequest",
    "CreateSnapshotRequest",
    "Encoding",
    "Method",
    "Methods",
    "ModifyAckDeadlineRequest",
    "PublishRequest",
    "PubsubMessage",
    "PullRequest",
    "Schema",
    "SeekRequest",
    "Snapshot",
    "StreamingPullRequest",
    "Subscription",
    "Topic",
    "UpdateSubscriptionRequest",
    "UpdateTopicRequest",
    "request_of",
]


_wrapped: Any = _types


def _raw(wrapped: Any) -> Any:
    """The protobuf class of a wrapper."""
    raw: Any = wrapped.pb(wrapped())
    return raw.__class__


PubsubMessage: Final = _raw(_wrapped.PubsubMessage)
PublishRequest: Final = _raw(_wrapped.PublishRequest)
PullRequest: Final = _raw(_wrapped.PullRequest)
StreamingPullRequest: Final = _raw(_wrapped.StreamingPullRequest)
AcknowledgeRequest: Final = _raw(_wrapped.AcknowledgeRequest)
ModifyAckDeadlineRequest: Final = _raw(_wrapped.ModifyAckDeadlineRequest)
Topic: Final = _raw(_wrapped.Topic)
Subscription: Final = _raw(_wrapped.Subscription)
Snapshot: Final = _raw(_wrapped.Snapshot)
Schema: Final = _raw(_wrapped.Schema)
Encoding: Final = _wrapped.Encoding
SeekRequest: Final = _raw(_wrapped.SeekRequest)
CreateSnapshotRequest: Final = _raw(_wrapped.CreateSnapshotRequest)
UpdateTopicRequest: Final = _raw(_wrapped.UpdateTopicRequest)
UpdateSubscriptionRequest: Final = _raw(_wrapped.UpdateSubscriptionRequest)


class Method(NamedTuple):
    """One remote call.

    :ivar routing: the field of the request that the service routes by; sent as a header too.
    """

    path: str
    request: Any
    response: Any
    routing: str


def _publisher(name: str, request: Any, response: Any, routing: str) -> Method:
    return Method(f"/google.pubsub.v1.Publisher/{name}", request, response, routing)


def _subscriber(name: str, request: Any, response: Any, routing: str) -> Method:
    return Method(f"/google.pubsub.v1.Subscriber/{name}", request, response, routing)


def _schemas(name: str, request: Any, response: Any, routing: str) -> Method:
    return Method(f"/google.pubsub.v1.SchemaService/{name}", request, response, routing)


class Methods:
    """The calls in use."""

    PUBLISH: Final = _publisher("Publish", PublishRequest, _raw(_wrapped.PublishResponse), "topic")
    CREATE_TOPIC: Final = _publisher("CreateTopic", Topic, Topic, "name")
    UPDATE_TOPIC: Final = _publisher("UpdateTopic", UpdateTopicRequest, Topic, "topic.name")
    GET_TOPIC: Final = _publisher("GetTopic", _raw(_wrapped.GetTopicRequest), Topic, "topic")
    LIST_TOPICS: Final = _publisher(
        "ListTopics", _raw(_wrapped.ListTopicsRequest), _raw(_wrapped.ListTopicsResponse), "project"
    )
    LIST_TOPIC_SUBSCRIPTIONS: Final = _publisher(
        "ListTopicSubscriptions",
        _raw(_wrapped.ListTopicSubscriptionsRequest),
        _raw(_wrapped.ListTopicSubscriptionsResponse),
        "topic",
    )
    DELETE_TOPIC: Final = _publisher("DeleteTopic", _raw(_wrapped.DeleteTopicRequest), Empty, "topic")

    PULL: Final = _subscriber("Pull", PullRequest, _raw(_wrapped.PullResponse), "subscription")
    STREAMING_PULL: Final = _subscriber(
        "StreamingPull", StreamingPullRequest, _raw(_wrapped.StreamingPullResponse), "subscription"
    )
    ACKNOWLEDGE: Final = _subscriber("Acknowledge", AcknowledgeRequest, Empty, "subscription")
    MODIFY_ACK_DEADLINE: Final = _subscriber("ModifyAckDeadline", ModifyAckDeadlineRequest, Empty, "subscription")
    CREATE_SUBSCRIPTION: Final = _subscriber("CreateSubscription", Subscription, Subscription, "name")
    UPDATE_SUBSCRIPTION: Final = _subscriber(
        "UpdateSubscription", UpdateSubscriptionRequest, Subscription, "subscription.name"
    )
    GET_SUBSCRIPTION: Final = _subscriber(
        "GetSubscription", _raw(_wrapped.GetSubscriptionRequest), Subscription, "subscription"
    )
    DELETE_SUBSCRIPTION: Final = _subscriber(
        "DeleteSubscription", _raw(_wrapped.DeleteSubscriptionRequest), Empty, "subscription"
    )
    SEEK: Final = _subscriber("Seek", SeekRequest, _raw(_wrapped.SeekResponse), "subscription")
    CREATE_SNAPSHOT: Final = _subscriber("CreateSnapshot", CreateSnapshotRequest, Snapshot, "name")
    DELETE_SNAPSHOT: Final = _subscriber("DeleteSnapshot", _raw(_wrapped.DeleteSnapshotRequest), Empty, "snapshot")

    CREATE_SCHEMA: Final = _schemas("CreateSchema", _raw(_wrapped.CreateSchemaRequest), Schema, "parent")
    DELETE_SCHEMA: Final = _schemas("DeleteSchema", _raw(_wrapped.DeleteSchemaRequest), Empty, "name")


def request_of(method: Method, **fields: Any) -> Any:
    """A request of a call; `update_mask` may be given as names."""
    mask = fields.pop("update_mask", None)
    request = method.request(**fields)
    if mask is not None:
        request.update_mask.CopyFrom(FieldMask(paths=mask))
    return request
