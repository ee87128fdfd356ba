"""The blocking surface mirrors the asynchronous one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

import broker.admin
import broker.blocking
import broker.bus
import broker.consuming.consumer
import broker.messages
import broker.protocols
import broker.publishing.topic
import broker.reading.log_follower
import broker.reading.log_reader
import broker.reading.record_consumer
import broker.records
from broker.blocking import AsMessagesOptions, MessageOptions, RecordOptions

ONLY_ASYNCHRONOUS = {
    "backend": "the backend's calls belong to the bus's loop; `bus.call` gets there",
    "check_open": "inner: the check of the bus's objects",
    "make_engine": "inner",
    "member": "inner",
    "give_back": "inner: what a caller of the blocking form could not take",
    "bus": "inner",
    "commit_records": "inner: the owner's side of a commit",
    "begin_settling": "inner",
    "codec": "inner",
    "runs_in": "inner: whether a close is called by a handler",
}


def parameters(function: Callable[..., Any], options: type | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values()):
        if parameter.kind is parameter.VAR_KEYWORD and options is not None:
            found |= dict.fromkeys(get_type_hints(options), "option")
        elif parameter.name != "self":
            found[parameter.name] = parameter.kind.name
    return found


@pytest.mark.parametrize(
    ("asynchronous", "blocking"),
    [
        (broker.bus.Bus, broker.blocking.Bus),
        (broker.publishing.topic.TopicFacade, broker.blocking.Topic),
        (broker.consuming.consumer.MessageConsumer, broker.blocking.MessageConsumer),
        (broker.reading.record_consumer.RecordConsumer, broker.blocking.RecordConsumer),
        (broker.reading.log_reader.LogReaderFacade, broker.blocking.LogReader),
        (broker.reading.log_follower.LogFollower, broker.blocking.LogFollower),
        (broker.admin.AdminFacade, broker.blocking.Admin),
        (broker.messages.Message, broker.blocking.BlockingMessage),
        (broker.messages.MessageBatch, broker.blocking.BlockingMessageBatch),
        (broker.records.Record, broker.blocking.BlockingRecord),
        (broker.records.RecordBatch, broker.blocking.BlockingRecordBatch),
        (broker.protocols.TransactionalPublisher, broker.blocking.TransactionalPublisher),
        (broker.protocols.Transaction, broker.blocking.Transaction),
        (broker.protocols.TableWriter, broker.blocking.TableWriter),
        (broker.consuming.consumer.Service, broker.blocking.Service),
    ],
)
def test_blocking_surface_mirrors_the_asynchronous_one(asynchronous: type, blocking: type) -> None:
    options = {"messages": MessageOptions, "records": RecordOptions, "as_messages": AsMessagesOptions}
    fields: set[str] = set(getattr(asynchronous, "__struct_fields__", ()))
    for name, member in vars(asynchronous).items():
        if name.startswith("_") or name in ONLY_ASYNCHRONOUS or name in fields:
            continue
        if name in get_type_hints(blocking):
            continue
        assert hasattr(blocking, name), f"{blocking.__qualname__} has no {name}"
        mirrored = inspect.getattr_static(blocking, name)
        if not inspect.isfunction(member):
            assert not inspect.isfunction(mirrored), name
            continue
        assert not inspect.iscoroutinefunction(mirrored), name
        wanted = dict.fromkeys(parameters(member, None), None)
        found = dict.fromkeys(parameters(mirrored, options.get(name)), None)
        assert wanted == found, f"{blocking.__qualname__}.{name}"
    for name in ("__iter__", "__enter__", "__exit__"):
        awaited = {"__iter__": "__aiter__", "__enter__": "__aenter__", "__exit__": "__aexit__"}[name]
        assert hasattr(asynchronous, awaited) <= hasattr(blocking, name), name


@pytest.mark.parametrize(
    ("asynchronous", "blocking"),
    [
        (broker.messages.Message, broker.blocking.BlockingMessage),
        (broker.records.Record, broker.blocking.BlockingRecord),
    ],
)
def test_blocking_messages_have_every_field(asynchronous: type, blocking: type) -> None:
    inner = {"raw", "view", "size", "owner", "decoded", "retries", "lease", "lease_ends", "outcome", "in_use", "scope"}
    inner.add("received_at")
    for name in set(getattr(asynchronous, "__struct_fields__", ())) - inner - {"generation"}:
        assert isinstance(inspect.getattr_static(blocking, name), property), name
