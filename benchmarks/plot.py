"""The plot of the findings and their targets: one PNG, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Finding, Section

__all__ = ["draw"]

_MET, _MISSED = "#3b7dd8", "#c0392b"
_CURVES_HEIGHT = 9.0
"""Height of a panel with curves, in bars."""


def draw(sections: Sequence[Section], path: Path) -> bool:
    """Draw a panel per section with an axis, and one per section with curves.

    A finding is a bar, with its spread as a line and its target as a mark.

    :returns: False if there is nothing to draw.
    """
    barred = [(section, found) for section in sections if section.axis and (found := _with_bars(section))]
    curved = [section for section in sections if section.curves]
    if not barred and not curved:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pyplot: Any = plt
    heights = [len(findings) + 1.5 for _, findings in barred] + [_CURVES_HEIGHT] * len(curved)
    figure, grid = pyplot.subplots(
        len(heights),
        1,
        figsize=(10, 0.34 * sum(heights) + 0.6),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    panels = list(grid[:, 0])
    for (section, findings), panel in zip(barred, panels, strict=False):
        _draw_bars(panel, section, findings)
    for section, panel in zip(curved, panels[len(barred) :], strict=True):
        _draw_curves(panel, section)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _draw_bars(panel: Any, section: Section, findings: Sequence[Finding]) -> None:
    names = [finding.what for finding in findings]
    medians = [finding.measured.median for finding in findings]
    colours = [_MET if finding.verdict == "met" else _MISSED for finding in findings]
    below = [finding.measured.median - finding.measured.least for finding in findings]
    above = [finding.measured.most - finding.measured.median for finding in findings]
    panel.barh(names, medians, color=colours, height=0.6)
    panel.errorbar(medians, names, xerr=(below, above), fmt="none", ecolor="#444444", elinewidth=1, capsize=2)
    for row, finding in enumerate(findings):
        panel.plot([_bar(finding)] * 2, [row - 0.42, row + 0.42], color="black", linewidth=2)
    panel.invert_yaxis()
    panel.set_title(f"{section.title} (black: the bar)", loc="left", fontsize=11)
    panel.set_xlabel(section.axis)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_curves(panel: Any, section: Section) -> None:
    colour = None
    for curve in section.curves:
        line = "--" if curve.beside else "-"
        points = zip(*curve.points, strict=True)
        (drawn,) = panel.plot(*points, line, marker="o", label=curve.name, color=colour if curve.beside else None)
        colour = drawn.get_color()
    if section.logarithmic:
        panel.set_xscale("log")
        panel.set_yscale("log")
    else:
        panel.set_xticks(sorted({x for curve in section.curves for x, _ in curve.points}))
        panel.set_ylim(bottom=0)
    panel.set_title(section.title, loc="left", fontsize=11)
    panel.set_xlabel(section.curve_axes[0])
    panel.set_ylabel(section.curve_axes[1])
    panel.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    panel.spines[["top", "right"]].set_visible(False)


def _with_bars(section: Section) -> list[Finding]:
    return [finding for finding in section.findings if _bar(finding) is not None]


def _bar(finding: Finding) -> float | None:
    return finding.at_most if finding.at_most is not None else finding.at_least
