"""One real broker with a listener for each way to authenticate, which refuses all others.

| door | what it demands |
| --- | --- |
| `PLAIN` | nothing; who comes here may do all, and brokers and raw admins do |
| `TLS` | TLS |
| `MISNAMED` | TLS, with a certificate that another authority gave to another host |
| `MUTUAL` | TLS and a client's certificate |
| `SASL_PLAIN`, `SASL_PLAIN_TLS` | user and password, without and over TLS |
| `SCRAM_256` | SCRAM-SHA-256, over TLS |
| `SCRAM_512` | SCRAM-SHA-512 |
| `UNSECURED` | OAUTHBEARER with unsigned tokens |
| `OIDC` | OAUTHBEARER with tokens of the broker's `TokenServer`, over TLS |

A user may do all but use the topics (and groups, …) that `restrict` gives to another, and write to those of
`forbid_writing`. Blocking, as `KafkaServer` is.
"""

# pyright: reportPrivateImportUsage=false
# confluent_kafka.admin re-exports without saying so.
from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import trustme
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives import serialization

from tests.servers.kafka import PLAIN, KafkaServer, Listener
from tests.servers.kafka_client import SECONDS, RawAdmin, wait_for
from tests.servers.kafka_tokens import AUDIENCE, ISSUER, TokenServer
from tests.servers.nats import Certificates
from tests.servers.server_process import Servers

__all__ = ["DOORS", "SecureBroker"]

USERS = {"ann": "pa/ss@:%;'", "bob": "s3cret"}
"""Passwords of PLAIN and SCRAM, and the secrets of OIDC's clients."""
DOORS = ("TLS", "MUTUAL", "SASL_PLAIN", "SASL_PLAIN_TLS", "SCRAM_256", "SCRAM_512", "UNSECURED", "OIDC")
_MECHANISMS = {
    "SASL_PLAIN": "PLAIN",
    "SASL_PLAIN_TLS": "PLAIN",
    "SCRAM_256": "SCRAM-SHA-256",
    "SCRAM_512": "SCRAM-SHA-512",
    "UNSECURED": "OAUTHBEARER",
    "OIDC": "OAUTHBEARER",
}
_OVER_TLS = frozenset({"SASL_PLAIN_TLS", "SCRAM_256", "OIDC"})
_MODULES = {
    "PLAIN": "plain.PlainLoginModule",
    "SCRAM-SHA-256": "scram.ScramLoginModule",
    "SCRAM-SHA-512": "scram.ScramLoginModule",
    "OAUTHBEARER": "oauthbearer.OAuthBearerLoginModule",
}
_VALIDATOR = "org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallbackHandler"


