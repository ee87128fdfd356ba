"""nats-py without its per-message cost: the only module that uses its private calls, and a fallback without them.

`supports_fast_path()` checks that the installed nats-py has the private parts that were tested; else `make_client`
falls back to the public calls. Both transports connect by a `_CheckedSocket`, and pass raw messages: subject, reply,
body and header block as bytes. The fast one skips nats-py's message objects and queues, and joins many commands into
one write. A handler runs inside nats-py's read loop: it must not raise and must not block. Everything runs on the
client's event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import ssl
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, NamedTuple, Protocol
from urllib.parse import ParseResult, urlsplit

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.errors import ProtocolError
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from broker.driver import logger
from broker_jetstream.codec import header_lines
from broker_jetstream.errors import NoTls

__all__ = [
    "LARGEST_PAYLOAD",
    "FastClient",
    "Outgoing",
    "PublicClient",
    "RawHandler",
    "Transport",
    "close_now",
    "drop_socket",
    "is_standalone",
    "make_client",
    "supports_fast_path",
]

RawHandler = Callable[[bytes, bytes, bytes, bytes], None]
"""Called with subject, reply, body and header block (empty without headers)."""

LARGEST_PAYLOAD: Final = 64 << 20
"""Bytes; the largest max_payload that NATS documents."""
_LARGEST_MESSAGE: Final = LARGEST_PAYLOAD + 65_536
"""With its headers."""
_LONGEST_LINE: Final = 1 << 20
"""Bytes of a line that is not a message; one may name all servers of a cluster."""
_MESSAGES: Final = frozenset({b"HMSG", b"MSG"})
_PROCESS_MSG: Final = ["self", "sid", "subject", "reply", "data", "headers"]


class Outgoing(NamedTuple):
    """One message to write."""

    subject: bytes
    reply: bytes
    block: bytes
    data: bytes


class Transport(Protocol):
    """A client of nats-py, and the calls that this backend adds."""

    client: Client
    forgets_unwritten: bool
    """Whether `forget_unwritten` works, and many messages are joined into one write."""

    async def listen(self, subject: str, handler: RawHandler) -> Any: ...
    async def unlisten(self, listener: Any) -> None: ...
    async def send(self, messages: Sequence[Outgoing]) -> None: ...
    async def send_empty(self, subjects: Sequence[bytes]) -> None: ...
    def forget_unwritten(self) -> None: ...


def supports_fast_path(client_type: type[Client] = Client) -> bool:
    """Whether this nats-py has the private parts that `FastClient` needs, as they were tested."""
    try:
        process = client_type._process_msg  # pyright: ignore[reportPrivateUsage]
        send, flush = client_type._send_command, client_type._flush_pending  # pyright: ignore[reportPrivateUsage]
        probe = client_type()
        parser = probe._ps  # pyright: ignore[reportPrivateUsage]
        return (
            all(inspect.iscoroutinefunction(call) for call in (process, send, flush))
            and list(inspect.signature(process).parameters) == _PROCESS_MSG
            and list(inspect.signature(send).parameters)[:2] == ["self", "cmd"]
            and type(parser) is Parser
            and inspect.iscoroutinefunction(parser.parse)
            and (parser.state, parser.needed, bytes(parser.buf)) == (AWAITING_CONTROL_LINE, 0, b"")
            and isinstance(probe._pending, list)  # pyright: ignore[reportPrivateUsage]
            and isinstance(probe._pending_data_size, int)  # pyright: ignore[reportPrivateUsage]
        )
    except (AttributeError, TypeError, ValueError):
        return False


class _Greeting(msgspec.Struct):
    """What nats-py reads of the greeting, by type; nats-py checks nothing."""

    version: str = ""
    max_payload: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)] = 1
    auth_required: bool | None = None
    tls_required: bool | None = None
    headers: bool | None = None
    nonce: str | None = None
    connect_urls: list[str] | None = None


class _CheckedSocket(TcpTransport):
    """A socket that checks what a server says before nats-py reads its messages.

    Whatever the server says is an error of nats-py: any other exception would end nats-py's reconnects for good.

    :param tls_only: write nothing before TLS. nats-py starts TLS only if the greeting says so. A man in the middle can
        change the greeting, which comes in clear; nats-py would then send the credentials in clear too.
    """

    def __init__(self, *, tls_only: bool) -> None:
        super().__init__()
        self._tls_only = tls_only
        self._secure = False
        self._greeted = False

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        self._secure = self._greeted = False
        try:
            await super().connect(uri, buffer_size, connect_timeout)
        except ValueError as error:  # a host or a port that a server named
            raise nats.errors.Error(f"nats: invalid server address: {error}") from error

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        self._secure = True

    async def readline(self) -> bytes:
        try:
            line: bytes = await super().readline()
        except ValueError as error:  # longer than the buffer
            raise ProtocolError from error
        if not self._greeted:
            self._greeted = True
            return _checked_greeting(line, tls_only=self._tls_only and not self._secure)
        if b"-ERR" in line:
            raise nats.errors.Error(f"nats: {line.partition(b'-ERR')[2].decode('utf-8', 'replace').strip()}")
        return line

    def write(self, payload: bytes) -> None:
        self._check()
        super().write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        self._check()
        super().writelines(payload)

    def _check(self) -> None:
        if self._tls_only and not self._secure:
            raise NoTls

    def __bool__(self) -> bool:
        # nats-py replaces a transport that is false.
        return True


def _checked_greeting(line: bytes, *, tls_only: bool) -> bytes:
    """The greeting, with the servers that can be used.

    :param tls_only: the greeting must announce TLS, and came without: the servers that it names may be anyone's.
    :raises NoTls: the server offers no TLS.
    :raises ProtocolError: it is not a greeting.
    """
    if not line.startswith(b"INFO "):
        return b""  # nats-py reports the missing greeting
    try:
        info = msgspec.json.decode(line[5:], type=dict[str, Any])
        greeting = msgspec.convert(info, _Greeting)
    except (ValueError, RecursionError) as error:
        raise ProtocolError from error
    if tls_only and not greeting.tls_required:
        raise NoTls
    info["connect_urls"] = [] if tls_only else [url for url in greeting.connect_urls or () if _is_address(url)]
    return b"INFO %b\r\n" % msgspec.json.encode(info)


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(f"nats://{text}")
        return bool(parts.hostname and parts.port)
    except ValueError:
        return False


class _BoundedParser(Parser):
    """nats-py's parser, with limits; the server announces the size of each message."""

    _needed = 0

    @property
    def needed(self) -> int:
        return self._needed

    @needed.setter
    def needed(self, size: int) -> None:
        _check_size(size)
        self._needed = size

    async def parse(self, data: bytes = b"") -> None:
        try:
            await super().parse(data)
        except (ProtocolError, OSError):
            raise
        except Exception as error:
            # Any other exception would end nats-py's read loop for good; this one makes it reconnect.
            logger.warning("The server sent a line that nats-py cannot read: %r", error)
            raise ProtocolError from error
        if self.state == AWAITING_CONTROL_LINE and len(self.buf) > _LONGEST_LINE:
            logger.warning("The server sent a line of more than %d bytes", _LONGEST_LINE)
            raise ProtocolError


