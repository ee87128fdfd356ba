"""The registry: built-in schemes, registered ones, entry points, and errors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import pytest

import broker.blocking
from broker.driver.settings import BackendSettings
from broker.errors import ConfigurationError, InvalidSetting, MissingClient, UnknownScheme, UnknownSetting
from broker.hooks import Hooks
from broker.registry import create_backend, load_backend, register, schemes


class StubSettings(BackendSettings):
    schemes: ClassVar[tuple[str, ...]] = ("stub",)
    size: int = 1


class StubBackend:
    settings_type = StubSettings

    def __init__(self, settings: StubSettings, hooks: Hooks) -> None:
        self.settings = settings
        self.hooks = hooks


@pytest.fixture(autouse=True)
def _stub():
    stub: Any = StubBackend
    undo = register("stub", stub)
    yield
    undo()


def created(target: Any) -> Any:
    return create_backend(target, Hooks())


def test_a_url_makes_a_backend_with_its_settings():
    backend = created("stub:?size=4")
    assert isinstance(backend, StubBackend)
    assert backend.settings.size == 4


def test_a_settings_object_finds_its_backend():
    settings = StubSettings(size=7)
    assert created(settings).settings is settings


def test_a_bus_shows_where_it_goes_and_no_secret():
    for connect in (broker.connect, broker.blocking.connect):
        bus = connect("nats://me:hidden@localhost?name=app")
        assert bus.url.startswith("nats://me:***@localhost?name=app")
        assert "hidden" not in repr(bus)
        assert repr(connect("inmem:")) == "<Bus inmem:, not open>"


def test_without_a_target_the_environment_names_the_broker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BROKER_URL", "stub:?size=3")
    assert created(None).settings.size == 3
    monkeypatch.setenv("BROKER_URL", " ")
    with pytest.raises(ConfigurationError, match="set BROKER_URL"):
        created(None)


def test_invalid_parameters_raise_when_the_backend_is_created():
    with pytest.raises(UnknownSetting, match="Did you mean 'size'"):
        created("stub:?sise=4")
    with pytest.raises(InvalidSetting, match="not a broker URL"):
        created("localhost")


def test_an_unknown_scheme_suggests_the_nearest():
    with pytest.raises(UnknownScheme, match=r"'natss'. Did you mean 'nats'\?"):
        created("natss://localhost")


def test_an_unknown_scheme_near_nothing_lists_the_known():
    with pytest.raises(UnknownScheme, match=r"Known schemes: .*inmem, kafka"):
        load_backend("zzzzzz")


def test_an_object_that_is_not_settings_is_refused():
    with pytest.raises(ConfigurationError, match="type int names no broker"):
        created(5)


def test_settings_of_another_class_are_refused():
    class Impostor(BackendSettings):
        schemes: ClassVar[tuple[str, ...]] = ("stub",)

    with pytest.raises(ConfigurationError, match=r"settings of type Impostor. Use StubSettings"):
        created(Impostor())


def test_a_registration_can_be_undone_and_is_listed():
    stub: Any = StubBackend
    undo = register("passing", stub)
    assert "passing" in schemes()
    undo()
    undo()
    assert "passing" not in schemes()


@pytest.mark.parametrize(
    ("scheme", "target", "says"),
    [
        ("nats", "module:Class", "built in"),
        ("No Scheme", "module:Class", "'No Scheme' is invalid"),
        ("fine", "module.Class", "module:Class"),
    ],
)
def test_an_invalid_registration_is_refused(scheme: str, target: str, says: str):
    with pytest.raises(ConfigurationError, match=says):
        register(scheme, target)


def test_a_target_that_is_not_a_backend_is_refused():
    undo = register("wrong", "json:JSONDecoder")
    with pytest.raises(ConfigurationError, match="'json:JSONDecoder' of scheme 'wrong' is not a backend class"):
        load_backend("wrong")
    undo()


def run_python(code: str, folder: Path) -> str:
    """Run code in a fresh interpreter that finds modules in `folder` first; its output."""
    program = f"import sys; sys.path.insert(0, {str(folder)!r})\n{textwrap.dedent(code)}"
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


CLIENTS = ["nats", "nkeys", "confluent_kafka", "google.cloud", "grpc", "pulsar", "azure", "pyarrow", "typer", "rich"]


def test_importing_the_core_imports_no_backend_and_no_client(tmp_path: Path):
    printed = run_python(
        "import broker, broker.blocking; print(*sys.modules); import broker.driver.settings; print(*sys.modules)",
        tmp_path,
    )
    core, settings = (line.split() for line in printed.splitlines())
    assert not {name for name in settings if name in CLIENTS or name.startswith(("broker_", "nats."))}
    assert not {name for name in core if name.startswith("pydantic")}, "half of the time, and only for who connects"


def test_a_missing_client_names_the_exact_pip_line(tmp_path: Path):
    printed = run_python(
        """
        import broker.registry, broker.errors
        sys.modules["nats"] = None
        for scheme in ("nats", "embedded"):
            try:
                broker.registry.load_backend(scheme)
            except broker.errors.MissingClient as error:
                print(error)
        """,
        tmp_path,
    )
    nats, embedded = printed.splitlines()
    assert nats.endswith("Run: pip install 'anybroker[nats]'")
    assert embedded.endswith("Run: pip install 'anybroker[embedded]'")


def test_a_missing_module_that_is_not_the_client_is_raised_unchanged(tmp_path: Path):
    (tmp_path / "broker_kafka").mkdir()
    (tmp_path / "broker_kafka" / "__init__.py").write_text("")
    (tmp_path / "broker_kafka" / "backend.py").write_text("import a_typing_error_of_ours\n")
    printed = run_python(
        """
        import broker.registry
        try:
            broker.registry.load_backend("kafka")
        except ModuleNotFoundError as error:
            print(type(error).__name__, error.name)
        """,
        tmp_path,
    )
    assert printed.split() == ["ModuleNotFoundError", "a_typing_error_of_ours"]


def write_plugin(folder: Path, value: str, source: str) -> None:
    info = folder / "thirdparty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[broker.backends]\nthird = {value}\n")
    (folder / "thirdparty.py").write_text(textwrap.dedent(source))


def test_an_entry_point_is_found_by_its_scheme(tmp_path: Path):
    write_plugin(
        tmp_path,
        "thirdparty:Third",
        """
        from broker.driver.settings import BackendSettings
        class Settings(BackendSettings):
            schemes = ("third",)
            depth: int = 1
        class Third:
            settings_type = Settings
            def __init__(self, settings, hooks):
                self.settings = settings
        """,
    )
    printed = run_python(
        """
        import broker.registry, broker.hooks
        backend = broker.registry.create_backend("third:?depth=5", broker.hooks.Hooks())
        print(type(backend).__name__, backend.settings.depth, "third" in broker.registry.schemes())
        """,
        tmp_path,
    )
    assert printed.split() == ["Third", "5", "True"]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("thirdparty:Third [fast]", "pip install 'thirdparty[fast]'"),
        ("thirdparty:Third", "pip install a_client_nobody_has"),
    ],
)
def test_the_missing_client_of_an_entry_point_is_named(value: str, line: str, tmp_path: Path):
    write_plugin(tmp_path, value, "import a_client_nobody_has\n")
    printed = run_python(
        """
        import broker.registry, broker.errors
        try:
            broker.registry.load_backend("third")
        except broker.errors.MissingClient as error:
            print(error)
        """,
        tmp_path,
    )
    assert printed.strip().endswith(f"Run: {line}")


def test_the_missing_client_error_is_a_configuration_error():
    assert issubclass(MissingClient, ConfigurationError)
