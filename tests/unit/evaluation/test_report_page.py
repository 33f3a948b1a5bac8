"""The HTML report of an evaluation: its content, safety, size and layout at any width."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quantforge.evaluation.columns import ABSENT
from quantforge.evaluation.compare_models import QUANTILES, Evaluation
from quantforge.evaluation.measurement_options import EvaluationOptions
from quantforge.evaluation.reference_text import Prompts
from quantforge.evaluation.report import render
from quantforge.evaluation.report_page.charts import (
    LABEL_SPACING,
    front_chart,
    quantile_chart,
    series_chart,
    shorten,
    spread_labels,
)
from quantforge.evaluation.report_page.page import mark_differences, sort_key
from quantforge.evaluation.tasks import Tasks
from quantforge.evaluation.text_tables import notes
from quantforge.evaluation.text_windows import EvaluationProtocol
from quantforge.evaluation.verdict import Verdict
from scripts.report_pictures import SCHEMES, WIDTHS, browser, chromium, shown
from tests.evaluations import TRIAL, cache_rows
from tests.thorough import parametrize_each_value

ROOT = Path(__file__).parents[3]
NAMES = (
    "source",
    "demo-gptq-int4-g64-asym-with-a-long-name",
    "demo-rtn",
    "demo<b>&x",
    "sub/demo.gguf",
)
TEXTS = ("a b c d", "a b x d", "a b c d e", "<script>alert(1)</script>", "a b c d")


def row(index: int) -> dict[str, Any]:
    """Return figures of one model for all sections of the report; the first model is the reference."""
    kl = 0.01 * index
    compared = {
        "perplexity_increase": 0.01 * index, "perplexity_increase_se": 0.001, "kl_mean": kl, "kl_se": kl / 10,
        "kl_median": kl / 2, "kl_p99": 4 * kl, "kl_quantiles": {str(q): kl * (0.1 + q) for q in QUANTILES},
        "top1_agreement": 1 - kl, "block_errors": [kl * (1 + block % 3) for block in range(40)],
    }  # fmt: skip
    answer = {"text": TEXTS[index], "tokens": 4, "finished": index == 2}
    against = {"kl_mean": kl, "diverges_at": 2 if index % 2 else None, "length_ratio": 1.0}
    summary = {
        "kl_mean": kl,
        "kl_se": None,
        "top1_agreement": 0.9,
        "diverged_answers": 1,
        "tokens_before_divergence": 2.0,
        "length_ratio": 1.0,
    }
    made_by = {
        "method": "rtn",
        "source": "source",
        "exported": index == 4,
        "recipe": 'method = "rtn"\n',
    }
    return {
        "path": NAMES[index], "format": "plain" if index == 0 else "compressed-tensors", "scheme": "int4:g128:sym:bf16",
        "bits_per_weight": 4.125, "bits_per_weight_total": 5.0, "weight_bytes": 4_000_000 + 100_000 * (index % 3),
        "resident_bytes": 4_000_000, "read_bytes_per_token": 4_000_000, "kv_cache": "none",
        "kernels": {"llvm-int": 0.75, "dense": 0.25}, "made_by": made_by if index else None,
        "events": [{"kind": "substitution", "where": "lm_head", "detail": "kept"}] if index == 2 else [],
        "perplexity": 10.0 + index, "perplexity_se": 0.5, "nll": 2.3,
        **(compared if index else dict.fromkeys(compared)),
        "generated": {"answers": [answer]} if index == 0 else {**summary, "answers": [answer | against]},
        "peak_bytes": 60_000_000, "prefill_tokens_per_second": 4000.0, "decode_tokens_per_second": 1000.0 + index,
        "ttft_seconds": 0.05, "tpot_seconds": 0.001, "tpot_spread": 0.1, "bandwidth_utilization": 0.5,
        "llama_cpp_perplexity": None, "decoder": "own", "ttft_by_prompt": {"32": 0.01, "128": 0.05},
        "decode_by_batch": {"1": 1000.0, "4": 3000.0, "16": 9000.0}, "kv_bytes_per_token": 2048,
        "processor_share": 0.99,
        "tasks": {"a_task": {"acc": 0.5, "acc_stderr": 0.1}}, "caches": cache_rows() if index < 2 else None,
    }  # fmt: skip


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    protocol = EvaluationProtocol(
        "a test",
        "0" * 64,
        4,
        24,
        None,
        92,
        "float32",
        "bfloat16",
        "cpu",
        1,
        adapter="lora (SHA-256 00)",
    )
    prompts = Prompts("builtin prompts", ("What\nis <it>?",), 16)
    tasks = Tasks(("a_task", "./where/own.yaml"), 8, allow_code=True)
    options = EvaluationOptions(
        "",
        "a test",
        caches=("int8", "int4"),
        engine="llama.cpp",
        tasks=tasks,
        prompts=prompts,
    )
    rows = tuple(row(index) for index in range(5))
    return Evaluation(protocol, rows, options, TRIAL, "2026-01-02", {"quantforge": "0.1.0"})


@pytest.fixture(scope="module")
def page(evaluation, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(evaluation, "html"))
    return path


def without_keys(evaluation: Evaluation, *keys: str) -> Evaluation:
    rows = tuple({**row, **dict.fromkeys(keys)} for row in evaluation.rows)
    return replace(evaluation, rows=rows)


def test_the_report_page_has_all_sections_and_no_external_resources(page):
    text = page.read_text()
    order = [
        "<h1>source: 4 models compared", "2026-01-02", 'class="verdict"', "Winners", "KL divergence against size",
        "KL divergence of a token", "Relative error of each block", ">Perplexity<", "Time to the first token",
        "Tokens per second", "Memory (MB)", "a_task: acc", "The same prompts", "Make it again", "All figures",
    ]  # fmt: skip
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)
    assert "://" not in text
    assert len(text.encode()) < 1.5e6
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


def test_the_report_command_names_a_text_given_by_the_user(evaluation):
    for text_found in (True, False):
        named = replace(evaluation.protocol, text="evaluation.txt (SHA-256 ab)")
        options = replace(evaluation.options, text_found=text_found)
        text = unescape(render(replace(evaluation, protocol=named, options=options), "html"))
        assert ("--text evaluation.txt " in text) != text_found


def test_unsteady_speeds_are_marked_and_explained(evaluation):
    fast = {**evaluation.rows[4], "decode_tokens_per_second": 4321.0, "tpot_spread": 20.0}
    unsteady_evaluation = replace(evaluation, rows=(*evaluation.rows[:4], fast))
    for kind, count in (("html", 3), ("markdown", 2)):  # the verdict, its card, the table
        assert render(unsteady_evaluation, kind).count("~4320") == count
        assert "~1" not in render(evaluation, kind)
    assert sort_key("~48.2") == "48.2"
    unsteady = notes(unsteady_evaluation, ())[-1]
    assert (
        f"~: unsteady, as on a machine with other work: {unsteady_evaluation.verdict.names[4]};"
        in unsteady
    )
    assert unsteady.endswith(
        "the threads got 99% or more of the processor time that they asked for"
    )
    assert "unsteady" not in notes(evaluation, ())[-1]


def test_generated_text_is_escaped_in_html(page):
    text = page.read_text()
    assert "<script>alert" not in text
    assert "<b>" not in text
    assert "demo&lt;b&gt;&amp;x" in text
    assert "a b <mark>x</mark> d" in text.replace("</mark> <mark>", " ")


def test_sections_without_figures_are_left_out(evaluation):
    fast = replace(evaluation.protocol, speed_dtype="")
    less = without_keys(
        evaluation,
        "ttft_by_prompt",
        "decode_by_batch",
        "peak_bytes",
        "tasks",
        "block_errors",
        "generated",
    )
    unasked = replace(evaluation.options, prompts=None)
    text = render(replace(less, protocol=fast, options=unasked), "html")
    for part in (
        "Speed and memory",
        "Tasks",
        "Relative error of each block",
        "The same prompts",
        "KL of answers",
    ):
        assert part not in text
    assert "KL divergence against size" in text
    alone = render(replace(less, rows=less.rows[:1], options=unasked, protocol=fast), "html")
    assert "Winners" not in alone
    assert "KL divergence" not in alone.partition("All figures")[0]


def test_zero_divergence_is_left_out_of_logarithmic_charts(evaluation):
    same = {**evaluation.rows[1], "kl_mean": 0.0, "kl_se": 0.0, "block_errors": [0.0] * 3,
            "kl_quantiles": dict.fromkeys(map(str, QUANTILES), 0.0)}  # fmt: skip
    text = render(replace(evaluation, rows=(evaluation.rows[0], same)), "html")
    assert "KL divergence against size" not in text
    assert "Relative error of each block" not in text


@parametrize_each_value(
    ("ratio", [1.0, 1.01, 1.2, 1.9, 4.6, 9.5, 70.0, 1e5]),
    ("base", [3.77e6, 1.93e8, 8.9e10]),
)
def test_every_chart_axis_has_three_distinct_labels(base, ratio):
    """Logarithmic axes and size axes; overlapping labels are not drawn."""
    values = [base, base * ratio**0.4, base * ratio]
    drawn = [
        series_chart("t", "n", "w", {f"m{at}": {"1": item / 1e5} for at, item in enumerate(values)}),
        quantile_chart("t", "n", {
            f"m{at}": dict.fromkeys(map(str, QUANTILES), item / 1e12) for at, item in enumerate(values)
        }),
        front_chart(
            [{"weight_bytes": item, "kl_mean": item / 1e12, "kl_se": item / 1e14} for item in values],
            Verdict(("a name that is long, of a model", "b", "c"), (0,), (), ()),
        ),
    ]  # fmt: skip
    for chart in drawn:
        for svg in (chart.wide, chart.narrow):
            axes = re.findall(
                r'<g class="mark-text role-axis-label"[^>]*>(.*?)</g>', svg, re.DOTALL
            )
            for axis in axes:
                texts = re.findall(r"<text([^>]*)>([^<]*)</text>", axis)
                labels = [text for looks, text in texts if 'opacity="0"' not in looks]
                assert len(labels) >= 3, labels
                assert len({*labels}) == len(labels)


def test_a_missing_block_error_is_a_dash_in_the_table(evaluation):
    changed_row = {**evaluation.rows[1], "block_errors": [0.25, None, 0.5]}
    changed = replace(evaluation, rows=(evaluation.rows[0], changed_row))
    text = render(changed, "html")
    assert "most in block 2, 0.5" in text
    table = text.partition("Error of each block</caption>")[2].partition("</table>")[0]
    cells = re.findall(r"<td[^>]*>([^<]*)<", table)
    assert [cell.strip() for cell in cells] == ["0.250", ABSENT, "0.500"]
    schema = json.loads((ROOT / "docs" / "eval.schema.json").read_text())
    jsonschema.validate(json.loads(render(changed, "json")), schema)


def test_the_report_lists_commands_that_reproduce_it(page):
    text = page.read_text()
    assert "quantforge quantize source --recipe demo-rtn.toml -o demo-rtn" in text
    assert (
        "quantforge export sub-demo.gguf-source" not in text
    )  # names are the shortest that differ
    assert "quantforge export demo.gguf-source --format compressed-tensors -o demo.gguf" in text
    assert "--windows 4 --length 24 --generated builtin --generated-tokens 16" in text
    assert "--tasks a_task,own.yaml --task-limit 8 --allow-code --cache int8,int4" in text
    assert "--cache int8,int4 --engine llama.cpp --adapter lora --threads 1 --report" in text


def test_the_evaluation_document_follows_its_published_schema(evaluation):
    schema = json.loads((ROOT / "docs" / "eval.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    document = json.loads(render(evaluation, "json"))
    jsonschema.validate(document, schema)
    for key in ("kl_quantiles", "made_by"):
        broken = json.loads(render(evaluation, "json"))
        del broken["models"][0][key]
        with pytest.raises(jsonschema.ValidationError, match=key):
            jsonschema.validate(broken, schema)


def test_plot_labels_do_not_overlap():
    for wanted_positions in ([5, 5, 5], [100, 101, 102, 300], [290, 291, 299], [6, 150, 294]):
        positions = spread_labels(wanted_positions, LABEL_SPACING, 6, 294)
        assert all(later - first >= LABEL_SPACING for first, later in pairwise(positions))
        assert positions[0] >= 6
        assert positions[-1] <= 294
    assert shorten("demo-gptq-int4-g64", 11) == "demo-…4-g64"
    assert shorten("demo", 11) == "demo"


def test_differing_words_are_marked():
    assert mark_differences("a b x d", "a b c d") == [("a b ", False), ("x", True), (" d", False)]
    assert mark_differences("a b", "a b") == [("a b", False)]
    assert mark_differences("", "a") == []


def test_table_cells_sort_by_value_across_units():
    assert float(sort_key("950 kB")) < float(sort_key("3.72 MB")) < float(sort_key("1.20 GB"))
    assert float(sort_key("1.20 s")) > float(sort_key("950 ms"))
    assert float(sort_key("0.0045 ± 0.0001")) == 0.0045
    assert sort_key("-") == ""
    assert sort_key("gguf") == "gguf"


# In a browser


@pytest.fixture(scope="module")
def chromium_browser():
    pytest.importorskip("playwright")
    if chromium() is None:
        pytest.skip("no Chromium on this machine")
    with browser() as running_browser:
        yield running_browser


TOUCHING = """() => [...document.querySelectorAll("figure svg")].flatMap(svg => {
  const boxes = [...svg.querySelectorAll(".role-axis-label text, .role-axis-title text")].map(
    text => [text.textContent, text.getBoundingClientRect()]).filter(([_, box]) => box.width);
  const titles = boxes.filter(([_, box]) => box.height > 2 * box.width);
  return titles.flatMap(([name, a]) => boxes.filter(([other, b]) => other !== name &&
    b.left < a.right + 3 && b.right > a.left && b.top < a.bottom && b.bottom > a.top
  ).map(([other]) => name + " / " + other));
})"""
OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter(element => {
  const box = element.getBoundingClientRect();
  return box.width && !element.classList.contains("skip") && !element.closest("svg svg, defs") &&
    (box.right > document.documentElement.clientWidth + 1 || box.left < -1);
}).map(element => element.tagName + ": " + element.textContent.slice(0, 40))"""
COLLIDING = """() => [...document.querySelectorAll("figure svg")].flatMap(svg => {
  const drawn = [...svg.querySelectorAll("text, .role-legend-symbol path")];
  const boxes = drawn.map(one => [one.textContent || "a symbol", one.getBoundingClientRect()])
    .filter(([_, box]) => box.width);
  return boxes.flatMap(([name, a], index) => boxes.slice(index + 1).filter(([_, b]) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3
  ).map(([other]) => name + " / " + other));
})"""


