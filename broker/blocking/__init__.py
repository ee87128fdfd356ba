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
from broker.blocking.consumer import BatchHandler, Handler, MessageConsumer, Service
from broker.blocking.log_reader import LogReader
from broker.blocking.record_consumer import AsMessagesOptions, RecordConsumer
from broker.blocking.runner import run
from broker.blocking.settling import BlockingMessage, BlockingMessageBatch, BlockingRecord, BlockingRecordBatch
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
    "LogReader",
    "MessageConsumer",
    "MessageOptions",
    "ReceiptFuture",
    "RecordConsumer",
    "RecordOptions",
    "Service",
    "Topic",
    "Transaction",
    "TransactionalPublisher",
    "connect",
    "run",
]
