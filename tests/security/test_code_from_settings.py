"""A URL, a variable or a settings file cannot load a library, run a command or name a file that is written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from pydantic import SecretStr

from broker import ConfigurationError, InvalidSetting, UnknownSetting
from broker.registry import read_target
from broker_kafka.config.properties import ALIASES, CODE_PROPERTIES, KNOWN_PROPERTIES, OWNED
from broker_kafka.group.options import with_options
from broker_kafka.settings import KafkaSettings
from broker_pulsar.settings import PulsarSettings
from broker_spark.common.options import SourceOptions

FROM_CODE = "Only code may set it, in a KafkaSettings object"
GSSAPI = {"sasl_mechanism": "GSSAPI", "sasl_kerberos_service_name": "kafka"}
COMMAND = "touch /tmp/was-run"
MALFORMED = [
    "plugin.library.paths\0",
    "plugin.library.paths\0.x",
    "\0plugin.library.paths",
    "Plugin.library.paths",
    "plugin.library.paths;",
    "plugin library.paths",
    "ſsl.engine.id",
    "ut_handle_ProduceResponse",
]
UNKNOWN = ["internal.termination.signal", "test.mock.num.brokers", "plugin.library.path", "topic.plugin.library.paths"]


def toml(directory: Path, name: str, value: str = COMMAND) -> Path:
    """A settings file with this property."""
    file = directory / "kafka.toml"
    file.write_text(f"properties = {{ {json.dumps(name)} = {json.dumps(value)} }}")
    return file


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
        assert COMMAND not in str(caught.value), "a command may hold a password"
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


class TestOtherNames:
    """librdkafka compares names up to a NUL, and has properties for its own tests that end or crash a process."""

    @pytest.mark.parametrize("name", MALFORMED)
    def test_a_malformed_name_is_refused_from_anywhere(self, name: str, tmp_path: Path) -> None:
        for refused in (
            lambda: KafkaSettings.from_url(f"kafka://h?properties={quote(name)}%3D{COMMAND}"),
            lambda: KafkaSettings.from_url(f"kafka://h?properties=client.rack%3Da,{quote(name)}%3D{COMMAND}"),
            lambda: read_target(f"kafka://h?properties={quote(name)}%3D{COMMAND}"),
            lambda: KafkaSettings.from_toml(toml(tmp_path, name)),
            lambda: KafkaSettings(properties={name: COMMAND}),
            lambda: with_options(KafkaSettings(), {"properties": {name: COMMAND}}),
        ):
            with pytest.raises(InvalidSetting, match="lower-case letters, digits, dots"):
                refused()

    @pytest.mark.parametrize("name", UNKNOWN)
    def test_only_code_may_give_an_unknown_one(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for refused in (
            lambda: KafkaSettings.from_url(f"kafka://h?properties={name}%3D9"),
            lambda: read_target(f"kafka://h?properties={name}%3D9"),
            lambda: KafkaSettings.from_toml(toml(tmp_path, name)),
        ):
            with pytest.raises(UnknownSetting, match=rf"{re.escape(name)}.*only code may set"):
                refused()
        monkeypatch.setenv("BROKER_KAFKA_PROPERTIES", f"client.rack=a,{name}=9")
        with pytest.raises(UnknownSetting, match=rf"{re.escape(name)}.*environment BROKER_KAFKA_PROPERTIES"):
            KafkaSettings.from_url("kafka://h")
        assert KafkaSettings(properties={name: "9"}).client_config("producer")[name] == "9"

    @pytest.mark.parametrize("value", ["a\0", "\0", "a\0,ssl.engine.id=b"])
    def test_no_value_has_a_nul(self, value: str, tmp_path: Path) -> None:
        for refused in (
            lambda: KafkaSettings.from_url(f"kafka://h?client.rack={quote(value)}"),
            lambda: KafkaSettings.from_url(f"kafka://h?properties=client.rack%3D{quote(value)}"),
            lambda: KafkaSettings.from_toml(toml(tmp_path, "client.rack", value)),
            lambda: KafkaSettings(properties={"client.rack": SecretStr(value)}),
        ):
            with pytest.raises(InvalidSetting, match="contains a NUL"):
                refused()

    def test_a_url_may_give_all_others(self) -> None:
        for name in KNOWN_PROPERTIES - CODE_PROPERTIES - OWNED.keys():
            if ALIASES.get(name, name).replace(".", "_") not in KafkaSettings.model_fields:
                protocol = "SSL" if name.startswith("ssl.") else "PLAINTEXT"
                settings = KafkaSettings.from_url(f"kafka://h?{name}=a&security_protocol={protocol}")
                assert name in settings.properties


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
