"""The page of a bench: every technique is in its picture and in its table, and it can be read at any width."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quantforge.evaluation.report_page.load_page import assemble_load
from quantforge.evaluation.serving_load.latency_figures import Slo, Waited, figures
from quantforge.evaluation.serving_load.load_options import LoadFound, LoadOptions, LoadRow
from quantforge.evaluation.serving_load.stream_of_requests import LengthRange, RequestStream
from quantforge.runtime.speculation.draft_options import DraftOptions
from scripts.report_pictures import SCHEMES, WIDTHS, browser, chromium, shown
from tests.unit.evaluation.test_report_page import COLLIDING, OVERFLOWING, TOUCHING

RUNGS = (
    "no cache",
    "cache, one request at a time",
    "+ quantized weights",
    "+ static batches",
    "+ continuous batching",
    "+ chunked prompts",
    "+ prefix cache",
    "+ cache in k=int8,v=int4",
    "+ activations of 8 bits",
)


def row(name: str, rate: float) -> LoadRow:
    """A technique that makes a token in ``1 / rate`` seconds."""
    served = [Waited(0.0, 8, [(one + 1) / rate for one in range(4)]) for _ in range(3)]
    return LoadRow(name, figures(served, Slo(ttft=1.0), 2.0), None, 0.031)


@pytest.fixture(scope="module")
def ladder() -> LoadFound:
    stream = RequestStream(3, prompt=LengthRange(8, 8), new=LengthRange(4, 6), shared=2, share=0.5)
    asked = LoadOptions(
        stream,
        slo=Slo(ttft=1.0, e2e=0.5),
        price=2.0,
        ladder=True,
        cache="k=int8,v=int4",
        drafts=DraftOptions("/somewhere/small", 5),
    )
    rows = [row(name, 2.0**place) for place, name in enumerate(RUNGS)]
    forecast = {"static": 0.5, "continuous": 0.9, "contiguous_waste": 0.4, "paged_waste": 0.03}
    return LoadFound(rows, forecast, asked, ("/somewhere/demo<b>", "/somewhere/demo-int4"), 8)


@pytest.fixture(scope="module")
def page(ladder: LoadFound, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "bench.html"
    path.write_text(assemble_load(ladder))
    return path


def test_the_picture_and_the_table_hold_every_technique(page: Path, ladder: LoadFound) -> None:
    text = page.read_text()
    picture, _, table = text.partition('id="tables"')
    for one in ladder.rows:
        assert one.name in picture
        assert one.name in table
    assert picture.count("<figure>") == 1
    assert table.count("<table") == 1
    for word in ("TTFT p50", "e2e p99", "goodput/s", "cost/M", "by arithmetic", "no cache"):
        assert word in table
    assert "<script>" in text
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_the_command_makes_it_again_and_no_path_is_told(page: Path) -> None:
    text = page.read_text()
    assert "/somewhere" not in text
    assert "demo&lt;b&gt;" in text
    assert "<b>" not in text
    told = "quantforge bench &#39;demo&lt;b&gt;&#39; demo-int4 --requests 3 --prompt-tokens 8 --new-tokens 4..6"
    assert told in text
    assert "--shared-tokens 2 --share 50% --slo ttft=1s,e2e=0.5s --price 2/h" in text
    assert "--cache k=int8,v=int4 --draft small --draft-tokens 5 --input-bits 8 --ladder" in text


def test_models_are_named_by_the_last_part_of_their_paths(ladder: LoadFound) -> None:
    rows = [row("/somewhere/demo", 3.0), row("/somewhere/demo-int4", 5.0)]
    models = replace(ladder, rows=rows, options=replace(ladder.options, ladder=False))
    text = assemble_load(models)
    assert "demo-int4" in text
    assert "/somewhere" not in text
    assert "--ladder" not in text


@pytest.fixture(scope="module")
def running():
    pytest.importorskip("playwright")
    if chromium() is None:
        pytest.skip("no Chromium on this machine")
    with browser() as found:
        yield found


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows_or_collides(running, page, width):
    with shown(running, page, width, SCHEMES[width % 2]) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        for found in (OVERFLOWING, COLLIDING, TOUCHING):
            assert tab.evaluate(found) == []
