"""Runs the examples of the documentation.

Every `python` block of README.md and docs/ is executed, those of a page one after the other in one namespace, as a
script that calls `asyncio.run` or with `await` at the top as in a notebook. BROKER_URL names a server of its own.
A word behind `python` in the fence says what else a block is:

    python notest     a fragment that cannot run; used sparingly
    python forever    runs until it is stopped, by Ctrl-C after two seconds
    python pytest     a test file, run by pytest
    python raises     ends with an error of `broker`
    python file       belongs into the file that its first line names, which a test of its own runs

In a `console` block each `$ broker …` line is run, by a shell where it is more than one command, and what the page
shows below is compared with what it printed; `…` stands for anything, within a line or as a line of its own.
`$ export NAME=value` holds for the page.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import broker
from broker.bus import connect
from broker.cli import main
from broker.errors import BrokerError
from broker_spark.testing import QUICK
from tests.holding import holding
from tests.servers import pubsub, pulsar
from tests.servers.kafka import shared_server
from tests.servers.servicebus import missing, shared_double
from tests.servers.spark_python import quick_python

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.exists()
]
FENCE = re.compile(
    r"^(?P<indent> *)(?P<mark>```+|~~~+) *(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=mark) *$",
    re.MULTILINE | re.DOTALL,
)
MARKERS = {"notest", "forever", "pytest", "raises", "file"}
FOREVER_SECONDS = 2.0
KAFKA = "kafka://localhost:9092"
"""What a page calls the Kafka broker of the tests."""
PUBSUB = "pubsub://my-project?emulator_host=localhost:8085"
"""What a page calls the Pub/Sub emulator of the tests."""
SERVICEBUS = "servicebus://policy:key@mine.servicebus.windows.net"
"""What a page calls the double of Service Bus."""
PULSAR = "pulsar://localhost:6650"
"""What a page calls the Pulsar broker of the tests."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    markers: frozenset[str]
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in FENCE.finditer(text):
        language, *markers = match["info"].split() or [""]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, frozenset(markers), textwrap.dedent(match["code"])))
    return found


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment and working directory of the page's code and commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BROKER_URL", f"embedded://{tmp_path}/broker")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return {"embedded:///var/lib/app": os.environ["BROKER_URL"]}


def replaced(text: str, places: Mapping[str, str]) -> str:
    for shown, real in places.items():
        text = text.replace(shown, real)
    return text


SPARK = (ROOT / "docs" / "spark.md", ROOT / "docs" / "pipelines.md")
"""Their JVM takes longer to start than other pages to run, and has a session that is not that of the tests of Spark."""


