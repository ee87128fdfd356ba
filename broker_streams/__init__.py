"""Stateful stream processing on any broker with a log: callbacks over messages, with a table of rows by key.

    from broker import Json
    from broker_streams import Context, Group, Input, Persist, Processor

    counts = Persist(Json(int))

    def on_click(ctx: Context, click: Click) -> None:
        ctx[counts] = (ctx[counts] or 0) + 1

    group = Group("clicks", Input("clicks-topic", Json(Click), on_click), counts)

    async with broker.connect(url) as bus:
        await broker.serve(Processor(bus, group))

A `View` reads a table anywhere else, an `Emitter` sends to an input, and a `Tester` runs groups without a broker.
"""

from broker_streams.codecs import Int64, MsgPack
from broker_streams.context import Context, Done, Window
from broker_streams.emitter import Emitter
from broker_streams.failures import SKIP, STOP, DeadLetter, Policy, Retrying, StreamFailed
from broker_streams.graph import (
    Callback,
    Edge,
    Group,
    Hopping,
    Input,
    Join,
    Lookup,
    Loop,
    Output,
    Persist,
    Session,
    Timer,
    TimerCallback,
    Tumbling,
    Visitor,
    VisitorCallback,
    WindowCallback,
    differences,
    table_of,
)
from broker_streams.partition import PartitionState
from broker_streams.processor import Processor, VisitAborted
from broker_streams.recovery import CopyState
from broker_streams.stats import (
    InputStats,
    PartitionStats,
    ProcessorState,
    ProcessorStats,
    RecoveryStats,
    TableStats,
)
from broker_streams.stores.lmdb import Lmdb
from broker_streams.stores.memory import Memory
from broker_streams.stores.rocksdb import RocksDb
from broker_streams.stores.sqlite import Sqlite
from broker_streams.stores.store import Store, StoreCorrupt, StoreFactory, StoreLocked
from broker_streams.tester import EndlessLoop, Published, TableView, Tester
from broker_streams.topics import TopicPolicy
from broker_streams.view import Change, View, ViewStats

__all__ = [
    "SKIP",
    "STOP",
    "Callback",
    "Change",
    "Context",
    "CopyState",
    "DeadLetter",
    "Done",
    "Edge",
    "Emitter",
    "EndlessLoop",
    "Group",
    "Hopping",
    "Input",
    "InputStats",
    "Int64",
    "Join",
    "Lmdb",
    "Lookup",
    "Loop",
    "Memory",
    "MsgPack",
    "Output",
    "PartitionState",
    "PartitionStats",
    "Persist",
    "Policy",
    "Processor",
    "ProcessorState",
    "ProcessorStats",
    "Published",
    "RecoveryStats",
    "Retrying",
    "RocksDb",
    "Session",
    "Sqlite",
    "Store",
    "StoreCorrupt",
    "StoreFactory",
    "StoreLocked",
    "StreamFailed",
    "TableStats",
    "TableView",
    "Tester",
    "Timer",
    "TimerCallback",
    "TopicPolicy",
    "Tumbling",
    "View",
    "ViewStats",
    "VisitAborted",
    "Visitor",
    "VisitorCallback",
    "Window",
    "WindowCallback",
    "differences",
    "table_of",
]
