"""Remember of each user how often and when they clicked, and serve the table over HTTP.

.venv/bin/python -m examples.streams.clicks
curl localhost:9095/user-3
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Protocol

import msgspec

import broker
from broker import Json
from broker_streams import Context, Emitter, Group, Input, Persist, Processor, View

__all__ = ["CLICKS", "Click", "User", "Users", "answer", "main"]

TOPIC = "demo-clicks"
PORT = 9095


class Click(msgspec.Struct):
    """What is published, with the name of the user as key."""

    page: str


class User(msgspec.Struct):
    """What is known of a user."""

    clicks: int = 0
    last_page: str = ""
    last_click: datetime | None = None


users = Persist(Json(User))


def on_click(ctx: Context, click: Click) -> None:
    user = ctx[users] or User()
    user.clicks += 1
    user.last_page = click.page
    user.last_click = ctx.timestamp
    ctx[users] = user


CLICKS = Group("demo-user-clicks", Input(TOPIC, Json(Click), on_click), users)


class Users(Protocol):
    """What the server needs of a view."""

    def get(self, key: str) -> User | None: ...
    def items(self) -> Iterator[tuple[str, User]]: ...


def answer(view: Users, path: str) -> tuple[int, bytes]:
    """The status and the body for a path: a user, or all of them."""
    if path == "/":
        return 200, msgspec.json.encode(dict(view.items()))
    user = view.get(path.removeprefix("/"))
    return (404, b"null") if user is None else (200, msgspec.json.encode(user))


async def serve(view: Users) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readline()
        status, body = answer(view, request.decode().split(" ")[1])
        head = f"HTTP/1.0 {status} \r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", PORT) as server:
        print(f"http://localhost:{PORT}/ has all users, http://localhost:{PORT}/user-3 one of them")
        await server.serve_forever()


async def click_about(clicks: Emitter[Click]) -> None:
    while True:
        await clicks.emit(f"user-{random.randrange(10)}", Click(random.choice(["/home", "/news", "/about"])))
        await asyncio.sleep(0.05)


async def main() -> None:
    """Run until Ctrl-C."""
    async with broker.connect(os.environ.get("BROKER_URL", "inmem://clicks")) as bus:
        await bus.admin.ensure_topic(TOPIC, partitions=4)
        async with Processor(bus, CLICKS) as processor:
            await processor.ready()
            async with View(bus, CLICKS.table, Json(User)) as view, Emitter(bus, TOPIC, Json(Click)) as clicks:
                await asyncio.gather(serve(view), click_about(clicks))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main())
