"""Credentials of calls: default credentials, a file, or impersonation of a service account.

Reading credentials and refreshing tokens block, so both run in threads. Not used with an emulator.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import google.auth
import google.auth.exceptions
import google.auth.impersonated_credentials
import google.oauth2.credentials
import google.oauth2.service_account
import grpc
from google.auth.transport.grpc import AuthMetadataPlugin
from google.auth.transport.requests import Request

from broker import AuthenticationFailed, BackendError, InvalidSetting
from broker.driver import is_loopback, mask_url, read_answer, reads_answer
from broker_pubsub.errors import NO_TOKEN, REFUSED_TOKEN
from broker_pubsub.settings import PubSubSettings

__all__ = ["call_credentials", "channel_credentials", "is_transient", "load"]

SCOPES: Final = ("https://www.googleapis.com/auth/pubsub", "https://www.googleapis.com/auth/cloud-platform")
_TOKEN_SECONDS: Final = 3600
_user: Any = google.oauth2.credentials
_account: Any = google.oauth2.service_account


def load(settings: PubSubSettings) -> Any:
    """The credentials of the settings; blocks.

    :raises InvalidSetting: `credentials_file` cannot be read, contains no credentials, or sends them without TLS.
    :raises AuthenticationFailed: there are no default credentials.
    """
    adc: Any = google.auth
    found: Any
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
    # Private, and None where a credential has no such address.
    address: object = getattr(found, "_token_uri", None)
    if isinstance(address, str) and not _is_safe(address):
        raise InvalidSetting(
            f"The Google credentials name the token_uri {mask_url(address)!r}, which is not https, so what signs in "
            "would go there in clear",
            advice="Give the token_uri of the file an https:// address",
        )
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


def _is_safe(address: str) -> bool:
    """Whether the connection to a token server is private: TLS, or the loopback."""
    try:
        place = urlsplit(address)
        return place.scheme == "https" or is_loopback(place.hostname or "")
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


class _Tokens(grpc.AuthMetadataPlugin):
    """Google's plugin with the cause of a missing token: gRPC passes on only a text, with status UNAVAILABLE."""

    def __init__(self, credentials: Any) -> None:
        self._google = AuthMetadataPlugin(credentials, Request())

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
