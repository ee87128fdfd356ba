"""A real Apache Pulsar standalone as a small object: start, stop, kill, restart, pause, resume. Loopback only.

Blocking, for fixtures and threads (`asyncio.to_thread` in a coroutine); every call returns when it is done. Ports and
data stay the same over restarts, and no other program can take the ports meanwhile. The broker, its bookie and its
metadata are one process, which ends with this one, however that ends. Its jars come from Maven once per machine, as
`pulsar.pom.xml` names them. A machine without Java or Maven fails here: nothing is skipped.
"""

from __future__ import annotations

import atexit
import http.client
import os
import shutil
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, Self

from tests.servers.kafka_jars import find_java, jars_of
from tests.servers.process import ChildProcess

__all__ = ["POM", "TEST_OPTIONS", "PulsarServer", "shared_server"]

POM: Final = Path(__file__).with_name("pulsar.pom.xml")
START_SECONDS = 90.0
STOP_SECONDS = 30.0
_PREFIX = "anybroker-test-pulsar-"
_HOST = "127.0.0.1"

TEST_OPTIONS: Mapping[str, str] = {
    "clusterName": "standalone",
    "bindAddress": _HOST,
    "advertisedAddress": _HOST,
    # The starter's own defaults are those of a cluster.
    "managedLedgerDefaultEnsembleSize": "1",
    "managedLedgerDefaultWriteQuorum": "1",
    "managedLedgerDefaultAckQuorum": "1",
    "loadBalancerEnabled": "false",
    "loadManagerClassName": "org.apache.pulsar.broker.loadbalance.NoopLoadManager",
    "allowLoopback": "true",
    "allowAutoTopicCreation": "false",
    "journalSyncData": "false",
    # Machines of tests may have full disks, on which a bookie would only read.
    "diskUsageThreshold": "0.99",
    "diskUsageWarnThreshold": "0.99",
    "dbStorage_writeCacheMaxSizeMb": "16",
    "dbStorage_readAheadCacheMaxSizeMb": "16",
    "managedLedgerCacheSizeMB": "32",
    "nettyMaxFrameSizeBytes": "5253120",
    # One broker that serves one test process needs few threads; each of its pools is as large as the machine otherwise.
    "numIOThreads": "2",
    "numHttpServerThreads": "8",
    "numOrderedExecutorThreads": "2",
    "numCacheExecutorThreadPoolSize": "2",
    "managedLedgerNumSchedulerThreads": "2",
    "bookkeeperNumberOfChannelsPerBookie": "1",
    "bookkeeperClientNumWorkerThreads": "1",
    "bookkeeperClientNumIoThreads": "1",
    # A bookie that answers late after a kill is the only one there is.
    "bookkeeperClientHealthCheckEnabled": "false",
    "topicLevelPoliciesEnabled": "true",
    "systemTopicEnabled": "true",
    "transactionCoordinatorEnabled": "false",
    "functionsWorkerEnabled": "false",
    # What has no subscription yet is kept for the one that comes.
    "defaultRetentionTimeInMinutes": "-1",
    "defaultRetentionSizeInMB": "-1",
    "brokerDeduplicationProducerInactivityTimeoutMinutes": "10",
    "acknowledgmentAtBatchIndexLevelEnabled": "true",
    # Brokers before the fix of apache/pulsar#26475 forget which part of a batch was acked, unless it is stored so.
    "managedLedgerMaxUnackedRangesToPersistInMetadataStore": "-1",
    # What a cursor has of a batch is stored once a second, and not once a minute.
    "managedLedgerCursorPositionFlushSeconds": "1",
    "managedLedgerDefaultMarkDeleteRateLimit": "100",
    "delayedDeliveryTickTimeMillis": "100",
    # Members and connections that find out in seconds what takes Pulsar's defaults minutes.
    "activeConsumerFailoverDelayTimeMillis": "500",
    "keepAliveIntervalSeconds": "1",
    "retentionCheckIntervalInSeconds": "1",
    "managedLedgerMinLedgerRolloverTimeMinutes": "0",
    "managedLedgerMaxLedgerRolloverTimeMinutes": "1",
}
"""What every broker of the tests is started with."""

_OPENS: Final = (
    "java.base/java.io",
    "java.base/java.util.zip",
    "java.base/java.nio",
    "java.base/jdk.internal.misc",
    "java.base/sun.net",
    "java.base/jdk.internal.platform",
    "java.management/sun.management",
)
_DRIVERS: Final = "org.apache.pulsar.metadata.bookkeeper.PulsarMetadata"
_LOGGING: Final = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="error">
  <Appenders>
    <Console name="OUT"><PatternLayout pattern="%d{HH:mm:ss.SSS} %p %c{1} %m%n"/></Console>
  </Appenders>
  <Loggers><Root level="warn"><AppenderRef ref="OUT"/></Root></Loggers>