class SecureBroker(Servers):
    """The broker, its certificates and its token server; to be used as a context."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="anybroker-test-security-")
        folder = Path(self._folder.name)
        self.certificates = Certificates(folder)
        self.tokens = TokenServer(dict(USERS), self.certificates.server)
        self.misnamed_authority = folder / "misnamed-authority.pem"
        misnamed = trustme.CA()
        misnamed.cert_pem.write_to_path(str(self.misnamed_authority))
        chain = misnamed.issue_cert("elsewhere.example.org").private_key_and_cert_chain_pem.bytes()
        elsewhere = self._tls_options(_write_for_java(folder / "elsewhere.pem", chain))
        tls = self._tls_options(_write_for_java(folder / "broker.pem", self.certificates.server.read_bytes()))
        self.server = KafkaServer(
            {
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "super.users": "User:ANONYMOUS",
                "allow.everyone.if.no.acl.found": "true",
                "num.network.threads": "1",
                "connection.failed.authentication.delay.ms": "0",
            },
            listeners=[
                PLAIN,
                Listener("TLS", "SSL", tls),
                Listener("MISNAMED", "SSL", elsewhere),
                Listener("MUTUAL", "SSL", {**tls, "ssl.client.auth": "required"}),
                *(self._sasl(door, tls) for door in _MECHANISMS),
            ],
            java_options=[
                "-XX:TieredStopAtLevel=1",
                f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self.tokens.keys_url}",
            ],
        )

    @cached_property
    def admin(self) -> RawAdmin:
        """A raw client that may do all."""
        return RawAdmin(self.server.bootstrap)

    def raw(self, door: str, user: str = "ann") -> dict[str, Any]:
        """The properties with which confluent-kafka can connect."""
        config: dict[str, Any] = {"bootstrap.servers": self.server.address(door), "security.protocol": "SSL"}
        if door in _OVER_TLS | {"TLS", "MUTUAL"}:
            config["ssl.ca.location"] = str(self.certificates.authority)
        if door == "MUTUAL":
            config["ssl.certificate.location"] = str(self.certificates.client)
            config["ssl.key.location"] = str(self.certificates.client_key)
        if door in _MECHANISMS:
            config["security.protocol"] = "SASL_SSL" if door in _OVER_TLS else "SASL_PLAINTEXT"
            config["sasl.mechanism"] = _MECHANISMS[door]
        if door == "UNSECURED":
            config["enable.sasl.oauthbearer.unsecure.jwt"] = True
            config["sasl.oauthbearer.config"] = f"principal={user}"
        elif door == "OIDC":
            config["sasl.oauthbearer.method"] = "oidc"
            config["sasl.oauthbearer.token.endpoint.url"] = self.tokens.url()
            config["sasl.oauthbearer.client.id"] = user
            config["sasl.oauthbearer.client.secret"] = USERS[user]
        elif door in _MECHANISMS:
            config["sasl.username"] = user
            config["sasl.password"] = USERS[user]
        return config

    def restrict(self, name: str, user: str, resource: ResourceType = ResourceType.TOPIC) -> None:
        """Restrict the topic, or the group or transactional id of that name, to this user."""
        self._add_rule(resource, name, user)

    def forbid_writing(self, topic: str, user: str) -> None:
        """Allow this user everything on the topic except writing."""
        self._add_rule(ResourceType.TOPIC, topic, user, AclOperation.WRITE, AclPermissionType.DENY)
        # A topic with an ACL is closed to all users that it does not name.
        self._add_rule(ResourceType.TOPIC, topic, "*")

    def start(self) -> Self:
        self.server.start()
        self.add_scram_users()
        # Otherwise a user with all rights on the cluster may delete every topic.
        self._add_rule(ResourceType.BROKER, "kafka-cluster", "*")
        self._add_rule(ResourceType.BROKER, "kafka-cluster", "*", AclOperation.DELETE, AclPermissionType.DENY)
        return self

    def close(self) -> None:
        self.server.close()
        self.tokens.close()
        self._folder.cleanup()

    def _tls_options(self, keys: Path) -> Mapping[str, str]:
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(keys),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.certificates.authority),
            "ssl.client.auth": "none",
        }

    def _sasl(self, door: str, tls: Mapping[str, str]) -> Listener:
        mechanism = _MECHANISMS[door]
        over_tls = door in _OVER_TLS
        prefix = mechanism.lower()
        values: dict[str, str] = {}
        if mechanism == "PLAIN":
            values = {f"user_{user}": password for user, password in USERS.items()}
        elif door == "UNSECURED":
            values = {"unsecuredLoginStringClaim_sub": "broker"}
        said = "".join(f" {name}={_quote(value)}" for name, value in values.items())
        options = {
            "sasl.enabled.mechanisms": mechanism,
            f"{prefix}.sasl.jaas.config": (f"org.apache.kafka.common.security.{_MODULES[mechanism]} required{said};"),
        }
        if door == "OIDC":
            options |= {
                f"{prefix}.sasl.server.callback.handler.class": _VALIDATOR,
                # Connections end with their token unless they reauthenticate.
                f"{prefix}.connections.max.reauth.ms": "3600000",
                "sasl.oauthbearer.jwks.endpoint.url": self.tokens.keys_url,
                "sasl.oauthbearer.expected.issuer": ISSUER,
                "sasl.oauthbearer.expected.audience": AUDIENCE,
                "sasl.oauthbearer.clock.skew.seconds": "0",
            }
        return Listener(door, "SASL_SSL" if over_tls else "SASL_PLAINTEXT", {**(tls if over_tls else {}), **options})

    def _add_rule(
        self,
        resource: ResourceType,
        name: str,
        user: str,
        operation: AclOperation = AclOperation.ALL,
        permission: AclPermissionType = AclPermissionType.ALLOW,
    ) -> None:
        what = (resource, name, ResourcePatternType.LITERAL, f"User:{user}", "*", operation, permission)
        client = self.admin.client
        for future in client.create_acls([AclBinding(*what)], request_timeout=SECONDS).values():
            future.result(2 * SECONDS)
        # The controller knows it now; the broker learns it a moment later.
        same = AclBindingFilter(*what)
        wait_for(lambda: client.describe_acls(same, request_timeout=SECONDS).result(2 * SECONDS))

    def remove_scram_user(self, user: str) -> None:
        """Remove the user's SCRAM-SHA-512 credentials; open connections remain."""
        dropped: list[UserScramCredentialAlteration] = [UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_512)]
        for future in self.admin.client.alter_user_scram_credentials(dropped, request_timeout=SECONDS).values():
            future.result(2 * SECONDS)

    def add_scram_users(self) -> None:
        """Add SCRAM credentials for all users."""
        # A request may change a user only once, so there is one for each mechanism.
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            added: list[UserScramCredentialAlteration] = [
                UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, 4096), password.encode())
                for user, password in USERS.items()
            ]
            for future in self.admin.client.alter_user_scram_credentials(added, request_timeout=SECONDS).values():
                future.result(2 * SECONDS)


def _write_for_java(path: Path, chain: bytes) -> Path:
    """A key and its certificates with the key in PKCS 8, the one form that Java reads."""
    key = serialization.load_pem_private_key(chain, None)
    pkcs8 = serialization.PrivateFormat.PKCS8
    text = key.private_bytes(serialization.Encoding.PEM, pkcs8, serialization.NoEncryption())
    path.write_bytes(text + chain[chain.index(b"-----BEGIN CERTIFICATE") :])
    return path


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
