"""KafkaSettings: every source of a setting, the errors of invalid ones, and the properties that clients get."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, Producer
from pydantic import SecretStr

from broker.errors import BrokerError, InvalidSetting, UnknownSetting
from broker_kafka.config.properties import (
    CONSUMER_PROPERTIES,
    KNOWN_PROPERTIES,
    OWNED,
    PRODUCER_PROPERTIES,
    in_own_group,
)
from broker_kafka.config.queue import QueueSettings
from broker_kafka.settings import KafkaSettings


def refused(url: str) -> str:
    with pytest.raises(BrokerError) as caught:
        KafkaSettings.from_url(url)
    assert isinstance(caught.value, (InvalidSetting, UnknownSetting))
    return str(caught.value)


class TestTimeOfRequests:
    def test_a_frozen_broker_gets_a_part_of_the_message_timeout(self) -> None:
        settings = KafkaSettings()
        given = settings.client_config("producer")["socket.timeout.ms"]
        assert settings.request_timeout_ms < given < settings.message_timeout_ms / 2
        assert "socket.timeout.ms" not in settings.client_config("consumer")

    def test_an_explicit_socket_timeout_wins(self) -> None:
        config = KafkaSettings(socket_timeout_ms=45_000).client_config("producer")
        assert config["socket.timeout.ms"] == 45_000

    def test_the_socket_timeout_is_at_most_the_default(self) -> None:
        assert KafkaSettings(request_timeout_ms=900_000).client_config("producer")["socket.timeout.ms"] == 60_000


class TestServers:
    @pytest.mark.parametrize("server", ["h", "h:1", "10.0.0.1:65535", "[::1]", "[fe80::1%eth0]:9092", "höst_1:9092"])
    def test_hosts_with_and_without_a_port(self, server: str) -> None:
        assert KafkaSettings(servers=(server,)).servers == (server,)

    @pytest.mark.parametrize(
        "server", ["", "a b:1", "h:", "h:0", "h:99999", "h:x", "::1", "kafka://h:1", "h:1/x", "u:p@h", ":1"]
    )
    def test_invalid_hosts_are_rejected(self, server: str) -> None:
        with pytest.raises(InvalidSetting, match=r"'servers' \(from argument\) is .* is not a host, host:port or"):
            KafkaSettings(servers=("h:1", server))

    def test_no_host_is_rejected(self) -> None:
        with pytest.raises(InvalidSetting, match=r"'servers' .* is empty"):
            KafkaSettings(servers=())


class TestUrl:
    def test_hosts_and_credentials(self) -> None:
        settings = KafkaSettings.from_url("kafka://user:p%40ss@one,two:9093,[::1]:9094")
        assert settings.servers == ("one:9092", "two:9093", "[::1]:9094")
        config = settings.client_config("admin")
        assert config["bootstrap.servers"] == "one:9092,two:9093,[::1]:9094"
        assert (config["sasl.username"], config["sasl.password"]) == ("user", "p@ss")
        assert (config["security.protocol"], config["sasl.mechanism"]) == ("SASL_SSL", "PLAIN")

    def test_a_typed_setting_has_two_names(self) -> None:
        assert KafkaSettings.from_url("kafka://h?linger.ms=7").linger_ms == 7
        assert KafkaSettings.from_url("kafka://h?linger_ms=7").linger_ms == 7
        assert KafkaSettings.from_url("kafka://h?queue.buffering.max.ms=7").linger_ms == 7
        assert "given twice" in refused("kafka://h?linger.ms=7&linger_ms=8")

    def test_other_properties_have_dotted_names(self) -> None:
        config = KafkaSettings.from_url("kafka://h?socket.keepalive.enable=true&debug=all").client_config("producer")
        assert (config["socket.keepalive.enable"], config["debug"]) == ("true", "all")

    @pytest.mark.parametrize("name", sorted(OWNED.keys() - {"oauth_cb"}))
    def test_properties_that_the_sdk_sets_are_rejected_with_the_reason(self, name: str) -> None:
        text = refused(f"kafka://h?{name}=1")
        assert name in text
        assert OWNED[name] in text

    @pytest.mark.parametrize("name", sorted(name for name in OWNED if "." in name))
    def test_sdk_properties_are_recognized_with_underscores(self, name: str) -> None:
        assert OWNED[name] in refused(f"kafka://h?{name.replace('.', '_')}=1")

    def test_statistics_may_be_off(self) -> None:
        assert "nothing reads the clients' statistics" in refused("kafka://h?statistics.interval.ms=500")
        assert "bus.hooks" in refused("kafka://h?stats_cb=print")
        assert "nothing reads the clients' statistics" in refused("kafka://h?properties=statistics.interval.ms=500")
        config = KafkaSettings.from_url("kafka://h?statistics.interval.ms=0").client_config("producer")
        assert config["statistics.interval.ms"] == "0"

    def test_a_property_with_underscores_is_rejected_with_its_dotted_name(self) -> None:
        assert "Give it as 'socket.keepalive.enable'" in refused("kafka://h?socket_keepalive_enable=true")

    def test_a_compression_level_needs_compression(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "Set compression_type, for instance to zstd" in refused("kafka://h?compression_level=3")
        KafkaSettings.from_url("kafka://h?compression_level=3&compression_type=gzip")
        monkeypatch.setenv("BROKER_KAFKA_COMPRESSION_LEVEL", "3")
        KafkaSettings.from_url("kafka://h?compression_type=none")

    def test_invalid_settings_are_named_with_advice(self) -> None:
        assert "Did you mean 'linger_ms'?" in refused("kafka://h?lingr_ms=3")
        assert "at least one replica" in refused("kafka://h?replication_factor=0")
        assert "8192" in refused("kafka://h?message_max_bytes=1000")
        assert "group_instance_id" in refused("kafka://h?group_instance_id=")
        assert "3600" in refused("kafka://h?request_timeout=1e300")
        assert "one of none, gzip" in refused("kafka://h?compression_type=rar")
        assert "needs acks=all" in refused("kafka://h?acks=1")
        assert "without sasl_password" in refused("kafka://user@h")
        assert "without sasl_username" in refused("kafka://h?sasl_password=x")
        assert "needs sasl_username" in refused("kafka://h?sasl_mechanism=SCRAM-SHA-256")
        for protocol in ("PLAINTEXT", "SSL"):
            assert "sends none" in refused(f"kafka://u:p@h?security_protocol={protocol}")
        assert "sasl_kerberos_service_name" in refused("kafka://h?sasl_mechanism=GSSAPI")
        assert "not below" in refused("kafka://h?heartbeat_interval_ms=5000&session_timeout_ms=5000")
        assert "max_poll_interval_ms 10 is below" in refused("kafka://h?max_poll_interval_ms=10")
        assert "max_poll_interval_ms 9999 is below" in refused("kafka://h?max.poll.interval.ms=9999")
        assert "takes no path" in refused("kafka://h/topic")
        assert "invalid host" in refused("kafka://h%20h")
        for name in ("client_id", "group_instance_id", "sasl_username"):
            assert f"{name!r} (from url) is " in refused(f"kafka://h?{name}=a%00b")

    def test_no_secret_is_shown(self) -> None:
        settings = KafkaSettings.from_url(
            "kafka://u:hunter2@h?ssl.certificate.pem=c&ssl.key.pem=hunter3&sasl.mechanism=PLAIN"
            "&sasl.oauthbearer.assertion.private.key.passphrase=hunter4"
        )
        shown = f"{settings.url} {settings!r} {settings.explain()}"
        assert "hunter" not in shown
        assert "sasl.mechanism=PLAIN" in shown
        assert settings.client_config("admin")["sasl.oauthbearer.assertion.private.key.passphrase"] == "hunter4"


class TestRoles:
    def test_a_property_goes_only_to_its_role(self) -> None:
        settings = KafkaSettings(properties={"check.crcs": "true", "queuing.strategy": "fifo", "client.rack": "a"})
        consumer, producer = settings.client_config("consumer"), settings.client_config("producer")
        assert consumer["check.crcs"] == "true"
        assert "check.crcs" not in producer
        assert producer["queuing.strategy"] == "fifo"
        assert "queuing.strategy" not in consumer
        assert consumer["client.rack"] == producer["client.rack"] == "a"

    def test_kip_848_omits_settings_of_the_classic_protocol(self) -> None:
        config = KafkaSettings(group_protocol="consumer", group_remote_assignor="range").client_config("consumer")
        assert config["group.remote.assignor"] == "range"
        assert not {"session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy"} & config.keys()

    def test_members_of_groups_of_the_library_have_one_assignor(self) -> None:
        for given in ("", "partition_assignment_strategy=range,roundrobin", "partition_assignment_strategy=range"):
            config = in_own_group(KafkaSettings.from_url(f"kafka://host?{given}").client_config("consumer"))
            assert config["partition.assignment.strategy"] == "cooperative-sticky"
        config = in_own_group(KafkaSettings(group_protocol="consumer").client_config("consumer"))
        assert "partition.assignment.strategy" not in config

    @pytest.mark.parametrize(
        ("given", "name"),
        [
            ("group_protocol=consumer&session_timeout_ms=6000", "session_timeout_ms"),
            ("group_protocol=consumer&partition_assignment_strategy=range", "partition_assignment_strategy"),
            ("group_remote_assignor=range", "group_remote_assignor"),
        ],
    )
    def test_a_setting_of_the_other_group_protocol_is_a_warning(
        self, given: str, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        settings = KafkaSettings.from_url(f"kafka://host?{given}")
        (text,) = [record.getMessage() for record in caplog.records]
        assert text == f"Setting {name!r} (url) has no effect with group_protocol={settings.group_protocol}"

    @pytest.mark.parametrize("protocol", ["classic", "consumer"])
    def test_librdkafka_accepts_every_default(self, protocol: str) -> None:
        settings = KafkaSettings(group_protocol=protocol, servers=("127.0.0.1:1",))  # pyright: ignore[reportArgumentType]
        consumer = Consumer({**settings.client_config("consumer"), "group.id": "g"})
        assert consumer.assignment() == []
        consumer.close()
        Producer(settings.client_config("producer"))

    def test_every_setting_is_a_property_of_librdkafka(self) -> None:
        names = {*KafkaSettings().client_config("consumer"), *KafkaSettings().client_config("producer")}
        assert names - {"logger"} <= KNOWN_PROPERTIES
        assert not PRODUCER_PROPERTIES & CONSUMER_PROPERTIES

    def test_properties_reject_settings_and_invalid_values(self) -> None:
        with pytest.raises(InvalidSetting, match="Give it as linger_ms"):
            KafkaSettings(properties={"linger.ms": "3"})
        with pytest.raises(InvalidSetting, match="takes text, a number"):
            KafkaSettings(properties={"client.rack": object()})  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidSetting, match="1 is no name of a property"):
            KafkaSettings(properties={1: "x"})  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidSetting, match=r"'properties' .* contains a NUL"):
            KafkaSettings(properties={"client.rack": "a\0b"})

    def test_properties_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BROKER_KAFKA_PROPERTIES", "client.rack=a,debug=msg")
        monkeypatch.setenv("BROKER_KAFKA_SASL_USERNAME", "u")
        monkeypatch.setenv("BROKER_KAFKA_SASL_PASSWORD", "p")
        settings = KafkaSettings.from_url("kafka://h")
        assert settings.properties == {"client.rack": "a", "debug": "msg"}
        assert settings.sasl_password == SecretStr("p")


GIVEN = {
    "markers": {
        "lease_seconds": "30",
        "marker_format": "v1",
        "marker_topic": "open",
        "queue_tracker": "false",
        "queue_id": "billing",
        "queue_transactions": "true",
        "redelivery_rate": "100",
    },
    "share": {"share_lock": "20", "share_members": "2"},
}
"""The settings of each engine of queues."""


class TestEngines:
    @pytest.mark.parametrize(
        ("queue", "engine", "name", "value"),
        [
            (queue, engine, name, value)
            for queue in ("", "offsets", "markers", "share")
            for engine, given in GIVEN.items()
            for name, value in given.items()
            if queue != engine
        ],
    )
    def test_a_setting_of_another_engine_is_rejected_with_advice(
        self, queue: str, engine: str, name: str, value: str
    ) -> None:
        text = refused(f"kafka://h?{f'queue={queue}&' if queue else ''}{name}={value}")
        assert f"{name!r} (from url) is " in text
        assert value in text.replace("True", "true").replace("False", "false")
        assert f"and queue={queue or 'offsets'} (from {'url' if queue else 'default'})" in text
        assert f"Set queue={engine}, or remove {name}" in text

    @pytest.mark.parametrize("engine", list(GIVEN))
    def test_settings_of_the_chosen_engine_are_accepted(self, engine: str) -> None:
        parameters = "&".join(f"{name}={value}" for name, value in GIVEN[engine].items())
        settings = KafkaSettings.from_url(f"kafka://h?queue={engine}&{parameters}")
        assert settings.queue == engine
        for name in GIVEN[engine]:
            assert settings.origin(name).kind == "url"

    @pytest.mark.parametrize("name", ["a/b", "", "a b", "ä", "a\n", "a" * 241])
    def test_an_invalid_marker_topic_is_explained(self, name: str) -> None:
        with pytest.raises(InvalidSetting, match=r"'marker_topic' .*1 to 240 letters of ASCII, digits, dots") as caught:
            KafkaSettings(queue="markers", marker_topic=name)
        assert "pattern" not in str(caught.value)
        assert "A-Z" not in str(caught.value)

    def test_every_setting_of_queues_belongs_to_an_engine(self) -> None:
        assert set(QueueSettings.model_fields) == {"queue", *GIVEN["markers"], *GIVEN["share"]}

    def test_arguments_are_checked_and_none_means_unset(self) -> None:
        with pytest.raises(InvalidSetting, match=r"'share_lock' \(from argument\) is 20.0, .* \(from arg"):
            KafkaSettings(queue="markers", share_lock=20)
        assert KafkaSettings(queue="markers", share_lock=None).share_lock is None

    def test_the_urls_queue_overrides_the_environments_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BROKER_KAFKA_LEASE_SECONDS", "60")
        with pytest.raises(InvalidSetting, match=r"from environment BROKER_KAFKA_LEASE_SECONDS.* is 60.0"):
            KafkaSettings()
        monkeypatch.setenv("BROKER_KAFKA_QUEUE", "markers")
        assert KafkaSettings().lease_seconds == 60
        assert KafkaSettings.from_url("kafka://h?queue=share").queue == "share"
        monkeypatch.setenv("BROKER_KAFKA_QUEUE_ID", "billing")
        with pytest.raises(InvalidSetting, match=r"'queue_id' .* would deliver the messages of all queues"):
            KafkaSettings.from_url("kafka://h?queue=offsets")
