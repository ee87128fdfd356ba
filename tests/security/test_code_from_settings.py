"""A URL, a variable or a settings file cannot load a library, run a command or name a file that is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from broker import ConfigurationError, InvalidSetting, UnknownSetting
from broker_kafka.config.properties import CODE_PROPERTIES, KNOWN_PROPERTIES
from broker_kafka.settings import KafkaSettings
from broker_pulsar.settings import PulsarSettings
from broker_spark.common.options import SourceOptions

FROM_CODE = "Only code may set it, in a KafkaSettings object"
GSSAPI = {"sasl_mechanism": "GSSAPI", "sasl_kerberos_service_name": "kafka"}
COMMAND = "touch /tmp/was-run"


def test_every_such_property_is_known() -> None:
    said = {name for name in KNOWN_PROPERTIES if re.search("plugin|cmd|engine|provider", name)}
    assert said == CODE_PROPERTIES


@pytest.mark.parametrize("name", sorted(CODE_PROPERTIES))
class TestKafkaProperty:
    def test_a_url_is_refused(self, name: str) -> None:
        with pytest.raises(InvalidSetting) as caught:
            KafkaSettings.from_url(f"kafka://h?{name}={COMMAND}")
        assert name in str(caught.value).replace("_", ".")
        assert "(from url)" in str(caught.value)
        assert COMMAND in str(caught.value)
        assert FROM_CODE in str(caught.value.advice)

    def test_an_underscored_name_is_refused(self, name: str) -> None:
        with pytest.raises((InvalidSetting, UnknownSetting)) as caught:
            KafkaSettings.from_url(f"kafka://h?{name.replace('.', '_')}={COMMAND}")
        assert FROM_CODE in str(caught.value.advice)

    def test_the_environment_is_refused(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        own = name.replace(".", "_")
        if own in KafkaSettings.model_fields:
            monkeypatch.setenv(f"BROKER_KAFKA_{own.upper()}", COMMAND)
        else:
            monkeypatch.setenv("BROKER_KAFKA_PROPERTIES", f"client.rack=a, {name}={COMMAND}")
        with pytest.raises(InvalidSetting, match=r"from environment BROKER_KAFKA_") as caught:
            KafkaSettings.from_url("kafka://h")
        assert FROM_CODE in str(caught.value.advice)
        with pytest.raises(InvalidSetting, match=r"from environment BROKER_KAFKA_"):
            KafkaSettings(servers=("h:1",))

    def test_a_file_is_refused(self, name: str, tmp_path: Path) -> None:
        own = name.replace(".", "_")
        line = f"{own} = '{COMMAND}'"
        if own not in KafkaSettings.model_fields:
            line = f"properties = {{ '{name}' = '{COMMAND}' }}"
        (tmp_path / "kafka.toml").write_text(line)
        with pytest.raises(InvalidSetting, match=r"from file .*kafka\.toml") as caught:
            KafkaSettings.from_toml(tmp_path / "kafka.toml")
        assert FROM_CODE in str(caught.value.advice)

    def test_code_may_set_it(self, name: str) -> None:
        given: dict[str, Any] = {"properties": {name: "mine"}}
        own = name.replace(".", "_")
        if own in KafkaSettings.model_fields:
            given = {own: "mine", **GSSAPI}
        elif name.startswith("ssl."):
            given["security_protocol"] = "SSL"
        settings = KafkaSettings(**given)
        assert settings.client_config("producer")[name] == "mine"
        if own not in given:
            again = KafkaSettings.from_url("kafka://h?security_protocol=SSL").replaced(given)
            assert again.client_config("consumer")[name] == "mine"


@pytest.mark.parametrize("name", ["service_name", "principal", "keytab"])
@pytest.mark.parametrize("text", ["a;id", "a$(id)", "a`id`", 'a";id;"', "a b", "a\nid", "a|id", "-Xa=b", "a\\b"])
def test_no_part_of_the_command_of_kinit_is_more_than_a_word(name: str, text: str) -> None:
    given: dict[str, Any] = GSSAPI | {f"sasl_kerberos_{name}": text}
    with pytest.raises(InvalidSetting, match=rf"sasl_kerberos_{name}.*It takes letters, digits and any of"):
        KafkaSettings(**given)


def test_kerberos_names_are_accepted() -> None:
    settings = KafkaSettings.from_url(
        "kafka://h?sasl_mechanism=GSSAPI&sasl.kerberos.service.name=kafka&sasl_kerberos_keytab=/etc/app/app-1.keytab"
        "&sasl_kerberos_principal=app/host.example.com@EXAMPLE.COM"
    )
    config = settings.client_config("producer")
    assert config["sasl.kerberos.principal"] == "app/host.example.com@EXAMPLE.COM"
    assert config["sasl.kerberos.keytab"] == "/etc/app/app-1.keytab"


def test_a_url_names_no_file_that_pulsar_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "client.log"
    with pytest.raises(InvalidSetting, match=r"client_log.*from url.*client\.log.*BROKER_PULSAR_CLIENT_LOG"):
        PulsarSettings.from_url(f"pulsar://h?client_log={log}")
    assert PulsarSettings(client_log=log).client_log == log
    monkeypatch.setenv("BROKER_PULSAR_CLIENT_LOG", str(log))
    assert PulsarSettings.from_url("pulsar://h").client_log == log


@pytest.mark.parametrize(
    "name",
    [
        "kafka.sasl.jaas.config",
        "kafka.sasl.client.callback.handler.class",
        "kafka.sasl.login.callback.handler.class",
        "kafka.sasl.login.class",
        "kafka.ssl.engine.factory.class",
        "kafka.security.providers",
        "kafka.interceptor.classes",
        "kafka.metric.reporters",
    ],
)
def test_spark_passes_no_class_to_its_connector(name: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"no option {name!r}")):
        SourceOptions.parse({"url": "kafka://h", "topic": "t", name: "evil.Login"})
