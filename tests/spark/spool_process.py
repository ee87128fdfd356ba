"""Drains a subscription as Spark does, with its write-ahead log, up to a step at which it is killed.

Each batch is one file of `out`, which is replaced if the batch runs again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from broker_spark.common.options import SourceOptions
from broker_spark.spool.source import SpoolPart, SpoolStreamReader
from tests.spark import spool_steps

__all__ = ["main"]


def main(url: str, topic: str, directory: str, step: str = "") -> None:
    """:param step: a step of `spool_steps`, and the number of the call; "" drains to the end."""
    name, _, number = step.partition(":")
    if name:
        spool_steps.STEPS[name](int(number))
    root = Path(directory)
    given = {"url": url, "topic": topic, "subscription": "spark", "spool": str(root / "spool"), "maxRows": "100"}
    reader = SpoolStreamReader(SourceOptions.parse(given).for_stream())
    for name in ("offsets", "commits", "out"):
        (root / name).mkdir(exist_ok=True)
    planned = [_load(path) for path in _numbered(root / "offsets")]
    done = len(_numbered(root / "commits"))
    reader.prepareForTriggerAvailableNow()
    start = planned[done - 1] if done else _initial(root, reader)
    if done < len(planned):
        start = _run(root, reader, done, start, planned[done])
        done += 1
    while (end := _plain(reader.latestOffset(start, reader.getDefaultReadLimit()))) != start:
        _save(root / "offsets" / str(done), end)
        if done:
            reader.commit(start)
        start = _run(root, reader, done, start, end)
        done += 1
    reader.stop()


def _run(root: Path, reader: SpoolStreamReader, number: int, start: Any, end: Any) -> Any:
    rows: list[str] = []
    for part in reader.partitions(start, end):
        assert isinstance(part, SpoolPart)
        rows += [row.decode() for batch in reader.read(part) for row in batch.to_pydict()["value"]]
    _save(root / "out" / str(number), rows)
    _save(root / "commits" / str(number), end)
    return end


def _initial(root: Path, reader: SpoolStreamReader) -> Any:
    # Spark stores the initial offset in its first batch only, and calls again if that was never planned.
    path = root / "initial"
    if not path.exists() or not _numbered(root / "offsets"):
        _save(path, reader.initialOffset())
    return _load(path)


def _numbered(directory: Path) -> list[Path]:
    return sorted(directory.glob("[0-9]*"), key=lambda path: int(path.name))


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _load(path: Path) -> Any:
    return json.loads(path.read_text())


def _save(path: Path, value: Any) -> None:
    half = path.with_name(f"half-{path.name}")
    half.write_text(json.dumps(value))
    half.replace(path)
