"""Evaluation: figures equal their definitions, state their protocol, and meaningless ones are refused."""

from __future__ import annotations

import gc
import json
import math
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from quantforge.api import quantize
from quantforge.cli.evaluate import failed_gates
from quantforge.errors import InputError, RefusedError
from quantforge.evaluation import compare_models as run
from quantforge.evaluation import divergence, report, speed, tasks
from quantforge.evaluation.compare_models import Evaluation
from quantforge.evaluation.divergence import score, score_reference
from quantforge.evaluation.reference_text import Prompts
from quantforge.progress import report_to
from quantforge.recipe import Recipe
from quantforge.runtime.load import load
from quantforge.settings import Settings
from quantforge_kernels.cpu import instruction_sets
from tests.evaluations import TEXT, evaluate_models, evaluation_windows, options

KEYS = {
    "path", "format", "scheme", "bits_per_weight", "weight_bytes", "resident_bytes", "read_bytes_per_token",
    "perplexity", "perplexity_se",
    "nll", "kl_mean", "kl_p99", "top1_agreement", "peak_bytes", "prefill_tokens_per_second",
    "decode_tokens_per_second", "ttft_seconds", "tpot_seconds", "bandwidth_utilization", "kernels",
    "events",
}  # fmt: skip


@pytest.fixture(scope="module")
def rounded(tiny, tmp_path_factory):
    """The tiny tied llama at 3 bits."""
    out = tmp_path_factory.mktemp("rounded") / "int3"
    recipe = Recipe(scheme="int3:g32:sym", scales="absmax")
    quantize(str(tiny("llama-tied")), recipe, out, Settings())
    return out


@pytest.fixture(scope="module")
def full_evaluation(tiny, rounded) -> Evaluation:
    """Return a full evaluation in which the reference is also one of the compared models."""
    source = tiny("llama-tied")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "BANDWIDTH_BYTES", 32 << 20)
        patch.setattr(speed, "MAX_SECONDS", 0.0)
        return evaluate_models(source, [source, rounded], options(speed=True))


