"""Tokens, OAuth 2.0 and TLS, for the client and the HTTP API.

*Concurrency.* Any thread may request a token, also threads of the client; one at a time renews it. *Failure.* Opening
the connection reports credentials that cannot be read or are refused; the client alone would report a timeout.
"""

from __future__ import annotations

import http.client
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Final, TypeGuard

from broker import AuthenticationFailed, BackendError, ConnectionFailed, InvalidSetting
from broker.driver import is_finite, logger, mask_url, read_answer, read_body, reads_answer
from broker_pulsar.client import pulsar
from broker_pulsar.settings import PulsarSettings

__all__ = ["Credentials", "ssl_context"]

_RENEW_BEFORE: Final = 30.0
"""Seconds before its expiry at which a token is renewed."""
_LIFETIME: Final = 300.0
"""Seconds for which a token is used whose issuer does not say how long it lasts."""


class Credentials:
    """The current token, from a setting, a file or an OAuth 2.0 issuer."""

    def __init__(self, settings: PulsarSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._token = ""
        self._until = 0.0

    @property
    def has_token(self) -> bool:
        return self._settings.login is not None

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
        except Exception as error:
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


def _is_token(token: object) -> TypeGuard[str]:
    """Whether a header can carry it."""
    return isinstance(token, str) and token.isascii() and token.isprintable() and " " not in token


def _checked(token: str, what: str) -> str:
    """The token, if a header can carry it. Errors do not show it."""
    if not _is_token(token):
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
    """A token and its lifetime in seconds, by OAuth 2.0 client credentials.

    The client's secret goes only to the token endpoint: by TLS, unless the issuer is one without it.
    """
    issuer = (settings.oauth2_issuer or "").rstrip("/")
    what = f"The OAuth 2.0 issuer {issuer!r}"
    opener = urllib.request.build_opener(_Redirects(), urllib.request.HTTPSHandler(context=ssl_context(settings)))
    secret = settings.oauth2_client_secret
    form = {
        "grant_type": "client_credentials",
        "client_id": settings.oauth2_client_id or "",
        "client_secret": secret.get_secret_value() if secret is not None else "",
        "audience": settings.oauth2_audience,
        "scope": settings.oauth2_scope,
    }
    body = urllib.parse.urlencode({name: value for name, value in form.items() if value is not None}).encode()

    def ask(url: str, body: bytes | None) -> Any:
        until = time.monotonic() + settings.connect_timeout
        with opener.open(url, body, settings.connect_timeout) as answer:
            return read_answer(read_body(answer, until, what), what)

    try:
        with reads_answer(what):
            endpoint = issuer
            if not issuer.endswith("/token"):
                endpoint = str(ask(f"{issuer}/.well-known/openid-configuration", None)["token_endpoint"])
                _check_endpoint(endpoint, issuer, what)
            answer = ask(endpoint, body)
            token, seconds = answer["access_token"], float(answer.get("expires_in") or _LIFETIME)
            if not _is_token(token) or not is_finite(seconds) or seconds <= 0:
                raise TypeError("no token, or a lifetime that is none")
            return token, seconds
    except urllib.error.HTTPError as error:
        error.close()
        raise AuthenticationFailed(
            f"{what} refuses to give a token: {error.code} {error.reason}",
            native=error,
            advice="Set oauth2_issuer to the address that it redirects to"
            if 300 <= error.code < 400
            else "Check oauth2_client_id, oauth2_client_secret, oauth2_audience and oauth2_scope",
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionFailed(
            f"{what} cannot be reached: {error}", native=error, advice="Check oauth2_issuer"
        ) from error
    except BackendError as error:
        raise AuthenticationFailed(
            f"{error.message}; it gave no token", native=error, advice="Check oauth2_issuer"
        ) from error


def _check_endpoint(endpoint: str, issuer: str, what: str) -> None:
    """:raises AuthenticationFailed: the client's secret would leave TLS."""
    scheme = urllib.parse.urlsplit(endpoint).scheme
    if scheme != "https" and (scheme != "http" or urllib.parse.urlsplit(issuer).scheme == "https"):
        raise AuthenticationFailed(
            f"{what} names the token endpoint {mask_url(endpoint)!r}, which is not https",
            advice="The client secret would go there in clear: have the issuer name an https:// endpoint",
        )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect that leaves TLS, and none of a request for a token, which holds the secret."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        scheme = urllib.parse.urlsplit(newurl).scheme
        if req.data is not None or (scheme != "https" and scheme != req.type):
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)
