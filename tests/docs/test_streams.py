"""The tutorial of docs/streams.md, from its files to its last command, and the tests that the pages on streams name."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.docs.test_docs import ROOT, Block, blocks, commands, environment, matches, replaced, run_by_shell
from tests.holding import holding

__all__ = ["environment"]

PAGE = ROOT / "docs" / "streams.md"
NAMED = re.compile(r"# (\w+\.py)\n")
PAGES = [ROOT / "docs" / f"streams-{name}.md" for name in ("guarantees", "operations", "comparison")]
SECONDS = 60.0


def written(directory: Path) -> list[str]:
    """Write the files of the tutorial; return their names."""
    names: list[str] = []
    for block in blocks(PAGE):
        if match := NAMED.match(block.code):
            (directory / match[1]).write_text(block.code, encoding="utf-8")
            names.append(match[1])
    return names


def shown() -> list[Block]:
    """The blocks of commands."""
    return [block for block in blocks(PAGE) if block.language == "" and block.code.startswith("$ ")]


def test_the_tests_of_the_tutorial_pass(tmp_path: Path) -> None:
    assert written(tmp_path) == ["spending.py", "test_spending.py"]
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, "test_spending.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.timeout(300)
def test_the_commands_of_the_tutorial(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    url = environment["embedded:///var/lib/app"]
    _, before, after = shown()
    with holding(url):
        for command in commands(before):
            if command.text.startswith("broker "):
                assert run_by_shell(command.text)[0] == 0, command.text
        service = subprocess.Popen([sys.executable, "spending.py"], cwd=tmp_path)
        try:
            deadline = time.monotonic() + SECONDS
            while '"ada has spent 5300"' not in run_by_shell("broker peek warnings")[1]:
                assert service.poll() is None, "the service has ended"
                assert time.monotonic() < deadline, "the service has published nothing"
        finally:
            service.send_signal(signal.SIGINT)
            service.wait(SECONDS)
        for command in commands(after):
            _, output = run_by_shell(replaced(command.text, environment))
            assert matches(command.shown, output), f"{command.text}\nprinted:\n{output}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tests_that_a_page_names_exist(page: Path) -> None:
    known = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))
    }
    named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
    assert named - known - {path.stem for path in (ROOT / "tests").rglob("test_*.py")} == set()
