"""Parses and masks broker URLs: `scheme://user:password@host:port,host:port/path?name=value`.

Pure functions, safe from any thread. Errors and masked URLs never show a password, a token or the value of a parameter
with a secret name, even if the URL is malformed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import quote, unquote, unquote_plus

from broker.errors import InvalidSetting

__all__ = [
    "MASK",
    "Host",
    "UrlParts",
    "is_loopback",
    "is_secret_name",
    "mask_url",
    "mask_within",
    "parse_url",
    "scheme_of",
]

MASK: Final = "***"

_SCHEME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*")
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9a-fA-F]{2})")
_SECRET_NAME: Final = re.compile(
    r"pass|secret|token|cred|seed|jwt|signature|sas(?!l)|(^|_)key$|(private|access|account|api)_?key|key[_.]pem|[_.]cmd$",
    re.IGNORECASE,
)
_NAME_OF_PAIR: Final = re.compile(rf"(?<![\w.-])([\w.-]+)\s*=(?!{re.escape(MASK)}(?:[&,]|$))")
"""The name and the `=` of a pair whose value is not masked yet."""
_BLANK: Final = re.compile(r"[\s\0]")
_SHAPE: Final = "scheme://user:password@host:port/path?name=value"


class Host(NamedTuple):
    """A server of a URL; `port` is None if the URL has none. IPv6 addresses are without brackets."""

    name: str
    port: int | None = None

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.port is None else f"{name}:{self.port}"


@dataclass(frozen=True, slots=True)
class UrlParts:
    """The parts of a URL, percent-decoded.

    :ivar path: with its leading slash; empty if the URL has none.
    :ivar query: the parameters, in the order of the URL.
    """

    scheme: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    hosts: tuple[Host, ...] = ()
    path: str = ""
    query: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


def scheme_of(url: str) -> str:
    """The scheme of a URL, in lower case.

    :raises InvalidSetting: the text does not begin with a scheme.
    """
    scheme, colon, _ = url.strip().partition(":")
    if not colon or not _SCHEME.fullmatch(scheme):
        raise InvalidSetting(
            f"{_mask_malformed(url.strip())!r} is not a broker URL", advice=f"A URL has the form {_SHAPE}"
        )
    return scheme.lower()


def parse_url(url: str) -> UrlParts:
    """Split a URL into its parts.

    :raises InvalidSetting: the URL is malformed; the error names the part and says how to write it.
    """
    scheme = scheme_of(url)
    rest = url.strip().partition(":")[2]
    if "#" in rest:
        raise _invalid(url, "has a fragment", "Write '#' as %23")
    if _BAD_ESCAPE.search(rest):
        raise _invalid(url, "has a '%' that does not begin an escape", "Write '%' as %25")
    body, _, query = rest.partition("?")
    authority, path = "", body
    if body.startswith("//"):
        authority, slash, path = body[2:].partition("/")
        path = slash + path
    if "@" in path:
        raise _invalid(url, "has an '@' after the host", "Write '@' in a path as %40, and '/' in a password as %2F")
    login, at, host_list = authority.rpartition("@")
    user, colon, password = login.partition(":")
    return UrlParts(
        scheme,
        unquote(user) if at and user else None,
        unquote(password) if colon else None,
        tuple(_parse_host(url, item) for item in host_list.split(",")) if host_list else (),
        unquote(path),
        _parse_query(url, query),
    )


def mask_url(url: str, secret: Iterable[str] = ()) -> str:
    """The URL with its secrets replaced by `***`.

    Secrets are the password, a user without a password (which may be a token), the parameters in `secret`, parameters
    with a secret name, and the same in parameters that are URLs. A malformed URL is masked generously.
    """
    url = url.strip()
    try:
        parts = parse_url(url)
    except InvalidSetting:
        return _mask_malformed(url)
    head, _, written = url.partition("?")
    scheme, slashes, authority = head.partition("//")
    name, colon, _ = authority.partition(":")
    if "@" in written if colon else any("@" in item and "://" not in item for item in written.split("&")):
        # What looks like host, port and query may be a user and a password that contains '?'.
        return f"{scheme}{slashes}{name}{colon and colon + MASK}?{MASK}"
    if "@" in head:
        before, _, after = head.rpartition("@")
        opening = before[: before.index("//") + 2]
        shown = MASK if parts.password is None else f"{quote(parts.user or '', safe='')}:{MASK}"
        head = f"{opening}{shown}@{after}"
    hidden = set(secret)
    query = "&".join(
        f"{quote(name)}={MASK if name in hidden or is_secret_name(name) else quote(mask_within(value), safe='/:,@*')}"
        for name, value in parts.query.items()
    )
    return f"{head}?{query}" if query else head


def mask_within(value: str) -> str:
    """The value of a setting without the secrets of URLs, logins (`user:password@host`) and `name=value` pairs."""
    shown = mask_url(value) if "://" in value or "@" in value.partition(":")[2] else value
    for pair in _NAME_OF_PAIR.finditer(shown):
        if is_secret_name(pair.group(1)):
            # The secret may contain what separates pairs.
            return shown[: pair.end()] + MASK
    return shown


def is_secret_name(name: str) -> bool:
    """Whether the name of a parameter suggests a secret value."""
    return _SECRET_NAME.search(name) is not None


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its name or address; resolves nothing."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _mask_malformed(url: str) -> str:
    head, mark, _ = url.partition("?")
    # An unescaped '/', '?' or '#' splits a password: all up to the last '@' may belong to it.
    if "@" in url:
        scheme, slashes, _ = head.partition("//")
        opening = scheme + slashes if slashes else ""
        return f"{opening}{MASK}@{url.rpartition('@')[2].partition('?')[0]}"
    return f"{head}?{MASK}" if mark else head


def _parse_host(url: str, text: str) -> Host:
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.%]+)\](?::(.*))?", text)
    if bracketed:
        name, port = bracketed.group(1), bracketed.group(2)
    else:
        name, colon, after = text.partition(":")
        port = after if colon else None
    if not name or (not bracketed and (":" in (port or "") or "[" in name or _BLANK.search(unquote(name)))):
        raise _invalid(url, "has an invalid host", "Write host, host:port or [IPv6]:port; separate several with commas")
    if port is None:
        return Host(unquote(name))
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _invalid(
            url,
            "has a port that is not a number from 1 to 65535",
            "Write host:port; write '/' and ':' in a password as %2F and %3A",
        )
    return Host(unquote(name), int(port))


def _parse_query(url: str, text: str) -> dict[str, str]:
    query: dict[str, str] = {}
    for item in text.split("&") if text else ():
        raw_name, equals, value = item.partition("=")
        name = unquote_plus(raw_name)
        if not equals or not name or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise _invalid(
                url,
                "has a query that is not name=value&name=value",
                "Write '&', '=', '?' and '@' in values and passwords as %26, %3D, %3F and %40",
            )
        if name in query:
            raise _invalid(url, f"has the parameter {name!r} twice", "Write it once; separate a list with commas")
        query[name] = unquote_plus(value)
    return query


def _invalid(url: str, problem: str, advice: str) -> InvalidSetting:
    return InvalidSetting(f"The URL {_mask_malformed(url.strip())!r} {problem}", advice=advice)
