"""Tables as they are drawn at three widths: those of an evaluation, and of the formats.

The drawings lie in ``snapshots/``; ``QUANTFORGE_SNAPSHOTS=write`` writes them again, to be looked at before they are
committed.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from quantforge.cli.console import Console
from quantforge.cli.evaluate import show_tables
from quantforge.evaluation.columns import (
    EXPERT_RANK,
    Column,
    describe_omitted,
    select_columns,
    wrap_cells,
)
from quantforge.evaluation.compare_models import FIGURES, Evaluation
from quantforge.evaluation.measurement_options import EvaluationOptions
from quantforge.evaluation.reference_text import Prompts
from quantforge.evaluation.report import markdown
from quantforge.evaluation.text_tables import cache_tables, notes
from quantforge.evaluation.text_windows import EvaluationProtocol
from tests.evaluations import TRIAL, cache_rows
from tests.runs import run_command

SNAPSHOTS = Path(__file__).with_name("snapshots")
WIDTHS = (80, 120, 160)


def row(name, scheme, nbytes, bits, **figures):
    return dict.fromkeys(FIGURES) | {
        "path": f"models/{name}", "format": "gguf" if "_" in scheme else "compressed-tensors", "scheme": scheme,
        "weight_bytes": nbytes, "bits_per_weight": bits, "bits_per_weight_total": bits + 1, "kv_cache": "none",
        "read_bytes_per_token": nbytes, "resident_bytes": nbytes, "kernels": {"llvm-int": 0.75, "dense": 0.25},
        "peak_bytes": 9 * nbytes, "ttft_seconds": 0.0525, "prefill_tokens_per_second": 4878.1, "decoder": "own",
        "ttft_by_prompt": {"32": 0.0322, "256": 0.0525}, "kv_bytes_per_token": 2048, "bandwidth_utilization": 2.83,
        "decode_by_batch": {"1": 0, "4": 5898.1, "16": 409.2}, "events": [], **figures,
    }  # fmt: skip


def quality(kl, agreement, rise):
    return {
        "kl_mean": kl, "kl_se": kl / 9, "kl_median": kl / 1.2, "kl_p99": 4 * kl, "top1_agreement": agreement,
        "perplexity": 227.677 * (1 + rise), "perplexity_se": 30.08, "perplexity_increase": rise,
    }  # fmt: skip


@pytest.fixture
def found():
    protocol = EvaluationProtocol(
        "builtin evaluation text",
        "826dfde9" * 8,
        16,
        512,
        None,
        8176,
        "float32",
        "bfloat16",
        "cpu",
        1,
    )
    return Evaluation(
        protocol,
        (
            row("wren", "bf16", 8_393_216, 16.0, decode_tokens_per_second=1894.1,
                perplexity=227.677, perplexity_se=30.08),
            row("wren-rtn-int4", "int4:g128:sym:bf16", 3_724_224, 4.126, decode_tokens_per_second=3110.7,
                **quality(0.018345, 0.8597, 0.00793)),
            row("wren-gptq-int4", "int4:g128:sym:bf16", 3_724_224, 4.126, decode_tokens_per_second=3076.5,
                **quality(0.0063012, 0.9335, -0.00219)),
            row("wren-Q8_0.gguf", "q8_0", 5_297_088, 8.5, decode_tokens_per_second=1022.2,
                **quality(0.00010164, 0.9924, -0.00106)),
        ),
        EvaluationOptions("", protocol.text),
    )  # fmt: skip


def check(name: str, drawn: str) -> None:
    """Compare with the snapshot of a name."""
    file = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("QUANTFORGE_SNAPSHOTS") == "write":
        file.write_text(drawn, encoding="utf-8")
    assert drawn == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", WIDTHS)
def test_an_evaluation_uses_the_width_and_no_more(found, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    show_tables(Console(), found, wide=False)
    drawn = capsys.readouterr().out
    assert max(map(len, drawn.splitlines())) <= width
    check(f"eval-{width}", drawn)


@pytest.mark.parametrize("width", WIDTHS)
def test_caches_fit(found, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    reference = found.rows[0] | {"caches": cache_rows()}
    show_tables(Console(), replace(found, rows=(reference,), caches=TRIAL), wide=False)
    drawn = capsys.readouterr().out
    assert max(map(len, drawn.splitlines())) <= width
    check(f"eval-caches-{width}", drawn)


def test_caches_of_several_models_bear_their_names(found):
    rows = tuple(row | {"caches": cache_rows()} for row in found.rows)
    tables = cache_tables(rows, found.verdict.names)
    assert len(tables) == 3
    for _, (label, *_) in tables:
        assert label.cells[:4] == (
            "wren 16bit",
            "wren int8",
            "wren k=int8,v=int4",
            "wren-rtn-int4 16bit",
        )


def test_all_columns_are_there_when_asked_for(found, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show_tables(Console(), found, wide=True)
    told = capsys.readouterr().out
    assert all(header in told for header in ("bits of all", "bandwidth %", "first token by prompt"))


@pytest.mark.parametrize("width", WIDTHS)
def test_formats_fit(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    drawn = run_command(capsys, "formats").out
    assert max(map(len, drawn.splitlines())) <= width
    check(f"formats-{width}", drawn)


def test_columns_are_left_out_from_the_highest_rank_down():
    columns = [
        Column("model", ("a",)), Column("third", ("3",), 3), Column("first", ("1",), 1), Column("none", ("-",), 1),
        Column("expert", ("9",), EXPERT_RANK),
    ]  # fmt: skip
    headers = [
        [one.header for one in select_columns(columns, width)] for width in (None, 19, 18, 5, 1)
    ]
    assert headers == [
        ["model", "third", "first"], ["model", "third", "first"], ["model", "first"], ["model"], ["model"],
    ]  # fmt: skip
    assert [one.header for one in select_columns(columns, 5, wide=True)] == [
        "model",
        "third",
        "first",
        "expert",
    ]


def test_a_text_that_a_reference_does_not_know_is_told(found, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    show_tables(Console(), found, wide=False)
    assert (
        "perplexity 228 of the reference: it was not trained on text of this kind"
        in capsys.readouterr().out
    )
    known = ({**found.rows[0], "perplexity": 20.0}, *found.rows[1:])
    show_tables(Console(), replace(found, rows=known), wide=False)
    assert "not trained on" not in capsys.readouterr().out


def test_best_values_are_bold_on_a_terminal_alone(found, monkeypatch, capsys):
    show_tables(Console(), found, wide=False)
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    show_tables(Console(), found, wide=False)
    bold = capsys.readouterr().out
    assert "\x1b[1m0.000102" in bold
    assert "\x1b[1m0.00630" not in bold


@pytest.mark.parametrize("width", WIDTHS)
def test_no_word_of_a_plan_is_broken(width, tiny, monkeypatch, capsys):
    """On a terminal, whose right edge would otherwise cut words."""
    monkeypatch.setenv("COLUMNS", str(width))
    asked = ["plan", tiny("llama-wide"), "--bits", "4"]
    piped = run_command(capsys, *asked).out
    monkeypatch.setattr("quantforge.cli.console.Console.is_terminal", property(lambda _: True))
    drawn = run_command(capsys, *asked).out
    lines = re.sub(r"\x1b\[[0-9;]*m", "", drawn).splitlines()
    assert max(map(len, lines)) <= width
    words = {part for word in piped.split() for part in re.findall(r"[^.:/,]+", word)}
    shown = {
        part for line in lines for word in line.split() for part in re.findall(r"[^.:/,]+", word)
    }
    assert shown <= words


def test_what_is_too_wide_is_broken_where_words_end():
    columns = [
        Column("layers", ("layers.*.self_attn.k_proj", "norm")),
        Column("why", ("a reason to wait",)),
    ]
    assert wrap_cells(columns, 43) == columns
    assert [one.cells for one in wrap_cells(columns, 30)] == [
        ("layers.*.\nself_attn.\nk_proj", "norm"),
        ("a reason to\nwait",),
    ]
    assert [one.cells[0] for one in wrap_cells(columns, 3)] == [
        "layers.*.\nself_attn.\nk_proj",
        "a\nreason\nto\nwait",
    ]


def test_what_a_table_leaves_out_is_named_with_the_option_that_shows_it(found, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    answers = {"kl_mean": 0.1, "kl_se": 0.01, "tokens_before_divergence": 9.0, "length_ratio": 1.0}
    rows = tuple({**row, "generated": answers} for row in found.rows)
    show_tables(Console(), replace(found, rows=rows), wide=False)
    told = " ".join(capsys.readouterr().out.split())
    assert "left out, too wide: perplexity, " in told
    assert "(--wide)" in told
    show_tables(Console(), replace(found, rows=rows), wide=True)
    assert "too wide" not in capsys.readouterr().out


@pytest.mark.parametrize("width", WIDTHS)
def test_what_was_asked_for_can_be_read_alone(found, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    first, *others, last = found.rows
    asked = replace(found, rows=(first, *others, {**last, "llama_cpp_perplexity": 228.1}))
    show_tables(Console(), asked, wide=False)
    drawn = capsys.readouterr().out
    above, below = drawn.splitlines()[1:3]
    place = below.index("in llama.cpp")
    assert above[place:].split() == ["perplexity"]
    assert "perplexity" in below[:place]
    assert "KL" in below
    assert "\nperplexity in llama.cpp: of the same tokens, " in drawn
    assert "| perplexity | perplexity in llama.cpp |" in markdown(asked)


def test_the_divergence_stays_longest(found, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    show_tables(Console(), found, wide=False)
    drawn = capsys.readouterr().out
    assert drawn.splitlines()[1].split() == ["model", "KL"]
    assert "left out, too wide: weights, bits, " in " ".join(drawn.split())


def test_what_was_measured_of_answers_is_told(found, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    compared = {"kl_mean": 0.1, "kl_se": 0.01, "tokens_before_divergence": 9.0, "length_ratio": 1.0}
    own = {
        "answers": [
            {"text": "a", "tokens": 100, "finished": True},
            {"text": "b", "tokens": 28, "finished": False},
        ]
    }
    first, *others = found.rows
    rows = ({**first, "generated": own}, *({**row, "generated": compared} for row in others))
    options = replace(found.options, prompts=Prompts("builtin", ("x", "y")))
    asked = replace(found, rows=rows, options=options)
    show_tables(Console(), asked, wide=True)
    told = " ".join(capsys.readouterr().out.split())
    assert "to 2 prompts (builtin), 128 tokens in all, at most 128 each" in told
    assert all(f"; {title}: " in told for title in ("KL of answers", "parts after", "length"))
    assert "answers: " not in " ".join(notes(asked, {"KL"}))


def test_columns_that_are_left_out_are_told_by_their_ranks():
    columns = [
        Column("model", ("a",)), Column("third", ("3",), 3), Column("second", ("2",), 2), Column("none", ("-",), 1),
        Column("expert", ("9",), EXPERT_RANK),
    ]  # fmt: skip
    assert (
        describe_omitted(columns, select_columns(columns, 5))
        == "left out, too wide: second, third (--wide)"
    )
    assert describe_omitted(columns, select_columns(columns, None)) == "with --wide also: expert"
    for count, end in ((9, "i (--wide)"), (10, "h, and 2 more (--wide)")):
        many = [
            Column("model", ("a",)),
            *(Column("abcdefghij"[i], ("1" * 9,), i + 1) for i in range(count)),
        ]
        assert describe_omitted(many, select_columns(many, 5)).endswith(end)
    assert describe_omitted(columns, select_columns(columns, None, wide=True)) == ""
    many = [Column(str(number), ("1",), number) for number in range(1, 12)]
    assert describe_omitted(many, many[:1]).endswith("8, 9, and 2 more (--wide)")
