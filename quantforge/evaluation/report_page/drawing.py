"""Drawing of charts: a specification of Vega-Lite becomes SVG, by the ``vl-convert-python`` wheel (optional).

Every chart is drawn twice, for narrow and for wide places, and the page shows the one that fits: text is never scaled
down. Colours are names of the page's style, so that a chart follows its reader's light or dark setting. What is in a
drawing is hidden from screen readers behind one description; the figures themselves stand in tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from quantforge.errors import UsageError

WIDE, NARROW = 640, 330  # pixels
VEGA_LITE = "6.1"
FONT = "Helvetica, Arial, Liberation Sans, sans-serif"
INK, MUTED, LINE, PAPER = "var(--ink)", "var(--muted)", "var(--line)", "var(--paper)"
ACCENT, SERIES = "var(--accent)", ("var(--series-1)", "var(--series-2)", "var(--series-3)")
HEAT = tuple(f"var(--heat-{step})" for step in range(7))
_CONFIG = {
    "font": FONT,
    "aria": False,
    "background": None,
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED, "titleColor": INK, "gridColor": LINE, "tickColor": LINE, "domain": False,
        "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "ticks": False, "titlePadding": 8,
    },
    "legend": {
        "orient": "top", "labelColor": INK, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12,
        "titleFontWeight": "normal", "labelLimit": 200, "titleLimit": 0,
        "columnPadding": 30,  # a reader's font may be wider than the one that is measured here
    },
}  # fmt: skip
Specification = Callable[[int], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn chart.

    Attributes:
        title: what stands above it.
        note: what stands below it: how to read it.
        wide: SVG of `WIDE` pixels.
        narrow: SVG of `NARROW` pixels.
    """

    title: str
    note: str
    wide: str
    narrow: str


def check_drawing() -> None:
    """Check that charts can be drawn.

    Raises:
        UsageError: the wheel is not installed.
    """
    try:
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "--report FILE.html needs the package vl-convert-python",
            "pip install 'quantforge[report]', or end the report in .md or .json",
        ) from error


def draw(title: str, note: str, description: str, specification: Specification) -> Chart:
    """Draw a chart.

    Args:
        title: of the chart.
        note: how to read it.
        description: what it shows, for those who do not see it.
        specification: of Vega-Lite, for a width in pixels.
    """
    wide, narrow = (_svg(specification(width), description) for width in (WIDE, NARROW))
    return Chart(title, note, wide, narrow)


def _svg(specification: Mapping[str, Any], description: str) -> str:
    import vl_convert

    whole = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": 2,
        "config": _CONFIG,
        **specification,
    }
    svg = vl_convert.vegalite_to_svg(json.dumps(whole), vl_version=VEGA_LITE)
    opening, _, rest = svg.partition(">")
    width, height = re.findall(r'(?:width|height)="([\d.]+)"', opening)
    head = (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(description)}">'
    )
    return head + rest
