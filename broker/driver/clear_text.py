"""Warns of credentials that leave the machine without TLS."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from broker.hooks import Hooks, Warned, logger
from broker.urls import is_loopback

__all__ = ["warn_of_clear_text"]


def warn_of_clear_text(hooks: Hooks, setting: str, servers: Iterable[str], advice: str) -> None:
    """Log one warning and emit it as an event, unless all servers are on the loopback.

    :param setting: the setting that holds the credentials.
    :param servers: where they go without TLS, as host or host:port.
    :param advice: what to do: "use pulsar+ssl://".
    """
    remote = dict.fromkeys(server for server in servers if not _is_local(server))
    if not remote:
        return
    text = f"The credentials of setting {setting!r} are sent in clear to {', '.join(remote)}: {advice}"
    logger.warning(text)
    hooks.emit(Warned(text=text))


def _is_local(server: str) -> bool:
    name = server
    with suppress(ValueError):
        name = urlsplit(f"//{server}").hostname or ""
    return is_loopback(name)
