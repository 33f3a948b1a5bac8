"""The charts of a report, as specifications of Vega-Lite.

In all of them models are rows with their names above, so that names may be as long as they like. The chart of size
against divergence is in `front_chart`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quantforge.evaluation.report_page.axes import log_axis, log_domain
from quantforge.evaluation.report_page.drawing import (
    ACCENT,
    HEAT,
    INK,
    MUTED,
    PAPER,
    SERIES,
    Chart,
    draw,
)
from quantforge.results.significant import significant

Row = Mapping[str, Any]
Figures = Sequence[tuple[str, float, float | None]]  # name, value, standard error
_ROW = 42  # pixels of a model
_NAMES = {
    "field": "model",
    "type": "nominal",
    "sort": None,
    "title": None,
    "axis": {
        "labelAlign": "left", "labelBaseline": "bottom", "labelPadding": -2, "labelOffset": -5,
        "labelColor": INK, "labelLimit": 300,
    },
}  # fmt: skip


def with_errors(title: str, note: str, figures: Figures) -> Chart:
    """Draw one figure of every model with its standard error."""
    values = [
        {"model": name, "value": value, "low": value - (error or 0), "high": value + (error or 0)}
        for name, value, error in figures
    ]
    described = ", ".join(
        f"{name} {significant(value)}" + (f" ± {significant(error)}" if error else "")
        for name, value, error in figures
    )
    x = {
        "type": "quantitative",
        "title": title,
        "scale": {"zero": False, "nice": True},
        "axis": {"tickCount": 6, "labelOverlap": True},
    }
    layers: list[Row] = [
        {"mark": {"type": "rule", "color": ACCENT, "strokeWidth": 2, "yOffset": 7},
         "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}}},
        {"mark": {"type": "point", "filled": True, "size": 70, "color": ACCENT, "opacity": 1, "yOffset": 7},
         "encoding": {"x": {**x, "field": "value"}}},
    ]  # fmt: skip
    return draw(title, note, f"{title}: {described}", lambda width: _rows(values, layers, width))


def series(title: str, note: str, what: str, figures: Mapping[str, Mapping[str, float]]) -> Chart:
    """Draw several figures of every model on a logarithmic axis, each series in its colour.

    Args:
        title: with the unit.
        note: how to read it.
        what: the series are called.
        figures: by model, then by name of the series; at most three.
    """
    values = [
        {"model": name, "series": key, "value": value}
        for name, found in figures.items()
        for key, value in found.items()
    ]
    names = list(dict.fromkeys(str(item["series"]) for item in values))
    every = [value for found in figures.values() for value in found.values()]
    described = "; ".join(
        f"{name}: "
        + ", ".join(f"{what} {key} {significant(value)}" for key, value in found.items())
        for name, found in figures.items()
    )
    layers = [
        {"mark": {"type": "point", "filled": True, "size": 80, "opacity": 1, "yOffset": 7},
         "encoding": {
            "x": {"field": "value", "type": "quantitative", "title": title, **log_axis(log_domain(every))},
            "color": {"field": "series", "type": "nominal", "sort": names, "title": what,
                      "scale": {"domain": names, "range": list(SERIES[: len(names)])}},
            "shape": {"field": "series", "type": "nominal", "sort": names, "title": what,
                      "scale": {"domain": names, "range": ["circle", "square", "diamond"][: len(names)]}}}},
    ]  # fmt: skip
    return draw(title, note, f"{title}. {described}", lambda width: _rows(values, layers, width))


def quantiles(title: str, note: str, figures: Mapping[str, Mapping[str, float]]) -> Chart:
    """Draw quantiles of every model: half of the tokens as a bar, 90 % as a line, marks beyond."""
    values = [
        {"model": name, **{f"q{key.replace('.', '_')}": max(value, 1e-9) for key, value in found.items()}}
        for name, found in figures.items()
    ]  # fmt: skip
    described = "; ".join(
        f"{name}: median {significant(found['0.5'])}, 99 % of the tokens below {significant(found['0.99'])}"
        for name, found in figures.items()
    )
    every = [max(value, 1e-9) for found in figures.values() for value in found.values()]
    x = {"type": "quantitative", "title": title, **log_axis(log_domain(every))}

    def mark(kind: str, first: str, last: str = "", **looks: object) -> dict[str, Any]:
        encoding: dict[str, Any] = {"x": {**x, "field": f"q{first}"}}
        if last:
            encoding["x2"] = {"field": f"q{last}"}
        return {"mark": {"type": kind, "yOffset": 7, **looks}, "encoding": encoding}

    layers = [
        mark("rule", "0_05", "0_95", color=ACCENT, strokeWidth=2),
        mark("rule", "0_25", "0_75", color=ACCENT, strokeWidth=10),
        mark("tick", "0_5", color=PAPER, thickness=2, size=10),
        mark("tick", "0_99", color=ACCENT, thickness=2, size=12),
        mark("tick", "0_999", color=MUTED, thickness=2, size=12),
    ]
    return draw(title, note, f"{title}. {described}", lambda width: _rows(values, layers, width))


def heat(title: str, note: str, figures: Mapping[str, Sequence[float | None]]) -> Chart:
    """Draw one strip for each model, whose cells are its blocks, the darker the larger the figure; None has no cell."""
    values: list[dict[str, Any]] = [
        {"model": name, "block": block, "value": value}
        for name, found in figures.items()
        for block, value in enumerate(found)
        if value is not None
    ]
    largest = [
        max(own, key=lambda item: float(item["value"]))
        for name in figures
        if (own := [item for item in values if item["model"] == name])
    ]
    described = "; ".join(
        f"{item['model']}: most in block {item['block']}, {significant(item['value'])}"
        for item in largest
    )
    most, count = max(item["value"] for item in values), max(map(len, figures.values()))
    steps = [most * step / len(HEAT) for step in range(1, len(HEAT))]
    labels = ["0", *map(significant, steps)]
    for item in values:
        item["step"] = sum(item["value"] >= step for step in steps)
    wanted = [index for index in range(count) if index % max(1, math.ceil(count / 12)) == 0]
    layers = [
        {"mark": {"type": "rect", "yOffset": 7, "height": 16, "stroke": PAPER, "strokeWidth": 0.5},
         "encoding": {
            "x": {"field": "block", "type": "ordinal", "title": "block",
                  "axis": {"labelAngle": 0, "values": wanted, "grid": False}},
            "color": {"field": "step", "type": "ordinal", "title": "error from",
                      "scale": {"domain": list(range(len(HEAT))), "range": list(HEAT)},
                      "legend": {"symbolType": "square", "symbolSize": 200, "symbolStrokeWidth": 0,
                                 "columns": 4, "labelExpr": f"{labels}[datum.value]"}}}},
    ]  # fmt: skip
    return draw(title, note, f"{title}. {described}", lambda width: _rows(values, layers, width))


def _rows(values: Sequence[Row], layers: Sequence[Row], width: int) -> dict[str, Any]:
    """Return a chart whose rows are models."""
    count = len({item["model"] for item in values})
    return {
        "width": width,
        "height": {"step": _ROW} if count else 0,
        "data": {"values": values},
        "encoding": {"y": {**_NAMES, "scale": {"type": "band", "padding": 0}}},
        "layer": list(layers),
    }
