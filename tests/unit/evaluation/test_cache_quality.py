"""Quality of quantized KV caches: figures equal their definitions, and unsupported models are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch

from quantforge.api.evaluate import check_measurement_options
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.evaluation.cache_quality import (
    BASELINE_REQUESTS,
    CUE_TOKENS,
    KEY_TOKENS,
    LEAD_IN_TOKENS,
    _by_position,
    compare_caches,
    plan_cache_comparison,
    plant_keys,
)
from quantforge.evaluation.text_windows import Windows
from quantforge.formats.open_model import open_model
from quantforge.runtime.cache import CacheShape, PagedCache
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.load import load
from quantforge_kernels.kv import PAGE_SIZE
from tests.conftest import make_tiny
from tests.evaluations import TEXT, evaluate_models, options

KINDS = ("int8", "int4", "k=int8,v=int4")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def source(tiny):
    return tiny("llama-tied")


@pytest.fixture(scope="module")
def trial(source):
    return plan_cache_comparison([open_model(source)], TEXT * 4, KINDS, 400)


@pytest.fixture(scope="module")
def rows(source, trial):
    return compare_caches(load(source, dtype=torch.float32), trial)


def test_fp8_caches_are_compared_with_the_stored_scales(source):
    """A model with stored KV scales uses only these when it is served with an fp8 cache."""
    comparison = plan_cache_comparison([open_model(source)], TEXT * 2, ("fp8",), 200)
    loaded = load(source, dtype=torch.float32)
    coarse = torch.full((1,), 2.0**8)  # most of what a head holds is below its smallest numbers
    scales = dict.fromkeys(range(loaded.model.config.num_hidden_layers), (coarse, coarse))
    own, with_scales = (
        compare_caches(loaded_model, comparison)[1]
        for loaded_model in (loaded, replace(loaded, kv_scales=scales))
    )
    assert with_scales["kl_mean"] > 2 * own["kl_mean"] > 0


def test_cache_windows_span_all_positions(source, trial):
    assert trial.windows.ids.shape == (3, 128)


def test_a_short_text_gives_shorter_cache_windows(source):
    comparison = plan_cache_comparison([open_model(source)], TEXT[:240], ("16bit",), 400)
    assert 2 <= comparison.windows.ids.shape[1] < 128
    assert comparison.kinds == ()
    with pytest.raises(InputError, match="nothing to score"):
        plan_cache_comparison([open_model(source)], "", ("int8",), 400)


def test_cache_windows_end_at_8k_and_ranges_at_powers_of_two(tmp_path):
    model = make_tiny("llama", tmp_path / "long", max_position_embeddings=1 << 14)
    comparison = plan_cache_comparison([open_model(model)], TEXT * 200, ("int8",), 400)
    assert comparison.windows.ids.shape == (1, 8192)
    assert [item.distance for item in comparison.keys] == [32 << n for n in range(8)]
    ranges = [*_by_position(torch.ones(2, 8191))]
    assert [item["last"] for item in ranges] == [64 << n for n in range(7)] + [8191]
    assert [item["first"] for item in ranges] == [1, *(item["last"] + 1 for item in ranges[:-1])]


def test_cache_divergence_equals_token_by_token_decoding(source, trial, rows):
    """Decode token by token, with keys and values rounded to bfloat16."""
    decoder = Decoder(load(source, dtype=torch.float32).model)
    ids = trial.windows.ids[0]

    class Handed(PagedCache):
        def write(self, layer, slots, keys, values):
            super().write(layer, slots, keys.bfloat16().float(), values.bfloat16().float())

    def logits(kind):
        cache = Handed(decoder.cache_shape(kind), 1, len(ids), torch.device("cpu"))
        cache.reserve(0, len(ids))
        result = []
        with torch.inference_mode():
            for token in ids[:-1]:
                result.append(decoder.logits(decoder.hidden(token.view(1, 1), cache))[0, -1])
                cache.advance_all(1)
        return torch.stack(result).log_softmax(-1).double()

    reference_logits = logits("16bit")
    single = compare_caches(
        load(source, dtype=torch.float32),
        type(trial)(KINDS, Windows(trial.windows.ids[:1], None), ()),
    )
    for row in single[1:]:
        other = logits(row["kind"])
        kl = (reference_logits.exp() * (reference_logits - other)).sum(-1)
        assert row["kl_mean"] == pytest.approx(kl.mean().item(), rel=0.02)
        assert row["kl_se"] is None  # of one window
        assert [item["last"] for item in row["by_position"]] == [64, 127]
        assert row["by_position"][1]["kl_mean"] == pytest.approx(kl[64:].mean().item(), rel=0.02)
        assert row["keys_found"] is None
    assert rows[0]["kl_mean"] is None


def test_cache_divergence_grows_with_fewer_bits_of_keys_or_values(rows):
    by_kind = {row["kind"]: row for row in rows}
    assert [*by_kind] == ["16bit", *KINDS]
    int8, int4, both = (by_kind[kind]["kl_mean"] for kind in KINDS)
    assert 0 < 10 * int8 < both < int4
    for row in rows[1:]:
        total = sum(
            (item["last"] - item["first"] + 1) * item["kl_mean"] for item in row["by_position"]
        )
        assert total / 127 == pytest.approx(row["kl_mean"])
        assert row["kl_se"] > 0


def test_request_counts_follow_from_the_page_sizes(trial, rows):
    length = trial.windows.ids.shape[1]

    def request(kind):
        shape = CacheShape(3, 2, 16, kind, torch.bfloat16)
        cache = PagedCache(shape, 1, length, torch.device("cpu"))
        return sum(part.nbytes for pair in cache.layers for item in pair for part in item.tensors())

    memory = BASELINE_REQUESTS * request("16bit")
    for row in rows:
        assert row["requests"] == memory // request(row["kind"])
        assert row["token_bytes"] * PAGE_SIZE * -(-length // PAGE_SIZE) == request(row["kind"])
    assert rows[1]["requests"] > 1.7 * BASELINE_REQUESTS


def test_keys_are_planted_at_the_stated_distances():
    windows = Windows(torch.arange(3 * 400).view(3, 400), None)
    planted_keys = plant_keys(windows)
    assert [item.distance for item in planted_keys] == [32, 64, 128, 256]
    for planted in planted_keys:
        for ids, others in zip(planted.ids, planted.control_ids, strict=True):
            cue, key = ids[-CUE_TOKENS - KEY_TOKENS : -KEY_TOKENS], ids[-KEY_TOKENS:]
            assert torch.equal(
                ids[LEAD_IN_TOKENS:][: CUE_TOKENS + KEY_TOKENS], torch.cat((cue, key))
            )
            assert torch.equal(others[-CUE_TOKENS - KEY_TOKENS :], ids[-CUE_TOKENS - KEY_TOKENS :])
            assert len(ids) == LEAD_IN_TOKENS + planted.distance + 2 * (CUE_TOKENS + KEY_TOKENS)
            changed = (ids != others).nonzero()[:, 0]
            assert changed.min() >= LEAD_IN_TOKENS + CUE_TOKENS
            assert changed.max() < LEAD_IN_TOKENS + CUE_TOKENS + KEY_TOKENS
    assert plant_keys(Windows(torch.arange(60)[None], None)) == ()


def test_key_nats_are_log_probabilities_of_the_key(source, trial, rows):
    model = load(source, dtype=torch.float32).model
    planted = trial.keys[0]
    with torch.inference_mode():
        nats = model(planted.ids).logits[:, :-1].log_softmax(-1)
    expected = nats[:, -KEY_TOKENS:].gather(2, planted.ids[:, -KEY_TOKENS:, None]).mean().item()
    result = rows[0]["by_distance"][0]
    assert result["distance"] == planted.distance == 32
    assert result["key_nats"] == pytest.approx(expected, abs=2e-3)  # keys and values in bfloat16
    assert rows[0]["key_change"] is None
    assert rows[2]["key_change_se"] > 0


def test_an_evaluation_with_caches_follows_the_published_schema(source):
    changed = options(text=TEXT * 4, caches=("int8", "k=int8,v=int4"), windows=20)
    evaluation = evaluate_models(source, [source], changed)
    assert [row["kind"] for row in evaluation.rows[1]["caches"]] == [
        "16bit",
        "int8",
        "k=int8,v=int4",
    ]
    assert evaluation.rows[0]["caches"] == evaluation.rows[1]["caches"]
    document = json.loads(json.dumps(evaluation.to_json()))
    assert document["caches"]["length"] == 128
    schema = json.loads((ROOT / "docs" / "eval.schema.json").read_text())
    jsonschema.validate(document, schema)
    assert evaluate_models(source, [], options()).to_json()["caches"] is None


@pytest.mark.parametrize("family", ["deepseek-v3", "falcon-h1", "gpt2"])
def test_cache_comparison_is_refused_for_models_without_our_decoder(tiny, family, monkeypatch):
    monkeypatch.setattr(
        "quantforge.evaluation.compare_models.load", lambda *_: pytest.fail("loaded")
    )
    with pytest.raises(RefusedError, match="own decoder"):
        evaluate_models(tiny(family), [], options(caches=("int8",)))


@pytest.mark.parametrize(
    "cache_names", ["", "int5", "k=int8", "int8,", [], ["int8", "v=int4"], ["k=int8,v=int3"]]
)
def test_unknown_cache_names_are_refused(cache_names):
    if cache_names == []:
        check_measurement_options({"cache": cache_names})
        return
    with pytest.raises(UsageError, match="--cache"):
        check_measurement_options({"cache": cache_names})
