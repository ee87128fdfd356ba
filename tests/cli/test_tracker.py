"""`broker tracker` and `broker queue` on a real Kafka broker."""

from __future__ import annotations

import asyncio
import signal
import socket
import uuid
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from broker.cli.queue import tracker_pages
from broker.driver.queue_tracking import Histogram
from broker.hooks import Hooks, Warned
from broker.probes import ProbeServer
from broker.testing.waiting import eventually
from broker_kafka.backend import KafkaBackend
from broker_kafka.queue.markers.wire import Content, Kind, Marker
from broker_kafka.settings import KafkaSettings
from tests.cli.conftest import InnerCli, ProcessCli
from tests.kafka.queue_markers import Queue, prepared_queue
from tests.servers.kafka import KafkaServer, shared_server
from tests.servers.kafka_client import RawAdmin, wait_for


@pytest.fixture
def queue() -> Queue:
    """A queue with a marker topic."""
    return prepared_queue(shared_server())


def ask(url: str, path: str) -> tuple[int, str]:
    """Status and body."""
    with closing(HTTPConnection(url.partition("//")[2], timeout=10)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def get(url: str, path: str) -> str:
    status, body = ask(url, path)
    assert status == 200
    return body


@pytest.mark.deep
def test_a_tracker_with_a_settings_file(queue: Queue, tmp_path: Path) -> None:
    """`tests/chaos` runs it with a URL."""
    server, file = shared_server(), tmp_path / "tracker.toml"
    file.write_text(
        f'[kafka]\nservers = ["{server.bootstrap}"]\nsession_timeout_ms = 6000\nheartbeat_interval_ms = 300\n'
    )
    cli = ProcessCli(server.url)
    first, second, third = queue.send(3)
    queue.take([first], period=100)
    queue.take([second], period=600_000)
    started = Marker(kind=Kind.START, id=third, after_ms=600_000, attempt=2)
    queue.write((started, Content(holder="me\x1b7")))
    queue.commit([third])
    named = ("--config", str(file), "--url", "kafka:")
    with cli.start(*named, "tracker", queue.subscription, "--topic", queue.topic, "--listen", "0") as process:
        try:
            line = process.stderr.readline().decode()
            url = line.split()[-1]
            assert line.startswith("Health and metrics are at http://127.0.0.1:")
            wait_for(lambda: ask(url, "/health") == (200, "ok\n"))
            (again,) = queue.wait_for_again(1, 3)
            assert again.value() == b"m0"
            labels = f'{{subscription="{queue.subscription}"}}'
            wait_for(lambda: f"anybroker_queue_open_leases{labels} 2\n" in get(url, "/metrics"))
            metrics = get(url, "/metrics")
            assert (
                f"# TYPE anybroker_queue_redelivered_total counter\nanybroker_queue_redelivered_total{labels} 1\n"
                in metrics
            )
            assert f"anybroker_queue_up{labels} 1\n" in metrics
            assert f"anybroker_queue_clock_lag_seconds{labels} " in metrics
            for name in ("lateness", "delay"):
                assert f"anybroker_queue_redelivery_{name}_seconds_count{labels} 1\n" in metrics
            shown = cli.inner("queue", "inspect", queue.subscription, "--json").json
            assert {lease["offset"]: (lease["state"], lease["attempt"], lease["holder"]) for lease in shown} == {
                1: ("held", 1, ""),
                2: ("held", 2, "me\x1b7"),
            }
            # Text in markers is escaped for the terminal.
            assert r"me\x1b7" in cli.inner("queue", "inspect", queue.subscription).text
            process.send_signal(signal.SIGTERM)
            _, reported = process.communicate(timeout=60)
            assert process.returncode == 0
            assert b"Tracking" in reported
            assert b"tracks partitions 0" in reported
            assert b"Traceback" not in reported
        finally:
            process.kill()
    # It has committed: the START of `second` is the lowest open one.
    assert queue.committed() == 1


def test_an_address_in_use_leaves_no_marker_topic_behind(queue: Queue) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        reported = InnerCli(shared_server().url)("tracker", f"{queue.subscription}-new", "--listen", port, code=2).err
    assert f"The address 127.0.0.1:{port} cannot be used" in reported
    assert (
        "does not exist" in InnerCli(shared_server().url)("queue", "inspect", f"{queue.subscription}-new", code=3).err
    )


def test_lag_of_a_queue(queue: Queue) -> None:
    first, _ = queue.send(2)
    queue.take([first], period=600_000)
    cli = InnerCli(shared_server().url)
    (reported,) = cli("queue", "lag", queue.topic, queue.subscription, "--json").json
    assert reported == cli("lag", queue.topic, queue.subscription, "--json").json[0]
    assert reported["waiting"] == 1


def test_invalid_arguments(memory: InnerCli) -> None:
    assert "has no queues that need a tracker" in memory("tracker", "billing", code=2).err
    assert "has no queues that need a tracker" in memory("queue", "inspect", "billing", code=2).err
    kafka = InnerCli(shared_server().url)
    assert "--listen is 'somewhere'" in kafka("tracker", "billing", "--listen", "somewhere", code=2).err
    kafka("tracker", "billing", "--topic", "no-such-topic", code=3)
    for name, reported in (
        ("", "subscription is ''"),
        ("b.tracker", "not end with '.tracker'"),
        ("a/b", "marker_topic"),
    ):
        assert reported in kafka("tracker", name, code=2).err
        assert reported in kafka("queue", "inspect", name, code=2).err


@pytest.mark.parametrize("command", [["inspect"], ["peek"], ["purge", "--yes"]], ids=lambda command: command[0])
def test_a_missing_queue_is_reported_without_creating_topics(command: list[str]) -> None:
    reported = InnerCli(shared_server().url)("queue", *command, "nobodys", code=3).err
    assert "'nobodys' is no queue with markers: topic 'nobodys.markers' does not exist. Check its name" in reported
    # A topic created by hand would not suit markers.
    assert "create" not in reported


async def test_a_tracker_of_an_unknown_subscription_warns() -> None:
    name, hooks, reported = f"misspelt-{uuid.uuid4().hex[:12]}", Hooks(), list[str]()
    hooks.listen(lambda event: reported.append(event.text) if isinstance(event, Warned) else None)
    backend = KafkaBackend(KafkaSettings(servers=(shared_server().bootstrap,)), hooks)
    await backend.open()
    try:
        for _ in range(2):
            tracker = backend.queue_tracker(name)
            await tracker.open()
            await tracker.close()
    finally:
        await backend.close()
    assert len(reported) == 1
    assert f"'{name}' had no marker topic, and '{name}.markers' was created. If the name is misspelt" in reported[0]


@pytest.mark.deep
async def test_trackers_are_unhealthy_while_no_broker_answers() -> None:
    with KafkaServer() as server:
        RawAdmin(server.bootstrap).make_topic("jobs")
        backends = [KafkaBackend(KafkaSettings(servers=(server.bootstrap,)), Hooks()) for _ in range(2)]
        for backend in backends:
            await backend.open()
        trackers = [backend.queue_tracker("billing", topics=("jobs",)) for backend in backends]
        try:
            await trackers[0].open()
            await eventually(lambda: trackers[0].metrics()["partitions"] == 1, 30)
            await trackers[1].open()
            # One of them has the partition.
            await eventually(lambda: sorted(str(each.metrics()["partitions"]) for each in trackers) == ["0", "1"], 30)
            assert [tracker.trouble() for tracker in trackers] == ["", ""]
            server.pause()
            await eventually(lambda: all(tracker.trouble() for tracker in trackers), 40)
            server.resume()
            await eventually(lambda: not any(tracker.trouble() for tracker in trackers), 40)
        finally:
            server.resume()
            for tracker, backend in zip(trackers, backends, strict=True):
                await tracker.close()
                await backend.close()


async def test_health() -> None:
    said = ""
    took = Histogram(bounds=(0.5, 2.0), counts=[0, 0, 0])
    for seconds in (0.25, 0.5, 1.5, 60.0):
        took.add(seconds)
    metrics = {"open": 3, "sent_total": 10_000_001, "took_seconds": took}

    async with ProbeServer("127.0.0.1", 0, tracker_pages('a "b"', lambda: said, lambda: metrics)) as server:
        assert await asyncio.to_thread(get, server.url, "/health?verbose") == "ok\n"
        text = await asyncio.to_thread(get, server.url, "/metrics")
        assert '# TYPE anybroker_queue_open gauge\nanybroker_queue_open{subscription="a \\"b\\""} 3\n' in text
        assert "sent_total" in text
        assert " 10000001\n" in text
        name, of = "anybroker_queue_took_seconds", 'subscription="a \\"b\\""'
        assert (
            f"# TYPE {name} histogram\n"
            f'{name}_bucket{{{of},le="0.5"}} 2\n{name}_bucket{{{of},le="2"}} 3\n{name}_bucket{{{of},le="+Inf"}} 4\n'
            f"{name}_sum{{{of}}} 62.25\n{name}_count{{{of}}} 4\n"
        ) in text
        said = "no broker"
        assert await asyncio.to_thread(ask, server.url, "/health") == (503, "no broker\n")
        assert (await asyncio.to_thread(ask, server.url, "/"))[0] == 404
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(b"POST /health HTTP/1.1\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 405 ")
        writer.close()
