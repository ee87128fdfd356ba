"""The security settings of Kafka, and the checks of their combinations. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol, Self

from pydantic import Field, SecretStr, model_validator

from broker import InvalidSetting
from broker.driver import mask_url
from broker.driver.settings import BackendSettings, Form, Origin

__all__ = ["MECHANISMS", "Secured", "SecuritySettings", "check_security", "login_of", "protocol_of"]

_SHELL_SAFE: Final = Form(
    r"[\w./@:,=+][\w./@:,=+-]*",
    "letters, digits and any of ./@:,=+_-, not beginning with -: it becomes a part of kinit's command in a shell",
)


class SecuritySettings(BackendSettings):
    """The part of `KafkaSettings` for TLS and login."""

    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] | None = Field(
        default=None,
        description="Protocol to the brokers; if not set, SSL with a certificate setting, SASL_SSL with "
        "credentials, else PLAINTEXT",
    )
    ssl_ca_location: Path | None = Field(
        default=None, description="PEM file or directory of the CA certificates that verify the brokers' certificates"
    )
    ssl_ca_pem: str | None = Field(default=None, description="The CA certificates as PEM text")
    ssl_certificate_location: Path | None = Field(
        default=None, description="PEM file of the client's certificate, for mutual TLS"
    )
    ssl_certificate_pem: str | None = Field(default=None, description="The client's certificate as PEM text")
    ssl_key_location: Path | None = Field(default=None, description="PEM file of the client's private key")
    ssl_key_pem: SecretStr | None = Field(default=None, description="The client's private key as PEM text")
    ssl_key_password: SecretStr | None = Field(default=None, description="Password of the private key")
    ssl_keystore_location: Path | None = Field(
        default=None, description="PKCS#12 file of the client's certificate and private key"
    )
    ssl_keystore_password: SecretStr | None = Field(default=None, description="Password of the PKCS#12 file")
    ssl_endpoint_identification_algorithm: Literal["none", "https"] = Field(
        default="https", description="`https` checks that the broker's certificate names its host; `none` does not"
    )
    enable_ssl_certificate_verification: bool = Field(default=True, description="Verify the brokers' certificates")
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI"] | None = Field(
        default=None, description="SASL mechanism; PLAIN if only user and password are set"
    )
    sasl_username: str | None = Field(default=None, description="User name for PLAIN and SCRAM; the user of the URL")
    sasl_password: SecretStr | None = Field(
        default=None, description="Password for PLAIN and SCRAM; the password of the URL"
    )
    sasl_oauthbearer_method: Literal["default", "oidc"] = Field(
        default="default", description="OAUTHBEARER: `oidc` fetches tokens from an endpoint"
    )
    sasl_oauthbearer_client_id: str | None = Field(default=None, description="OAUTHBEARER with oidc: client id")
    sasl_oauthbearer_client_secret: SecretStr | None = Field(
        default=None, description="OAUTHBEARER with oidc: client secret"
    )
    sasl_oauthbearer_token_endpoint_url: str | None = Field(
        default=None, description="OAUTHBEARER with oidc: URL of the token endpoint"
    )
    sasl_oauthbearer_allow_http: bool = Field(
        default=False,
        description="OAUTHBEARER with oidc: accept a token endpoint without TLS, to which the client secret goes in "
        "clear",
    )
    sasl_oauthbearer_scope: str | None = Field(default=None, description="OAUTHBEARER with oidc: requested scope")
    sasl_oauthbearer_extensions: str | None = Field(
        default=None, description="OAUTHBEARER with oidc: extensions as key=value, separated by commas"
    )
    sasl_oauthbearer_config: str | None = Field(
        default=None, description="OAUTHBEARER with unsecured tokens: principal=, scope= and lifeSeconds="
    )
    enable_sasl_oauthbearer_unsecure_jwt: bool = Field(
        default=False, description="OAUTHBEARER: create unsecured tokens in the client; for tests only"
    )
    oauth_cb: Callable[[str], tuple[str, float]] | None = Field(
        default=None,
        description="OAUTHBEARER: called with sasl_oauthbearer_config, returns a token and the time.time() at "
        "which it expires; only in a settings object",
    )
    sasl_kerberos_service_name: Annotated[str | None, _SHELL_SAFE] = Field(
        default=None, description="GSSAPI: the brokers' principal name; needs a librdkafka built with GSSAPI"
    )
    sasl_kerberos_principal: Annotated[str | None, _SHELL_SAFE] = Field(
        default=None, description="GSSAPI: the client's principal"
    )
    sasl_kerberos_keytab: Annotated[Path | None, _SHELL_SAFE] = Field(
        default=None, description="GSSAPI: the client's keytab file"
    )
    sasl_kerberos_kinit_cmd: SecretStr | None = Field(
        default=None, description="GSSAPI: the command that renews the ticket; only in a settings object"
    )
    sasl_kerberos_min_time_before_relogin: int | None = Field(
        default=None, ge=0, le=86_400_000, description="GSSAPI: milliseconds between renewals of the ticket"
    )

    @model_validator(mode="after")
    def _check_certificate(self) -> Self:
        certificate = self.ssl_certificate_location or self.ssl_certificate_pem
        key = self.ssl_key_location or self.ssl_key_pem
        if certificate and not key:
            # Without its key the certificate proves nothing, and the broker only reports "bad certificate".
            raise ValueError(
                "a client certificate is given without its key, as ssl_key_location or ssl_key_pem; one file may hold "
                "both"
            )
        if key and not certificate:
            raise ValueError(
                "a client key is given without its certificate, as ssl_certificate_location or ssl_certificate_pem"
            )
        return self

    @model_validator(mode="after")
    def _check_login(self) -> Self:
        if self.sasl_password is not None and self.sasl_username is None:
            raise ValueError("sasl_password is given without sasl_username")
        if self.sasl_username is not None and self.sasl_password is None:
            raise ValueError("sasl_username is given without sasl_password")
        if (self.sasl_mechanism or "").startswith(("PLAIN", "SCRAM")) and self.sasl_username is None:
            raise ValueError(f"sasl_mechanism {self.sasl_mechanism} needs sasl_username and sasl_password")
        if self.security_protocol in {"PLAINTEXT", "SSL"} and (self.sasl_username or self.sasl_mechanism):
            raise ValueError(f"credentials are given, and security_protocol {self.security_protocol} sends none")
        if self.sasl_mechanism == "GSSAPI" and self.sasl_kerberos_service_name is None:
            raise ValueError("sasl_mechanism GSSAPI needs sasl_kerberos_service_name")
        return self


_TLS: Final = (
    "ssl_ca_location",
    "ssl_ca_pem",
    "ssl_certificate_location",
    "ssl_certificate_pem",
    "ssl_key_location",
    "ssl_key_pem",
    "ssl_keystore_location",
)
"""Any of these turns TLS on."""
_TLS_OPTIONS: Final = (
    "ssl_key_password",
    "ssl_keystore_password",
    "ssl_endpoint_identification_algorithm",
    "enable_ssl_certificate_verification",
)
"""Options of TLS that do not turn it on."""
MECHANISMS: Final = {
    "oauth_cb": "OAUTHBEARER",
    "enable_sasl_oauthbearer_unsecure_jwt": "OAUTHBEARER",
    **dict.fromkeys(
        (
            f"sasl_oauthbearer_{name}"
            for name in (
                "method",
                "client_id",
                "client_secret",
                "token_endpoint_url",
                "allow_http",
                "scope",
                "extensions",
                "config",
            )
        ),
        "OAUTHBEARER",
    ),
    **dict.fromkeys(
        (
            f"sasl_kerberos_{name}"
            for name in ("service_name", "principal", "keytab", "kinit_cmd", "min_time_before_relogin")
        ),
        "GSSAPI",
    ),
}
"""Settings that only one SASL mechanism uses."""
_METADATA_AUTHENTICATION: Final = "sasl.oauthbearer.metadata.authentication.type"
_STS_ENDPOINT: Final = re.compile(r"\bsts_endpoint=([^,]*)")


class Secured(Protocol):
    """The part of `KafkaSettings` that is checked here."""

    @property
    def security_protocol(self) -> str | None: ...
    @property
    def sasl_mechanism(self) -> str | None: ...
    @property
    def sasl_username(self) -> str | None: ...
    @property
    def sasl_oauthbearer_method(self) -> str: ...
    @property
    def sasl_oauthbearer_token_endpoint_url(self) -> str | None: ...
    @property
    def sasl_oauthbearer_config(self) -> str | None: ...
    @property
    def sasl_oauthbearer_allow_http(self) -> bool: ...
    @property
    def enable_sasl_oauthbearer_unsecure_jwt(self) -> bool: ...
    @property
    def oauth_cb(self) -> Callable[[str], tuple[str, float]] | None: ...
    @property
    def properties(self) -> Mapping[str, Any]: ...
    def is_given(self, name: str) -> bool: ...
    def is_outranked(self, name: str, by: str) -> bool: ...
    def origin(self, name: str) -> Origin: ...


def protocol_of(settings: Secured) -> str:
    """`security_protocol`, or the protocol that the other settings imply."""
    if settings.security_protocol is not None:
        return settings.security_protocol
    if settings.sasl_username is not None or settings.sasl_mechanism is not None:
        return "SASL_SSL"
    return "PLAINTEXT" if all(getattr(settings, name) is None for name in _TLS) else "SSL"


def login_of(settings: Secured) -> str | None:
    """The setting of the credentials that a listener without TLS would show to others; None if there is none."""
    match settings.sasl_mechanism:
        case "OAUTHBEARER":
            if settings.oauth_cb is not None:
                return "oauth_cb"
            return "sasl_oauthbearer_method" if settings.sasl_oauthbearer_method == "oidc" else None
        case "GSSAPI":
            return None
        case _:
            return None if settings.sasl_username is None else "sasl_password"


def check_security(settings: Secured) -> None:
    """:raises InvalidSetting: a setting has no effect, so that the connection would be less secure than it looks."""
    mechanism = settings.sasl_mechanism
    if not protocol_of(settings).endswith("SSL"):
        _check_no_tls(settings)
    for name, needed in MECHANISMS.items():
        if mechanism != needed and settings.is_given(name) and not settings.is_outranked(name, "sasl_mechanism"):
            raise InvalidSetting(
                f"Setting {name!r} (from {settings.origin(name)}) is given, and sasl_mechanism "
                f"{'is not' if mechanism is None else f'{mechanism} does not use it'}",
                advice=f"Set sasl_mechanism={needed}, or remove {name}",
            )
    if mechanism == "OAUTHBEARER":
        _check_tokens(settings)


def _check_no_tls(settings: Secured) -> None:
    protocol = protocol_of(settings)
    # A check that is off has nothing to lose.
    given = [
        (name, name)
        for name in (*_TLS, *_TLS_OPTIONS)
        if settings.is_given(name) and getattr(settings, name) not in (False, "none")
    ]
    given += [(name, "properties") for name in settings.properties if name.startswith("ssl.")]
    for name, setting in given:
        if not settings.is_outranked(setting, "security_protocol"):
            raise InvalidSetting(
                f"Setting {name!r} (from {settings.origin(setting)}) is given, and security_protocol={protocol} "
                f"(from {settings.origin('security_protocol')}) does not use it",
                advice=f"Set security_protocol={protocol.replace('PLAINTEXT', 'SSL')}, or remove {name}",
            )


def _check_tokens(settings: Secured) -> None:
    if settings.sasl_oauthbearer_method == "oidc":
        _check_endpoint(settings)
    elif settings.oauth_cb is None and not settings.enable_sasl_oauthbearer_unsecure_jwt:
        raise InvalidSetting(
            "sasl_mechanism is OAUTHBEARER, and no source of tokens is configured",
            advice="Set sasl_oauthbearer_method=oidc and the token endpoint, or give oauth_cb",
        )


def _check_endpoint(settings: Secured) -> None:
    """:raises InvalidSetting: there is no token endpoint, or the client would sign in there in clear."""
    kind = str(settings.properties.get(_METADATA_AUTHENTICATION)).strip().lower()
    if kind == "azure_imds":
        return  # The endpoint knows the machine: the client sends no credentials.
    name, endpoints = "sasl_oauthbearer_token_endpoint_url", [settings.sasl_oauthbearer_token_endpoint_url]
    if kind == "aws_iam":
        # The client signs in to AWS over https, unless the setting names another endpoint.
        name, endpoints = "sasl_oauthbearer_config", _STS_ENDPOINT.findall(settings.sasl_oauthbearer_config or "")
    for endpoint in endpoints:
        if endpoint is None:
            raise InvalidSetting(
                "sasl_oauthbearer_method is oidc, and no token endpoint is given",
                advice=f"Give {name}, or azure_imds as {_METADATA_AUTHENTICATION}",
            )
        if not endpoint.lower().startswith("https://") and not settings.sasl_oauthbearer_allow_http:
            raise InvalidSetting(
                f"Setting {name!r} has the token endpoint {mask_url(endpoint)!r}, which is not https, so the client's "
                "credentials would go there in clear",
                advice="Use https://, or set sasl_oauthbearer_allow_http=true",
            )
