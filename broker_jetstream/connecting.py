"""The first connection of a client: one honest try, every way in, and an error that says what to do.

`connect` may be cancelled; what it had begun is closed. Credential files are read at each call, so that a renewed one
is used when a client has to be made again. nats-py would try for ever and reads a malformed credentials file without
end: both are cut short here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import nats.errors
import nkeys  # pyright: ignore[reportMissingTypeStubs]
from nats.aio.client import Client, Server

from broker import BrokerError, InvalidSetting
from broker.driver import jitter, mask_url
from broker_jetstream.errors import connect_error
from broker_jetstream.fastpath import FastClient, PublicClient, drop_socket, hang_up, make_client
from broker_jetstream.settings import JetStreamSettings

__all__ = ["Watcher", "connect", "discard", "located"]

logger = logging.getLogger("broker")
_CLOSE_SECONDS = 2.0


class Watcher(Protocol):
    """Who is told what becomes of a client once it was connected."""

    def error(self, error: Exception) -> None: ...
    def disconnected(self, transport: FastClient | PublicClient) -> None: ...
    def reconnected(self, transport: FastClient | PublicClient) -> None: ...
    def gave_up(self, transport: FastClient | PublicClient) -> None: ...


class _FirstConnectFailed(Exception):
    """Carries the reason out of nats-py's connect, which would try for ever."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason


async def connect(
    settings: JetStreamSettings, servers: Sequence[str], token: str | None, watcher: Watcher
) -> FastClient | PublicClient:
    """A connected client, that reconnects by itself from now on.

    :raises ConnectionFailed: no server answered within `connect_timeout`; each was tried once.
    :raises AuthenticationFailed: one refused the credentials or demands some.
    :raises InvalidSetting: a file that a setting names cannot be used.
    """
    tls = settings.ssl_context()
    transport = make_client(settings.fast_path)
    client = transport.client
    failures = 0
    connecting = True

    async def on_error(error: Exception) -> None:
        nonlocal failures
        if not connecting:
            watcher.error(error)
            return
        failures += 1
        # Each server gets one try; a refusal is final at once.
        if failures >= len(servers) or not isinstance(error, OSError | nats.errors.TimeoutError | TimeoutError):
            raise _FirstConnectFailed(error)

    async def on_disconnected() -> None:
        if not connecting:
            watcher.disconnected(transport)

    async def on_reconnected() -> None:
        watcher.reconnected(transport)

    async def on_closed() -> None:
        watcher.gave_up(transport)

    options: dict[str, Any] = {
        **_options(settings, client),
        **_credentials(settings, token),
        "servers": list(servers),
        "tls": tls,
        "error_cb": on_error,
        "disconnected_cb": on_disconnected,
        "reconnected_cb": on_reconnected,
        "closed_cb": on_closed,
    }
    try:
        # A timeout around all, because several servers and TLS each have their own.
        async with asyncio.timeout(settings.connect_timeout + 0.5):
            await client.connect(**options)
            # nats-py takes a connection that the server closed right after the greeting for a good one.
            if not client.is_connected:
                raise nats.errors.UnexpectedEOF
            await client.flush(max(1, round(settings.connect_timeout)))
    except BaseException as error:
        reason = error.reason if isinstance(error, _FirstConnectFailed) else error
        # After a failed handshake nothing tells nats-py that the connection is closed.
        await discard(client, 0.1)
        if isinstance(reason, BrokerError) or not isinstance(reason, Exception):
            raise reason from None
        shown = located(settings, ", ".join(mask_url(server) for server in servers))
        raise connect_error(reason, shown, tls=tls is not None or _demands_tls(client)) from reason
    connecting = False
    return transport


def located(settings: JetStreamSettings, servers: str) -> str:
    """Servers that do not answer, by the URL that users gave as well: the address of one that is ours says little."""
    return f"{settings.private} at {servers}" if settings.private else servers


async def discard(client: Client, seconds: float = _CLOSE_SECONDS) -> None:
    """Close a client, whatever state it is in."""
    try:
        async with asyncio.timeout(seconds):
            await hang_up(client)
    except Exception as error:  # a client that never connected may fail in any way to close
        logger.debug("Closing a connection: %r", error)


def _options(settings: JetStreamSettings, client: Client) -> dict[str, Any]:
    def pick(pool: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
        # nats-py leaves behind the socket of an attempt that failed after it was connected.
        drop_socket(client)
        # Spread, so that many clients do not come back in the same moment.
        return jitter.choice(pool), settings.reconnect_wait * jitter.uniform(0.5, 1.5)

    return {
        "name": settings.name,
        "reconnect_to_server_handler": pick,
        "allow_reconnect": True,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": settings.reconnect_wait,
        "connect_timeout": settings.connect_timeout,
        "ping_interval": settings.ping_interval,
        "max_outstanding_pings": settings.max_outstanding_pings,
        "inbox_prefix": settings.inbox_prefix,
        "tls_hostname": settings.tls_hostname,
        "tls_handshake_first": settings.tls_handshake_first,
    }


def _credentials(settings: JetStreamSettings, token: str | None) -> dict[str, Any]:
    seed = settings.nkey_seed.get_secret_value() if settings.nkey_seed else None
    if settings.nkey_seed_file is not None:
        seed = _read(settings.nkey_seed_file, "nkey_seed_file").strip()
    if seed is not None:
        _check_seed(seed, "nkey_seed" if settings.nkey_seed else "nkey_seed_file")
    if settings.creds_file is not None:
        text = _read(settings.creds_file, "creds_file")
        # nats-py reads a file without these lines for ever.
        if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
            raise InvalidSetting(
                f"Setting 'creds_file' {str(settings.creds_file)!r} is no credentials file",
                advice="Name a file with the user's JWT and NKey seed, as `nsc generate creds` writes it",
            )
    found: dict[str, Any] = {
        "user": settings.user,
        "password": settings.password.get_secret_value() if settings.password else None,
        "token": token,
        "user_credentials": str(settings.creds_file) if settings.creds_file else None,
        "nkeys_seed_str": seed,
    }
    return {name: value for name, value in found.items() if value is not None}


def _demands_tls(client: Client) -> bool:
    return bool(getattr(client, "_server_info", {}).get("tls_required"))


def _read(path: Path, setting: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(
            f"Setting {setting!r} {str(path)!r} cannot be read: {error}", native=error, advice="Name a readable file"
        ) from error


def _check_seed(seed: str, setting: str) -> None:
    from_seed: Any = nkeys.from_seed  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    try:
        from_seed(bytearray(seed.encode())).wipe()
    except Exception as error:  # the library raises what base32 and libsodium raise, too
        raise InvalidSetting(
            f"Setting {setting!r} is no NKey seed", native=error, advice="A seed begins with 'SU'"
        ) from None
