"""The text beside the demo model: of the kind that it knows, scored without being named, and left to other models."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from pathlib import Path

import pytest

from quantforge.api import demo
from quantforge.api.demo_text import evaluation_text
from quantforge.api.scored_text import BUILTIN, REFERENCE_TEXT, find_reference_text
from quantforge.evaluation.text_tables import UNFAMILIAR_PERPLEXITY
from tests.runs import run_command

FEW = ("--windows", "2", "--length", "128", "--no-speed", "--json")


def test_the_text_beside_a_reference_is_scored_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(capsys, "demo").code == 0
    text = Path("demo", REFERENCE_TEXT).read_bytes()
    assert text.decode() == evaluation_text()
    ended = run_command(capsys, "eval", "demo", *FEW, "--json-progress")
    found = json.loads(ended.out)
    assert (
        found["protocol"]["text"]
        == f"{REFERENCE_TEXT} (SHA-256 {hashlib.sha256(text).hexdigest()})"
    )
    assert found["models"][0]["perplexity"] < UNFAMILIAR_PERPLEXITY / 2
    assert f"--text demo/{REFERENCE_TEXT}: the text that lies beside the reference" in ended.err
    named = json.loads(run_command(capsys, "eval", "demo", *FEW, "--text", "builtin").out)
    assert named["protocol"]["text"] == "builtin evaluation text"
    assert named["models"][0]["perplexity"] > UNFAMILIAR_PERPLEXITY


def test_without_a_text_beside_it_the_built_in_one_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))  # a Python without sources
    made = demo(tmp_path / "demo")
    assert not (made / REFERENCE_TEXT).exists()
    assert find_reference_text(made) == BUILTIN
    (made / REFERENCE_TEXT).mkdir()
    assert find_reference_text(made) == BUILTIN
    file = tmp_path / "x.gguf"
    file.touch()
    assert find_reference_text(file) == BUILTIN