@pytest.mark.parametrize("width", [*WIDTHS, 1250, 1600])
def test_nothing_overflows_or_collides(chromium_browser, page, width):
    with shown(chromium_browser, page, width, SCHEMES[width % 2]) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        tab.evaluate("document.querySelectorAll('details').forEach(item => { item.open = true; })")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate(OVERFLOWING) == []
        assert tab.evaluate(COLLIDING) == []
        assert tab.evaluate(TOUCHING) == []


def test_a_screen_reader_finds_headings_figures_and_tables(chromium_browser, page):
    with shown(chromium_browser, page, 390) as tab:
        nodes = tab.context.new_cdp_session(tab).send("Accessibility.getFullAXTree")["nodes"]
    seen = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"]
    ]
    assert ("heading", "source: 4 models compared") in seen
    assert {"Winners", "Size and quality", "Make it again", "All figures"} <= {
        name for role, name in seen if role == "heading"
    }
    pictures = [name for role, name in seen if role in ("image", "img")]
    assert len(pictures) >= 8
    assert all(len(name) > 30 for name in pictures)
    assert any("demo-rtn 4.20 MB, KL 0.0200" in name for name in pictures)
    assert sum(role == "table" for role, _ in seen) == 5
    assert ("columnheader", "KL") in seen
    assert ("rowheader", "demo-rtn") in seen
    assert ("button", "weights") in seen


