"""The settings of a Kafka URL as properties of Kafka's Java client. No I/O but reading PEM files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

__all__ = ["java_properties"]

_LOGIN: Final = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


def java_properties(settings: Any) -> tuple[dict[str, str], str]:
    """Servers and security of `KafkaSettings`, and why Java's client cannot use them, or an empty text.

    Settings that only tune librdkafka are left out.

    :raises OSError: a PEM file cannot be read.
    """
    if settings.properties:
        return {}, f"{next(iter(settings.properties))!r} is a property of librdkafka"
    protocol: str = settings.protocol
    found = {"bootstrap.servers": ",".join(settings.servers), "security.protocol": protocol}
    if protocol.endswith("SSL"):
        if not settings.enable_ssl_certificate_verification:
            return {}, "Java's client always verifies certificates, and enable_ssl_certificate_verification is false"
        found |= _tls(settings)
    if protocol.startswith("SASL"):
        mechanism = settings.sasl_mechanism or "PLAIN"
        if mechanism not in _LOGIN:
            return {}, f"sasl_mechanism {mechanism} is not supported with Java's client"
        found["sasl.mechanism"] = mechanism
        found["sasl.jaas.config"] = (
            f"{_LOGIN[mechanism]} required username={_quoted(settings.sasl_username)} "
            f"password={_quoted(settings.sasl_password.get_secret_value())};"
        )
    return found, ""


def _tls(settings: Any) -> dict[str, str]:
    found = {
        "ssl.endpoint.identification.algorithm": ""
        if settings.ssl_endpoint_identification_algorithm == "none"
        else "https"
    }
    authorities = _pem(settings.ssl_ca_pem, settings.ssl_ca_location)
    if authorities is not None:
        found |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authorities}
    if settings.ssl_keystore_location is not None:
        found |= {"ssl.keystore.type": "PKCS12", "ssl.keystore.location": str(settings.ssl_keystore_location)}
        if settings.ssl_keystore_password is not None:
            found["ssl.keystore.password"] = settings.ssl_keystore_password.get_secret_value()
        return found
    certificate = _pem(settings.ssl_certificate_pem, settings.ssl_certificate_location)
    secret = settings.ssl_key_pem
    key = _pem(None if secret is None else secret.get_secret_value(), settings.ssl_key_location)
    if certificate is not None and key is not None:
        found |= {"ssl.keystore.type": "PEM", "ssl.keystore.certificate.chain": certificate, "ssl.keystore.key": key}
        if settings.ssl_key_password is not None:
            found["ssl.key.password"] = settings.ssl_key_password.get_secret_value()
    return found


def _pem(text: str | None, place: Path | None) -> str | None:
    if text is not None or place is None:
        return text
    files = sorted(each for each in place.iterdir() if each.is_file()) if place.is_dir() else [place]
    return "\n".join(each.read_text() for each in files)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
