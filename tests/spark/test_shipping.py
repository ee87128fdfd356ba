"""The package in an archive that `spark-submit` ships: batch reads work, and a streaming one says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pyspark
import pytest

from broker.blocking import Bus
from broker_spark.data_source import BrokerDataSource
from broker_spark.home import home_without_archive
from broker_spark.shipping import shipped_source
from tests.spark.conftest import SETTINGS, MakeTopic
from tests.spark.support import numbered, publish

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("shipped_program.py")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All our packages, as somebody ships them who cannot install anything on the nodes."""
    path = tmp_path_factory.mktemp("shipped") / "anybroker.zip"
    with zipfile.ZipFile(path, "w") as file:
        for package in sorted(ROOT.glob("broker*")):
            for source in sorted(package.rglob("*.py")):
                file.write(source, source.relative_to(ROOT))
        # Where entry points are looked for: backends are found by them.
        for info in ROOT.glob("*.egg-info"):
            for each in sorted(info.iterdir()):
                file.write(each, f"anybroker-0.dist-info/{'METADATA' if each.name == 'PKG-INFO' else each.name}")
    return path


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This Python without our packages: `-S` leaves the links out by which they are installed here."""
    path = tmp_path_factory.mktemp("python") / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    path.chmod(0o755)
    return path


def submit(archive: Path, python: Path, work: Path, *arguments: str, path: str = "") -> str:
    real = Path(pyspark.__file__).parent
    # Python starts several times.
    home = home_without_archive(real, work) or real
    libraries = [sysconfig.get_path("purelib"), path]
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": str(python),
        "PYTHONPATH": os.pathsep.join(filter(None, libraries)),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [str(home / "bin" / "spark-submit"), "--master", "local[1]", "--py-files", str(archive)]
    for name, value in SETTINGS.items():
        command += ["--conf", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    command += [str(PROGRAM), *arguments]
    done = subprocess.run(
        command,
        env=environment,
        cwd=work,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_an_archive_is_found_by_a_path_from_here(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(archive.parent)
    package = archive / "broker_spark"
    for path in (archive.name, f"./{archive.name}", str(archive)):
        assert shipped_source(BrokerDataSource, package, ["elsewhere", path]) is None, path
    assert shipped_source(BrokerDataSource, package, ["elsewhere", archive.parent.name]) is not None


@pytest.mark.parametrize("url", ["kafka"], indirect=True)
def test_an_archive_says_how_to_read_streams(
    archive: Path, python: Path, bus: Bus, url: str, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic()
    publish(bus, topic, numbered(30))
    told = submit(archive, python, tmp_path, url, topic)
    assert "anybroker.zip" in told.splitlines()[0]
    assert "batch 30" in told
    assert "cannot be read from anybroker.zip" in told, told
    assert "PYTHONPATH" in told
    shutil.rmtree(tmp_path / "spark-warehouse", ignore_errors=True)
    told = submit(archive, python, tmp_path, url, topic, path=os.path.relpath(archive, tmp_path))
    assert "stream ok" in told
