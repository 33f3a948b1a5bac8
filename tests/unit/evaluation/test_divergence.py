"""Perplexity and KL divergence equal their definitions, however the logits are chunked."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from quantforge.api import quantize
from quantforge.evaluation import divergence, output_head
from quantforge.evaluation.divergence import (
    Divergence,
    Estimate,
    ModelScores,
    final_hidden,
    score,
    score_reference,
)
from quantforge.evaluation.output_head import OutputHead
from quantforge.model.hidden_states import InMemory, OnDisk
from quantforge.progress import Progress, report_to
from quantforge.recipe import Recipe
from quantforge.runtime.load import load
from quantforge.settings import Settings
from tests.evaluations import evaluate_models, evaluation_windows, options


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt"])
def test_perplexity_equals_the_loss_of_transformers(tiny, family):
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32).eval()
    windows = evaluation_windows(tiny(family))
    with torch.inference_mode():
        losses = [peer(ids[None], labels=ids[None]).loss.double().item() for ids in windows.ids]
    row = evaluate_models(tiny(family), [], options()).rows[0]
    assert row["nll"] == pytest.approx(sum(losses) / 4, rel=1e-6)
    assert row["perplexity"] == pytest.approx(math.exp(sum(losses) / 4), rel=1e-5)


@pytest.mark.parametrize("family", ["llama-tied", "gemma2"])
def test_divergence_equals_full_logits_in_float64(tiny, tmp_path, family):
    recipe = Recipe(scheme="int3:g32:sym", scales="absmax")
    quantize(str(tiny(family)), recipe, tmp_path / "out", Settings())
    windows = evaluation_windows(tiny(family))
    source, model = load(tiny(family)).model, load(tmp_path / "out").model
    scores = score(model, windows, score_reference(source, windows))
    with torch.inference_mode():
        p, q = (m(windows.ids).logits[:, :-1].double().log_softmax(-1) for m in (source, model))
    kl = (p.exp() * (p - q)).sum(-1)
    assert kl.mean() > 0.01
    torch.testing.assert_close(scores.divergence.kl.double(), kl, rtol=1e-4, atol=1e-6)
    assert scores.divergence.mean.mean == pytest.approx(kl.mean().item(), rel=1e-5)
    assert torch.equal(scores.divergence.agrees, p.argmax(-1) == q.argmax(-1))
    nll = -q.gather(2, windows.targets[:, :, None])[:, :, 0]
    torch.testing.assert_close(scores.nll.double(), nll, rtol=1e-5, atol=1e-5)


def test_logits_in_chunks_give_the_same_scores(tiny, monkeypatch):
    model, windows = load(tiny("llama-tied")).model, evaluation_windows(tiny("llama-tied"))
    unchunked = score_reference(model, windows).scores
    logits, sizes = OutputHead.logits, []

    def record_shape(*arguments):
        chunk = logits(*arguments)
        sizes.append(chunk.shape)
        return chunk

    monkeypatch.setitem(output_head.MAX_CHUNK_LOGITS, "cpu", 200)
    monkeypatch.setattr(output_head, "MAX_CHUNK_TOKENS", 5)
    monkeypatch.setattr(OutputHead, "logits", record_shape)
    chunked = score_reference(model, windows)
    assert max(sizes[1:]) == (5, 40)  # the first checks the head
    torch.testing.assert_close(chunked.scores.nll, unchunked.nll, rtol=1e-5, atol=1e-5)
    again = score(model, windows, chunked)
    assert torch.equal(again.nll, chunked.scores.nll)
    assert not bool(again.divergence.kl.any())
    assert bool(again.divergence.agrees.all())


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_mlps_are_computed_in_chunks_of_tokens(tiny, monkeypatch, family):
    model, windows = load(tiny(family)).model, evaluation_windows(tiny(family))
    with torch.inference_mode():
        unchunked = [hidden for _, hidden in final_hidden(model, windows.ids)]
    seen = []
    mlp = model.base_model.layers[1].mlp
    mlp.down_proj.register_forward_hook(lambda _, x, y: seen.append(y.shape[1]))
    monkeypatch.setitem(divergence.MAX_FORWARD_TOKENS, "cpu", 7)
    with torch.inference_mode():
        cut = [hidden for _, hidden in final_hidden(model, windows.ids)]
    assert max(seen) == 7
    assert sum(seen) == windows.ids.numel()
    torch.testing.assert_close(torch.cat(cut), torch.cat(unchunked), rtol=1e-4, atol=1e-5)
    assert "forward" not in vars(mlp)


def test_an_unsplittable_head_is_computed_in_chunks_of_tokens(tiny, monkeypatch):
    model, windows = load(tiny("llama-tied")).model, evaluation_windows(tiny("llama-tied"))
    reference = score_reference(model, windows)
    monkeypatch.setattr(OutputHead, "_weight_rows", lambda *_: None)
    monkeypatch.setattr(output_head, "MIN_CHUNK_TOKENS", 5)
    monkeypatch.setitem(output_head.MAX_CHUNK_LOGITS, "cpu", 1)
    assert list(OutputHead(model).token_slices(12)) == [slice(0, 5), slice(5, 10), slice(10, 12)]
    result = score(model, windows, reference)  # of which the reference's can
    torch.testing.assert_close(result.nll, reference.scores.nll, rtol=1e-5, atol=1e-5)
    assert float(result.divergence.kl.abs().max()) < 1e-6


@pytest.mark.parametrize("whose", ["the model's", "the reference's"])
def test_vocabulary_is_split_only_if_both_heads_allow_it(tiny, monkeypatch, whose):
    class Uncut(OutputHead):
        def _weight_rows(self, part):
            return None

    monkeypatch.setitem(
        output_head.MAX_CHUNK_LOGITS, "cpu", 200
    )  # parts of a few words for a head that can
    model, windows = load(tiny("llama-tied")).model, evaluation_windows(tiny("llama-tied"))
    reference = score_reference(model, windows)
    assert OutputHead(model).splits_vocabulary
    assert not Uncut(model).splits_vocabulary
    if whose == "the model's":
        monkeypatch.setattr(output_head, "OutputHead", Uncut)
    else:
        reference.head = Uncut(model)
    result = score(model, windows, reference)
    torch.testing.assert_close(result.nll, reference.scores.nll, rtol=1e-5, atol=1e-5)
    assert float(result.divergence.kl.abs().max()) < 1e-6


def record_progress(reports: list[tuple[int, int]], report: Progress) -> None:
    reports.append((report.done, report.total))


def test_hidden_states_use_the_given_storage_and_progress_counts_windows(tiny, tmp_path):
    model, windows = load(tiny("llama-tied")).model, evaluation_windows(tiny("llama-tied"))
    for directory, kind in ((None, InMemory), (tmp_path, OnDisk)):
        reports: list[tuple[int, int]] = []
        with report_to(partial(record_progress, reports)):
            reference = score_reference(model, windows, directory)
            assert isinstance(reference.states, kind)
            score(model, windows, reference)
        reference.close()
        steps, total = zip(*reports, strict=True)
        assert set(total) == {4}
        assert [step for step in steps if step == 4] == [4, 4]
        assert list(steps[: steps.index(4) + 1]) == sorted(set(steps[: steps.index(4) + 1]))
        assert min(steps) > 0


def test_logit_sums_over_chunks_equal_cross_entropy():
    torch.manual_seed(0)
    logits = torch.randn(6, 50) * torch.tensor([0.1, 1, 5, 30, 80, 3])[:, None]
    targets = torch.tensor([0, 7, 49, 20, 33, 12])
    sums = output_head.LogitSums(targets, find_best=True)
    for first in range(0, 50, 7):
        part = slice(first, min(first + 7, 50))
        sums.add(logits[:, part].clone(), part)
    expected = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(sums.nll, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(sums.best, logits.argmax(-1))


def test_standard_errors_are_taken_over_windows():
    values = torch.tensor([1.0, 2.0, 4.0, 5.0])
    estimate = Estimate.of(values)
    assert estimate.mean == 3
    assert estimate.error == pytest.approx(math.sqrt((4 + 1 + 1 + 4) / 3 / 4))
    assert estimate.exp().error == pytest.approx(math.e**3 * estimate.error)
    assert math.isnan(Estimate.of(values[:1]).error)


def test_models_are_compared_window_by_window():
    nll = torch.tensor([[1, 3], [5, 7]]).double()  # windows differ much, models by 0.1 and 0.3
    worse = ModelScores(nll + torch.tensor([[0.1], [0.3]]).double())
    increase = worse.increase(ModelScores(nll))
    assert increase.mean == pytest.approx(math.exp(0.2) - 1)
    assert increase.error == pytest.approx(math.exp(0.2) * 0.1)
    assert worse.mean_nll.error > 10 * increase.error


def test_quantiles_are_taken_over_tokens():
    result = Divergence(torch.arange(100.0).view(4, 25).flip(0), torch.ones(4, 25))
    assert result.quantile(0.5) == 50
    assert result.quantile(0.99) == 99
    assert result.quantile(1.0) == 99
