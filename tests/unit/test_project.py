"""The project's files: packages, lock, exports and documentation agree."""

from __future__ import annotations

import email
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from broker import registry

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
LOCKED = re.findall(
    r"^([a-z0-9._-]+)==\S+(?: ; [^\\]+)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", CONSTRAINTS, re.MULTILINE
)
"""The names of those requirements that have an exact version and hashes."""


def modules() -> list[str]:
    """Every module of the packages except the command line's start, which runs when imported."""
    found = list(PACKAGES)
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        found += [module.name for module in pkgutil.walk_packages(path, f"{package}.")]
    return [name for name in found if not name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_all_lists_names_of_the_module(name: str):
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert list(exported) == sorted(set(exported), key=exported.index)
    assert not [attribute for attribute in exported if not hasattr(module, attribute)]
    assert module.__doc__, "a module says what it promises"


def test_every_locked_requirement_has_hashes_and_no_index_is_named():
    requirements = re.findall(r"^[a-z0-9].*$", CONSTRAINTS, re.MULTILINE)
    assert len(LOCKED) == len(requirements) > 30
    assert not re.search(r"://|--(extra-)?index|--find-links|@ ", CONSTRAINTS)


def test_every_requirement_is_locked():
    extras = PROJECT["project"]["optional-dependencies"]
    groups = PROJECT["dependency-groups"]
    required = [
        *PROJECT["project"]["dependencies"],
        *(line for lines in (*extras.values(), *groups.values()) for line in lines),
    ]
    names = {re.split(r"[\[<>=]", line)[0] for line in required if isinstance(line, str)}
    assert names - {"anybroker"} <= set(LOCKED)


def test_every_backend_of_this_version_has_its_extra_and_is_in_all():
    extras = PROJECT["project"]["optional-dependencies"]
    shipped = {
        built_in.extra for built_in in registry._BUILT_IN.values() if built_in.target.partition(".")[0] in PACKAGES
    }
    assert shipped == {"inmem", "kafka", "nats", "embedded", "pubsub", "pulsar", "servicebus"}
    assert shipped <= set(extras)
    assert all(extra in extras["all"][0] for extra in shipped)


def test_the_wheel_holds_every_package_typed_and_licensed(tmp_path: Path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("anybroker-*.whl")
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {f"{package}/__init__.py" for package in PACKAGES} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    fields = email.message_from_bytes(archive.read(path))
    assert (fields["Author"], fields["License-Expression"]) == ("The anybroker authors", "Apache-2.0")


def test_the_version_is_in_the_changelog():
    assert f"## [{PROJECT['project']['version']}]" in (ROOT / "CHANGELOG.md").read_text()
