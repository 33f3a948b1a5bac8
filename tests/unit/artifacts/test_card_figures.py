"""Measured figures in a model card change two sections of it and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from quantforge import api
from quantforge.artifacts import card_figures
from quantforge.artifacts.manifest import NAME
from quantforge.errors import InputError, UsageError
from quantforge.verification.verify import verify
from tests.conftest import Tiny
from tests.runs import copy_model, file_digests, quantize, recipe, run_command

SECTION = card_figures._SECTION


@pytest.fixture(scope="module")
def quantized(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "q"
    quantize(tiny("llama-wide"), out, recipe(scheme="int4:g32:sym", scales="absmax"))
    return out


def evaluate_into_card(model: Path, result: Path, **options: Any) -> None:
    options = {"windows": 2, "length": 24, "speed": False, "card": result, **options}
    api.evaluate(model, [result], **options)


def test_measured_figures_change_only_their_card_sections(
    tiny: Tiny, quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = copy_model(quantized, tmp_path / "q")
    card_path, before = result / "README.md", file_digests(result)
    text = card_path.read_text()
    arguments = (
        "eval",
        tiny("llama-wide"),
        result,
        "--windows",
        2,
        "--length",
        24,
        "--card",
        result,
    )
    assert run_command(capsys, *arguments, "--no-speed", "-q").code == 0
    first = card_path.read_text()
    assert card_figures.with_figures(first, "", "") == text
    assert {**file_digests(result), "README.md": before["README.md"]} == before
    data = ModelCard(first).data
    metrics = {item.metric_type: item for item in data.eval_results}
    assert data.model_name == "q"
    assert set(metrics) == {"perplexity", "kl_divergence", "agreement"}
    assert metrics["kl_divergence"].metric_value > 0
    assert metrics["perplexity"].dataset_args["windows"] == 2
    assert "| `q` |" in first
    assert "token ids SHA-256" in first
    evaluate_into_card(tiny("llama-wide"), result, windows=3)
    second = card_path.read_text()
    assert second != first
    assert "3 windows" in second
    assert "2 windows" not in second
    assert card_figures.with_figures(second, "", "") == text
    assert verify(result, tiny("llama-wide"), forward=False).findings == []


def test_edits_of_a_card_by_hand_are_preserved(tiny: Tiny, quantized: Path, tmp_path: Path) -> None:
    result = copy_model(quantized, tmp_path / "q")
    card_path = result / "README.md"
    mine = card_path.read_bytes().replace(
        b"## Loading", b"## Mine\r\n\xff\xfe text\r\n\n## Loading"
    )
    card_path.write_bytes(mine)
    evaluate_into_card(tiny("llama-wide"), result)
    text = card_path.read_bytes().decode(errors="surrogateescape")
    assert card_figures.with_figures(text, "", "").encode(errors="surrogateescape") == mine


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda text: text.replace(SECTION.end, ""), "where the figures should stand"),
        (lambda text: text.replace(SECTION.begin, f"{SECTION.begin}\n{SECTION.begin}"), "where the figures"),
        (lambda text: text.replace(SECTION.empty, f"{SECTION.end}\n{SECTION.begin}"), "where the figures"),
        (lambda text: text.replace("# quantforge eval: end\n", ""), "in the front matter"),
    ],
)  # fmt: skip
def test_a_damaged_section_delimiter_is_refused_before_measuring(
    change: Any,
    where: str,
    tiny: Tiny,
    quantized: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = copy_model(quantized, tmp_path / "q")
    card_path = result / "README.md"
    card_path.write_text(change(card_path.read_text()))
    damaged = card_path.read_bytes()
    monkeypatch.setattr(
        "quantforge.evaluation.compare_models.compare_models", lambda *_: pytest.fail("measured")
    )
    with pytest.raises(InputError, match="is not between one line") as caught:
        evaluate_into_card(tiny("llama-wide"), result)
    assert where in str(caught.value.hint)
    assert card_path.read_bytes() == damaged


def test_a_foreign_or_missing_card_is_refused(tiny: Tiny, quantized: Path, tmp_path: Path) -> None:
    result, model = copy_model(quantized, tmp_path / "q"), tiny("llama-wide")
    with pytest.raises(UsageError, match="no model of it is measured"):
        evaluate_into_card(model, result, card=model)
    (result / "README.md").rename(tmp_path / "kept.md")
    with pytest.raises(InputError, match="there is no card"):
        evaluate_into_card(model, result)
    (result / "README.md").symlink_to(tmp_path / "kept.md")
    with pytest.raises(InputError):
        evaluate_into_card(model, result)
    (result / "README.md").unlink()
    (tmp_path / "kept.md").rename(result / "README.md")
    manifest_path = result / NAME
    manifest_path.write_text(
        manifest_path.read_text().replace(card_figures.MUTABLE[0]["begin"], "<!-- other -->")
    )
    with pytest.raises(InputError, match="declares parts of"):
        evaluate_into_card(model, result)
