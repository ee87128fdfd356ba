"""A strict parser of Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

__all__ = ["Family", "read_text"]

Labels = frozenset[tuple[str, str]]

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"')
_ESCAPES: Final = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_SUFFIXES: Final = ("_bucket", "_sum", "_count")


@dataclass(slots=True)
class Family:
    """One metric: its type, and its samples by full name and labels."""

    type: str
    help: str = ""
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)


def read_text(text: str) -> Mapping[str, Family]:
    """The metrics by name.

    :raises AssertionError: it is not the format, or breaks a rule of Prometheus.
    """
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    helps: dict[str, str] = {}
    current = ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, _, help_text = line.removeprefix("# HELP ").partition(" ")
            assert name not in helps, f"{name} has two HELP lines"
            helps[name] = help_text
        elif line.startswith("# TYPE "):
            current, _, kind = line.removeprefix("# TYPE ").partition(" ")
            assert _NAME.fullmatch(current), line
            assert kind in ("counter", "gauge", "histogram"), line
            assert current not in families, f"the lines of {current} are not together"
            families[current] = Family(kind, helps.get(current, ""))
        else:
            _read_sample(line, current, families[current])
    assert set(helps) <= set(families)
    for name, family in families.items():
        _check(name, family)
    return families


def _read_sample(line: str, current: str, family: Family) -> None:
    found = _NAME.match(line)
    assert found is not None, line
    name, rest = found[0], line[found.end() :]
    allowed = [current + suffix for suffix in _SUFFIXES] if family.type == "histogram" else [current]
    assert name in allowed, f"{line} is below the TYPE of {current}"
    labels: dict[str, str] = {}
    if rest.startswith("{"):
        at = 1
        while rest[at] != "}":
            label = _LABEL.match(rest, at)
            assert label is not None, line
            assert label[1] not in labels, line
            labels[label[1]] = re.sub(r"\\.", lambda escape: _ESCAPES[escape[0]], label[2])
            at = label.end()
            assert rest[at] in ",}", line
            at += rest[at] == ","
        rest = rest[at + 1 :]
    assert rest.startswith(" "), line
    key = (name, frozenset(labels.items()))
    assert key not in family.samples, f"{line} is there twice"
    family.samples[key] = float(rest[1:])


def _check(name: str, family: Family) -> None:
    assert family.samples, f"{name} has no sample"
    assert name.endswith("_total") == (family.type == "counter"), name
    if family.type == "counter":
        assert all(value >= 0 for value in family.samples.values()), name
    if family.type != "histogram":
        return
    buckets: dict[Labels, list[tuple[float, float]]] = {}
    for (sample, labels), value in family.samples.items():
        if sample == f"{name}_bucket":
            (bound,) = (text for label, text in labels if label == "le")
            rest = frozenset(each for each in labels if each[0] != "le")
            buckets.setdefault(rest, []).append((float(bound), value))
    for suffix in ("_sum", "_count"):
        assert {labels for sample, labels in family.samples if sample == name + suffix} == set(buckets), name
    for labels, found in buckets.items():
        assert found == sorted(found), f"the buckets of {name} do not rise"
        assert [value for _, value in found] == sorted(value for _, value in found), f"those of {name} do not add up"
        assert found[-1] == (inf, family.samples[f"{name}_count", labels]), name
