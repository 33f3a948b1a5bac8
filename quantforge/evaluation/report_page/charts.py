"""The charts of a report: specifications of Vega-Lite, drawn as SVG by the ``vl-convert-python`` wheel (optional).

In all charts but one, models are rows with their names above, so that names may be as long as they like. In the chart
of size against divergence, names beside their points would cover each other, and other points: a column of names beside
the plot, pushed apart as far as their height asks for and tied to their points by lines, cannot. Axes have marks at
round values, of which at least three can be read, whatever the range.

Every chart is drawn twice, for narrow and for wide places, and the page shows the one that fits: text is never scaled
down. Colours are names of the page's style, so that a chart follows its reader's light or dark setting. What is in a
drawing is hidden from screen readers behind one description; the figures themselves stand in tables.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from quantforge.artifacts.number_text import significant
from quantforge.errors import UsageError
from quantforge.evaluation.verdict import Verdict

Row = Mapping[str, Any]
Figures = Sequence[tuple[str, float, float | None]]  # name, value, standard error
Specification = Callable[[int], Mapping[str, Any]]  # of Vega-Lite, for a width in pixels

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
        "labelColor": MUTED,
        "titleColor": INK,
        "gridColor": LINE,
        "tickColor": LINE,
        "domain": False,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "ticks": False,
        "titlePadding": 8,
    },
    "legend": {
        "orient": "top",
        "labelColor": INK,
        "titleColor": INK,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 200,
        "titleLimit": 0,
        "columnPadding": 30,  # a reader's font may be wider than the one that is measured here
    },
}

_ROW = 42  # pixels of a model
_NAMES = {
    "field": "model",
    "type": "nominal",
    "sort": None,
    "title": None,
    "axis": {
        "labelAlign": "left",
        "labelBaseline": "bottom",
        "labelPadding": -2,
        "labelOffset": -5,
        "labelColor": INK,
        "labelLimit": 300,
    },
}

LETTER, APART = 6.3, 17  # pixels: of a letter, at most, and between names
LEFT, BELOW, ABOVE = 62, 40, 10  # pixels around the plot
NAMES_SHARE = 0.45  # of the width, at most
_UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}  # of sizes, so that labels are short
TITLE = "KL divergence against size"

LEAST_MARKS, MOST_MARKS = 3, 8  # of an axis
_NARROW = 210  # pixels in which round values may be too close to each other for their labels
_DIGITS = ((1,), (1, 3), (1, 2, 5))  # of each power, the coarsest first
_LOOKS = {"labelOverlap": "greedy", "gridColor": LINE}


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
    layers = [
        _layer(
            "rule",
            {"x": {**x, "field": "low"}, "x2": {"field": "high"}},
            color=ACCENT,
            strokeWidth=2,
            yOffset=7,
        ),
        _layer(
            "point",
            {"x": {**x, "field": "value"}},
            filled=True,
            size=70,
            color=ACCENT,
            opacity=1,
            yOffset=7,
        ),
    ]
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
    by_series = {"field": "series", "type": "nominal", "sort": names, "title": what}
    x = {"field": "value", "type": "quantitative", "title": title, **log_axis(log_domain(every))}
    encoding = {"x": x}
    for channel, looks in (("color", SERIES), ("shape", ("circle", "square", "diamond"))):
        scale = {"domain": names, "range": list(looks[: len(names)])}
        encoding[channel] = {**by_series, "scale": scale}
    layers = [_layer("point", encoding, filled=True, size=80, opacity=1, yOffset=7)]
    return draw(title, note, f"{title}. {described}", lambda width: _rows(values, layers, width))


def quantiles(title: str, note: str, figures: Mapping[str, Mapping[str, float]]) -> Chart:
    """Draw quantiles of every model: half of the tokens as a bar, 90 % as a line, marks beyond."""
    values = [
        {
            "model": name,
            **{f"q{key.replace('.', '_')}": max(value, 1e-9) for key, value in found.items()},
        }
        for name, found in figures.items()
    ]
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
        return _layer(kind, encoding, yOffset=7, **looks)

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
    x = {
        "field": "block",
        "type": "ordinal",
        "title": "block",
        "axis": {"labelAngle": 0, "values": wanted, "grid": False},
    }
    legend = {"symbolType": "square", "symbolSize": 200, "symbolStrokeWidth": 0}
    color = {
        "field": "step",
        "type": "ordinal",
        "title": "error from",
        "scale": {"domain": list(range(len(HEAT))), "range": list(HEAT)},
        "legend": {**legend, "columns": 4, "labelExpr": f"{labels}[datum.value]"},
    }
    looks = {"yOffset": 7, "height": 16, "stroke": PAPER, "strokeWidth": 0.5}
    layers = [_layer("rect", {"x": x, "color": color}, **looks)]
    return draw(title, note, f"{title}. {described}", lambda width: _rows(values, layers, width))


def _layer(mark: str, encoding: Row, **looks: object) -> dict[str, Any]:
    return {"mark": {"type": mark, **looks}, "encoding": encoding}


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


def front_chart(rows: Sequence[Row], verdict: Verdict) -> Chart | None:
    """Draw the models that differ from the reference, or return None where there are none."""
    differing = [row["weight_bytes"] for row in rows if (row["kl_mean"] or 0) > 0]
    unit = next(
        (name for name, least in _UNITS.items() if max(differing, default=0) >= least), "kB"
    )
    points = [
        {
            "name": verdict.names[index],
            "size": row["weight_bytes"] / _UNITS[unit],
            "kl": row["kl_mean"],
            "low": max(row["kl_mean"] - (row["kl_se"] or 0), row["kl_mean"] / 10),
            "high": row["kl_mean"] + (row["kl_se"] or 0),
            "front": index in verdict.front,
        }
        for index, row in enumerate(rows)
        if (row["kl_mean"] or 0) > 0
    ]
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
        TITLE,
        note,
        f"{TITLE}: {described}",
        lambda width: _front_specification(points, unit, width),
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


def _front_specification(points: Sequence[Row], unit: str, width: int) -> dict[str, Any]:
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
        {
            **point,
            "label": shortened(point["name"], letters),
            "label_kl": 10 ** (high - top / height * (high - low)),
            "edge": max(sizes) + room,
        }
        for point, top in zip(ordered, spread(tops, APART, 6, height - 6), strict=True)
    ]
    x = {
        "type": "quantitative",
        "title": f"weights ({unit})",
        **linear_axis([min(sizes) - room, max(sizes) + room], plot),
    }
    y = {
        "type": "quantitative",
        "title": "KL divergence (nats per token)",
        **log_axis([10**low, 10**high]),
    }
    y["axis"] |= {"titlePadding": 12}
    at_point = {"x": {**x, "field": "size"}, "y": {**y, "field": "kl"}}
    at_label = {"x": {**x, "field": "edge"}, "y": {**y, "field": "label_kl"}}
    error = {"x": at_point["x"], "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    fill = {"condition": {"test": "datum.front", "value": ACCENT}, "value": PAPER}
    tie = {**at_point, "x2": {"field": "edge"}, "y2": {"field": "label_kl"}}
    line = {**at_point, "order": {"field": "size"}}
    text = {"align": "left", "baseline": "middle", "dx": 6, "color": INK, "fontSize": 12}
    point = {"filled": True, "size": 80, "opacity": 1, "stroke": ACCENT, "strokeWidth": 2}
    return {
        "width": plot,
        "height": height,
        "autosize": "none",
        "data": {"values": values},
        "padding": {"left": LEFT, "right": names, "top": ABOVE, "bottom": BELOW},
        "layer": [
            _layer("rule", tie, color=MUTED, strokeDash=[1, 3]),
            _layer("text", {**at_label, "text": {"field": "label"}}, **text),
            {
                "transform": [{"filter": "datum.front"}],
                **_layer("line", line, color=ACCENT, strokeDash=[4, 3]),
            },
            _layer("rule", error, color=MUTED, strokeWidth=2),
            _layer("point", {**at_point, "fill": fill}, **point),
        ],
    }


def log_domain(values: Sequence[float]) -> list[float]:
    """Return the ends of a logarithmic axis, with some room around the values, which are above 0."""
    low, high = math.log10(min(values)), math.log10(max(values))
    room = 0.04 * max(high - low, 0.1)
    return [10 ** (low - room), 10 ** (high + room)]


def log_axis(domain: Sequence[float]) -> dict[str, Any]:
    """Return scale and axis from the first value of a domain to the last: powers, or as few of their parts as do."""
    low, high = domain
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for digits in _DIGITS:
        marks = (digit * 10.0**power for power in powers for digit in digits)
        found = [mark for mark in marks if low <= mark <= high]
        if len(found) >= LEAST_MARKS:
            break
    else:
        found = _round_values(low, high)
    found = found[:: math.ceil(len(found) / MOST_MARKS)]
    return {
        "scale": {"type": "log", "nice": False, "domain": [low, high]},
        "axis": {"values": found, "format": ".6~r", **_LOOKS},
    }


def linear_axis(domain: Sequence[float], width: float) -> dict[str, Any]:
    """Return scale and axis from the first value of a domain to the last, on so many pixels."""
    low, high = domain
    if width < _NARROW:
        found = [float(f"{low + share * (high - low):.3g}") for share in (1 / 6, 1 / 2, 5 / 6)]
    else:
        found = _round_values(low, high)
    return {
        "scale": {"domain": [low, high], "nice": False, "zero": False},
        "axis": {"values": found, "format": ".6~r", **_LOOKS},
    }


def _round_values(low: float, high: float) -> list[float]:
    """Return multiples of the largest step (1, 2 or 5 of a power of ten) that has enough of them within a range."""
    for step in _steps(high - low):
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first + 1 >= LEAST_MARKS:
            return [number * step for number in range(first, last + 1)]
    raise AssertionError("steps become as small as it takes")


def _steps(most: float) -> Iterator[float]:
    """Yield steps of 5, 2 and 1 of the powers of ten, from about a range downwards."""
    power = math.ceil(math.log10(most))
    while True:
        yield from (digit * 10.0**power for digit in (5, 2, 1))
        power -= 1


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
