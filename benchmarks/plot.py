"""The plot of the findings against their bars: one PNG, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Finding, Section

__all__ = ["draw"]

_MET, _MISSED = "#3b7dd8", "#c0392b"


def draw(sections: Sequence[Section], path: Path) -> bool:
    """A panel per section that has an axis; a bar per finding, its spread as a line, its bar as a mark.

    :returns: False if no section has one: then nothing is drawn.
    """
    shown = [(section, [f for f in section.findings if _bar(f) is not None]) for section in sections if section.axis]
    if not shown:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pyplot: Any = plt
    heights = [len(findings) + 1.5 for _, findings in shown]
    figure, panels = pyplot.subplots(
        len(shown),
        1,
        figsize=(10, 0.34 * sum(heights) + 0.6),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for (section, findings), panel in zip(shown, panels[:, 0], strict=True):
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
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _bar(finding: Finding) -> float | None:
    return finding.at_most if finding.at_most is not None else finding.at_least
