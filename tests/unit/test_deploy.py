"""The dashboard and the alerts ask for metrics that exist, by labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker import metrics
from broker_spark.pipeline import metrics as pipeline_metrics
from broker_streams import metrics as stream_metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
KNOWN = {**metrics.HELP, **stream_metrics.HELP, **pipeline_metrics.HELP}
LABELS = {"topic", "delivery", "group", "partition", "state", "pipeline", "sink", "source", "expectation"}
OF_THE_SCRAPE = {"job", "instance", "le"}


def queries() -> list[str]:
    """Every expression in PromQL."""
    dashboard: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    alerts: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus-alerts.yaml").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return asked + [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("query", queries())
def test_the_metrics_exist(query: str) -> None:
    asked = set(re.findall(r"\banybroker_\w+", query))
    assert asked
    for name in asked:
        base = re.sub(r"_(bucket|sum|count)$", "", name) if name not in KNOWN else name
        assert base in KNOWN, f"{name} does not exist"
        assert (base == name) == (not base.endswith("_seconds")), f"{name} is not what a histogram is asked for"
    by = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
    assert by <= LABELS | OF_THE_SCRAPE


def test_every_counter_is_shown_as_a_rate() -> None:
    for query in queries():
        for name in re.findall(r"\banybroker_\w+_total\b", query):
            if not re.search(rf"(rate|increase)\({name}", query):
                # A connection that broke and is not back: two counters that are compared.
                assert "disconnects_total" in query


def test_alerts_say_what_is_wrong_and_what_to_do() -> None:
    alerts: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus-alerts.yaml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        by = {label.strip() for found in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in found.split(",")}
        assert labels <= by


def test_panels_do_not_overlap() -> None:
    dashboard: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells
        assert panel["title"]
