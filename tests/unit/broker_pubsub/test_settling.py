"""Acks and leases after broken calls and refused ids, as of exactly-once subscriptions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from broker.driver.contract import Settlement, SourceListener
from broker.errors import BrokerError, LeaseLost, SettleError
from broker.messages import Message, Outcome
from broker_pubsub.messages import PubSubMessageSource
from broker_pubsub.protocol import Methods
from broker_pubsub.settings import PubSubSettings
from broker_pubsub.settling import Settler


def fails(code: grpc.StatusCode, text: str = "", metadata: Sequence[tuple[str, bytes]] = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details=text)


def refuses(ack_id: str) -> grpc.aio.AioRpcError:
    detail = Packed()
    detail.Pack(ErrorInfo(metadata={ack_id: "PERMANENT_FAILURE_INVALID_ACK_ID"}))
    status = Status(details=[detail]).SerializeToString()
    return fails(grpc.StatusCode.INVALID_ARGUMENT, "", [("grpc-status-details-bin", status)])


BROKEN = fails(grpc.StatusCode.UNAVAILABLE, "Socket closed")


class Answers:
    """The part of a connection that a settler uses: each call gets the next of these answers."""

    def __init__(self, *answers: grpc.aio.AioRpcError | None) -> None:
        self.settings = PubSubSettings(project="my-project", settle_timeout=5.0)
        self._answers = list(answers)

    async def start(self, method: Any, request: Any, timeout: float) -> None:
        if (answer := self._answers.pop(0)) is not None:
            raise answer


def settler(*answers: grpc.aio.AioRpcError | None) -> Settler:
    connection: Any = Answers(*answers)
    return Settler(connection, "projects/p/subscriptions/s", "Subscription 's'", 30)


def message(ack_id: str) -> Message[Any]:
    view: Any = SimpleNamespace(id=lambda raw: raw.ack_id)
    return Message("orders", b"x", SimpleNamespace(ack_id=ack_id), view, float("inf"), 1)


async def acked(*answers: grpc.aio.AioRpcError | None) -> list[BrokerError | None]:
    return await settler(*answers).settle([Settlement(message(each), Outcome.ACK) for each in ("a", "b")])


async def test_a_refused_ack_is_lost():
    first, second = await acked(refuses("a"))
    assert isinstance(first, LeaseLost)
    assert second is None


async def test_the_outcome_of_an_ack_that_is_refused_after_a_lost_answer_is_unknown():
    first, second = await acked(BROKEN, refuses("a"))
    assert isinstance(first, SettleError)
    assert not isinstance(first, LeaseLost)
    assert second is None


async def test_an_ack_that_was_never_sent_is_lost():
    first, _ = await acked(fails(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"), refuses("a"))
    assert isinstance(first, LeaseLost)


async def test_a_renewal_that_is_refused_after_a_lost_answer_is_lost():
    first, second = await settler(BROKEN, refuses("a")).extend([message("a"), message("b")])
    assert isinstance(first, LeaseLost)
    assert second is None


class Server:
    """Delivers one message, and refuses to set its lease."""

    def __init__(self) -> None:
        self.settings = PubSubSettings(project="my-project", emulator_host="localhost:1", lease_seconds=30.0)

    async def start(self, method: Any, request: Any, timeout: float) -> Any:
        if method is not Methods.PULL:
            raise fails(grpc.StatusCode.PERMISSION_DENIED, "no")
        return Methods.PULL.response(received_messages=[{"ack_id": "a", "message": {"data": b"x"}}])


async def test_a_lease_that_cannot_be_set_is_that_of_the_subscription():
    """Otherwise a late ack would pass for one in time, which a plain subscription accepts and ignores."""
    connection: Any = Server()
    made, listener = SimpleNamespace(name="s", ack_deadline_seconds=10), cast("SourceListener", None)
    source = PubSubMessageSource(
        connection, "orders", "s", made, listener, max_outstanding=1, ephemeral=False, on_close=lambda _: None
    )
    (message,) = await source.fetch(1, 1_000_000, 5.0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert message.lease - monotonic() < 10
    await source.close()
