"""The settings of Kafka's security, and what each of them needs beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from broker.settings import BackendSettings

__all__ = ["SecuritySettings"]


class SecuritySettings(BackendSettings):
    """Those of `KafkaSettings` that say how connections are secured and who logs in."""

    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] | None = Field(
        default=None,
        description="How to talk to the brokers; left open, TLS is used where a certificate setting is given, and SASL "
        "over TLS where credentials are",
    )
    ssl_ca_location: Path | None = Field(
        default=None, description="PEM file or directory of the authorities that the brokers' certificates must be of"
    )
    ssl_ca_pem: str | None = Field(default=None, description="The same as PEM text")
    ssl_certificate_location: Path | None = Field(
        default=None, description="PEM file of the client's certificate, for mutual TLS"
    )
    ssl_certificate_pem: str | None = Field(default=None, description="The same as PEM text")
    ssl_key_location: Path | None = Field(default=None, description="PEM file of the client's private key")
    ssl_key_pem: SecretStr | None = Field(default=None, description="The same as PEM text")
    ssl_key_password: SecretStr | None = Field(default=None, description="Password of the private key")
    ssl_keystore_location: Path | None = Field(default=None, description="PKCS#12 file of certificate and key")
    ssl_keystore_password: SecretStr | None = Field(default=None, description="Password of the PKCS#12 file")
    ssl_endpoint_identification_algorithm: Literal["none", "https"] = Field(
        default="https", description="Whether the broker's certificate must be of the host's name"
    )
    enable_ssl_certificate_verification: bool = Field(
        default=True, description="Whether the broker's certificate is checked at all"
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI"] | None = Field(
        default=None, description="How to log in; PLAIN where a user is given and nothing else is said"
    )
    sasl_username: str | None = Field(default=None, description="User for PLAIN and SCRAM; the user of the URL")
    sasl_password: SecretStr | None = Field(default=None, description="Its password; the password of the URL")
    sasl_oauthbearer_method: Literal["default", "oidc"] = Field(
        default="default", description="OAUTHBEARER: `oidc` fetches tokens from an endpoint"
    )
    sasl_oauthbearer_client_id: str | None = Field(default=None, description="OAUTHBEARER with oidc: the client's id")
    sasl_oauthbearer_client_secret: SecretStr | None = Field(
        default=None, description="OAUTHBEARER with oidc: its secret"
    )
    sasl_oauthbearer_token_endpoint_url: str | None = Field(
        default=None, description="OAUTHBEARER with oidc: where tokens are fetched"
    )
    sasl_oauthbearer_scope: str | None = Field(default=None, description="OAUTHBEARER with oidc: the scope asked for")
    sasl_oauthbearer_extensions: str | None = Field(
        default=None, description="OAUTHBEARER with oidc: extensions as key=value, split by commas"
    )
    sasl_oauthbearer_config: str | None = Field(
        default=None, description="OAUTHBEARER with unsecured tokens: principal=, scope= and lifeSeconds="
    )
    enable_sasl_oauthbearer_unsecure_jwt: bool = Field(
        default=False, description="OAUTHBEARER: make unsecured tokens here; for tests only"
    )
    oauth_cb: Callable[[str], tuple[str, float]] | None = Field(
        default=None,
        description="OAUTHBEARER: called with sasl_oauthbearer_config, returns a token and the time.time() it ends; "
        "for settings objects only",
    )
    sasl_kerberos_service_name: str | None = Field(
        default=None, description="GSSAPI: the brokers' principal name; needs a librdkafka that is built with it"
    )
    sasl_kerberos_principal: str | None = Field(default=None, description="GSSAPI: the client's principal")
    sasl_kerberos_keytab: Path | None = Field(default=None, description="GSSAPI: the client's keytab file")
    sasl_kerberos_kinit_cmd: str | None = Field(default=None, description="GSSAPI: the command that renews the ticket")
    sasl_kerberos_min_time_before_relogin: int | None = Field(
        default=None, ge=0, le=86_400_000, description="GSSAPI: milliseconds between renewals of the ticket"
    )

    @model_validator(mode="after")
    def _check_certificate(self) -> Self:
        certificate = self.ssl_certificate_location or self.ssl_certificate_pem
        key = self.ssl_key_location or self.ssl_key_pem
        if certificate and not key:
            # The broker would be shown a certificate that nobody can prove to be theirs, and says no more than "bad".
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
