"""Size against divergence, with the Pareto front: names stand beside the plot, in the order of the points.

Names beside their points would cover each other, and other points. A column of names, pushed apart as far as their
height asks for and tied to their points by lines, cannot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quantforge.evaluation.report_page.axes import linear_axis, log_axis
from quantforge.evaluation.report_page.charts import Row
from quantforge.evaluation.report_page.drawing import ACCENT, INK, MUTED, Chart, draw
from quantforge.evaluation.verdict import Verdict
from quantforge.results.significant import significant

LETTER, APART = 6.3, 17  # pixels: of a letter, at most, and between names
LEFT, BELOW, ABOVE = 62, 40, 10
NAMES_SHARE = 0.45  # of the width, at most
_UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}  # of sizes, so that labels are short
TITLE = "KL divergence against size"


def front_chart(rows: Sequence[Row], verdict: Verdict) -> Chart | None:
    """Draw the models that differ from the reference, or return None where there are none."""
    differing = [row["weight_bytes"] for row in rows if (row["kl_mean"] or 0) > 0]
    unit = next(
        (name for name, least in _UNITS.items() if max(differing, default=0) >= least), "kB"
    )
    points = [
        {
            "name": verdict.names[index], "size": row["weight_bytes"] / _UNITS[unit], "kl": row["kl_mean"],
            "low": max(row["kl_mean"] - (row["kl_se"] or 0), row["kl_mean"] / 10),
            "high": row["kl_mean"] + (row["kl_se"] or 0), "front": index in verdict.front,
        }
        for index, row in enumerate(rows) if (row["kl_mean"] or 0) > 0
    ]  # fmt: skip
    if not points:
        return None
    described = ", ".join(
        f"{point['name']} {significant(point['size'])} {unit}, KL {significant(point['kl'])}"
        + (" (on the Pareto front)" if point["front"] else "")
        for point in points
    )
    note = (
        "Down and left is better. Filled points and the line are the Pareto front: no other model is "
        "as small and as close to the reference. Lines through points: one standard error."
    )
    return draw(
        TITLE, note, f"{TITLE}: {described}", lambda width: _specification(points, unit, width)
    )


def spread(wanted: Sequence[float], apart: float, least: float, most: float) -> list[float]:
    """Return places near the wanted ones (ascending), at least ``apart``, from ``least`` to ``most`` if they fit."""
    places: list[float] = []
    for want in wanted:
        places.append(max(want, places[-1] + apart if places else least))
    limit = most
    for index in range(len(places) - 1, -1, -1):
        places[index] = max(min(places[index], limit), least + index * apart)
        limit = places[index] - apart
    return places


def shortened(name: str, letters: int) -> str:
    """Return a name of at most so many letters, its middle left out."""
    if len(name) <= letters:
        return name
    head = max(1, (letters - 1) // 2)
    return f"{name[:head]}…{name[len(name) - (letters - 1 - head) :]}"


def _specification(points: Sequence[Row], unit: str, width: int) -> dict[str, Any]:
    longest = max(len(point["name"]) for point in points)
    names = min(longest * LETTER + 24, NAMES_SHARE * width)
    plot, height = width - LEFT - names, max(280, APART * (len(points) + 1))
    sizes = [point["size"] for point in points]
    room = max(0.08 * (max(sizes) - min(sizes)), 0.03 * max(sizes))
    low = math.log10(min(point["low"] for point in points)) - 0.08
    high = math.log10(max(point["high"] for point in points)) + 0.08
    ordered = sorted(points, key=lambda point: (-point["kl"], point["size"]))
    tops = [(high - math.log10(point["kl"])) / (high - low) * height for point in ordered]
    letters = int((names - 20) / LETTER)
    values = [
        {**point, "label": shortened(point["name"], letters),
         "label_kl": 10 ** (high - top / height * (high - low)), "edge": max(sizes) + room}
        for point, top in zip(ordered, spread(tops, APART, 6, height - 6), strict=True)
    ]  # fmt: skip
    x = {"type": "quantitative", "title": f"weights ({unit})",
         **linear_axis([min(sizes) - room, max(sizes) + room], plot)}  # fmt: skip
    y = {
        "type": "quantitative",
        "title": "KL divergence (nats per token)",
        **log_axis([10**low, 10**high]),
    }
    y["axis"] |= {"titlePadding": 12}
    across = {"x": {**x, "field": "size"}, "y": {**y, "field": "kl"}}
    fill = {"condition": {"test": "datum.front", "value": ACCENT}, "value": "var(--paper)"}
    return {
        "width": plot, "height": height, "autosize": "none", "data": {"values": values},
        "padding": {"left": LEFT, "right": names, "top": ABOVE, "bottom": BELOW},
        "layer": [
            {"mark": {"type": "rule", "color": MUTED, "strokeDash": [1, 3]},
             "encoding": {**across, "x2": {"field": "edge"}, "y2": {"field": "label_kl"}}},
            {"mark": {"type": "text", "align": "left", "baseline": "middle", "dx": 6, "color": INK, "fontSize": 12},
             "encoding": {"x": {**x, "field": "edge"}, "y": {**y, "field": "label_kl"}, "text": {"field": "label"}}},
            {"transform": [{"filter": "datum.front"}], "mark": {"type": "line", "color": ACCENT, "strokeDash": [4, 3]},
             "encoding": {**across, "order": {"field": "size"}}},
            {"mark": {"type": "rule", "color": MUTED, "strokeWidth": 2},
             "encoding": {"x": across["x"], "y": {**y, "field": "low"}, "y2": {"field": "high"}}},
            {"mark": {"type": "point", "filled": True, "size": 80, "opacity": 1, "stroke": ACCENT, "strokeWidth": 2},
             "encoding": {**across, "fill": fill}},
        ],
    }  # fmt: skip
