"""``quantforge bench`` on the bundled model: a table for people, a document for programs, refusals before the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Tiny
from tests.runs import run_command

DEMO = str(Path(__file__).parents[2] / "models/demo")
SMALL = ("--requests", "6", "--prompt-tokens", "8..20", "--new-tokens", "3..6", "--rows", "4")


def test_document_has_every_request(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_command(
        capsys,
        "bench",
        DEMO,
        *SMALL,
        "--slo",
        "ttft=60s,tpot=60s",
        "--price",
        "2/h",
        "--rate",
        "50",
        "--json",
    )
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["schema"] == "quantforge.bench/2"
    (row,) = found["rows"]
    figures = row["metrics"]
    assert (figures["requests"], figures["failed"], figures["slo_attainment"]) == (6, 0, 1.0)
    assert 18 <= figures["new_tokens"] <= 36
    assert row["engine"]["new_tokens"] == figures["new_tokens"]
    assert 0 < figures["ttft"]["50"] <= figures["ttft"]["99"]
    assert figures["cost"] > 0


@pytest.mark.thorough
def test_drafted_tokens_are_counted_and_need_an_engine_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (
        "--requests",
        "2",
        "--prompt-tokens",
        "20",
        "--new-tokens",
        "60",
        "--rows",
        "1",
        "--draft",
        "int3",
    )
    found = json.loads(
        run_command(capsys, "bench", DEMO, *words, "--draft-tree", "2x1", "--json").out
    )
    assert found["options"]["drafts"] == {"draft": "int3", "tokens": 8, "tree": "2x1"}
    counts = found["rows"][0]["engine"]["speculation"]
    assert counts["drafted"] >= counts["accepted"] > 0
    table = run_command(capsys, "bench", DEMO, *words).out
    assert "drafted tokens right" in " ".join(table.split())
    refused = run_command(
        capsys, "bench", DEMO, "--url", "http://127.0.0.1:9/v1", "--draft", "ngram"
    )
    assert (refused.code, "--draft" in refused.err) == (2, True)
    refused = run_command(capsys, "bench", DEMO, "--draft", "lookahead")
    assert (refused.code, "single text" in refused.err) == (2, True)


MEANINGLESS: list[tuple[tuple[object, ...], str]] = [
    (("--new-tokens", "5..2"), "smaller one first"),
    (("--slo", "speed=5ms"), "ttft=500ms"),
    (("--price", "2 EUR"), "2.5/h"),
    (("--rate", "0"), "above 0"),
    (("--share", "150%"), "0 to 1"),
    (("--cache", "int5"), "int8"),
    (("--rows", "0"), "1 to"),
    (("--prompt-tokens", "1020"), "positions"),
    (("--trace", "absent.jsonl"), "absent.jsonl"),
    (("--url", "localhost:8000"), "http://"),
    (("--url", "http://127.0.0.1:9/v1", DEMO), "one server"),
]


def test_what_means_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in MEANINGLESS:
        result = run_command(capsys, "bench", DEMO, *words)
        assert result.code in {2, 3}, (words, result.err)
        assert said in result.err, words
        assert not result.out, words


def test_a_model_that_is_not_computed_here_is_refused(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_command(capsys, "bench", str(tiny("falcon-h1")), *SMALL)
    assert result.code != 0
    assert "--url" in result.err