def _check_size(size: int) -> None:
    """:raises ProtocolError: no message has this size."""
    if not 0 <= size <= _LARGEST_MESSAGE:
        logger.warning("The server announced a message of %d bytes; the limit is %d", size, _LARGEST_MESSAGE)
        raise ProtocolError


class _QuickParser(_BoundedParser):
    """Parses messages of raw subscriptions, and leaves everything else to nats-py's parser.

    The server writes control lines with single blanks: `HMSG <subject> <sid> [reply] <header bytes> <all bytes>` and
    `MSG <subject> <sid> [reply] <bytes>`. A message that is not complete waits in the buffer with its control line.
    """

    def __init__(self, handlers: dict[bytes, RawHandler], client: Client) -> None:
        self._handlers = handlers
        self._enough = 0
        self.buf: bytearray
        super().__init__(client)  # pyright: ignore[reportUnknownMemberType]

    def reset(self) -> None:
        super().reset()
        self._enough = 0

    async def parse(self, data: bytes = b"") -> None:
        if self.state != AWAITING_CONTROL_LINE:
            # nats-py's parser has begun a message: pass on the rest of that message only.
            rest = self.needed + 2 - len(self.buf)
            await super().parse(data[:rest])
            if self.state != AWAITING_CONTROL_LINE:
                return
            data = data[rest:]
        self.buf += data
        if len(self.buf) < self._enough:
            return
        try:
            complete = self._take()
        except ProtocolError:
            raise
        except Exception as error:
            logger.exception("A message from NATS could not be handled")
            raise ProtocolError from error
        if not complete:
            await super().parse()

    def _take(self) -> bool:
        """Handle all complete messages at the front; returns False if nats-py's parser must continue."""
        buffer, handlers = bytes(self.buf), self._handlers
        size = len(buffer)
        position = self._enough = 0
        waits = True
        while position < size:
            end = buffer.find(b"\r\n", position)
            fields = buffer[position:end].split(b" ") if end >= 0 else ()
            if len(fields) < 4 or fields[0] not in _MESSAGES or (handler := handlers.get(fields[2])) is None:
                waits = False
                break
            body = end + 2
            stop = body + int(fields[-1])
            if size < stop + 2 or stop < body:
                _check_size(stop - body)
                self._enough = stop + 2 - position
                break
            if fields[0] == b"HMSG":
                split = body + int(fields[-2])
                reply = fields[3] if len(fields) == 6 else b""
                handler(fields[1], reply, buffer[split:stop], buffer[body:split])
            else:
                handler(fields[1], fields[3] if len(fields) == 5 else b"", buffer[body:stop], b"")
            position = stop + 2
        del self.buf[:position]
        return waits


