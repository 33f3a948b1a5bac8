"""The page of a bench: the rate of every technique or model as a picture, all figures as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.evaluation.made import Made
from quantforge.evaluation.report_page.charts import bars
from quantforge.evaluation.report_page.rendering import rendered
from quantforge.evaluation.report_page.sections import sortable
from quantforge.evaluation.serving_load.load_tables import bench_command, columns_of, lines_of

if TYPE_CHECKING:
    from quantforge.evaluation.serving_load.load_options import LoadFound

TEMPLATE = "load.html.jinja"
CAPTION = "Latency (ms) and throughput"
STEPS = "Each line is that technique with all before it, on the same requests."
MODELS = "Of all finished requests, from the first arrival to the last token."


def assemble_load(found: LoadFound) -> str:
    """Return the page; models are named by the last part of their paths."""
    ladder, rates = found.options.ladder, {}
    for row in found.rows:
        rates[row.name if ladder else Path(row.name).name] = row.figures.tokens_per_second
    charts = [bars("New tokens per second", STEPS if ladder else MODELS, rates)]
    names = ", ".join(Path(name).name for name in found.models)
    requests = f"{found.rows[-1].figures.requests} requests"
    return rendered(
        TEMPLATE,
        title=f"{names}: {'techniques one at a time' if ladder else 'under load'}, {requests}",
        made=Made.now(),
        charts=charts,
        item=sortable(CAPTION, columns_of(found, named=True)),
        notes=[*lines_of(found, named=True)],
        command=bench_command(found),
    )