def test_tables_sort_by_keyboard(chromium_browser, page):
    with shown(chromium_browser, page, 1440) as tab:
        button = tab.get_by_role("button", name="KL", exact=True).first
        first = "document.querySelector('tbody tr th').textContent"
        button.focus()
        tab.keyboard.press("Enter")
        assert tab.evaluate(first) == "demo.gguf"
        tab.keyboard.press("Enter")
        assert tab.evaluate(first) == "demo-gptq-int4-g64-asym-with-a-long-name"
        headers = tab.evaluate(
            "[...document.querySelectorAll('th[aria-sort]')].map(item => item.ariaSort)"
        )
        assert headers == ["ascending"]
        last = tab.evaluate("[...document.querySelectorAll('table:first-of-type tbody tr')].length")
        assert last >= 5


def test_light_and_dark_schemes_have_enough_contrast(chromium_browser, page):
    """The contrast of text is at least 4.5 (WCAG 2 AA)."""
    for scheme in SCHEMES:
        with shown(chromium_browser, page, 768, scheme) as tab:
            colours = tab.evaluate(
                "['--paper', '--ink', '--muted', '--accent'].map(name => getComputedStyle("
                "document.documentElement).getPropertyValue(name).trim())"
            )
        paper, *inks = map(_luminance, colours)
        for ink in inks:
            high, low = max(ink, paper), min(ink, paper)
            assert (high + 0.05) / (low + 0.05) > 4.5


def _luminance(colour: str) -> float:
    """Relative luminance of ``#rgb`` or ``#rrggbb``, by the formula of WCAG 2."""
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(part, 16) / 255 for part in re.findall("..", digits)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
