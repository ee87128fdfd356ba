"""Credentials of calls: default credentials, a file, or impersonation of a service account.

Reading credentials and refreshing tokens block, so both run in threads. Not used with an emulator.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import google.auth
import google.auth.exceptions
import google.auth.impersonated_credentials
import google.oauth2.credentials
import google.oauth2.service_account
import grpc
from google.auth import _cloud_sdk, environment_vars
from google.auth.transport.grpc import AuthMetadataPlugin
from google.auth.transport.requests import Request

from broker import AuthenticationFailed, BackendError, InvalidSetting
from broker.driver import is_loopback, mask_url, read_answer, reads_answer
from broker_pubsub.errors import NO_TOKEN, REFUSED_TOKEN
from broker_pubsub.settings import PubSubSettings

__all__ = ["TokenRequest", "call_credentials", "channel_credentials", "is_transient", "load"]

SCOPES: Final = ("https://www.googleapis.com/auth/pubsub", "https://www.googleapis.com/auth/cloud-platform")
_TOKEN_SECONDS: Final = 3600
_user: Any = google.oauth2.credentials
_account: Any = google.oauth2.service_account
_METADATA_SERVERS: Final = frozenset({"metadata.google.internal", "fd00:ec2::254"})
"""Of Google and AWS, besides the link-local addresses; they have no TLS."""


def load(settings: PubSubSettings) -> Any:
    """The credentials of the settings; blocks.

    :raises InvalidSetting: `credentials_file` cannot be read or contains no credentials; it, or the file of the default
        credentials, names a server without TLS.
    :raises AuthenticationFailed: there are no default credentials.
    """
    adc: Any = google.auth
    found: Any
    # Before anything else, because reading the default credentials may fetch a token.
    _check_addresses(settings.credentials_file or _default_file())
    if settings.credentials_file is not None:
        found = _read(settings.credentials_file)
    else:
        try:
            found = adc.default(scopes=SCOPES)[0]
        except google.auth.exceptions.GoogleAuthError as error:
            raise AuthenticationFailed(
                f"No Google default credentials found: {error}",
                native=error,
                advice="Set credentials_file, run `gcloud auth application-default login`, or set emulator_host for an "
                "emulator",
            ) from None
    if settings.impersonate is not None:
        found = google.auth.impersonated_credentials.Credentials(
            source_credentials=found,
            target_principal=settings.impersonate,
            target_scopes=list(SCOPES),
            lifetime=_TOKEN_SECONDS,
        )
    if settings.quota_project is not None and hasattr(found, "with_quota_project"):
        found = found.with_quota_project(settings.quota_project)
    return found


def _default_file() -> Path:
    """The file from which google.auth reads default credentials, if it exists."""
    sdk: Any = _cloud_sdk
    return Path(os.environ.get(environment_vars.CREDENTIALS) or sdk.get_application_default_credentials_path())


def _check_addresses(path: Path) -> None:
    """Check all addresses in a file of credentials, of every type. A file that cannot be read is reported later.

    :raises InvalidSetting: secrets or tokens would travel without TLS.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return
    for name, address, is_source in _addresses(content):
        if not _is_safe(address, is_source):
            raise InvalidSetting(
                f"The Google credentials in {str(path)!r} name the {name} {mask_url(address)!r}, which is not https, "
                "so secrets and tokens would travel in clear",
                advice=f"Give the {name} of the file an https:// address",
            )


def _addresses(content: Any, *, is_source: bool = False) -> Iterator[tuple[str, str, bool]]:
    """The addresses in a file of credentials: name, address, and whether a subject token is read from there."""
    fields = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    for name, value in fields.items():
        if isinstance(value, str):
            if value and name.endswith(("url", "uri")):
                yield name, value, is_source
        else:
            yield from _addresses(value, is_source=is_source or name == "credential_source")


def _is_safe(address: str, is_source: bool) -> bool:
    """Whether the connection to a server is private: TLS, the loopback, or a metadata server for subject tokens."""
    try:
        place = urlsplit(address)
        host = place.hostname or ""
    except ValueError:
        return False
    return place.scheme == "https" or is_loopback(host) or (is_source and _is_metadata_server(host))


def _is_metadata_server(host: str) -> bool:
    if host in _METADATA_SERVERS:
        return True
    try:
        return ip_address(host).is_link_local
    except ValueError:
        return False


def _read(path: Path) -> Any:
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("type")
        if kind == "service_account":
            return _account.Credentials.from_service_account_file(str(path), scopes=SCOPES)
        if kind == "authorized_user":
            # A user login has fixed scopes; requesting others fails.
            return _user.Credentials.from_authorized_user_file(str(path))
    except (OSError, ValueError, AttributeError, google.auth.exceptions.GoogleAuthError) as error:
        raise InvalidSetting(
            f"Setting 'credentials_file' {str(path)!r} cannot be used: {error}",
            native=error,
            advice="Name a JSON file of a service account, or of gcloud's application-default login",
        ) from None
    raise InvalidSetting(
        f"Setting 'credentials_file' {str(path)!r} holds credentials of type {kind!r}",
        advice="Use type service_account or authorized_user; set GOOGLE_APPLICATION_CREDENTIALS for other types",
    )


def call_credentials(credentials: Any) -> Any:
    """Adds a fresh token to every call; gRPC's thread fetches the token."""
    return grpc.metadata_call_credentials(_Tokens(credentials), name="google-auth")


class TokenRequest(Request):
    """Google's transport, without redirects, which would take secrets to any server, even without TLS."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        call: Any = super().__call__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return call(*args, **{**options, "allow_redirects": False})


class _Tokens(grpc.AuthMetadataPlugin):
    """Google's plugin with the cause of a missing token: gRPC passes on only a text, with status UNAVAILABLE."""

    def __init__(self, credentials: Any) -> None:
        self._google = AuthMetadataPlugin(credentials, TokenRequest())

    def __call__(self, context: Any, callback: Any) -> None:
        try:
            self._google(context, callback)
        except Exception as error:
            callback(None, RuntimeError(f"{NO_TOKEN if is_transient(error) else REFUSED_TOKEN}: {error}"))


def is_transient(error: BaseException) -> bool:
    """Whether fetching a token may succeed later."""
    if not isinstance(error, google.auth.exceptions.GoogleAuthError):
        return False
    known: Any = error
    if isinstance(error, google.auth.exceptions.TransportError) or known.retryable:
        return True
    # Compute Engine credentials wrap the transport error, and impersonation keeps the answer as text.
    if isinstance(error.__cause__, google.auth.exceptions.TransportError):
        return True
    return any(_is_transient_answer(each) for each in error.args)


def _is_transient_answer(answer: Any) -> bool:
    what = "The token server"
    try:
        with reads_answer(what):
            status = int(read_answer(answer.encode(), what)["error"]["code"])
    except BackendError:
        return False
    return status == 429 or status >= 500


def channel_credentials(settings: PubSubSettings, calls: Any) -> Any:
    """TLS channel credentials combined with call credentials.

    :raises InvalidSetting: `tls_ca` cannot be read.
    """
    roots = None
    if settings.tls_ca is not None:
        try:
            roots = settings.tls_ca.read_bytes()
        except OSError as error:
            raise InvalidSetting(
                f"Setting 'tls_ca' {str(settings.tls_ca)!r} cannot be read: {error}",
                native=error,
                advice="Name a PEM file of certificates",
            ) from None
    return grpc.composite_channel_credentials(grpc.ssl_channel_credentials(roots), calls)
