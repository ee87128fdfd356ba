"""Loops on nats-py without the library, from the documented way to the fastest that we found.

Every consuming loop acks each message of a durable pull consumer; every publishing loop gets each message confirmed,
with the same headers as ours. Failures end the run. The fastest ways use private calls of nats-py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import count as counting
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

import broker
from broker_jetstream.server import ServerAddress

__all__ = ["PULL", "RawNats"]

PULL = 2000
"""Messages per pull request; two are kept open."""
WINDOW = 4000
"""Unconfirmed messages in flight."""
JOINED = 500
"""Commands joined in one write."""
_EXPIRES = 30_000_000_000
_PRIVATE = "anybroker-key: %s\r\nanybroker-time: %d\r\nNats-Msg-Id: %s\r\ntype: created\r\n"


class _QuickClient(Client):
    """A client that passes the raw messages of one subscription to a function."""

    quick_sid = -1
    quick: Any = None

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        if sid == self.quick_sid:
            self.quick(reply, data, headers)
        else:
            await super()._process_msg(sid, subject, reply, data, headers)


class RawNats:
    """A connection of nats-py to the library's server."""

    def __init__(self, client: _QuickClient, stream: str) -> None:
        self._client: Any = client
        self._js: Any = self._client.jetstream(timeout=30)
        self._stream = stream
        self._subject = f"{stream}.0"
        self._numbers = counting()

    @classmethod
    async def connect(cls, place: ServerAddress, topic: str) -> RawNats:
        """:param topic: the topic to consume from, or to publish to."""
        client = _QuickClient()
        await client.connect(place.url, token=place.token)
        return cls(client, topic.replace(".", "="))

    async def close(self) -> None:
        await self._client.close()

    # -- consuming; `consumer` is a durable that exists -------------------------------------------------------

    async def fetch_and_ack(self, consumer: str, count: int) -> None:
        """The documented way: fetch a batch, ack its messages."""
        inbox = await self._js.pull_subscribe_bind(consumer, self._stream)
        while count > 0:
            for message in await inbox.fetch(500, timeout=5):
                await message.ack()
                count -= 1
        await self._client.flush()
        await inbox.unsubscribe()

    async def pull_with_callback(self, consumer: str, count: int) -> None:
        """Pull requests by hand, a callback per message, acks joined in one write."""
        pulling = _Pulling(self._client, self._stream, consumer, count)

        async def take(message: Msg) -> None:
            pulling.take(message.reply.encode(), message)

        inbox = self._client.new_inbox()
        listening = await self._client.subscribe(inbox, cb=take, pending_msgs_limit=0, pending_bytes_limit=0)
        await pulling.run(inbox)
        await listening.unsubscribe()

    async def pull_raw(self, consumer: str, count: int) -> None:
        """The same without the client's header parsing and message objects: the fastest that we found."""
        pulling = _Pulling(self._client, self._stream, consumer, count)

        def take(reply: bytes, data: bytes, headers: bytes) -> None:
            pulling.take(reply, (data, headers))

        inbox = self._client.new_inbox()
        listening = await self._client.subscribe(inbox, pending_msgs_limit=0, pending_bytes_limit=0)
        self._client.quick, self._client.quick_sid = take, listening._id
        await pulling.run(inbox)
        self._client.quick_sid = -1
        await listening.unsubscribe()

    # -- publishing --------------------------------------------------------------------------------------------

    async def gathered(self, messages: Sequence[broker.OutboundMessage]) -> None:
        """`js.publish`, a thousand at a time."""
        for start in range(0, len(messages), 1000):
            await asyncio.gather(*map(self._publish_one, messages[start : start + 1000]))

    async def _publish_one(self, message: broker.OutboundMessage) -> None:
        await self._js.publish(self._subject, message.data or b"", headers=_headers(message))

    async def publish_async(self, messages: Sequence[broker.OutboundMessage]) -> None:
        """`js.publish_async`, with its default window."""
        acks = [
            await self._js.publish_async(self._subject, message.data or b"", headers=_headers(message))
            for message in messages
        ]
        await asyncio.gather(*acks)

    async def own_inbox(self, messages: Sequence[broker.OutboundMessage]) -> None:
        """An inbox of its own for the confirmations, a future per message, commands joined in one write."""
        loop, prefix = asyncio.get_running_loop(), self._client.new_inbox()
        waiting: dict[str, asyncio.Future[Any]] = {}
        room = asyncio.Event()

        async def confirmed(message: Msg) -> None:
            answer = json.loads(message.data)
            if "error" in answer:
                raise RuntimeError(str(answer["error"]))
            waiting.pop(message.subject.rpartition(".")[2]).set_result(answer["seq"])
            if len(waiting) <= WINDOW - JOINED:
                room.set()

        listening = await self._client.subscribe(
            f"{prefix}.*", cb=confirmed, pending_msgs_limit=0, pending_bytes_limit=0
        )
        futures: list[asyncio.Future[Any]] = []
        for start in range(0, len(messages), JOINED):
            while len(waiting) > WINDOW - JOINED:
                room.clear()
                await room.wait()
            commands: list[bytes] = []
            for message in messages[start : start + JOINED]:
                token = str(next(self._numbers))
                future = waiting[token] = loop.create_future()
                futures.append(future)
                commands.append(self._command(f"{prefix}.{token}", message))
            await self._client._send_command(b"".join(commands))
            await self._client._flush_pending()
        await asyncio.gather(*futures)
        await listening.unsubscribe()

    def _command(self, reply: str, message: broker.OutboundMessage) -> bytes:
        block = ("NATS/1.0\r\n" + _PRIVATE % ((message.key or b"").decode(), 1, message.id) + "\r\n").encode()
        body = message.data or b""
        line = f"HPUB {self._subject} {reply} {len(block)} {len(block) + len(body)}\r\n".encode()
        return b"".join((line, block, body, b"\r\n"))


class _Pulling:
    """Keeps two pull requests open, and acks in joined writes, until a number of messages has arrived."""

    def __init__(self, client: Any, stream: str, consumer: str, count: int) -> None:
        self._client = client
        self._request = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._left = count
        self._credit = 0
        self._replies: list[bytes] = []
        self._messages: list[object] = []
        self._came = asyncio.Event()

    def take(self, reply: bytes, message: object) -> None:
        if not reply.startswith(b"$JS.ACK."):
            return
        self._credit -= 1
        self._replies.append(reply)
        self._messages.append(message)
        if len(self._replies) == 1:
            self._came.set()

    async def run(self, inbox: str) -> None:
        while self._left > 0:
            while self._credit <= PULL:
                request = json.dumps({"batch": PULL, "expires": _EXPIRES}).encode()
                self._credit += PULL
                await self._client.publish(self._request, request, reply=inbox)
            await self._came.wait()
            self._came.clear()
            replies, self._replies = self._replies, []
            # A user would read these now.
            self._messages = []
            self._left -= len(replies)
            acks = b"PUB " + b" 0\r\n\r\nPUB ".join(replies) + b" 0\r\n\r\n"
            await self._client._send_command(acks)
            await self._client._flush_pending()
        await self._client.flush()


def _headers(message: broker.OutboundMessage) -> dict[str, str]:
    return {
        "anybroker-key": (message.key or b"").decode(),
        "anybroker-time": "1",
        "Nats-Msg-Id": message.id or "",
        **message.attributes,
    }