class _RawClient(Client):
    """A client that passes messages of some subscriptions on without parsing them."""

    def __init__(self) -> None:
        super().__init__()
        self.raw_handlers: dict[bytes, RawHandler] = {}
        """By subscription id, as the server writes it."""
        self._ps = _QuickParser(self.raw_handlers, self)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        handler = self.raw_handlers.get(b"%d" % sid)
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            handler(subject, reply, data, headers or b"")


class FastClient:
    """Raw messages and joined writes, by nats-py's private calls."""

    forgets_unwritten = True

    def __init__(self, *, tls_only: bool = False) -> None:
        self._raw = raw = _RawClient()
        self.client: Client = raw
        _use_checked_socket(raw, tls_only)
        self._append, self._flush = raw._send_command, raw._flush_pending  # pyright: ignore[reportPrivateUsage]

    async def listen(self, subject: str, handler: RawHandler) -> Any:
        # nats-py would drop messages beyond its limits; the pull requests are the bound.
        subscribe: Any = self._raw.subscribe  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        subscription = await subscribe(subject, pending_msgs_limit=0, pending_bytes_limit=0)
        self._raw.raw_handlers[b"%d" % subscription._id] = handler
        return subscription

    async def unlisten(self, listener: Any) -> None:
        """Unsubscribe; returns after the handler got every message that the server had sent."""
        if self._raw.is_closed:
            return
        sid: int = listener._id
        try:
            await listener.unsubscribe()
            if self._raw.is_connected:
                await _flush_all(self._raw)
        finally:
            self._raw.raw_handlers.pop(b"%d" % sid, None)

    async def send(self, messages: Sequence[Outgoing]) -> None:
        lines: list[bytes] = []
        for subject, reply, block, data in messages:
            if block:
                size = len(block)
                lines.append(b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, size, size + len(data), block, data))
            else:
                lines.append(b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(data), data))
        await self._append(b"".join(lines))
        await self._flush()

    async def send_empty(self, subjects: Sequence[bytes]) -> None:
        await self._append(b"PUB " + b" 0\r\n\r\nPUB ".join(subjects) + b" 0\r\n\r\n")
        await self._flush()

    def forget_unwritten(self) -> None:
        """Drop writes that the broken connection did not take, so they cannot overtake their repetition."""
        self._raw._pending = []  # pyright: ignore[reportPrivateUsage]
        self._raw._pending_data_size = 0  # pyright: ignore[reportPrivateUsage]


