"""Ways to ship the package to a cluster whose Python does not have it, and the errors of the others."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shutil import copy, copytree, make_archive
from typing import NamedTuple
from uuid import uuid4

import pytest
from pyspark import cloudpickle
from pyspark.serializers import CloudPickleSerializer

import broker_spark
from broker.blocking import Bus, connect
from broker_spark.data_source import BrokerDataSource
from broker_spark.runtime.shipping import shipped_source
from tests.servers import nats
from tests.servers.spark import SparkCluster
from tests.spark.conftest import SETTINGS
from tests.spark.support import log, numbered, publish

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("shipped_program.py")
ROWS = numbered(30)


class Shipped(NamedTuple):
    """All our packages, for users who cannot install anything on the nodes."""

    packages: Path
    """A directory for the path."""
    archive: Path
    """The same in an archive."""
    environment: Path
    """A directory with `bin/python`, which has our packages."""
    packed: Path
    """The same in an archive."""
    python: Path
    """A Python with everything but our packages, as on the nodes."""


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    directory = tmp_path_factory.mktemp("shipped")
    environment, libraries = directory / "environment", directory / "libraries"
    packages = environment / "lib"
    for package in sorted(ROOT.glob("broker*")):
        # Compiled, since otherwise each Python process would compile it again.
        copytree(package, packages / package.name)
    archive = directory / "anybroker.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for source in sorted(packages.rglob("*.py")):
            file.write(source, source.relative_to(packages))
    libraries.mkdir()
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if "anybroker" not in installed.name:
            (libraries / installed.name).symlink_to(installed)
    python = directory / "python"
    write_python(python, f"{libraries}")
    (environment / "bin").mkdir()
    write_python(environment / "bin" / "python", f'$(dirname "$0")/../lib:{libraries}')
    packed = Path(make_archive(str(environment), "gztar", environment))
    return Shipped(packages, archive, environment, packed, python)


def write_python(path: Path, found_in: str) -> None:
    # `-S` leaves out installed packages, and so the links to ours.
    path.write_text(
        f'#!/bin/sh\nPYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{found_in}" exec "{sys.executable}" -S "$@"\n'
    )
    path.chmod(0o755)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    with SparkCluster(workers=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def bus() -> Iterator[Bus]:
    with connect(nats.shared_server().url) as bus:
        yield bus


class Told(NamedTuple):
    output: str
    copied: list[bytes]


Submit = Callable[..., Told]


@pytest.fixture
def submit(cluster: SparkCluster, shipped: Shipped, bus: Bus, tmp_path: Path) -> Submit:
    """`submit(options, arguments, PYTHONPATH=...)` runs the program with this environment and returns its result."""

    def call(options: Sequence[str] = (), arguments: Sequence[str] = (), **variables: str) -> Told:
        source, target = topics = [f"spark.{uuid4().hex[:12]}" for _ in range(2)]
        for topic in topics:
            bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, source, ROWS)
        home = {"SPARK_HOME": str(cluster.home), "SPARK_LOCAL_IP": "127.0.0.1"}
        environment = {**os.environ, **home, "PYSPARK_PYTHON": str(shipped.python), **variables}
        command = [str(cluster.home / "bin" / "spark-submit"), "--master", cluster.url, *options]
        for name, value in {**SETTINGS, "spark.executor.memory": "512m"}.items():
            command += ["--conf", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
        done = subprocess.run(
            [*command, str(PROGRAM), nats.shared_server().url, source, target, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return Told(done.stdout, sorted(body for _, body in log(bus, target)))

    return call


@pytest.mark.deep
def test_an_archive_is_found_by_a_path_from_here(shipped: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = shipped.archive
    monkeypatch.chdir(archive.parent)
    package = archive / "broker_spark"
    for path in (archive.name, f"./{archive.name}", str(archive)):
        assert shipped_source(BrokerDataSource, package, ["elsewhere", path]) is None, path
    assert shipped_source(BrokerDataSource, package, ["elsewhere", archive.parent.name]) is not None


def test_the_python_of_the_nodes_does_not_have_the_package(shipped: Shipped) -> None:
    program = [str(shipped.python), "-c", "import pyspark.worker, nats; import broker_spark"]
    done = subprocess.run(program, cwd=shipped.python.parent, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'broker_spark'"


@pytest.mark.deep
def test_a_path_that_all_nodes_have(submit: Submit, shipped: Shipped) -> None:
    path = str(shipped.packages)
    result = submit(["--conf", f"spark.executorEnv.PYTHONPATH={path}"], PYTHONPATH=path)
    assert result == all_of_it(shipped.packages)


@pytest.mark.deep
def test_a_packed_environment_that_is_unpacked_where_the_driver_starts(
    submit: Submit, shipped: Shipped, tmp_path: Path
) -> None:
    (tmp_path / "environment").symlink_to(shipped.environment)
    result = submit(["--archives", f"{shipped.packed}#environment"], PYSPARK_PYTHON="environment/bin/python")
    assert result == all_of_it(tmp_path / "environment" / "lib")


@pytest.mark.deep
def test_a_shipped_archive_that_the_driver_has_on_its_path(submit: Submit, shipped: Shipped, tmp_path: Path) -> None:
    archive = tmp_path / "anybroker.zip"
    copy(shipped.archive, archive)
    assert submit(["--py-files", archive.name], PYTHONPATH=archive.name) == all_of_it(archive)


@pytest.mark.deep
def test_a_shipped_archive_is_enough_for_all_but_streaming_sources(submit: Submit, shipped: Shipped) -> None:
    result = submit(["--py-files", str(shipped.archive)])
    came, batch, stream, sink = result.output.splitlines()
    assert "anybroker.zip" in came
    assert (batch, sink) == ("batch ok", "sink ok")
    assert "A streaming source of broker_spark cannot be read from anybroker.zip" in stream
    assert "Install anybroker on all nodes, or set PYTHONPATH" in stream
    assert result.copied == sorted([*ROWS, b"line"])


@pytest.mark.deep
def test_a_driver_with_the_package_ships_it_to_all_but_streaming_sources(submit: Submit, shipped: Shipped) -> None:
    result = submit(arguments=[str(shipped.archive)], PYSPARK_DRIVER_PYTHON=sys.executable)
    came, batch, stream, sink = result.output.splitlines()
    assert came == f"from {broker_spark.__file__}"
    assert (batch, sink) == ("batch ok", "sink ok")
    assert "A streaming source of broker_spark cannot be read from anybroker.zip" in stream
    assert result.copied == sorted([*ROWS, b"line"])


def test_sent_archives_are_searched_for_the_package(shipped: Shipped, tmp_path: Path) -> None:
    package = Path(broker_spark.__file__).parent
    other, text = tmp_path / "other.zip", tmp_path / "notes.txt"
    with zipfile.ZipFile(other, "w") as file:
        file.writestr("notes.txt", "")
    text.write_text("")
    missing = tmp_path / "missing.zip"
    assert shipped_source(BrokerDataSource, package, [], [other, text, missing]) is None
    assert shipped_source(BrokerDataSource, package, [], [other, shipped.archive]) is not None
    assert shipped_source(BrokerDataSource, package, [str(shipped.archive)], [shipped.archive]) is None


def test_the_package_cannot_be_pickled_by_value() -> None:
    cloudpickle.register_pickle_by_value(broker_spark)
    try:
        with pytest.raises(pickle.PicklingError, match="cannot pickle '_thread"):
            CloudPickleSerializer().dumps(BrokerDataSource)
    finally:
        cloudpickle.unregister_pickle_by_value(broker_spark)


def all_of_it(packages: Path) -> Told:
    """The result of the program if everything works."""
    module = packages / "broker_spark" / "__init__.py"
    return Told(f"from {module}\nbatch ok\nstream ok\n", sorted(ROWS * 2))
