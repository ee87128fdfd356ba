"""The API of `broker` without `await`, for scripts, notebooks and the workers of other frameworks.

    with broker.blocking.connect("nats://localhost") as bus:
        bus.topic("orders").publish(b"...", key="42")
        with bus.messages("orders", subscription="billing") as inbox:
            for message in inbox:
                with message:
                    bill(message.data)

Each bus has an event loop in a thread. A call is a round trip to this thread, which costs tens of microseconds: use
batches for speed. `broker.blocking.bus` documents threads, interrupts and processes.
"""

from broker.blocking.admin import Admin
from broker.blocking.bus import Bus, MessageOptions, RecordOptions, connect
from broker.blocking.messages import (
    BatchHandler,
    BlockingMessage,
    BlockingMessageBatch,
    Handler,
    MessageConsumer,
    Service,
    run,
)
from broker.blocking.records import (
    AsMessagesOptions,
    BlockingRecord,
    BlockingRecordBatch,
    LogFollower,
    LogReader,
    RecordConsumer,
)
from broker.blocking.tables import TableWriter
from broker.blocking.topic import ReceiptFuture, Topic
from broker.blocking.transactions import Transaction, TransactionalPublisher

__all__ = [
    "Admin",
    "AsMessagesOptions",
    "BatchHandler",
    "BlockingMessage",
    "BlockingMessageBatch",
    "BlockingRecord",
    "BlockingRecordBatch",
    "Bus",
    "Handler",
    "LogFollower",
    "LogReader",
    "MessageConsumer",
    "MessageOptions",
    "ReceiptFuture",
    "RecordConsumer",
    "RecordOptions",
    "Service",
    "TableWriter",
    "Topic",
    "Transaction",
    "TransactionalPublisher",
    "connect",
    "run",
]
