"""The tests of other suites that inspired the kit, and the promises that cover them."""

from __future__ import annotations

from typing import Final

__all__ = ["ORIGINS"]

ORIGINS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "go-cloud pubsub/drivertest": {
        "TestSendReceive": ("messages.arrive-equal", "publishing.receipt-names-the-message"),
        "TestSendReceiveTwo": ("messages.each-subscription-gets-all",),
        "TestSendReceiveJSON": ("codecs.json-comes-back-typed",),
        "TestNack": ("messages.nack-redelivers",),
        "TestBatching": ("publishing.every-receipt-is-true", "messages.batch-ack"),
        "TestDoubleAck": ("messages.settle-twice",),
        "TestErrorOnSendToClosedTopic": ("publishing.closed-bus-refuses",),
        "TestErrorOnReceiveFromClosedSubscription": ("outcomes.closed-is-closed",),
        "TestCancelSendReceive": ("outcomes.cancelled-is-cancelled",),
        "TestNonExistentTopicSucceedsOnOpenButFailsOnSend": ("publishing.opening-is-lazy",),
        "TestNonExistentSubscriptionSucceedsOnOpenButFailsOnReceive": ("errors.missing-subscription",),
        "TestMetadata": (
            "fidelity.hostile-attribute-names",
            "fidelity.hostile-attribute-values",
            "limits.wrong-types-are-refused",
        ),
        "TestNonUTF8MessageBody": ("fidelity.binary-bodies",),
        "TestAs": ("messages.foreign-object-is-reachable",),
        "concurrent receivers get every message once": ("messages.concurrent-callers-share",),
        "cancelling one of two waiting receivers": ("cancel.one-of-two-waiters",),
        "retry of transient receive errors": ("outcomes.retriable-is-an-event",),
        "a table of good and bad URLs": ("errors.unknown-scheme", "errors.unknown-parameter", "errors.malformed-value"),
    },
    "watermill pubsub/tests": {
        "TestPublishSubscribe": ("messages.arrive-equal", "outcomes.close-wakes-waiters"),
        "TestConcurrentSubscribe": ("messages.consumers-share-a-subscription",),
        "TestConcurrentSubscribeMultipleTopics": ("publishing.many-topics-at-once",),
        "TestResendOnError": ("messages.nacks-among-many",),
        "TestNoAck": ("messages.unsettled-is-nobody-elses",),
        "TestContinueAfterSubscribeClose": ("close.open-read-close-again-and-again",),
        "TestConcurrentClose": ("close.ten-at-once",),
        "TestContinueAfterErrors": ("messages.go-on-after-many-nacks",),
        "TestPublishSubscribeInOrder": ("order.one-consumer-sees-publish-order", "records.in-order-within-a-partition"),
        "TestPublisherClose": ("publishing.close-flushes",),
        "TestTopic": ("publishing.topics-never-mix",),
        "TestMessageCtx": ("leases.max-lease-ends-it", "close.late-settle-is-told"),
        "TestSubscribeCtx": ("cancel.receive-gives-back",),
        "TestNewSubscriberReceivesOldMessages": ("messages.earliest-sees-history", "records.each-group-gets-all"),
        "TestReconnect": ("reconnect.restart-loses-nothing",),
        "TestConsumerGroups": ("messages.each-subscription-gets-all",),
        "a blocked subscriber does not block others": ("messages.slow-subscription-blocks-no-other",),
    },
    "Dapr conformance and certification": {
        "ping": ("admin.health-is-a-round-trip",),
        "one failing message inside a bulk": ("messages.batch-handler-tells-each",),
        "bulk publish with failed entries": ("publishing.partial-failure-tells-each-fate",),
        "two topics, each subscriber stopped separately": ("messages.one-stops-the-other-goes-on",),
        "keyed messages with periodic errors, in order": ("order.failures-keep-order",),
        "a third consumer in the group": ("groups.more-members-than-partitions",),
        "consumer stop, then rebalance": ("groups.leaving-passes-partitions-on",),
        "network cut": ("reconnect.cut-in-a-batch-loses-nothing",),
    },
    "Spring Cloud Stream binder tests": {
        "bind and unbind twice": ("close.may-be-repeated", "close.open-read-close-again-and-again"),
        "several topics": ("messages.several-topics",),
        "anonymous groups": ("messages.ephemeral-is-ones-own",),
        "required groups": ("messages.subscription-made-by-admin",),
        "partitioned send": ("publishing.key-chooses-one-partition",),
    },
    "kombu transport tests": {
        "failed connect on a bad address": ("errors.no-server",),
        "an empty queue times out": ("outcomes.idle-is-an-answer",),
        "time to live": ("publishing.expired-is-not-delivered",),
        "reject": ("dead-letters.drop-is-explicit",),
    },
    "FastStream tests/brokers/base": {
        "get_one with a timeout": ("messages.shape-next-message", "outcomes.idle-is-an-answer"),
        "cancel settles nothing": ("cancel.block-gives-back",),
        "stop before start": ("close.may-be-repeated",),
    },
    "tested by none of them": {
        "rebalance with work in flight": (
            "groups.rebalance-with-work-in-flight",
            "as-messages.rebalance-loses-nothing",
        ),
        "dead-letter contents": ("dead-letters.carry-the-original",),
        "failure of the dead-letter write": (
            "dead-letters.write-failure-reruns-no-handler",
            "dead-letters.original-is-kept-until-written",
        ),
        "lease extension": ("leases.held-is-renewed", "leases.extend-raises-the-bound"),
        "settle after expiry": ("leases.refused-ack-raises", "errors.ack-after-lease-end"),
        "empty and absent bodies and keys": (
            "fidelity.empty-body",
            "fidelity.tombstone-is-not-empty",
            "fidelity.no-key-is-not-the-empty-key",
        ),
        "the largest body, and one byte more": ("limits.largest-body", "limits.largest-message"),
        "trace headers end to end": ("observing.trace-arrives",),
        "backoff on a clock": ("retry.long-delay-on-a-clock", "retry.backoff-grows"),
        "never more than N unsettled": ("flow.never-more-than-n-unsettled", "flow.bound-counts-the-buffer"),
        "kill -9, then no loss": ("leases.killed-process-gives-back", "reconnect.kill-loses-nothing"),
        "idle against closed against cancelled": (
            "outcomes.idle-is-an-answer",
            "outcomes.closed-is-closed",
            "outcomes.cancelled-is-cancelled",
        ),
        "restarts that burn attempts": (
            "retry.restarts-burn-no-attempts",
            "retry.restarts-use-up-no-deliveries",
            "retry.give-back-is-no-attempt",
        ),
        "a hot key that starves the rest": ("order.hot-key-starves-nobody",),
        "a slow consumer that hoards": ("flow.slow-consumer-hoards-nothing",),
        "an ack cancelled half-way": ("cancel.ack-is-carried-out",),
        "a close that waits for a message that is never settled": ("close.waits-for-no-forgotten-message",),
        "a stuck record with thousands finished above it": (
            "as-messages.stuck-record-is-not-passed",
            "as-messages.max-gap-pauses",
        ),
        "waiters racing": ("cancel.waiters-lose-nothing",),
    },
}
