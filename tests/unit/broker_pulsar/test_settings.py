"""Settings of the Pulsar backend: from a URL, and refused combinations."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.errors import InvalidSetting, UnknownSetting
from broker_pulsar.settings import PulsarSettings


def test_a_url_gives_hosts_tenant_and_namespace() -> None:
    settings = PulsarSettings.from_url("pulsar://one,two:6655/acme/sales?batching=off&chunking=true")
    assert settings.service_url == "pulsar://one:6650,two:6655"
    assert settings.hosts == (("one", 6650), ("two", 6655))
    assert (settings.tenant, settings.namespace) == ("acme", "sales")
    assert settings.http_url == "http://one:8080"
    assert settings.chunking


def test_tls_has_its_own_default_ports() -> None:
    settings = PulsarSettings.from_url("pulsar+ssl://secure.example")
    assert settings.uses_tls
    assert settings.service_url == "pulsar+ssl://secure.example:6651"
    assert settings.http_url == "https://secure.example:8443"
    assert PulsarSettings.from_url("pulsar://[::1]").http_url == "http://[::1]:8080"
    assert PulsarSettings.from_url("pulsar://h?admin_url=https://a:1/").http_url == "https://a:1"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("pulsar://h?token=a&token_file=b", "one way to authenticate"),
        ("pulsar://h?oauth2_issuer=https://i", "belong together"),
        ("pulsar://h?oauth2_audience=a", "oauth2_audience needs oauth2_issuer"),
        ("pulsar://h?oauth2_scope=a", "oauth2_scope needs oauth2_issuer"),
        ("pulsar://h?tls_cert=a.pem", "belong together"),
        ("pulsar://h?chunking=true", "batching=off"),
        ("pulsar://h?admin_url=h:8080", "http://"),
        ("pulsar://h?admin_url=http://", "and a host"),
        ("pulsar://h?admin_url=http://proxy/pulsar", "only scheme, host and port"),
        ("pulsar://h?oauth2_issuer=issuer&oauth2_client_id=a&oauth2_client_secret=b", "oauth2_issuer 'issuer'"),
        ("pulsar://h?tls_ca=ca.pem", r"pulsar\+ssl://"),
        ("pulsar://h?max_message_bytes=1000000000000", "2147483647"),
        ("pulsar://h?batching_max_messages=4096", "4095"),
        ("pulsar://h?batching_max_messages=1", "at least 2"),
        ("pulsar://h?batching_max_bytes=99999999999999999999", "2147483647"),
        ("pulsar://h?max_message_bytes=8192", "at least 16384"),
        ("pulsar://user:secret@h", "takes no"),
        ("pulsar:?service_url=pulsar://me:secret@h", "has a user"),
        ("pulsar://h?linger=0", "linger"),
    ],
)
def test_invalid_settings_are_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        PulsarSettings.from_url(url)


def test_an_unknown_parameter_suggests_the_nearest() -> None:
    with pytest.raises(UnknownSetting, match="compression"):
        PulsarSettings.from_url("pulsar://h?compresion=lz4")


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    settings = PulsarSettings.from_url("pulsar://h?token=very-secret")
    assert "very-secret" not in repr(settings)
