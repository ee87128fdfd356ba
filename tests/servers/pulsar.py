"""A real Apache Pulsar standalone as a small object: start, stop, kill, restart, pause, resume. Loopback only.

Blocking, for fixtures and threads (`asyncio.to_thread` in a coroutine); every call returns when it is done. Ports and
data stay the same over restarts, and no other program can take the ports meanwhile. The broker, its bookie and its
metadata are one process, which ends with this one, however that ends. Its jars come from Maven once per machine, as
`pulsar.pom.xml` names them. A machine without Java or Maven fails here: nothing is skipped.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import signal
import ssl
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from tests.servers.kafka_jars import find_java, jars_of, locked
from tests.servers.server_process import ServerProcess
from tests.servers.shared import Shared

__all__ = ["POM", "TEST_OPTIONS", "PulsarServer", "archive_classes", "shared_server"]

POM: Final = Path(__file__).with_name("pulsar.pom.xml")
START_SECONDS = 180.0
_HOST = "127.0.0.1"

TEST_OPTIONS: Mapping[str, str] = {
    "clusterName": "standalone",
    "bindAddress": _HOST,
    "advertisedAddress": _HOST,
    # The defaults are for a cluster.
    "managedLedgerDefaultEnsembleSize": "1",
    "managedLedgerDefaultWriteQuorum": "1",
    "managedLedgerDefaultAckQuorum": "1",
    "loadBalancerEnabled": "false",
    "loadManagerClassName": "org.apache.pulsar.broker.loadbalance.NoopLoadManager",
    "allowLoopback": "true",
    "allowAutoTopicCreation": "false",
    "journalSyncData": "false",
    # On a fuller disk the only bookie would become read-only, and no topic could be opened. The largest float below 1:
    # the bookie writes as long as some kilobytes are free.
    "diskUsageThreshold": "0.9999999",
    "diskUsageWarnThreshold": "0.9999999",
    "dbStorage_writeCacheMaxSizeMb": "16",
    "dbStorage_readAheadCacheMaxSizeMb": "16",
    "managedLedgerCacheSizeMB": "32",
    "nettyMaxFrameSizeBytes": "5253120",
    # A broker of one test process needs few threads; by default each pool is as large as the machine.
    "numIOThreads": "2",
    "numHttpServerThreads": "8",
    "numOrderedExecutorThreads": "2",
    "numCacheExecutorThreadPoolSize": "2",
    "managedLedgerNumSchedulerThreads": "2",
    "bookkeeperNumberOfChannelsPerBookie": "1",
    "bookkeeperClientNumWorkerThreads": "1",
    "bookkeeperClientNumIoThreads": "1",
    # The only bookie may answer late after a kill.
    "bookkeeperClientHealthCheckEnabled": "false",
    "topicLevelPoliciesEnabled": "true",
    "systemTopicEnabled": "true",
    "transactionCoordinatorEnabled": "false",
    "functionsWorkerEnabled": "false",
    # Messages without a subscription are kept for later ones.
    "defaultRetentionTimeInMinutes": "-1",
    "defaultRetentionSizeInMB": "-1",
    "brokerDeduplicationProducerInactivityTimeoutMinutes": "10",
    "acknowledgmentAtBatchIndexLevelEnabled": "true",
    # Brokers before the fix of apache/pulsar#26475 lose the acked part of a batch, unless it is stored so.
    "managedLedgerMaxUnackedRangesToPersistInMetadataStore": "-1",
    # Acked parts of batches are stored once a second instead of once a minute.
    "managedLedgerCursorPositionFlushSeconds": "1",
    "managedLedgerDefaultMarkDeleteRateLimit": "100",
    "delayedDeliveryTickTimeMillis": "100",
    # Otherwise the broker delivers scheduled messages up to a tick early.
    "isDelayedDeliveryDeliverAtTimeStrict": "true",
    # Members and connections are checked within seconds instead of minutes.
    "activeConsumerFailoverDelayTimeMillis": "500",
    "keepAliveIntervalSeconds": "1",
    # A topic load that hangs after a kill of the broker fails after this time instead of a minute.
    "topicLoadTimeoutSeconds": "20",
    # A topic that does not close must not delay the shutdown beyond `stop_seconds`.
    "namespaceBundleUnloadingTimeoutMs": "20000",
    "brokerShutdownTimeoutMs": "20000",
    "retentionCheckIntervalInSeconds": "1",
    "managedLedgerMinLedgerRolloverTimeMinutes": "0",
    "managedLedgerMaxLedgerRolloverTimeMinutes": "1",
}
"""The configuration of every broker of the tests."""

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


class PulsarServer(ServerProcess):
    """One standalone. `options` are added to its configuration.

    :param headers: headers of the health check, if it requires credentials.
    :param tls: TLS of the health check, if the server requires it.
    :param bookie_api: whether the bookie can be told to write nothing, by `read_only`.
    """

    stop_seconds = 90.0

    def __init__(
        self,
        options: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        java_options: Sequence[str] = (),
        bookie_api: bool = False,
    ) -> None:
        super().__init__("pulsar")
        self.options = dict(options or {})
        self._headers = dict(headers or {})
        self._tls = tls
        self._java_options = tuple(java_options)
        names = ["broker", "web", "bookie"]
        if tls is not None:
            names += ["broker_tls", "web_tls"]
        if bookie_api:
            names.append("bookie_web")
        self.ports = self._hold_ports(*names)
        self.wires: dict[str, int] = {}
        """Add listeners by name that advertise the port of a proxy; before the start."""

    @property
    def url(self) -> str:
        return f"pulsar://{_HOST}:{self.ports['broker']}?admin_url={self.admin_url}"

    @property
    def service_url(self) -> str:
        """The service URL for a raw client."""
        return f"pulsar://{_HOST}:{self.ports['broker']}"

    @property
    def admin_url(self) -> str:
        return f"http://{_HOST}:{self.ports['web']}"

    @property
    def port(self) -> int:
        return self.ports["broker"]

    def start(self) -> Self:
        """Start and wait until clients are served.

        :raises RuntimeError: the server ends or is not ready in time; the error has the end of its log.
        """
        (self.directory / "log4j2.xml").write_text(_LOGGING)
        config = self.directory / "standalone.conf"
        config.write_text("".join(f"{name}={value}\n" for name, value in self._properties().items()))
        config.chmod(0o600)
        child = self._launch(self._command(config))
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._healthy():
                return self
            if child.return_code is not None:
                raise RuntimeError(f"Pulsar ended with {child.return_code}: {self.log[-4000:]}")
            time.sleep(0.05)
        reported = self.log[-4000:]
        self.kill()
        raise RuntimeError(f"Pulsar is not ready after {START_SECONDS} s: {reported}")

    def stop(self) -> None:
        """Shut down: as a broker of a cluster it unloads its topics first, which stores their cursors."""
        if self.running:
            with suppress(OSError):
                # Hundreds of topics take long on a busy machine, and an interrupted unload loses acks.
                self.request("PUT", "/admin/v2/namespaces/public/default/unload", seconds=self.stop_seconds)
        super().stop()

    def read_only(self, is_so: bool = True) -> None:
        """Make the bookie read-only, as on a full disk, or writable again; returns when the broker has noticed.

        Takes `bookie_api`.
        """
        # The broker writes the state of a namespace with its first topic, and would wait minutes for that.
        assert not is_so or self._can_open_topics()
        connection = http.client.HTTPConnection(_HOST, self.ports["bookie_web"], timeout=20)
        try:
            connection.request("PUT", "/api/v1/bookie/state/readonly", body=json.dumps({"readOnly": is_so}))
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        assert (answer.status, json.loads(content)) == (200, {"readOnly": is_so}), content
        deadline = time.monotonic() + START_SECONDS
        while self._can_open_topics() is is_so:
            assert time.monotonic() < deadline, f"the broker does not notice: {self.log[-4000:]}"
            time.sleep(0.01)

    def _can_open_topics(self) -> bool:
        place = f"/admin/v2/persistent/public/default/probe-{uuid.uuid4().hex}"
        can = self.request("PUT", place, seconds=START_SECONDS)[0] == 204
        self.request("DELETE", f"{place}?force=true", seconds=START_SECONDS)
        return can

    def request(self, method: str, path: str, *, seconds: float = 5.0) -> tuple[int, bytes]:
        """One call of its HTTP API: status and body. :raises OSError: the server does not answer."""
        if self._tls is None:
            connection = http.client.HTTPConnection(_HOST, self.ports["web"], timeout=seconds)
        else:
            connection = http.client.HTTPSConnection(_HOST, self.ports["web_tls"], timeout=seconds, context=self._tls)
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

    def _properties(self) -> dict[str, str]:
        found = {
            **TEST_OPTIONS,
            "brokerServicePort": str(self.ports["broker"]),
            "webServicePort": str(self.ports["web"]),
        }
        if self._tls is not None:
            found["brokerServicePortTls"] = str(self.ports["broker_tls"])
            found["webServicePortTls"] = str(self.ports["web_tls"])
        if "bookie_web" in self.ports:
            found |= {
                "httpServerEnabled": "true",
                "httpServerClass": "org.apache.bookkeeper.http.vertx.VertxHttpServer",
                "httpServerHost": _HOST,
                "httpServerPort": str(self.ports["bookie_web"]),
            }
        if self.wires:
            advertised = {"plain": self.ports["broker"], **self.wires}
            listeners = ",".join(f"{name}:pulsar://{_HOST}:{port}" for name, port in advertised.items())
            found |= {"advertisedListeners": listeners, "internalListenerName": "plain"}
            del found["advertisedAddress"]
        return found | self.options

    def _command(self, config: Path) -> list[str]:
        java, archive = _java()
        return [
            java,
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
            f"{archive.parent}/*",
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


def archive_classes() -> None:
    """Start a standalone once and store the classes that the JVM loaded; optional, for speed."""
    _, archive = _java()
    with locked(archive.with_suffix(".lock")):
        if not archive.exists():
            beside = archive.with_name(f".{archive.name}")
            with PulsarServer(java_options=[f"-XX:ArchiveClassesAtExit={beside}"]) as server:
                server.end(signal.SIGTERM, seconds=60)
            if beside.exists():
                beside.rename(archive)


def _java() -> tuple[str, Path]:
    """The path of Java, and of the stored classes of Pulsar: beside the jars, for this version of Java."""
    java, version = find_java("Pulsar")
    name = f"classes-{hashlib.sha256(version.encode()).hexdigest()[:12]}.jsa"
    return java, jars_of(POM, "pulsar")[0].parent / name


@Shared.in_groups
def shared_server() -> PulsarServer:
    """The plain broker of this test process.

    Callers are in the xdist group `pulsar`, so that only one worker starts it, which takes six seconds.
    """
    return PulsarServer(bookie_api=True)
