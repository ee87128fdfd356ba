"""Write a messaging application once and run it on any broker by changing one URL.

    async with broker.connect("nats://localhost:4222") as bus:
        await bus.topic("orders").publish(b"...", key="42")

`broker.blocking` is the same API without `await`. `broker.codecs` has codecs for typed payloads. `broker.testing` is
the conformance kit for authors of backends.
"""

from broker.bus import Bus, Health, connect
from broker.capabilities import (
    Capabilities,
    ConfirmedAck,
    LeaseMode,
    Limits,
    MessageCapabilities,
    PublishCapabilities,
    RecordCapabilities,
)
from broker.codecs import Bytes, Json, Text
from broker.consumer_state import ConsumerState
from broker.consuming.consumer import MessageConsumer, Service
from broker.consuming.retry.policy import DROP, Retry
from broker.consuming.retry.topics import RetryTopics
from broker.consuming.runner import run, serve
from broker.driver.contract import Bounds, Lag, SubscriptionInfo, TopicInfo, TopicPartition
from broker.driver.group_admin import GroupInfo, PositionChange
from broker.driver.tables import CHECKPOINT_KEY
from broker.envelopes import Envelope
from broker.errors import (
    AlreadySettled,
    AuthenticationFailed,
    BackendError,
    BrokerError,
    Closed,
    ConfigurationError,
    ConnectionFailed,
    DecodeError,
    InvalidMessage,
    InvalidName,
    InvalidSetting,
    LeaseLost,
    MessageTooLarge,
    MissingClient,
    NotAuthorized,
    NotFound,
    OffsetOutOfRange,
    OperationTimeout,
    PublishError,
    SettleError,
    StorageFailed,
    SubscriptionNotFound,
    TopicNotFound,
    TopicRecreated,
    TransactionAborted,
    TransactionFatal,
    UnknownScheme,
    UnknownSetting,
    Unsupported,
    WrongEventLoop,
)
from broker.messages import Message, MessageBatch, Outcome, SettleState
from broker.names import ephemeral, native_name
from broker.outbound import OutboundMessage, OutboundPayload
from broker.partitioners import Partitioner, PartitionFunction
from broker.protocols import (
    Admin,
    AnyCodec,
    BatchedMessageIterator,
    BatchedMessageStream,
    BatchedReceiver,
    BatchedRecordIterator,
    BatchedRecordStream,
    Codec,
    EnvelopeCodec,
    GroupAdmin,
    LogReader,
    MessageIterator,
    MessageStream,
    PreparesBatches,
    Publisher,
    Receiver,
    RecordIterator,
    RecordStream,
    TableWriter,
    Topic,
    Transaction,
    TransactionalPublisher,
)
from broker.reading.record_consumer import RecordConsumer
from broker.receipts import Receipt
from broker.records import Record, RecordBatch
from broker.registry import register
from broker.threads.messages import BlockingMessage, BlockingMessageBatch
from broker.topic_patterns import TopicPattern

__all__ = [
    "CHECKPOINT_KEY",
    "DROP",
    "Admin",
    "AlreadySettled",
    "AnyCodec",
    "AuthenticationFailed",
    "BackendError",
    "BatchedMessageIterator",
    "BatchedMessageStream",
    "BatchedReceiver",
    "BatchedRecordIterator",
    "BatchedRecordStream",
    "BlockingMessage",
    "BlockingMessageBatch",
    "Bounds",
    "BrokerError",
    "Bus",
    "Bytes",
    "Capabilities",
    "Closed",
    "Codec",
    "ConfigurationError",
    "ConfirmedAck",
    "ConnectionFailed",
    "ConsumerState",
    "DecodeError",
    "Envelope",
    "EnvelopeCodec",
    "GroupAdmin",
    "GroupInfo",
    "Health",
    "InvalidMessage",
    "InvalidName",
    "InvalidSetting",
    "Json",
    "Lag",
    "LeaseLost",
    "LeaseMode",
    "Limits",
    "LogReader",
    "Message",
    "MessageBatch",
    "MessageCapabilities",
    "MessageConsumer",
    "MessageIterator",
    "MessageStream",
    "MessageTooLarge",
    "MissingClient",
    "NotAuthorized",
    "NotFound",
    "OffsetOutOfRange",
    "OperationTimeout",
    "OutboundMessage",
    "OutboundPayload",
    "Outcome",
    "PartitionFunction",
    "Partitioner",
    "PositionChange",
    "PreparesBatches",
    "PublishCapabilities",
    "PublishError",
    "Publisher",
    "Receipt",
    "Receiver",
    "Record",
    "RecordBatch",
    "RecordCapabilities",
    "RecordConsumer",
    "RecordIterator",
    "RecordStream",
    "Retry",
    "RetryTopics",
    "Service",
    "SettleError",
    "SettleState",
    "StorageFailed",
    "SubscriptionInfo",
    "SubscriptionNotFound",
    "TableWriter",
    "Text",
    "Topic",
    "TopicInfo",
    "TopicNotFound",
    "TopicPartition",
    "TopicPattern",
    "TopicRecreated",
    "Transaction",
    "TransactionAborted",
    "TransactionFatal",
    "TransactionalPublisher",
    "UnknownScheme",
    "UnknownSetting",
    "Unsupported",
    "WrongEventLoop",
    "connect",
    "ephemeral",
    "native_name",
    "register",
    "run",
    "serve",
]
