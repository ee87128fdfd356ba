"""The test files that docs/pipelines.md shows, run by pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_docs import ROOT, blocks
from tests.servers.spark_java import use_archive
from tests.servers.spark_python import quick_python

PAGE = ROOT / "docs" / "pipelines.md"
NAMED = re.compile(r"# (\w+\.py)\n")
OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR) (\S+)(?: - (.*))?$", re.MULTILINE)


def shown() -> dict[str, str]:
    """The files of the page, by the name in their first line."""
    named = {match[1]: block.code for block in blocks(PAGE) if (match := NAMED.match(block.code))}
    assert named.keys() == {"shop_pipeline.py", "conftest.py", "test_shop.py"}
    return named


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("spark-docs")
def test_the_shown_tests_pass_and_catch_mistakes(tmp_path: Path) -> None:
    files = shown()
    # Both in one process with one JVM. Each mistake fails one of the two tests.
    files["wrong_pipeline.py"] = files["shop_pipeline.py"]
    for good, bad in (("coffees >= 10", "coffees >= 9"), ('key="table"', 'key="coffees"')):
        assert good in files["wrong_pipeline.py"]
        files["wrong_pipeline.py"] = files["wrong_pipeline.py"].replace(good, bad)
    files["test_wrong.py"] = files["test_shop.py"].replace("from shop_pipeline", "from wrong_pipeline")
    for name, code in files.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    options = ["-q", "-rA", "--tb=short", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    use_archive()
    with quick_python():
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "test_shop.py", "test_wrong.py"],
            cwd=tmp_path,
            # Wide enough for the reasons.
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    reported = done.stdout + done.stderr
    found = {test: (outcome, why) for outcome, test, why in OUTCOME.findall(done.stdout)}
    assert found.keys() == {
        f"test_{module}.py::test_the_{what}" for module in ("shop", "wrong") for what in ("transform", "pipeline")
    }, reported
    assert [found[f"test_shop.py::test_the_{what}"][0] for what in ("transform", "pipeline")] == ["PASSED"] * 2, (
        reported
    )
    for what, wanted in (("transform", "assert [1, 2] == [2]"), ("pipeline", "assert [b'12'] == [b'1']")):
        outcome, why = found[f"test_wrong.py::test_the_{what}"]
        assert (outcome, why.removeprefix("AssertionError: ")) == ("FAILED", wanted), reported
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, reported