class PublicClient:
    """The same by nats-py's public calls."""

    forgets_unwritten = False

    def __init__(self, *, tls_only: bool = False) -> None:
        self.client = Client()
        self.client._ps = _BoundedParser(self.client)  # pyright: ignore[reportPrivateUsage]
        _use_checked_socket(self.client, tls_only)

    async def listen(self, subject: str, handler: RawHandler) -> Any:
        async def deliver(message: Msg) -> None:
            handler(message.subject.encode(), message.reply.encode(), message.data, _block(message.headers))

        subscribe: Any = self.client.subscribe  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return await subscribe(subject, cb=deliver, pending_msgs_limit=0, pending_bytes_limit=0)

    async def unlisten(self, listener: Any) -> None:
        if self.client.is_closed:
            return
        if self.client.is_connected:
            # Draining delivers messages queued in nats-py; unsubscribing would drop them.
            await listener.drain()
        else:
            await listener.unsubscribe()

    async def send(self, messages: Sequence[Outgoing]) -> None:
        for subject, reply, block, data in messages:
            headers = (
                {name.decode(): value.decode("utf-8", "replace") for name, value in header_lines(block)}
                if block
                else None
            )
            await self.client.publish(subject.decode(), data, reply=reply.decode(), headers=headers)

    async def send_empty(self, subjects: Sequence[bytes]) -> None:
        for subject in subjects:
            await self.client.publish(subject.decode())

    def forget_unwritten(self) -> None:
        """Impossible by public calls: nats-py writes its buffer after the reconnect."""


async def _flush_all(client: Client) -> None:
    """Return when the server has read everything that was sent.

    :raises nats.errors.Error: no answer in time, or the connection broke.
    """
    # nats-py writes a PING ahead of its buffer; by the time of the first PONG the buffer is written.
    for _ in range(2):
        await client.flush()


def drop_socket(client: Client) -> bool:
    """Close the socket of a client at once; returns False if it has none."""
    writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
    if not isinstance(writer, asyncio.StreamWriter):
        return False
    writer.transport.abort()
    return True


async def close_now(client: Client) -> None:
    """Close a flushed client without waiting for the TLS shutdown."""
    if drop_socket(client):
        # Else nats-py writes its buffer to the aborted connection, fails, and leaks its tasks.
        client._pending, client._pending_data_size = [], 0  # pyright: ignore[reportPrivateUsage]
    # No await in between, so the client does not notice a broken connection.
    await client.close()


def is_standalone(client: Client) -> bool:
    """Whether the server runs JetStream alone: it then executes the acks of one connection in order, and loses none
    on the way to another server."""
    info: Any = getattr(client, "_server_info", None) or {}
    return bool(info.get("jetstream")) and not (info.get("cluster") or info.get("domain"))


def make_client(fast: bool, *, tls_only: bool = False) -> Transport:
    """A `FastClient` if `fast` is set and nats-py supports it.

    :param tls_only: write nothing on a connection without TLS.
    """
    return FastClient(tls_only=tls_only) if fast and supports_fast_path() else PublicClient(tls_only=tls_only)


def _use_checked_socket(client: Client, tls_only: bool) -> None:
    client._transport = _CheckedSocket(tls_only=tls_only)  # pyright: ignore[reportPrivateUsage]


def _block(headers: Any) -> bytes:
    """The header block of a message that nats-py has parsed, which keeps the last of repeated headers."""
    if not headers:
        return b""
    lines: list[bytes] = []
    status = description = ""
    for name, value in headers.items():
        # nats-py mixes strings with members of a str enum.
        text = str(getattr(name, "value", name))
        if text == "Status":
            status = value
        elif text == "Description":
            description = value
        else:
            lines.append(f"{text}: {value}\r\n".encode())
    first = f"NATS/1.0 {status} {description}".rstrip() if status else "NATS/1.0"
    return first.encode() + b"\r\n" + b"".join(lines) + b"\r\n"
