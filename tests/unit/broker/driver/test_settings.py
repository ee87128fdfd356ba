"""Settings: sources of values, their precedence, and errors that say what to do and show no secret."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field, SecretStr, model_validator

from broker.driver.settings import BackendSettings, Form, Origin
from broker.errors import InvalidSetting, UnknownScheme, UnknownSetting
from broker.registry import load_backend
from broker.urls import UrlParts


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class ShopSettings(BackendSettings):
    schemes: ClassVar[tuple[str, ...]] = ("shop", "shop+tls")

    servers: tuple[str, ...] = ("localhost:1",)
    user: str | None = None
    password: SecretStr | None = None
    size: Annotated[int, Field(ge=1, le=10, description="How many fit in.")] = 3
    ratio: float = 0.5
    mode: Literal["fast", "safe"] = "safe"
    colour: Colour = Colour.RED
    verify: bool = True
    wait: timedelta = timedelta(seconds=5)
    folder: Path | None = None
    ports: tuple[int, ...] = ()
    prefix: Annotated[str, Field(pattern="[a-z]+", max_length=5)] = "shop"
    place: Annotated[str | None, Form(r"\w+:\d+", "a host and a port")] = None

    @classmethod
    def url_values(cls, parts: UrlParts) -> Mapping[str, Any]:
        cls.refuse_parts(parts, "path")
        values: dict[str, Any] = {}
        if parts.hosts:
            values["servers"] = tuple(map(str, parts.hosts))
        if parts.user is not None:
            values["user"] = parts.user
        if parts.password is not None:
            values["password"] = parts.password
        return values

    @model_validator(mode="after")
    def _user_needs_password(self) -> ShopSettings:
        if self.user == "root" and self.password is None:
            raise ValueError("root needs a password")
        return self


class PlainSettings(BackendSettings):
    schemes: ClassVar[tuple[str, ...]] = ("plain",)
    needed: str


def test_every_type_is_read_from_a_url():
    settings = ShopSettings.from_url(
        "shop://ann:pw@a:1,b?size=4&ratio=1.5&mode=fast&colour=blue&verify=false&wait=PT1M&folder=/x&ports=1,2"
    )
    assert settings.servers == ("a:1", "b")
    assert settings.password is not None
    assert settings.password.get_secret_value() == "pw"
    assert (settings.size, settings.ratio, settings.mode, settings.colour) == (4, 1.5, "fast", Colour.BLUE)
    assert (settings.verify, settings.wait, settings.folder) == (False, timedelta(minutes=1), Path("/x"))
    assert settings.ports == (1, 2)


def test_a_bare_scheme_is_all_defaults():
    settings = ShopSettings.from_url("shop:")
    assert settings.servers == ("localhost:1",)
    assert {info.origin.kind for info in settings.explain()} == {"default"}


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("size=x", "'size' .from url. is 'x'. It takes a whole number, at least 1, at most 10"),
        ("size=11", "'11'. It takes a whole number, at least 1, at most 10"),
        ("ratio=half", "'half'. It takes a number"),
        ("ratio=inf", "'inf': .*finite"),
        ("ratio=nan", "'nan': .*finite"),
        ("ratio=1e400", "'1e400': .*finite"),
        ("mode=slow", "'slow'. It takes one of fast, safe"),
        ("colour=green", "'green'. It takes one of red, blue"),
        ("verify=perhaps", "'perhaps'. It takes true or false"),
        ("verify=", "''. It takes true or false"),
        ("wait=soon", "'soon'. It takes a duration"),
        ("prefix=9", r"'prefix' .from url. is '9': String should match pattern '\[a-z\]\+'. It takes text"),
        ("place=a:1/b", r"'place' .from url. is 'a:1/b'\. It takes a host and a port$"),
        ("ports=1,x", "It takes a list split by commas, each a whole number"),
    ],
)
def test_a_malformed_value_is_reported_with_the_accepted_ones(query: str, says: str):
    with pytest.raises(InvalidSetting, match=says):
        ShopSettings.from_url(f"shop:?{query}")


def test_an_unknown_parameter_suggests_the_nearest():
    with pytest.raises(UnknownSetting, match=r"'sise' .from url.. Did you mean 'size'\?"):
        ShopSettings.from_url("shop:?sise=3")


@pytest.mark.parametrize("name", ["zzzzzz", "doctor"])
def test_an_unknown_parameter_near_nothing_lists_all(name: str):
    with pytest.raises(UnknownSetting, match="It has 'colour', 'folder'"):
        ShopSettings.from_url(f"shop:?{name}=3")


def test_a_keyword_argument_is_checked_like_a_parameter():
    with pytest.raises(UnknownSetting, match=r"Did you mean 'size'"):
        ShopSettings(sise=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(InvalidSetting, match=r"from argument.*at most 10"):
        ShopSettings(size=99)


def test_a_missing_setting_says_how_to_give_it():
    with pytest.raises(InvalidSetting, match=r"'needed' of PlainSettings is not given.*BROKER_PLAIN_NEEDED"):
        PlainSettings.from_url("plain:")


def test_contradicting_settings_say_why():
    with pytest.raises(InvalidSetting, match="do not fit together: root needs a password"):
        ShopSettings.from_url("shop://root@h")


def test_a_foreign_scheme_is_refused():
    with pytest.raises(UnknownScheme, match=r"'plain'. Use 'shop', 'shop\+tls'"):
        ShopSettings.from_url("plain:")


def test_an_unused_url_part_is_refused():
    with pytest.raises(InvalidSetting, match="takes no path, but '/x' is given"):
        ShopSettings.from_url("shop://h/x")
    with pytest.raises(InvalidSetting, match=r"takes no password, but \*\*\*"):
        PlainSettings.from_url("plain://:hidden@h?needed=1")


def test_a_setting_given_twice_is_refused():
    with pytest.raises(InvalidSetting, match="'user' is given by the parameter and by another part") as caught:
        ShopSettings.from_url("shop://ann:hidden@h?user=bob")
    assert "hidden" not in str(caught.value)


def test_the_environment_provides_what_the_url_omits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BROKER_SHOP_SIZE", "7")
    monkeypatch.setenv("broker_shop_mode", "fast")
    monkeypatch.setenv("BROKER_SHOP_PORTS", "5, 6")
    settings = ShopSettings.from_url("shop+tls://h?ratio=1")
    assert (settings.size, settings.mode, settings.ports) == (7, "fast", (5, 6))
    assert settings.origin("size") == Origin("environment", "BROKER_SHOP_SIZE")
    assert settings.origin("mode") == Origin("environment", "broker_shop_mode")
    assert settings.origin("ratio") == Origin("url")
    assert settings.origin("verify") == Origin("default")
    assert ShopSettings.from_url("shop:?size=2").size == 2
    assert ShopSettings(size=4).origin("size") == Origin("argument")


def test_a_malformed_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BROKER_SHOP_SIZE", "many")
    with pytest.raises(InvalidSetting, match=r"'size' \(from environment BROKER_SHOP_SIZE\) is 'many'"):
        ShopSettings.from_url("shop:")


def test_the_environment_overrides_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "shop.toml"
    file.write_text('size = 4\nmode = "fast"\nservers = ["a:1", "b:2"]\npassword = "pw"\n')
    monkeypatch.setenv("BROKER_SHOP_SIZE", "9")
    settings = ShopSettings.from_toml(file)
    assert (settings.size, settings.mode, settings.servers) == (9, "fast", ("a:1", "b:2"))
    assert settings.origin("size").kind == "environment"
    assert settings.origin("mode") == Origin("file", str(file))


def test_a_table_of_a_file_is_read(tmp_path: Path):
    file = tmp_path / "app.toml"
    file.write_text('title = "x"\n[brokers.main]\nsize = 4\n')
    assert ShopSettings.from_toml(file, table="brokers.main").size == 4
    with pytest.raises(InvalidSetting, match=r"no table \[brokers.other\]. Its tables are 'main'"):
        ShopSettings.from_toml(file, table="brokers.other")


def test_a_bad_file_says_what_is_wrong(tmp_path: Path):
    file = tmp_path / "shop.toml"
    with pytest.raises(InvalidSetting, match="cannot be read"):
        ShopSettings.from_toml(file)
    file.write_text("size = ")
    with pytest.raises(InvalidSetting, match="cannot be read"):
        ShopSettings.from_toml(file)
    file.write_text("sise = 3")
    with pytest.raises(UnknownSetting, match=r"'sise' \(from file .*shop.toml\). Did you mean 'size'"):
        ShopSettings.from_toml(file)
    file.write_text("size = 30")
    with pytest.raises(InvalidSetting, match=r"\(from file .*shop.toml\) is 30. It takes"):
        ShopSettings.from_toml(file)


def test_secrets_are_shown_nowhere():
    settings = ShopSettings.from_url("shop://ann:hush@h:1")
    shown = [repr(settings), str(settings), settings.url, str(settings.explain()), settings.model_dump_json()]
    assert not any("hush" in text for text in shown)
    assert settings.url == "shop://ann:***@h:1"
    assert next(info.value for info in settings.explain() if info.name == "password") == "***"


def test_a_malformed_secret_is_not_in_the_error():
    class Pins(BackendSettings):
        schemes: ClassVar[tuple[str, ...]] = ("pins",)
        pin: Annotated[SecretStr, Field(min_length=20)]

    with pytest.raises(InvalidSetting) as caught:
        Pins.from_url("pins:?pin=hush")
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "given",
    [{"servers": ("a", "b\0")}, {"user": "a\0"}, {"folder": Path("a\0")}, {"password": SecretStr("a\0"), "user": "a"}],
)
def test_no_value_has_a_nul(given: dict[str, Any]):
    with pytest.raises(InvalidSetting, match="It takes") as caught:
        ShopSettings(**given)
    assert next(iter(given)) in str(caught.value)


def test_settings_do_not_change():
    settings = ShopSettings.from_url("shop:")
    with pytest.raises(ValueError, match="frozen"):
        settings.size = 5


def test_replaced_values_leave_the_others_their_origin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BROKER_SHOP_RATIO", "0.25")
    settings = ShopSettings.from_url("shop://other:2?size=4").replaced({"mode": "fast"})
    assert (settings.servers, settings.size, settings.ratio, settings.mode) == (("other:2",), 4, 0.25, "fast")
    kinds = {name: settings.origin(name).kind for name in ("size", "ratio", "mode", "verify")}
    assert kinds == {"size": "url", "ratio": "environment", "mode": "argument", "verify": "default"}
    with pytest.raises(InvalidSetting, match=r"'size' \(from argument\) is 11"):
        settings.replaced({"size": 11})
    with pytest.raises(UnknownSetting, match="sise"):
        settings.replaced({"sise": 3})


def test_an_unknown_name_has_no_origin():
    with pytest.raises(UnknownSetting, match=r"Did you mean 'size'"):
        ShopSettings().origin("sizes")


def test_values_that_match_a_pattern_are_accepted():
    assert ShopSettings.from_url("shop:?place=a:1").place == "a:1"
    assert ShopSettings().place is None
    (accepts,) = (info.accepts for info in ShopSettings().explain() if info.name == "place")
    assert accepts == "a host and a port"


@pytest.mark.parametrize("scheme", ["inmem", "kafka", "nats", "pubsub", "pulsar", "servicebus"])
def test_no_backend_shows_a_pattern(scheme: str):
    for field in load_backend(scheme).settings_type.model_fields.values():
        assert not any(getattr(constraint, "pattern", None) for constraint in field.metadata)
