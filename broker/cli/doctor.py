"""`broker doctor`: the settings and their origin, whether the server answers, and the capabilities of the backend.

Changes nothing on the server. After a failure the results so far are shown, with what to do.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any, cast

from broker.cli.errors import Exit, Failure, error_json, exit_code
from broker.cli.output import print_line, show_table
from broker.cli.session import AsJson, Session, command, new_app
from broker.errors import BrokerError

__all__ = ["app"]

app = new_app("doctor")


@command(app, "doctor", connect=False)
async def doctor(session: Session, *, as_json: AsJson = False) -> None:
    """Check settings and connection.

    Also shows the capabilities of the backend.
    """
    report: dict[str, Any] = {"ok": False, "versions": _versions()}
    try:
        await _examine(session, report)
    except (BrokerError, Failure) as error:
        report["error"] = error_json(error)
        session.code = exit_code(error)
    if as_json:
        session.answer(report, "")
    else:
        _show(session, report)


async def _examine(session: Session, report: dict[str, Any]) -> None:
    settings = session.options.settings()
    report["url"] = settings.url
    report["source"] = session.options.source()
    report["settings"] = [
        {
            "name": line.name,
            "value": line.value,
            "origin": str(line.origin),
            "accepts": line.accepts,
            "description": line.description,
        }
        for line in settings.explain()
    ]
    from broker.bus import connect

    started = perf_counter()
    async with connect(settings) as bus:
        report["connect_seconds"] = perf_counter() - started
        report["capabilities"] = dict(_flat(bus.capabilities))
        health = await bus.health()
        report |= {"ok": health.ok, "round_trip_seconds": health.seconds, "detail": health.detail}
    if not report["ok"]:
        session.code = Exit.NO_CONNECTION


def _versions() -> dict[str, str]:
    try:
        own = version("anybroker")
    except PackageNotFoundError:
        own = "not installed"
    return {"anybroker": own, "python": platform.python_version(), "platform": platform.platform(terse=True)}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of the capabilities, by dotted name."""
    for field in fields(value):
        entry = getattr(value, field.name)
        if is_dataclass(entry):
            yield from _flat(entry, f"{prefix}{field.name}.")
        elif isinstance(entry, Mapping):
            named = cast("Mapping[str, Any]", entry)
            yield from ((f"{prefix}{field.name}.{name}", each) for name, each in named.items())
        else:
            yield f"{prefix}{field.name}", entry


def _show(session: Session, report: dict[str, Any]) -> None:
    versions = report["versions"]
    print_line(f"anybroker {versions['anybroker']}, Python {versions['python']}, {versions['platform']}")
    if "url" in report:
        print_line(f"{report['url']} (from {report['source']})")
        print_line("")
        show_table(
            ("SETTING", "VALUE", "ORIGIN"),
            [(line["name"], line["value"], line["origin"]) for line in report["settings"]],
        )
    if "capabilities" in report:
        print_line("")
        show_table(("CAPABILITY", "VALUE"), [(name, _shown(value)) for name, value in report["capabilities"].items()])
    print_line("")
    if "error" in report:
        error = report["error"]
        session.note(f"broker: {' '.join([error['message'].rstrip('.') + '.', error['advice']]).strip()}")
    elif report["ok"]:
        connected, trip = report["connect_seconds"] * 1000, report["round_trip_seconds"] * 1000
        print_line(f"Connected in {connected:.1f} ms, round trip {trip:.2f} ms. All is well.")
    else:
        session.note(f"broker: connected, but the health check failed: {report['detail']}")


def _shown(value: object) -> str:
    names = {True: "yes", False: "no", None: "-"}
    return names[value] if value is None or isinstance(value, bool) else str(value)