def marks(page: Path) -> list[pytest.MarkDecorator]:
    if page in SPARK:
        return [pytest.mark.timeout(600), pytest.mark.xdist_group("spark-docs")]
    text = page.read_text(encoding="utf-8")
    if PULSAR in text:
        # One worker starts that broker for all tests.
        return [pytest.mark.xdist_group("pulsar")]
    # One broker serves all workers, and the pages use the same names.
    return [pytest.mark.xdist_group("kafka-docs")] if KAFKA in text else []


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=marks(page)) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_page(page: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = blocks(page)
    if any(KAFKA in block.code for block in found):
        environment[KAFKA] = f"kafka://{shared_server().bootstrap}"
    if any(PUBSUB in block.code for block in found):
        environment[PUBSUB] = pubsub.shared_server().url
    if any(SERVICEBUS in block.code for block in found if block.language == "python"):
        environment[SERVICEBUS] = double_url()
    if any(PULSAR in block.code for block in found):
        environment[PULSAR] = pulsar.shared_server().service_url
        monkeypatch.setenv("BROKER_PULSAR_ADMIN_URL", pulsar.shared_server().admin_url)
    for block in found:
        assert block.markers <= MARKERS, f"{block.place}: unknown marker in {sorted(block.markers)}"

    module = type(sys)("__main__")
    # Pickle, type hints and dataclasses must find the block's definitions in its module.
    monkeypatch.setitem(sys.modules, "__main__", module)
    # The page's server keeps running between its blocks and commands.
    python = quick_python() if page in SPARK else nullcontext()
    if page in SPARK:
        make_spark_quick(tmp_path, monkeypatch)
    with python, holding(os.environ["BROKER_URL"]), asyncio.Runner() as runner:
        for block in found:
            if block.language == "python" and not block.markers & {"notest", "pytest", "file"}:
                run_python(block, runner, module.__dict__, environment)
            elif block.language == "console":
                for command in commands(block):
                    run_command(block, command, environment, monkeypatch)
        run_pytest([block for block in found if "pytest" in block.markers], environment, tmp_path)


def make_spark_quick(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults that a Spark installation may set for all sessions."""
    lines = [f"{name} {str(value).lower() if isinstance(value, bool) else value}\n" for name, value in QUICK.items()]
    (directory / "spark-defaults.conf").write_text("".join(lines))
    monkeypatch.setenv("SPARK_CONF_DIR", str(directory))


def run_python(block: Block, runner: asyncio.Runner, namespace: dict[str, Any], places: Mapping[str, str]) -> None:
    # Line numbers match the page, for tracebacks.
    tree = ast.parse("\n" * block.line + replaced(block.code, places), block.place)
    compiled = compile(tree, block.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    def execute() -> None:
        result = eval(compiled, namespace)  # noqa: S307
        if inspect.isawaitable(result):
            runner.run(_awaited(result))

    if "forever" in block.markers:
        stop = threading.Timer(FOREVER_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        stop.start()
        try:
            execute()
            assert not stop.is_alive(), f"{block.place}: it ended by itself"
        except KeyboardInterrupt:
            pass
        finally:
            stop.cancel()
    elif "raises" in block.markers:
        with pytest.raises(BrokerError):
            execute()
    else:
        execute()


async def _awaited(result: Awaitable[object]) -> None:
    await result


def run_pytest(tests: list[Block], places: Mapping[str, str], directory: Path) -> None:
    """Run the test files of a page, all in one process."""
    paths = [directory / f"test_block_{block.line}.py" for block in tests]
    for block, path in zip(tests, paths, strict=True):
        path.write_text(replaced(block.code, places))
    if paths:
        options = ["-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--rootdir", str(directory)]
        command = [sys.executable, "-m", "pytest", *options, *paths]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{tests[0].place} and those below:\n{done.stdout}{done.stderr}"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a console block and its shown output."""

    text: str
    shown: list[str]


def commands(block: Block) -> Iterator[Command]:
    lines = block.code.splitlines()
    while lines:
        line = lines.pop(0)
        if not line.startswith("$ "):
            continue
        text = line.removeprefix("$ ")
        while text.endswith("\\"):
            text += "\n" + lines.pop(0).removeprefix("> ")
        shown: list[str] = []
        while lines and not lines[0].startswith("$ "):
            shown.append(lines.pop(0).rstrip())
        while shown and not shown[-1]:
            shown.pop()
        yield Command(text, shown)


def run_command(block: Block, command: Command, places: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = replaced(command.text, places)
    if export := re.match(r"export (\w+)=", text):
        # In a shell, where an unquoted `&` ends the command.
        _, value = run_by_shell(f'{text}\nprintf %s "${export[1]}"')
        assert value == shlex.split(text)[1].removeprefix(f"{export[1]}="), f"{block.place}: {text} sets {value!r}"
        monkeypatch.setenv(export[1], value)
        return
    if not re.search(r"(^|[|;&(] *)broker ", text):
        return
    code, output = run_by_shell(text) if re.search(r"[|&;<>()$`*?~#]", text) else run_here(text)
    for shown, real in places.items():
        output = output.replace(real, shown)
    place = f"{block.place}: {command.text}"
    if not any(line.startswith("broker: ") for line in command.shown):
        assert code == 0, f"{place}: exit code {code}\n{output}"
    if command.shown:
        assert matches(command.shown, output), f"{place}\nshown:\n{chr(10).join(command.shown)}\nprinted:\n{output}"


def run_by_shell(text: str) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout


def run_here(text: str) -> tuple[int, str]:
    """Run `broker …` in this process, which has already loaded the modules."""
    _, *arguments = shlex.split(text)
    output = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        for stream in ("stdout", "stderr"):
            patch.setattr(sys, stream, output)
        code = main(arguments)
    return code, output.buffer.getvalue().decode()


def matches(shown: list[str], output: str) -> bool:
    parts = [r"(?:.*\n)*?" if line.strip() == "…" else f"{pattern(line)}\n" for line in shown]
    text = "".join(f"{line.rstrip()}\n" for line in output.splitlines())
    return re.fullmatch("".join(parts), text) is not None


def pattern(line: str) -> str:
    # Column widths depend on their contents, so blanks on the page match any number of blanks.
    return r" +".join(".*".join(map(re.escape, word.split("…"))) for word in re.split(r" +", line))


SETTINGS = re.compile(r"(<!-- settings of (?P<target>[\w.]+:\w+) -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL)


def settings_table(target: str) -> str:
    module, _, name = target.partition(":")
    lines = [
        f"| `{line.name}` | {line.value} | {line.accepts} | {line.description} |"
        for line in getattr(import_module(module), name)().explain()
    ]
    return "\n".join(["| setting | default | accepts | meaning |", "|---|---|---|---|", *lines]) + "\n"


def test_tables_of_settings_match_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("BROKER_")]:
        monkeypatch.delenv(variable)
    tables = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        wanted = SETTINGS.sub(lambda match: match[1] + settings_table(match["target"]) + match[4], text)
        tables += len(SETTINGS.findall(text))
        if os.environ.get("UPDATE_DOCS"):
            page.write_text(wanted, encoding="utf-8")
        else:
            assert text == wanted, f"{page.relative_to(ROOT)} is out of date: run UPDATE_DOCS=1 make docs"
    assert tables >= 2


CAPABILITIES = re.compile(r"(<!-- capabilities of (?P<url>\S+) -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL)


def double_url() -> str:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    return shared_double().url


async def capabilities_table(url: str) -> str:
    if KAFKA in url:
        url = url.replace(KAFKA, f"kafka://{shared_server().bootstrap}")
    elif PUBSUB in url:
        url = url.replace(PUBSUB, pubsub.shared_server().url)
    elif SERVICEBUS in url:
        url = url.replace(SERVICEBUS, double_url())
    elif PULSAR in url:
        url = url.replace(PULSAR, pulsar.shared_server().url)
    async with connect(url) as bus:
        lines = [f"| `{name}` | {value} |" for name, value in flat(bus.capabilities) if value != "{}"]
    return "\n".join(["| capability | value |", "|---|---|", *lines]) + "\n"


def flat(capabilities: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for field in fields(capabilities):
        value = getattr(capabilities, field.name)
        if is_dataclass(value):
            yield from flat(value, f"{prefix}{field.name}.")
        elif isinstance(value, bool):
            yield f"{prefix}{field.name}", "yes" if value else "no"
        else:
            yield f"{prefix}{field.name}", "none" if value is None else str(value)


@pytest.mark.xdist_group("pulsar")
async def test_tables_of_capabilities_match_the_backends() -> None:
    tables = 0
    for page in sorted((ROOT / "docs" / "backends").glob("*.md")):
        text = wanted = page.read_text(encoding="utf-8")
        for match in CAPABILITIES.finditer(text):
            tables += 1
            wanted = wanted.replace(match[0], match[1] + await capabilities_table(match["url"]) + match[4])
        if os.environ.get("UPDATE_DOCS"):
            page.write_text(wanted, encoding="utf-8")
        else:
            assert text == wanted, f"{page.relative_to(ROOT)} is out of date: run UPDATE_DOCS=1 make docs"
    assert tables >= 2


def test_the_comparison_of_output() -> None:
    assert matches(["a … c", "…", "end"], "a b  c\nx\ny\nend\n")
    assert matches(["a  b"], "a     b   \n")
    assert not matches(["a"], "a\nb\n")
    assert not matches(["a.c"], "abc\n")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in shown}


def test_links_between_pages_resolve() -> None:
    broken: list[str] = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            found = page.parent / target if target else page
            if not found.exists() or (anchor and anchor not in anchors(found)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not broken


ENTRY_POINT_GROUPS = {"backends", "cli"}


def test_mentioned_files_and_names_exist() -> None:
    wrong: list[str] = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        paths = re.findall(r"`((?:broker|broker_\w+|tests|docs|examples|benchmarks)/[\w./-]+)`", text)
        names = set(re.findall(r"`broker\.(\w+)[`(]", text)) - ENTRY_POINT_GROUPS
        wrong += [f"{page.relative_to(ROOT)}: {path}" for path in paths if not (ROOT / path).exists()]
        wrong += [
            f"{page.relative_to(ROOT)}: broker.{name}"
            for name in names
            if not hasattr(broker, name) and find_spec(f"broker.{name}") is None
        ]
    assert not wrong