</Configuration>
"""


class PulsarServer:
    """One standalone. `options` are added to its configuration, by their own names.

    :param headers: what its health check is asked with, where it wants credentials.
    :param context: how the health check speaks TLS, where the server demands it.
    """

    def __init__(
        self,
        options: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        java_options: Sequence[str] = (),
    ) -> None:
        _sweep()
        self.directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self.options = dict(options or {})
        self._headers = dict(headers or {})
        self._tls = tls
        self._java_options = tuple(java_options)
        names = ("broker", "web", "bookie", *(("broker_tls", "web_tls") if tls is not None else ()))
        self._held = {name: _hold_port() for name in names}
        self.ports = {name: held.getsockname()[1] for name, held in self._held.items()}
        self.wires: dict[str, int] = {}
        """Listeners by name, each advertised with a port that is not the broker's but a proxy's; before the start."""
        self._child: ChildProcess | None = None

    @property
    def url(self) -> str:
        return f"pulsar://{_HOST}:{self.ports['broker']}?admin_url={self.admin_url}"

    @property
    def service_url(self) -> str:
        """What a raw client takes."""
        return f"pulsar://{_HOST}:{self.ports['broker']}"

    @property
    def admin_url(self) -> str:
        return f"http://{_HOST}:{self.ports['web']}"

    @property
    def port(self) -> int:
        return self.ports["broker"]

    @property
    def log(self) -> str:
        """All it has said, over all its runs."""
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.return_code is None

    @property
    def process_id(self) -> int:
        return self._running_child().pid

    def start(self) -> Self:
        """Start and wait until clients are served.

        :raises RuntimeError: it ends or is not ready in time; the end of its log is told.
        """
        assert not self.running, "this broker runs already"
        (self.directory / "log4j2.xml").write_text(_LOGGING)
        config = self.directory / "standalone.conf"
        config.write_text("".join(f"{name}={value}\n" for name, value in self._properties().items()))
        config.chmod(0o600)
        self._child = child = ChildProcess(self._command(config), self.directory / "log")
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._healthy():
                return self
            if child.return_code is not None:
                raise RuntimeError(f"Pulsar ended with {child.return_code}: {self.log[-4000:]}")
            time.sleep(0.05)
        told = self.log[-4000:]
        self.kill()
        raise RuntimeError(f"Pulsar is not ready after {START_SECONDS} s: {told}")

    def stop(self) -> None:
        """End it orderly: as a broker of a cluster does, it lets go of its topics first, which stores their cursors."""
        if self.running:
            with suppress(OSError):
                self.request("PUT", "/admin/v2/namespaces/public/default/unload")
        self.end(signal.SIGTERM)

    def kill(self) -> None:
        """End it without notice."""
        self.end(signal.SIGKILL)

    def end(self, how: signal.Signals, seconds: float = STOP_SECONDS) -> None:
        """End it by a signal. Nothing happens if it does not run."""
        child, self._child = self._child, None
        if child is not None:
            child.end(how, seconds)

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze it: connections stay and nothing moves."""
        self._running_child().pause()

    def resume(self) -> None:
        self._running_child().resume()

    def close(self) -> None:
        """Kill it, give its ports back and remove all it stored."""
        self.kill()
        for held in self._held.values():
            held.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(self, method: str, path: str) -> tuple[int, bytes]:
        """One call of its HTTP API: status and body. :raises OSError: nobody answers."""
        if self._tls is None:
            connection = http.client.HTTPConnection(_HOST, self.ports["web"], timeout=5)
        else:
            connection = http.client.HTTPSConnection(_HOST, self.ports["web_tls"], timeout=5, context=self._tls)
        try:
            connection.request(method, path, headers=self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()

    def _healthy(self) -> bool:
        try:
            status, body = self.request("GET", "/admin/v2/brokers/health")
            if (status, body.strip()) != (200, b"ok"):
                return False
            return self.request("GET", "/admin/v2/namespaces/public/default")[0] == 200
        except OSError:
            return False

    def _running_child(self) -> ChildProcess:
        assert self._child is not None, "this broker does not run"
        return self._child

    def _properties(self) -> dict[str, str]:
        found = {
            **TEST_OPTIONS,
            "brokerServicePort": str(self.ports["broker"]),
            "webServicePort": str(self.ports["web"]),
        }
        if self._tls is not None:
            found["brokerServicePortTls"] = str(self.ports["broker_tls"])
            found["webServicePortTls"] = str(self.ports["web_tls"])
        if self.wires:
            advertised = {"plain": self.ports["broker"], **self.wires}
            listeners = ",".join(f"{name}:pulsar://{_HOST}:{port}" for name, port in advertised.items())
            found |= {"advertisedListeners": listeners, "internalListenerName": "plain"}
            del found["advertisedAddress"]
        return found | self.options

    def _command(self, config: Path) -> list[str]:
        jars = jars_of(POM, "pulsar")
        archive = jars[0].parent / "classes.jsa"
        return [
            find_java("Pulsar")[0],
            "-Xms128m",
            "-Xmx384m",
            "-XX:MaxDirectMemorySize=256m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            *([f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []),
            *(f"--add-opens={each}=ALL-UNNAMED" for each in _OPENS),
            "-Dio.netty.tryReflectionSetAccessible=true",
            "-Djava.net.preferIPv4Stack=true",
            "-Dlog4j2.is.webapp=false",
            f"-Dlog4j2.configurationFile=file:{self.directory / 'log4j2.xml'}",
            f"-Dbookkeeper.metadata.bookie.drivers={_DRIVERS}BookieDriver",
            f"-Dbookkeeper.metadata.client.drivers={_DRIVERS}ClientDriver",
            *self._java_options,
            "-cp",
            f"{jars[0].parent}/*",
            "org.apache.pulsar.PulsarStandaloneStarter",
            "--config",
            str(config),
            "-nfw",
            "-nss",
            "-a",
            _HOST,
            "--metadata-dir",
            str(self.directory / "metadata"),
            "--bookkeeper-dir",
            str(self.directory / "bookkeeper"),
            "--bookkeeper-port",
            str(self.ports["bookie"]),
        ]


@cache
def shared_server() -> PulsarServer:
    """The plain broker of this test process, started at the first call and ended with the process."""
    server = PulsarServer()
    atexit.register(server.close)
    return server.start()


def _hold_port() -> socket.socket:
    """A free port, bound and not listened on: nobody is given it, and the broker can still bind and listen."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((_HOST, 0))
    return held


@cache
def _sweep() -> None:
    """Remove the directories of brokers whose owners were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)
