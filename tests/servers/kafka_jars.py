"""Apache Kafka's jars, by Maven, in a cache outside the tree: `$XDG_CACHE_HOME/anybroker` or `~/.cache/anybroker`.

`distribution()` fills the cache at its first call on a machine (some 20 seconds) and downloads nothing afterwards. The
cache's name is a hash of `pom.xml`, of the Java version and of what else is kept, so another version is another cache.
It is filled beside its place, under a lock, and renamed when it is whole: processes that start together wait for one
of them, and what an interrupted one leaves is never used. What fails says what to install; nothing is skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from tests.servers.running import run_to_end

__all__ = ["Distribution", "cache_root", "distribution", "find_java", "jars_of", "locked"]

POM = Path(__file__).with_name("pom.xml")
FETCH_SECONDS = 600.0
_JAVA_MAJOR = 17
_CONTENT = 3  # raise this when the other content of the cache changes
_LOGGING = """status = error
appender.out.type = Console
appender.out.name = OUT
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1} %m%n
rootLogger.level = warn
rootLogger.appenderRef.out.ref = OUT
# Says "Kafka Server started".
logger.server.name = kafka.server.KafkaRaftServer
logger.server.level = info
# Says which transactions a broker that starts alone leaves open for ever.
logger.marks.name = kafka.coordinator.transaction.TransactionMarkerChannelManager
logger.marks.level = info
"""


class Distribution(NamedTuple):
    """A filled cache.

    :ivar bootstrap: what a formatted log directory holds: the feature levels of a new cluster.
    """

    java: str
    directory: Path
    bootstrap: Path

    def command(self, *arguments: str, memory: str = "512m") -> list[str]:
        """The command for Java with Kafka's classes; `arguments` are options, the main class and its arguments."""
        archive = self.directory / "classes.jsa"
        return [
            self.java,
            "-Xms128m",
            f"-Xmx{memory}",
            "-XX:+UseSerialGC",
            # Archived classes are not parsed and verified again: that halves the start.
            *([f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []),
            f"-Dlog4j2.configurationFile=file:{self.directory / 'log4j2.properties'}",
            "-Djava.net.preferIPv4Stack=true",
            "-cp",
            f"{self.directory / 'libs'}/*",
            *arguments,
        ]


@cache
def distribution() -> Distribution:
    """Kafka's jars, fetched if missing.

    :raises RuntimeError: Java or Maven is missing, or Maven cannot fetch.
    """
    java, version = find_java("Kafka")
    key = hashlib.sha256(POM.read_bytes() + f"{_LOGGING}{version}{_CONTENT}".encode()).hexdigest()[:12]
    place = cache_root() / f"kafka-{key}"
    found = Distribution(java, place, place / "bootstrap.checkpoint")
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.with_suffix(".lock")):
            if not place.exists():
                _fill(found)
    return found


def jars_of(pom: Path, name: str) -> list[Path]:
    """The jars of a Maven project, fetched into the cache if missing.

    :raises RuntimeError: Maven is missing, or cannot fetch.
    """
    place = cache_root() / f"{name}-{hashlib.sha256(pom.read_bytes()).hexdigest()[:12]}"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.with_suffix(".lock")):
            if not place.exists():
                partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
                try:
                    _fetch(pom, partial)
                    partial.rename(place)
                except BaseException:
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
    return sorted(place.glob("*.jar"))


def _fetch(pom: Path, directory: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise RuntimeError(
            "The tests against Kafka fetch it with Maven, which is not on the PATH; on Debian: apt install maven"
        )
    goals = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={directory}"]
    run_to_end(
        [maven, "-B", "-q", "-f", str(pom), *goals],
        f"Maven cannot fetch what {pom.name} names",
        seconds=FETCH_SECONDS,
    )


def cache_root() -> Path:
    """The directory of the cache."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "anybroker"


def find_java(whom: str) -> tuple[str, str]:
    """Java's path and version.

    :param whom: the server that needs it.
    :raises RuntimeError: it is missing or too old.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if java is None:
        raise RuntimeError(
            f"The tests against {whom} need Java {_JAVA_MAJOR} or newer, which is not "
            + (f"in JAVA_HOME={home!r}" if home else "on the PATH")
            + "; on Debian: apt install openjdk-17-jre-headless maven"
        )
    # Java first prints options from the environment.
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_TOOL_OPTIONS"}
    reported = subprocess.run([java, "-version"], env=environment, capture_output=True, text=True, check=False).stderr
    number = reported.partition('version "')[2].partition('"')[0]
    major = number.partition(".")[0].partition("-")[0]
    if not major.isdecimal() or int(major) < _JAVA_MAJOR:
        raise RuntimeError(
            f"The tests against {whom} need Java {_JAVA_MAJOR} or newer; {java} says {reported.strip()!r}"
        )
    return java, reported


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Only one process of the machine at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fill(wanted: Distribution) -> None:
    place = wanted.directory
    for old in place.parent.glob(f".{place.name}.*"):
        shutil.rmtree(old, ignore_errors=True)  # from an interrupted fetch; this process has the lock
    partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        (partial / "log4j2.properties").write_text(_LOGGING)
        _fetch(POM, partial / "libs")
        _format(wanted._replace(directory=partial), partial)
        partial.chmod(0o755)
        partial.rename(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _archive_classes(wanted)


def _format(partial: Distribution, target: Path) -> None:
    """Keep the output of Kafka's format tool, so that each start need not run it."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "server.properties"
        config.write_text(
            "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@127.0.0.1:1\n"
            "listeners=PLAINTEXT://127.0.0.1:2,CONTROLLER://127.0.0.1:1\ncontroller.listener.names=CONTROLLER\n"
            f"log.dirs={folder}/data\n"
        )
        tool = ["kafka.tools.StorageTool", "format", "--cluster-id", uuid4().hex[:22], "-c", str(config)]
        run_to_end(partial.command(*tool), "Kafka's storage tool fails", seconds=FETCH_SECONDS)
        shutil.copy(Path(folder) / "data" / "bootstrap.checkpoint", target)


def _archive_classes(filled: Distribution) -> None:
    """Use a broker once and archive the classes that the JVM loaded, which makes starts quicker."""
    from tests.servers.kafka import KafkaServer
    from tests.servers.kafka_client import use_all

    beside = filled.directory / ".classes.jsa"
    with KafkaServer(java_options=[f"-XX:ArchiveClassesAtExit={beside}"], kafka=filled) as server:
        use_all(server.bootstrap)
        server.end(signal.SIGTERM, seconds=60)
    if beside.exists():
        beside.rename(filled.directory / "classes.jsa")
