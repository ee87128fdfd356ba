"""Tokens, OAuth 2.0 and TLS, for the client and the HTTP API.

*Concurrency.* Any thread may request a token, also threads of the client; one at a time renews it. *Failure.* Opening
the connection reports credentials that cannot be read or are refused; the client alone would report a timeout.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Final

from broker import AuthenticationFailed, BrokerError, ConnectionFailed, InvalidSetting
from broker.driver import logger
from broker_pulsar.client import pulsar
from broker_pulsar.settings import PulsarSettings

__all__ = ["Credentials", "ssl_context"]

_RENEW_BEFORE: Final = 30.0
"""Seconds before its expiry at which a token is renewed."""
_MOST_BYTES: Final = 1 << 20


class Credentials:
    """The current token, from a setting, a file or an OAuth 2.0 issuer."""

    def __init__(self, settings: PulsarSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._token = ""
        self._until = 0.0

    @property
    def has_token(self) -> bool:
        settings = self._settings
        return settings.token is not None or settings.token_file is not None or settings.oauth2_issuer is not None

    def token(self) -> str:
        """The token to use now.

        :raises InvalidSetting: the file cannot be read, or the token is malformed.
        :raises AuthenticationFailed, ConnectionFailed: the issuer refuses, or does not answer.
        """
        settings = self._settings
        if settings.token is not None:
            return _checked(settings.token.get_secret_value(), "Setting 'token'")
        if settings.token_file is not None:
            return _checked(_read_token(settings.token_file), f"Setting 'token_file' {str(settings.token_file)!r}")
        with self._lock:
            if time.monotonic() >= self._until - _RENEW_BEFORE:
                self._token, seconds = _request_token(settings)
                self._until = time.monotonic() + seconds
            return self._token

    def authentication(self) -> Any:
        """The client's authentication object, which calls for a token at each connect and at the broker's request."""
        if self.has_token:
            return pulsar.AuthenticationToken(self._supply)
        settings = self._settings
        if settings.tls_cert is not None and settings.tls_key is not None:
            return pulsar.AuthenticationTLS(str(settings.tls_cert), str(settings.tls_key))
        return None

    def _supply(self) -> str:
        # Called in a thread of the client, where an exception would end the process.
        try:
            return self.token()
        except BrokerError as error:
            logger.warning("No token for Pulsar: %s", error)
            return ""


def ssl_context(settings: PulsarSettings) -> ssl.SSLContext:
    """The TLS context for the HTTP API and for probing the broker.

    :raises InvalidSetting: a file cannot be read or is invalid.
    """
    try:
        context = ssl.create_default_context(cafile=str(settings.tls_ca) if settings.tls_ca else None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidSetting(
            f"Setting 'tls_ca' {str(settings.tls_ca)!r} cannot be used: {error}",
            native=error,
            advice="Name a PEM file of certificates",
        ) from error
    if not settings.tls_validate_hostname:
        context.check_hostname = False
    if settings.tls_cert is not None:
        try:
            # A function, because OpenSSL asks on the terminal when an encrypted key has no password.
            context.load_cert_chain(settings.tls_cert, settings.tls_key, lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise InvalidSetting(
                f"Setting 'tls_cert' {str(settings.tls_cert)!r} with its key cannot be used: {error}",
                native=error,
                advice="Name PEM files of a certificate and of its unencrypted key",
            ) from error
    return context


def _checked(token: str, what: str) -> str:
    """The token, if a header can carry it. Errors do not show it."""
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidSetting(
            f"{what} contains a line break, a space or another character that is invalid in a token",
            advice="Set only the token",
        )
    return token


def _read_token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise InvalidSetting(
            f"Setting 'token_file' {str(path)!r} cannot be read: {error}",
            native=error,
            advice="Name a file that contains only the token",
        ) from error


def _request_token(settings: PulsarSettings) -> tuple[str, float]:
    """A token and its lifetime in seconds, by OAuth 2.0 client credentials."""
    issuer = (settings.oauth2_issuer or "").rstrip("/")
    context = ssl_context(settings) if issuer.startswith("https:") else None
    try:
        endpoint = _endpoint(issuer, context, settings.connect_timeout)
        secret = settings.oauth2_client_secret
        form = {
            "grant_type": "client_credentials",
            "client_id": settings.oauth2_client_id or "",
            "client_secret": secret.get_secret_value() if secret is not None else "",
        }
        if settings.oauth2_audience is not None:
            form["audience"] = settings.oauth2_audience
        if settings.oauth2_scope is not None:
            form["scope"] = settings.oauth2_scope
        answer = _read_json(endpoint, context, settings.connect_timeout, urllib.parse.urlencode(form).encode())
        return str(answer["access_token"]), float(answer.get("expires_in") or 300)
    except urllib.error.HTTPError as error:
        raise AuthenticationFailed(
            f"The OAuth 2.0 issuer {issuer!r} refuses to give a token: {error.code} {error.reason}",
            native=error,
            advice="Check oauth2_client_id, oauth2_client_secret, oauth2_audience and oauth2_scope",
        ) from error
    except OSError as error:
        raise ConnectionFailed(
            f"The OAuth 2.0 issuer {issuer!r} cannot be reached: {error}", native=error, advice="Check oauth2_issuer"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise AuthenticationFailed(
            f"The OAuth 2.0 issuer {issuer!r} gave no token: {error!r}", native=error, advice="Check oauth2_issuer"
        ) from error


def _endpoint(issuer: str, context: ssl.SSLContext | None, timeout: float) -> str:
    if issuer.endswith("/token"):
        return issuer
    found = _read_json(f"{issuer}/.well-known/openid-configuration", context, timeout, None)
    return str(found["token_endpoint"])


def _read_json(url: str, context: ssl.SSLContext | None, timeout: float, body: bytes | None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not an HTTP address")
    with urllib.request.urlopen(url, body, timeout, context=context) as answer:  # noqa: S310 - the scheme is checked above
        found: Any = json.loads(answer.read(_MOST_BYTES))
    return dict(found)
