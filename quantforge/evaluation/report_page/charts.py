"""Charts of the HTML report: Vega-Lite specifications, rendered as SVG by the optional ``vl-convert-python`` wheel.

In all charts but one, models are rows with their names above the data, so that names may have any length. In the chart
of size against divergence, names next to their points would overlap each other and other points. There the names form a
column beside the plot, spread so that they do not overlap, and connected to their points by lines. Axes have ticks at
round values, at least three of them, whatever the range.

Every chart is rendered in a narrow and a wide version, and the page shows the one that fits, so that text is never
scaled down. Colors are CSS variables of the page, so that a chart follows the reader's light or dark mode. Screen
readers get one description per chart instead of its contents; all values are also in tables.
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

WIDE_PIXELS, NARROW_PIXELS = 640, 330
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
        "columnPadding": 30,  # the reader's font may be wider than the one used for layout
    },
}

_ROW_HEIGHT = 42  # pixels per model
_MODEL_AXIS = {
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

LETTER_WIDTH, LABEL_SPACING = 6.3, 17  # pixels: widest letter; distance between labels
LEFT_MARGIN, BOTTOM_MARGIN, TOP_MARGIN = 62, 40, 10  # pixels
MAX_LABEL_FRACTION = 0.45  # of the width of the chart
_SIZE_UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}  # units of sizes, for short labels
FRONT_TITLE = "KL divergence against size"

MIN_TICKS, MAX_TICKS = 3, 8  # ticks of an axis
_NARROW_AXIS = 210  # pixels; labels of round values may overlap on a shorter axis
_TICK_DIGITS = ((1,), (1, 3), (1, 2, 5))  # multiples of each power of ten, the coarsest first
_AXIS_STYLE = {"labelOverlap": "greedy", "gridColor": LINE}


@dataclass(frozen=True, slots=True)
class Chart:
    """A rendered chart.

    Attributes:
        title: text above the chart.
        note: text below the chart that explains how to read it.
        wide: SVG of `WIDE_PIXELS` pixels.
        narrow: SVG of `NARROW_PIXELS` pixels.
    """

    title: str
    note: str
    wide: str
    narrow: str


def error_bar_chart(title: str, note: str, values_with_errors: Figures) -> Chart:
    """Draw one value per model with its standard error."""
    values = [
        {"model": name, "value": value, "low": value - (error or 0), "high": value + (error or 0)}
        for name, value, error in values_with_errors
    ]
    description = ", ".join(
        f"{name} {significant(value)}" + (f" ± {significant(error)}" if error else "")
        for name, value, error in values_with_errors
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
    return draw_chart(
        title,
        note,
        f"{title}: {description}",
        lambda width: _per_model_specification(values, layers, width),
    )


def series_chart(
    title: str, note: str, series_label: str, values_by_model: Mapping[str, Mapping[str, float]]
) -> Chart:
    """Draw several values per model on a logarithmic axis, with one color per series.

    Args:
        title: title of the chart and its axis, with the unit.
        note: explanation of the chart.
        series_label: what distinguishes the series, e.g. "sequences at once".
        values_by_model: values by model and series name; at most three series.
    """
    values = [
        {"model": name, "series": key, "value": value}
        for name, values_by_series in values_by_model.items()
        for key, value in values_by_series.items()
    ]
    names = list(dict.fromkeys(str(item["series"]) for item in values))
    all_values = [
        value
        for values_by_series in values_by_model.values()
        for value in values_by_series.values()
    ]
    description = "; ".join(
        f"{name}: "
        + ", ".join(
            f"{series_label} {key} {significant(value)}" for key, value in values_by_series.items()
        )
        for name, values_by_series in values_by_model.items()
    )
    by_series = {"field": "series", "type": "nominal", "sort": names, "title": series_label}
    x = {
        "field": "value",
        "type": "quantitative",
        "title": title,
        **log_axis(log_domain(all_values)),
    }
    encoding = {"x": x}
    for channel, palette in (("color", SERIES), ("shape", ("circle", "square", "diamond"))):
        scale = {"domain": names, "range": list(palette[: len(names)])}
        encoding[channel] = {**by_series, "scale": scale}
    layers = [_layer("point", encoding, filled=True, size=80, opacity=1, yOffset=7)]
    return draw_chart(
        title,
        note,
        f"{title}. {description}",
        lambda width: _per_model_specification(values, layers, width),
    )


def quantile_chart(
    title: str, note: str, quantiles_by_model: Mapping[str, Mapping[str, float]]
) -> Chart:
    """Draw quantiles per model: a bar for the middle half of the tokens, a line for 90 %, and ticks beyond."""
    values = [
        {
            "model": name,
            **{
                f"q{key.replace('.', '_')}": max(value, 1e-9)
                for key, value in model_quantiles.items()
            },
        }
        for name, model_quantiles in quantiles_by_model.items()
    ]
    description = "; ".join(
        f"{name}: median {significant(model_quantiles['0.5'])}, 99 % of the tokens below"
        f" {significant(model_quantiles['0.99'])}"
        for name, model_quantiles in quantiles_by_model.items()
    )
    all_values = [
        max(value, 1e-9)
        for model_quantiles in quantiles_by_model.values()
        for value in model_quantiles.values()
    ]
    x = {"type": "quantitative", "title": title, **log_axis(log_domain(all_values))}

    def quantile_layer(mark: str, first: str, last: str = "", **style: object) -> dict[str, Any]:
        encoding: dict[str, Any] = {"x": {**x, "field": f"q{first}"}}
        if last:
            encoding["x2"] = {"field": f"q{last}"}
        return _layer(mark, encoding, yOffset=7, **style)

    layers = [
        quantile_layer("rule", "0_05", "0_95", color=ACCENT, strokeWidth=2),
        quantile_layer("rule", "0_25", "0_75", color=ACCENT, strokeWidth=10),
        quantile_layer("tick", "0_5", color=PAPER, thickness=2, size=10),
        quantile_layer("tick", "0_99", color=ACCENT, thickness=2, size=12),
        quantile_layer("tick", "0_999", color=MUTED, thickness=2, size=12),
    ]
    return draw_chart(
        title,
        note,
        f"{title}. {description}",
        lambda width: _per_model_specification(values, layers, width),
    )


def heat_map(title: str, note: str, values_by_model: Mapping[str, Sequence[float | None]]) -> Chart:
    """Draw one strip per model with a cell per block, darker for larger values; None leaves a gap."""
    values: list[dict[str, Any]] = [
        {"model": name, "block": block, "value": value}
        for name, block_values in values_by_model.items()
        for block, value in enumerate(block_values)
        if value is not None
    ]
    largest = [
        max(model_values, key=lambda item: float(item["value"]))
        for name in values_by_model
        if (model_values := [item for item in values if item["model"] == name])
    ]
    description = "; ".join(
        f"{item['model']}: most in block {item['block']}, {significant(item['value'])}"
        for item in largest
    )
    maximum, count = max(item["value"] for item in values), max(map(len, values_by_model.values()))
    thresholds = [maximum * step / len(HEAT) for step in range(1, len(HEAT))]
    labels = ["0", *map(significant, thresholds)]
    for item in values:
        item["step"] = sum(item["value"] >= threshold for threshold in thresholds)
    labeled_blocks = [index for index in range(count) if index % max(1, math.ceil(count / 12)) == 0]
    x = {
        "field": "block",
        "type": "ordinal",
        "title": "block",
        "axis": {"labelAngle": 0, "values": labeled_blocks, "grid": False},
    }
    legend = {"symbolType": "square", "symbolSize": 200, "symbolStrokeWidth": 0}
    color = {
        "field": "step",
        "type": "ordinal",
        "title": "error from",
        "scale": {"domain": list(range(len(HEAT))), "range": list(HEAT)},
        "legend": {**legend, "columns": 4, "labelExpr": f"{labels}[datum.value]"},
    }
    style = {"yOffset": 7, "height": 16, "stroke": PAPER, "strokeWidth": 0.5}
    layers = [_layer("rect", {"x": x, "color": color}, **style)]
    return draw_chart(
        title,
        note,
        f"{title}. {description}",
        lambda width: _per_model_specification(values, layers, width),
    )


def _layer(mark: str, encoding: Row, **style: object) -> dict[str, Any]:
    """Return a Vega-Lite layer."""
    return {"mark": {"type": mark, **style}, "encoding": encoding}


def _per_model_specification(
    values: Sequence[Row], layers: Sequence[Row], width: int
) -> dict[str, Any]:
    """Return the Vega-Lite specification of a chart with one row per model."""
    count = len({item["model"] for item in values})
    return {
        "width": width,
        "height": {"step": _ROW_HEIGHT} if count else 0,
        "data": {"values": values},
        "encoding": {"y": {**_MODEL_AXIS, "scale": {"type": "band", "padding": 0}}},
        "layer": list(layers),
    }


def front_chart(rows: Sequence[Row], verdict: Verdict) -> Chart | None:
    """Draw size against divergence with the Pareto front; return None if no model differs from the reference."""
    differing = [row["weight_bytes"] for row in rows if (row["kl_mean"] or 0) > 0]
    unit = next(
        (
            name
            for name, unit_bytes in _SIZE_UNITS.items()
            if max(differing, default=0) >= unit_bytes
        ),
        "kB",
    )
    points = [
        {
            "name": verdict.names[index],
            "size": row["weight_bytes"] / _SIZE_UNITS[unit],
            "kl": row["kl_mean"],
            "low": max(row["kl_mean"] - (row["kl_se"] or 0), row["kl_mean"] / 10),
            "high": row["kl_mean"] + (row["kl_se"] or 0),
            "front": index in verdict.pareto_front,
        }
        for index, row in enumerate(rows)
        if (row["kl_mean"] or 0) > 0
    ]
    if not points:
        return None
    description = ", ".join(
        f"{point['name']} {significant(point['size'])} {unit}, KL {significant(point['kl'])}"
        + (" (on the Pareto front)" if point["front"] else "")
        for point in points
    )
    note = (
        "Down and left is better. Filled points and the line are the Pareto front: no other model is "
        "as small and as close to the reference. Lines through points: one standard error."
    )
    return draw_chart(
        FRONT_TITLE,
        note,
        f"{FRONT_TITLE}: {description}",
        lambda width: _front_specification(points, unit, width),
    )


def spread_labels(
    positions: Sequence[float], spacing: float, minimum: float, maximum: float
) -> list[float]:
    """Return label positions close to the given ones, but at least ``spacing`` apart.

    Args:
        positions: preferred positions in ascending order.
        spacing: minimum distance between two labels.
        minimum: smallest allowed position.
        maximum: largest allowed position, if the labels fit.
    """
    placed: list[float] = []
    for position in positions:
        placed.append(max(position, placed[-1] + spacing if placed else minimum))
    limit = maximum
    for index in range(len(placed) - 1, -1, -1):
        placed[index] = max(min(placed[index], limit), minimum + index * spacing)
        limit = placed[index] - spacing
    return placed


def shorten(name: str, max_letters: int) -> str:
    """Shorten a name to at most ``max_letters`` letters by replacing its middle with an ellipsis."""
    if len(name) <= max_letters:
        return name
    head = max(1, (max_letters - 1) // 2)
    return f"{name[:head]}…{name[len(name) - (max_letters - 1 - head) :]}"


def _front_specification(points: Sequence[Row], unit: str, width: int) -> dict[str, Any]:
    """Return the Vega-Lite specification of the chart of size against divergence."""
    longest = max(len(point["name"]) for point in points)
    names_width = min(longest * LETTER_WIDTH + 24, MAX_LABEL_FRACTION * width)
    plot_width = width - LEFT_MARGIN - names_width
    height = max(280, LABEL_SPACING * (len(points) + 1))
    sizes = [point["size"] for point in points]
    margin = max(0.08 * (max(sizes) - min(sizes)), 0.03 * max(sizes))
    log_low = math.log10(min(point["low"] for point in points)) - 0.08
    log_high = math.log10(max(point["high"] for point in points)) + 0.08
    points_by_kl = sorted(points, key=lambda point: (-point["kl"], point["size"]))
    label_tops = [
        (log_high - math.log10(point["kl"])) / (log_high - log_low) * height
        for point in points_by_kl
    ]
    max_letters = int((names_width - 20) / LETTER_WIDTH)
    values = [
        {
            **point,
            "label": shorten(point["name"], max_letters),
            "label_kl": 10 ** (log_high - top / height * (log_high - log_low)),
            "edge": max(sizes) + margin,
        }
        for point, top in zip(
            points_by_kl, spread_labels(label_tops, LABEL_SPACING, 6, height - 6), strict=True
        )
    ]
    x = {
        "type": "quantitative",
        "title": f"weights ({unit})",
        **linear_axis([min(sizes) - margin, max(sizes) + margin], plot_width),
    }
    y = {
        "type": "quantitative",
        "title": "KL divergence (nats per token)",
        **log_axis([10**log_low, 10**log_high]),
    }
    y["axis"] |= {"titlePadding": 12}
    at_point = {"x": {**x, "field": "size"}, "y": {**y, "field": "kl"}}
    at_label = {"x": {**x, "field": "edge"}, "y": {**y, "field": "label_kl"}}
    error = {"x": at_point["x"], "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    fill = {"condition": {"test": "datum.front", "value": ACCENT}, "value": PAPER}
    connector = {**at_point, "x2": {"field": "edge"}, "y2": {"field": "label_kl"}}
    line = {**at_point, "order": {"field": "size"}}
    text = {"align": "left", "baseline": "middle", "dx": 6, "color": INK, "fontSize": 12}
    point = {"filled": True, "size": 80, "opacity": 1, "stroke": ACCENT, "strokeWidth": 2}
    return {
        "width": plot_width,
        "height": height,
        "autosize": "none",
        "data": {"values": values},
        "padding": {
            "left": LEFT_MARGIN,
            "right": names_width,
            "top": TOP_MARGIN,
            "bottom": BOTTOM_MARGIN,
        },
        "layer": [
            _layer("rule", connector, color=MUTED, strokeDash=[1, 3]),
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
    """Return the limits of a logarithmic axis with a margin around the values, which must be positive."""
    log_low, log_high = math.log10(min(values)), math.log10(max(values))
    margin = 0.04 * max(log_high - log_low, 0.1)
    return [10 ** (log_low - margin), 10 ** (log_high + margin)]


def log_axis(domain: Sequence[float]) -> dict[str, Any]:
    """Return scale and axis of a logarithmic domain, with ticks at powers of ten or round values between them."""
    low, high = domain
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in _TICK_DIGITS:
        candidates = (digit * 10.0**power for power in powers for digit in digits)
        ticks = [candidate for candidate in candidates if low <= candidate <= high]
        if len(ticks) >= MIN_TICKS:
            break
    else:
        ticks = _round_values(low, high)
    ticks = ticks[:: math.ceil(len(ticks) / MAX_TICKS)]
    return {
        "scale": {"type": "log", "nice": False, "domain": [low, high]},
        "axis": {"values": ticks, "format": ".6~r", **_AXIS_STYLE},
    }


def linear_axis(domain: Sequence[float], width: float) -> dict[str, Any]:
    """Return scale and axis of a linear domain that is ``width`` pixels long."""
    low, high = domain
    if width < _NARROW_AXIS:
        ticks = [
            float(f"{low + fraction * (high - low):.3g}") for fraction in (1 / 6, 1 / 2, 5 / 6)
        ]
    else:
        ticks = _round_values(low, high)
    return {
        "scale": {"domain": [low, high], "nice": False, "zero": False},
        "axis": {"values": ticks, "format": ".6~r", **_AXIS_STYLE},
    }


def _round_values(low: float, high: float) -> list[float]:
    """Return the multiples of a round step (1, 2 or 5 times a power of ten) in a range, at least `MIN_TICKS`."""
    for step in _round_steps(high - low):
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first + 1 >= MIN_TICKS:
            return [number * step for number in range(first, last + 1)]
    raise AssertionError("steps become as small as it takes")


def _round_steps(value_range: float) -> Iterator[float]:
    """Yield steps of 5, 2 and 1 times powers of ten in decreasing order, starting near ``value_range``."""
    power = math.ceil(math.log10(value_range))
    while True:
        yield from (digit * 10.0**power for digit in (5, 2, 1))
        power -= 1


def check_drawing() -> None:
    """Check that charts can be rendered.

    Raises:
        UsageError: the ``vl-convert-python`` wheel is not installed.
    """
    try:
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "--report FILE.html needs the package vl-convert-python",
            "pip install 'quantforge[report]', or end the report in .md or .json",
        ) from error


def draw_chart(title: str, note: str, description: str, specification: Specification) -> Chart:
    """Render a chart in both widths.

    Args:
        title: title of the chart.
        note: explanation of the chart.
        description: text alternative for screen readers.
        specification: function from a width in pixels to a Vega-Lite specification.
    """
    wide, narrow = (
        _render_svg(specification(width), description) for width in (WIDE_PIXELS, NARROW_PIXELS)
    )
    return Chart(title, note, wide, narrow)


def _render_svg(specification: Mapping[str, Any], description: str) -> str:
    """Render a Vega-Lite specification as SVG with a description for screen readers."""
    import vl_convert

    document = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": 2,
        "config": _CONFIG,
        **specification,
    }
    svg = vl_convert.vegalite_to_svg(json.dumps(document), vl_version=VEGA_LITE)
    svg_tag, _, after_tag = svg.partition(">")
    width, height = re.findall(r'(?:width|height)="([\d.]+)"', svg_tag)
    head = (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(description)}">'
    )
    return head + after_tag
