"""The security settings of Kafka: valid combinations and rejected ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_kafka.config.security import MECHANISMS
from broker_kafka.settings import KafkaSettings
from tests.unit.broker_kafka.test_settings import refused


class TestSecurity:
    def test_a_certificate_implies_tls(self) -> None:
        assert KafkaSettings(ssl_ca_location=Path("ca.pem")).protocol == "SSL"
        assert KafkaSettings().protocol == "PLAINTEXT"

    @pytest.mark.parametrize(
        ("name", "more"),
        [
            ("ca_pem", ""),
            ("certificate_pem", "&ssl_key_pem=k"),
            ("key_location", "&ssl_certificate_pem=c"),
            ("key_pem", "&ssl_certificate_location=c"),
            ("keystore_location", ""),
        ],
    )
    def test_certificates_need_tls(self, name: str, more: str) -> None:
        given = f"ssl_{name}=x{more}"
        assert KafkaSettings.from_url(f"kafka://h?{given}").protocol == "SSL"
        text = refused(f"kafka://h?{given}&security_protocol=PLAINTEXT")
        assert "(from url) is given, and security_protocol=PLAINTEXT" in text
        assert "Set security_protocol=SSL, or remove ssl_" in text
        text = refused(f"kafka://u:p@h?{given}&security_protocol=SASL_PLAINTEXT")
        assert "Set security_protocol=SASL_SSL" in text

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ("ssl_certificate_location=c", "a client certificate is given without its key"),
            ("ssl.certificate.pem=c", "a client certificate is given without its key"),
            ("ssl_key_pem=k", "a client key is given without its certificate"),
            ("ssl_key_location=k&ssl_keystore_location=s", "a client key is given without its certificate"),
        ],
    )
    def test_half_of_a_client_certificate_is_rejected(self, given: str, expected: str) -> None:
        assert expected in refused(f"kafka://h?{given}")
        KafkaSettings.from_url("kafka://h?ssl_certificate_location=both.pem&ssl_key_location=both.pem")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("ssl_key_password", "x"),
            ("ssl_keystore_password", "x"),
            ("ssl_endpoint_identification_algorithm", "https"),
            ("enable_ssl_certificate_verification", "true"),
            ("ssl.cipher.suites", "ECDHE-RSA-AES128-GCM-SHA256"),
        ],
    )
    def test_tls_options_need_tls(self, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        text = refused(f"kafka://h?{name}={value}")
        assert f"Setting {name!r} (from url) is given, and security_protocol=PLAINTEXT (from default)" in text
        assert f"Set security_protocol=SSL, or remove {name}" in text
        KafkaSettings.from_url(f"kafka://h?{name}={value}&security_protocol=SSL")
        monkeypatch.setenv("BROKER_KAFKA_SSL_KEY_PASSWORD", "x")
        assert KafkaSettings.from_url("kafka://h?security_protocol=PLAINTEXT").protocol == "PLAINTEXT"

    def test_a_disabled_check_needs_no_tls(self) -> None:
        off = "enable_ssl_certificate_verification=false&ssl_endpoint_identification_algorithm=none"
        assert KafkaSettings.from_url(f"kafka://h?{off}").protocol == "PLAINTEXT"

    @pytest.mark.parametrize(
        ("parameters", "expected", "mechanism"),
        [
            ("sasl_oauthbearer_token_endpoint_url=http://t", "sasl_mechanism is not", "OAUTHBEARER"),
            ("enable_sasl_oauthbearer_unsecure_jwt=true", "sasl_mechanism is not", "OAUTHBEARER"),
            ("sasl_kerberos_service_name=kafka", "sasl_mechanism is not", "GSSAPI"),
            ("sasl_kerberos_keytab=k&sasl_username=u&sasl_password=p", "sasl_mechanism is not", "GSSAPI"),
            ("sasl_kerberos_keytab=k&sasl_mechanism=OAUTHBEARER", "OAUTHBEARER does not use", "GSSAPI"),
        ],
    )
    def test_settings_of_another_mechanism_are_rejected(self, parameters: str, expected: str, mechanism: str) -> None:
        text = refused(f"kafka://h?{parameters}")
        assert expected in text
        assert f"Set sasl_mechanism={mechanism}, or remove {parameters.partition('=')[0]}" in text

    def test_the_environments_settings_of_other_mechanisms_are_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BROKER_KAFKA_SSL_CA_LOCATION", "ca.pem")
        monkeypatch.setenv("BROKER_KAFKA_SASL_OAUTHBEARER_SCOPE", "s")
        url = "kafka://u:p@h?sasl_mechanism=PLAIN&security_protocol=SASL_PLAINTEXT"
        assert KafkaSettings.from_url(url).protocol == "SASL_PLAINTEXT"

    def test_every_sasl_setting_belongs_to_a_mechanism(self) -> None:
        beginnings = ("sasl_oauthbearer", "sasl_kerberos", "enable_sasl", "oauth")
        assert {name for name in KafkaSettings.model_fields if name.startswith(beginnings)} == MECHANISMS.keys()

    def test_oauthbearer_needs_a_token_source(self) -> None:
        assert "no source of tokens" in refused("kafka://h?sasl_mechanism=OAUTHBEARER")
        oidc = "kafka://h?sasl_mechanism=OAUTHBEARER&sasl_oauthbearer_method=oidc"
        assert "Give sasl_oauthbearer_token_endpoint_url" in refused(oidc)
        KafkaSettings.from_url(f"{oidc}&sasl.oauthbearer.metadata.authentication.type=azure_imds")

    def test_a_client_without_sasl_gets_no_sasl_property(self) -> None:
        assert not [name for name in KafkaSettings().client_config("producer") if name.startswith("sasl")]

    def test_kerberos_reaches_the_client(self) -> None:
        settings = KafkaSettings(
            sasl_mechanism="GSSAPI", sasl_kerberos_service_name="kafka", sasl_kerberos_keytab=Path("user.keytab")
        )
        config = settings.client_config("consumer")
        assert config["sasl.kerberos.service.name"] == "kafka"
        assert config["sasl.kerberos.keytab"] == "user.keytab"

    def test_a_token_callback_reaches_the_client(self) -> None:
        def token(config: str) -> tuple[str, float]:
            return config, 0.0

        settings = KafkaSettings(sasl_mechanism="OAUTHBEARER", oauth_cb=token)
        assert settings.client_config("consumer")["oauth_cb"] is token
