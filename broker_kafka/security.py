"""What the security settings say together: which protocol they mean, and which of them would do nothing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from broker.errors import InvalidSetting
from broker.settings import Origin

__all__ = ["MECHANISMS", "Secured", "check_security", "protocol_of"]

_TLS: Final = (
    "ssl_ca_location",
    "ssl_ca_pem",
    "ssl_certificate_location",
    "ssl_certificate_pem",
    "ssl_key_location",
    "ssl_key_pem",
    "ssl_keystore_location",
)
"""Whoever gives one of these wants TLS."""
_TLS_MORE: Final = (
    "ssl_key_password",
    "ssl_keystore_password",
    "ssl_endpoint_identification_algorithm",
    "enable_ssl_certificate_verification",
)
"""What says how TLS is done, and not that it is."""
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
"""The settings that one way of logging in alone has a use for."""
_CLOUD: Final = "sasl.oauthbearer.metadata.authentication.type"


class Secured(Protocol):
    """What is looked at of `KafkaSettings`."""

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
    def enable_sasl_oauthbearer_unsecure_jwt(self) -> bool: ...
    @property
    def oauth_cb(self) -> Callable[[str], tuple[str, float]] | None: ...
    @property
    def properties(self) -> Mapping[str, Any]: ...
    def is_given(self, name: str) -> bool: ...
    def is_outdone(self, name: str, by: str) -> bool: ...
    def origin(self, name: str) -> Origin: ...


def protocol_of(settings: Secured) -> str:
    """The security protocol, chosen from what is given if it is left open."""
    if settings.security_protocol is not None:
        return settings.security_protocol
    if settings.sasl_username is not None or settings.sasl_mechanism is not None:
        return "SASL_SSL"
    return "PLAINTEXT" if all(getattr(settings, name) is None for name in _TLS) else "SSL"


def check_security(settings: Secured) -> None:
    """:raises InvalidSetting: one would do nothing, so that a connection is less secure than it looks, or none."""
    mechanism = settings.sasl_mechanism
    if not protocol_of(settings).endswith("SSL"):
        _check_no_tls(settings)
    for name, needed in MECHANISMS.items():
        if mechanism != needed and settings.is_given(name) and not settings.is_outdone(name, "sasl_mechanism"):
            raise InvalidSetting(
                f"Setting {name!r} (from {settings.origin(name)}) is given, and sasl_mechanism "
                f"{'is not' if mechanism is None else f'{mechanism} has no use for it'}",
                advice=f"Say sasl_mechanism={needed}, or leave {name} out",
            )
    if mechanism == "OAUTHBEARER":
        _check_tokens(settings)


def _check_no_tls(settings: Secured) -> None:
    protocol = protocol_of(settings)
    # That a check is off is nothing to miss.
    given = [
        (name, name)
        for name in (*_TLS, *_TLS_MORE)
        if settings.is_given(name) and getattr(settings, name) not in (False, "none")
    ]
    given += [(name, "properties") for name in settings.properties if name.startswith("ssl.")]
    for name, setting in given:
        if not settings.is_outdone(setting, "security_protocol"):
            raise InvalidSetting(
                f"Setting {name!r} (from {settings.origin(setting)}) is given, and security_protocol={protocol} "
                f"(from {settings.origin('security_protocol')}) has no use for it",
                advice=f"Say security_protocol={protocol.replace('PLAINTEXT', 'SSL')}, or leave {name} out",
            )


def _check_tokens(settings: Secured) -> None:
    if settings.sasl_oauthbearer_method == "oidc":
        if settings.sasl_oauthbearer_token_endpoint_url is None and _CLOUD not in settings.properties:
            raise InvalidSetting(
                "sasl_oauthbearer_method is oidc, and no endpoint for its tokens is given",
                advice=f"Give sasl_oauthbearer_token_endpoint_url, or {_CLOUD}",
            )
    elif settings.oauth_cb is None and not settings.enable_sasl_oauthbearer_unsecure_jwt:
        raise InvalidSetting(
            "sasl_mechanism is OAUTHBEARER, and nothing says where its tokens come from",
            advice="Say sasl_oauthbearer_method=oidc and give the endpoint, or give oauth_cb",
        )