def with_bos(source: Path, target: Path) -> Path:
    """Copy a model and let its tokenizer begin each text with token 0."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(target / "tokenizer.json"))
    return target


# Windows and protocol


def test_without_bos_windows_cut_the_document_without_gaps(tiny):
    path = tiny("llama-tied")
    windows = evaluation_windows(path)
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(TEXT).ids
    assert windows.bos is None
    assert windows.ids.tolist() == [ids[i : i + 24] for i in range(0, 96, 24)]
    assert windows.targets.tolist() == [ids[i + 1 : i + 24] for i in range(0, 96, 24)]


def test_with_bos_every_window_begins_with_bos(tiny, tmp_path):
    path = with_bos(tiny("llama-tied"), tmp_path)
    windows = evaluation_windows(path)
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(TEXT, add_special_tokens=False)
    assert windows.bos == 0
    assert windows.ids.tolist() == [[0, *ids.ids[i : i + 23]] for i in range(0, 92, 23)]
    protocol = evaluate_models(path, [], options()).protocol
    assert protocol.bos == 0
    assert protocol.tokens_scored == 4 * 23
    assert protocol.tokens_sha256 == windows.sha256


def test_fewer_windows_when_the_text_is_short(tiny):
    assert len(evaluation_windows(tiny("llama-tied"), windows=10_000).ids) < 100


@pytest.mark.parametrize("text", ["", "the"])
def test_nothing_to_score_is_an_error(tiny, text):
    with pytest.raises(InputError, match="nothing to score"):
        evaluate_models(tiny("llama-tied"), [], options(text=text))


def test_the_protocol_states_text_windows_and_dtype(full_evaluation):
    text = str(full_evaluation.protocol)
    for part in ("a test", "4 windows of 24", "no BOS", "92 tokens scored", "float32"):
        assert part in text
    document = full_evaluation.to_json()["protocol"]
    assert document["overlap"] == 0
    assert len(document["tokens_sha256"]) == 64


@pytest.mark.skipif(instruction_sets.best_instruction_set() is None, reason="no vectors")
def test_eight_bit_inputs_change_scores_and_are_reported(tiny, rounded, full_evaluation):
    """Only the quantized model changes; the reference and packed weights with float32 inputs do not."""
    source, messages = tiny("llama-tied"), []
    eight = evaluate_models(
        source, [rounded], options(), Settings(input_bits=8, note=messages.append)
    )
    assert eight.rows[0]["nll"] == full_evaluation.rows[0]["nll"]
    assert "llvm-int8" in eight.rows[1]["kernels"]
    assert "llvm-int8" not in full_evaluation.rows[2]["kernels"]
    apart = abs(eight.rows[1]["kl_mean"] / full_evaluation.rows[2]["kl_mean"] - 1)
    assert 1e-6 < apart < 0.1
    assert not messages
    assert eight.to_json()["protocol"]["input_bits"] == 8
    for kind in ("markdown", "html"):
        page = report.render(eight, kind)
        assert "inputs of packed weights in 8 bits but for the reference" in page
    assert "--input-bits 8" in page
    assert "packed weights" not in str(full_evaluation.protocol)


@pytest.mark.skipif(instruction_sets.best_instruction_set() is None, reason="no vectors")
def test_input_bits_without_effect_give_a_note(tiny, tmp_path):
    recipe = Recipe(scheme="nf4:g64:sym", format="bnb")
    quantize(str(tiny("llama")), recipe, tmp_path / "nf4", Settings())
    messages: list[str] = []
    evaluate_models(
        tiny("llama"), [tmp_path / "nf4"], options(), Settings(input_bits=8, note=messages.append)
    )
    assert any(
        line.startswith("nf4: ") and "keep activations of 16 bits" in line for line in messages
    )


def test_a_model_has_zero_divergence_from_itself(full_evaluation):
    reference, itself, rounded = full_evaluation.rows
    assert itself["kl_mean"] == itself["kl_p99"] == itself["perplexity_increase"] == 0
    assert itself["top1_agreement"] == 1
    assert itself["nll"] == reference["nll"]
    assert rounded["kl_mean"] > 0.01
    assert rounded["top1_agreement"] < 1
    assert rounded["kl_median"] < rounded["kl_p99"]


def test_hidden_states_on_disk_give_the_same_figures(
    tiny, rounded, tmp_path, full_evaluation, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    on_disk = evaluate_models(
        tiny("llama-tied"), [rounded], options(), Settings(activations="disk")
    )
    assert on_disk.rows[1]["kl_mean"] == full_evaluation.rows[2]["kl_mean"]
    assert list(tmp_path.iterdir()) == []


# Refusals


def test_nan_scores_are_an_error(tiny):
    model, windows = load(tiny("llama-tied")).model, evaluation_windows(tiny("llama-tied"))
    reference = score_reference(model, windows)
    model.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(InputError, match="is nan at token"):
        score(model, windows, reference)
    with pytest.raises(InputError, match="is nan at token"):
        score_reference(model, windows)
    with pytest.raises(InputError, match="no token was scored"):
        divergence.check_finite(torch.empty(0, 4), "NLL")


def test_a_different_tokenizer_is_refused(tiny, tmp_path):
    other = with_bos(tiny("llama-tied"), tmp_path)
    with pytest.raises(InputError, match="other tokens of the text"):
        evaluate_models(tiny("llama-tied"), [other], options())


def test_a_different_vocabulary_size_is_refused(tiny):
    windows = evaluation_windows(tiny("llama-tied"))
    reference = score_reference(load(tiny("llama-tied")).model, windows)
    reference.head.vocabulary += 64
    with pytest.raises(InputError, match="vocabulary of 320, the reference has 384"):
        score(load(tiny("llama-tied")).model, windows, reference)


def test_windows_longer_than_the_model_positions_are_refused(tiny):
    with pytest.raises(InputError, match="128 positions"):
        evaluate_models(tiny("llama-tied"), [], options(length=129))
    assert evaluate_models(tiny("llama-tied"), [], options(length=128)).rows


def test_a_head_with_unknown_operations_is_refused(tiny, monkeypatch):
    model, windows = load(tiny("gemma2")).model, evaluation_windows(tiny("gemma2"))
    assert score_reference(model, windows)
    model.config.final_logit_softcapping = 3.0  # seen by the model and by our head
    capped = score_reference(model, windows)
    assert capped.scores.nll.max() < 3 + 3 + math.log(320)
    original_forward = model.forward

    def doubled(*args, **kwargs):
        output = original_forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(model, "forward", doubled)
    with pytest.raises(RefusedError, match="gemma2"):
        score_reference(model, windows)


def test_answers_and_caches_are_scored_with_a_checked_head(tiny, rounded, tmp_path):
    requested_options = options(
        text=TEXT * 4, caches=("int4",), prompts=Prompts("a test", ("the weights of",), 8)
    )
    plain = evaluate_models(tiny("llama-tied"), [rounded], requested_options).rows[1]
    assert plain["generated"]["kl_mean"] > 0.001
    for model in (tiny("llama-tied"), rounded):
        path = shutil.copytree(model, tmp_path / model.name)
        config = json.loads((path / "config.json").read_text())
        config["final_logit_softcapping"] = 1.0  # a llama of transformers applies none
        (path / "config.json").write_text(json.dumps(config))
    copies = tmp_path / tiny("llama-tied").name, tmp_path / rounded.name
    capped = evaluate_models(copies[0], [copies[1]], requested_options).rows[1]
    for figures in ("kl_mean", "generated", "caches"):
        assert capped[figures] == plain[figures]


# The whole document


def test_the_evaluation_document_has_the_schema_keys(full_evaluation):
    document = json.loads(report.render(full_evaluation, "json"))
    assert document["schema"] == "quantforge.eval/2"
    assert set(document) == {
        "schema", "date", "versions", "protocol", "generated", "caches", "models", "verdict",
    }  # fmt: skip
    assert all(set(row) >= KEYS for row in document["models"])
    reference, _, rounded = document["models"]
    assert reference["kl_mean"] is None
    assert reference["format"] == "plain"
    assert rounded["scheme"].startswith("int3:g32:sym")
    assert rounded["bits_per_weight"] == pytest.approx(3.5, abs=0.2)
    assert rounded["weight_bytes"] < reference["weight_bytes"]
    assert (
        rounded["read_bytes_per_token"] <= rounded["resident_bytes"] < reference["resident_bytes"]
    )


def test_speed_and_memory_are_measured(full_evaluation):
    for row in full_evaluation.rows:
        assert row["ttft_seconds"] > 0
        assert row["prefill_tokens_per_second"] == pytest.approx(24 / row["ttft_seconds"])
        assert row["decoder"] == "own"
        assert row["decode_by_batch"].keys() == {"1", "4", "16"}
        assert row["ttft_by_prompt"]["24"] == row["ttft_seconds"]
        # 3 layers, keys and values, 2 heads of 16 channels in bfloat16
        assert row["kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 2
        assert row["decode_tokens_per_second"] == pytest.approx(1 / row["tpot_seconds"])
        assert 0 < row["bandwidth_utilization"] < 1
        assert row["peak_bytes"] is None or row["peak_bytes"] >= 0
        assert sum(row["kernels"].values()) == pytest.approx(1)


def test_without_speed_and_with_one_window_figures_are_absent(tiny):
    row = evaluate_models(tiny("llama-tied"), [], options(windows=1)).rows[0]
    assert row["perplexity"] > 1
    assert row["perplexity_se"] is None
    assert row["peak_bytes"] is row["tpot_seconds"] is row["bandwidth_utilization"] is None


def test_one_model_is_in_memory_at_a_time(tiny, rounded, monkeypatch):
    loaded = []

    def watched(*args, **named):
        gc.collect()
        assert all(reference() is None for reference in loaded)
        loaded_model = load(*args, **named)
        loaded.append(weakref.ref(loaded_model.model))
        return loaded_model

    monkeypatch.setattr(run, "load", watched)
    monkeypatch.setattr(speed, "load", watched)
    monkeypatch.setattr(speed, "BANDWIDTH_BYTES", 1 << 20)
    monkeypatch.setattr(speed, "NEW_TOKENS", 5)
    monkeypatch.setattr(speed, "MAX_SECONDS", 0.0)
    evaluate_models(tiny("llama-tied"), [rounded, rounded], options(speed=True))
    assert len(loaded) == 6


def test_progress_counts_windows(tiny):
    reports = []
    with report_to(reports.append):
        evaluate_models(tiny("llama-tied"), [], options())
    (last,) = [
        progress_report
        for progress_report in reports
        if progress_report.step == "windows of the text" and progress_report.done == 4
    ]
    assert (last.phase, last.total) == (f"scoring {tiny('llama-tied').name}", 4)
    shares = [progress_report.share for progress_report in reports]
    assert shares == sorted(shares)


def test_every_evaluation_phase_has_a_share_of_the_progress(tiny, monkeypatch):
    monkeypatch.setattr(speed, "BANDWIDTH_BYTES", 1 << 20)
    monkeypatch.setattr(speed, "NEW_TOKENS", 5)
    monkeypatch.setattr(speed, "MAX_SECONDS", 0.0)
    reports = []
    with report_to(reports.append):
        evaluate_models(tiny("llama-tied"), [], options(caches=("int8",), speed=True))
    begun = {
        progress_report.phase.partition(" ")[0]: progress_report.share
        for progress_report in reversed(reports)
    }
    phases = [begun[name] for name in ("loading", "scoring", "caches", "speed")]
    assert phases == sorted(set(phases))
    assert phases[-1] < 0.95
    windows = max(
        progress_report.share
        for progress_report in reports
        if progress_report.step == "windows of caches"
    )
    assert windows < min(
        progress_report.share
        for progress_report in reports
        if progress_report.step == "planted keys"
    )


@pytest.mark.parametrize(
    ("ppl", "kl", "failing"),
    [
        (None, None, ()),
        (0.02, 0.03, ()),
        (0.019, None, ("bad",)),
        (None, 0.029, ("bad",)),
        (0.0, 0.0, ("good", "bad")),
    ],
)
def test_perplexity_and_kl_gates_name_failing_models(full_evaluation, ppl, kl, failing):
    rows = [
        {**full_evaluation.rows[0], "path": path, "perplexity_increase": increase, "kl_mean": mean}
        for path, increase, mean in (
            ("source", None, None),
            ("good", 0.01, 0.01),
            ("bad", 0.02, 0.03),
        )
    ]
    evaluation = Evaluation(full_evaluation.protocol, tuple(rows), full_evaluation.options)
    message = failed_gates(evaluation, ppl, kl)
    assert {name for name in ("good", "bad") if f"{name}: " in message} == set(failing)
    assert "source" not in message


def test_reports_hold_every_model_and_the_protocol(full_evaluation):
    text = report.render(full_evaluation, "markdown")
    assert "int3" in text
    assert str(full_evaluation.protocol) in text
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 2 * 5


def test_a_tokenizer_that_fails_on_the_text_is_bad_input(tiny, tmp_path):
    model = shutil.copytree(tiny("llama-tied"), tmp_path / "model")
    Tokenizer(WordLevel({"word": 0}, unk_token="absent")).save(str(model / "tokenizer.json"))
    with pytest.raises(InputError, match=r"tokenizer\.json cannot encode a text of \d{3}"):
        evaluate_models(model, [], options())


def test_only_finite_task_metrics_are_kept():
    metrics = {
        "alias": "x",
        "acc,none": 0.5,
        "acc_stderr,none": math.nan,
        "perplexity,none": math.inf,
    }
    assert tasks._metric_values(metrics) == {"acc": 0.5}
