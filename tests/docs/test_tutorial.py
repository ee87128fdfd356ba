"""The test files of docs/tutorial.md, run by pytest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.docs.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "tutorial.md"
NAMED = re.compile(r"# (\w+\.py)\n")


def test_the_tests_of_the_tutorial_pass(tmp_path: Path) -> None:
    files = {match[1]: block.code for block in blocks(PAGE) if (match := NAMED.match(block.code))}
    assert files.keys() == {"billing.py", "test_billing.py", "test_billing_embedded.py"}
    for name, code in files.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, "test_billing.py", "test_billing_embedded.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout
