"""The test brokers do what the fixtures promise, by the raw client."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer

from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import PLAIN, KafkaServer, Listener
from tests.servers.kafka_client import RawAdmin, produce, read_all, round_trip, wait_for
from tests.servers.kafka_disk import SmallDisk
from tests.servers.kafka_jars import distribution
from tests.servers.proxy import Proxy

pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("kafka-servers")]


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    """One to stop and kill."""
    with KafkaServer() as server:
        yield server


@pytest.fixture
def raw(server: KafkaServer) -> RawAdmin:
    return RawAdmin(server.bootstrap)


def values(bootstrap: str, topic: str) -> list[bytes | None]:
    return [message.value() for message in read_all(bootstrap, topic)]


def test_the_shared_broker_serves_topics(kafka: KafkaServer, make_topic: MakeTopic, admin: RawAdmin) -> None:
    topic = make_topic(partitions=3)
    assert set(admin.client.list_topics(topic).topics[topic].partitions) == {0, 1, 2}
    round_trip({"bootstrap.servers": kafka.bootstrap}, topic)
    admin.add_partitions(topic, 5)
    admin.delete_topic(topic)
    wait_for(lambda: topic not in admin.client.list_topics().topics)


def test_records_can_be_deleted(kafka: KafkaServer, topic: str, admin: RawAdmin) -> None:
    produce(kafka.bootstrap, topic, [b"1", b"2", b"3"])
    admin.delete_records(topic, 2)
    assert admin.bounds(topic) == (2, 3)
    assert values(kafka.bootstrap, topic) == [b"3"]


def test_transactions_are_waited_for_to_their_markers(kafka: KafkaServer, topic: str, admin: RawAdmin) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": f"tx-{topic}", "log_level": 3})
    producer.init_transactions()
    for number in range(30):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number)
        producer.flush()
        assert admin.bounds(topic) == (0, 2 * number + 1)
        producer.commit_transaction()
        admin.wait_for_markers(topic)
        assert admin.bounds(topic) == (0, 2 * number + 2)
        assert len(values(kafka.bootstrap, topic)) == number + 1


def test_data_stay_over_a_restart_and_a_kill(server: KafkaServer, raw: RawAdmin) -> None:
    topic = raw.make_topic()
    ports = dict(server.ports)
    produce(server.bootstrap, topic, [b"1"])
    server.restart()
    produce(server.bootstrap, topic, [b"2"])
    server.kill()
    assert not server.running
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", server.ports["PLAIN"])):
        pass
    # Nobody is given its ports meanwhile.
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", server.ports["PLAIN"]))
    server.start()
    assert values(server.bootstrap, topic) == [b"1", b"2"]
    assert server.ports == ports


def test_a_paused_broker_does_not_answer_until_it_resumes(server: KafkaServer, raw: RawAdmin) -> None:
    topic = raw.make_topic()
    server.pause()
    try:
        with pytest.raises(KafkaException):
            raw.client.list_topics(timeout=0.5)
    finally:
        server.resume()
    round_trip({"bootstrap.servers": server.bootstrap}, topic)


def test_a_broker_that_does_not_start_reports_why() -> None:
    begin = time.monotonic()
    server = KafkaServer({"log.retention.check.interval.ms": "never"})
    with pytest.raises(RuntimeError, match=r"never.*log\.retention\.check\.interval\.ms"), server:
        pass
    assert time.monotonic() - begin < 40
    assert not server.directory.exists()


def test_a_broker_ends_with_its_owner(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from tests.servers.kafka import KafkaServer\n"
        "server = KafkaServer().start()\n"
        "print(server.process_id, server.directory, flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert owner.stdout is not None
    pid, directory = owner.stdout.readline().split()
    owner.kill()
    owner.communicate(timeout=60)
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text())
    # The next test process removes what it left.
    sweep = "from tests.servers.server_process import sweep; sweep('anybroker-test-kafka-')"
    subprocess.run([sys.executable, "-c", sweep], check=True, timeout=60, cwd=Path.cwd())
    assert not Path(directory).exists()


@pytest.mark.deep
def test_a_proxy_can_cut_a_broker_off() -> None:
    server = KafkaServer(listeners=[PLAIN, Listener("PROXIED")])
    with Proxy(server.ports["PROXIED"]) as proxy, contextlib.closing(server):
        # The advertised address of clients; brokers and raw admins use the first listener.
        server.advertised["PROXIED"] = proxy.port
        server.start()
        topic = RawAdmin(server.bootstrap).make_topic()
        far = {"bootstrap.servers": f"127.0.0.1:{proxy.port}"}
        round_trip(far, topic)
        proxy.refuse()
        with pytest.raises(KafkaException):
            RawAdmin(far).client.list_topics(timeout=0.5)
        round_trip({"bootstrap.servers": server.bootstrap}, topic)
        proxy.refuse(False)
        round_trip(far, topic)
        assert len(values(server.bootstrap, topic)) == 3


@pytest.mark.deep
def test_a_full_disk_ends_a_broker_which_comes_back_with_what_it_had() -> None:
    """Files of limited length, where no file system can be mounted; tests/chaos has the other."""
    server = KafkaServer()
    with contextlib.closing(server), SmallDisk(server, by_limit=True) as disk:
        server.start()
        raw = RawAdmin(server.bootstrap)
        topic = raw.make_topic()
        written = len(produce(server.bootstrap, topic, [b"1" * 1000] * 1000))
        disk.fill()
        impatient = {"bootstrap.servers": server.bootstrap, "delivery.timeout.ms": 1000}
        with pytest.raises(KafkaException):
            while True:
                written += len(produce(impatient, topic, [b"2" * 1000] * 1000))
        wait_for(lambda: not server.running)
        assert "File too large" in server.log
        disk.free()
        server.start()
        # Of the batch that failed some may have been written before the room ended.
        assert len(read_all(server.bootstrap, topic)) >= written
        round_trip({"bootstrap.servers": server.bootstrap}, topic)


def test_a_missing_prerequisite_is_reported_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(RuntimeError, match=r"need Java 17 .* PATH; .*apt install"):
        distribution.__wrapped__()
    java = tools / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019' >&2\n")
    java.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"need Java 17 or newer; .*11\.0\.2"):
        distribution.__wrapped__()
    java.write_text("#!/bin/sh\necho 'openjdk version \"21.0.2\" 2024' >&2\n")
    with pytest.raises(RuntimeError, match=r"Maven, which is not on the PATH; .*apt install maven"):
        distribution.__wrapped__()
    maven = tools / "mvn"
    maven.write_text("#!/bin/sh\necho 'no route to host'\nexit 1\n")
    maven.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"cannot fetch .* with 1\): no route to host"):
        distribution.__wrapped__()
    assert not list((tmp_path / "cache").rglob("*.jar"))
    assert [path.suffix for path in (tmp_path / "cache" / "anybroker").iterdir()] == [".lock"]
