"""The tests of other suites that inspired the kit, and the promises that cover them."""

from __future__ import annotations

from typing import Final

__all__ = ["ORIGINS"]

ORIGINS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "go-cloud pubsub/drivertest": {
        "TestSendReceive": ("messages.arrive-unchanged", "publishing.receipt-has-the-message-id"),
        "TestSendReceiveTwo": ("messages.each-subscription-gets-all",),
        "TestSendReceiveJSON": ("codecs.json-round-trip-is-typed",),
        "TestNack": ("messages.nack-redelivers",),
        "TestBatching": ("publishing.confirmed-messages-arrive", "messages.batch-ack"),
        "TestDoubleAck": ("messages.settle-twice",),
        "TestErrorOnSendToClosedTopic": ("publishing.publish-after-close-raises",),
        "TestErrorOnReceiveFromClosedSubscription": ("outcomes.read-after-close-raises",),
        "TestCancelSendReceive": ("outcomes.cancelled-wait-raises",),
        "TestNonExistentTopicSucceedsOnOpenButFailsOnSend": ("publishing.opening-is-lazy",),
        "TestNonExistentSubscriptionSucceedsOnOpenButFailsOnReceive": ("errors.missing-subscription",),
        "TestMetadata": (
            "fidelity.hostile-attribute-names",
            "fidelity.hostile-attribute-values",
            "limits.wrong-types-are-refused",
        ),
        "TestNonUTF8MessageBody": ("fidelity.binary-bodies",),
        "TestAs": ("messages.native-object-is-exposed",),
        "concurrent receivers get every message once": ("messages.concurrent-callers-share",),
        "cancelling one of two waiting receivers": ("cancel.one-of-two-waiters",),
        "retry of transient receive errors": ("outcomes.retriable-is-an-event",),
        "a table of good and bad URLs": ("errors.unknown-scheme", "errors.unknown-parameter", "errors.malformed-value"),
    },
    "watermill pubsub/tests": {
        "TestPublishSubscribe": ("messages.arrive-unchanged", "outcomes.close-wakes-waiters"),
        "TestConcurrentSubscribe": ("messages.consumers-share-a-subscription",),
        "TestConcurrentSubscribeMultipleTopics": ("publishing.many-topics-at-once",),
        "TestResendOnError": ("messages.nacks-among-many",),
        "TestNoAck": ("messages.unsettled-is-exclusive",),
        "TestContinueAfterSubscribeClose": ("close.many-short-lived-consumers",),
        "TestConcurrentClose": ("close.ten-at-once",),
        "TestContinueAfterErrors": ("messages.recover-after-many-nacks",),
        "TestPublishSubscribeInOrder": ("order.one-consumer-sees-publish-order", "records.in-order-within-a-partition"),
        "TestPublisherClose": ("publishing.close-flushes",),
        "TestTopic": ("publishing.topics-are-isolated",),
        "TestMessageCtx": ("leases.max-lease-expires", "close.late-settle-raises"),
        "TestSubscribeCtx": ("cancel.receive-releases",),
        "TestNewSubscriberReceivesOldMessages": ("messages.earliest-sees-history", "records.each-group-gets-all"),
        "TestReconnect": ("reconnect.restart-loses-nothing",),
        "TestConsumerGroups": ("messages.each-subscription-gets-all",),
        "a blocked subscriber does not block others": ("messages.slow-subscription-does-not-block",),
    },
    "Dapr conformance and certification": {
        "ping": ("admin.health-is-a-round-trip",),
        "one failing message inside a bulk": ("messages.batch-handler-settles-each",),
        "bulk publish with failed entries": ("publishing.partial-failure-reports-each-outcome",),
        "two topics, each subscriber stopped separately": ("messages.closing-one-leaves-the-other",),
        "keyed messages with periodic errors, in order": ("order.failures-keep-order",),
        "a third consumer in the group": ("groups.more-members-than-partitions",),
        "consumer stop, then rebalance": ("groups.leaving-reassigns-partitions",),
        "network cut": ("reconnect.cut-in-a-batch-loses-nothing",),
    },
    "Spring Cloud Stream binder tests": {
        "bind and unbind twice": ("close.is-idempotent", "close.many-short-lived-consumers"),
        "several topics": ("messages.several-topics",),
        "anonymous groups": ("messages.ephemeral-is-exclusive",),
        "required groups": ("messages.subscription-created-by-admin",),
        "partitioned send": ("publishing.key-maps-to-one-partition",),
    },
    "kombu transport tests": {
        "failed connect on a bad address": ("errors.no-server",),
        "an empty queue times out": ("outcomes.idle-returns-none",),
        "time to live": ("publishing.expired-is-not-delivered",),
        "reject": ("dead-letters.drop-is-explicit",),
    },
    "FastStream tests/brokers/base": {
        "get_one with a timeout": ("messages.shape-next-message", "outcomes.idle-returns-none"),
        "cancel settles nothing": ("cancel.block-releases",),
        "stop before start": ("close.is-idempotent",),
    },
    "tested by none of them": {
        "rebalance with work in flight": (
            "groups.rebalance-with-work-in-flight",
            "as-messages.rebalance-loses-nothing",
        ),
        "dead-letter contents": ("dead-letters.carry-the-original",),
        "failure of the dead-letter write": (
            "dead-letters.write-failure-does-not-rerun-handler",
            "dead-letters.original-is-kept-until-written",
        ),
        "lease extension": ("leases.held-is-renewed", "leases.extend-exceeds-max-lease"),
        "settle after expiry": ("leases.refused-ack-raises", "errors.ack-after-lease-end"),
        "empty and absent bodies and keys": (
            "fidelity.empty-body",
            "fidelity.tombstone-is-not-empty",
            "fidelity.no-key-is-not-the-empty-key",
        ),
        "the largest body, and one byte more": ("limits.largest-body", "limits.largest-message"),
        "trace headers end to end": ("observing.trace-is-propagated",),
        "backoff on a clock": ("retry.long-delay-on-a-clock", "retry.backoff-grows"),
        "never more than N unsettled": ("flow.never-more-than-n-unsettled", "flow.bound-counts-the-buffer"),
        "kill -9, then no loss": ("leases.killed-process-releases-messages", "reconnect.kill-loses-nothing"),
        "idle against closed against cancelled": (
            "outcomes.idle-returns-none",
            "outcomes.read-after-close-raises",
            "outcomes.cancelled-wait-raises",
        ),
        "restarts that burn attempts": (
            "retry.restarts-count-no-attempts",
            "retry.restarts-count-no-deliveries",
            "retry.release-is-no-attempt",
        ),
        "a hot key that starves the rest": ("order.hot-key-does-not-starve-others",),
        "a slow consumer that hoards": ("flow.slow-consumer-does-not-hoard",),
        "an ack cancelled half-way": ("cancel.ack-completes",),
        "a close that waits for a message that is never settled": ("close.ignores-forgotten-messages",),
        "a stuck record with thousands finished above it": (
            "as-messages.commit-stops-at-stuck-record",
            "as-messages.max-gap-pauses",
        ),
        "waiters racing": ("cancel.waiters-lose-nothing",),
    },
}
