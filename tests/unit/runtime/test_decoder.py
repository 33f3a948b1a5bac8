"""The decoder gives transformers' logits for every family; quantized caches lose little."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from quantforge.api import quantize
from quantforge.architectures import architecture_of
from quantforge.architectures.families import declared_families
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.recipe import Recipe
from quantforge.runtime.cache import CacheShape, PagedCache
from quantforge.runtime.decoder import Decoder, supports
from quantforge.runtime.decoding import DecodingStep, prefill
from quantforge.runtime.load import load
from quantforge.runtime.packed_experts import PackedExperts
from quantforge.settings import Settings
from quantforge_kernels import kv
from quantforge_kernels.attention import attend, attend_reference
from quantforge_kernels.cpu import layer_launchers
from quantforge_kernels.cpu.instruction_sets import best_instruction_set
from quantforge_kernels.kv import PAGE_SIZE
from quantforge_kernels.kv_row_layout import channels_per_scale
from quantforge_kernels.score_options import ScoreOptions
from tests.conftest import FAMILIES, MIXTURES, TEXT_FAMILIES
from tests.plain_loop import StopLimits, generate
from tests.thorough import parametrize_each_value, thorough_case

TINY = {**FAMILIES, **MIXTURES}
UNCOMPUTED = (
    "gpt2", "opt", "lfm2", "qwen3.5", "qwen3-vl", "qwen2.5-vl", "falcon-h1", "falcon-h1-plain", "granite-hybrid",
    "nemotron-h", "openai-gpt", "gemma4", "gemma4-equal",
)  # fmt: skip
COMPUTED_MIXTURES = (
    "mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "glm4-moe", "dots1", "minimax-m2", "ernie4-5-moe", "hunyuan-v1-moe",
)  # fmt: skip
COMPUTED = tuple(name for name in TEXT_FAMILIES if name not in UNCOMPUTED) + COMPUTED_MIXTURES
# What the graph does differently: windows, norms of heads, soft caps, factors, layers without positions, norms around
# layers, rotations of a part, interleaved or stretched, parallel layers, other norms and gates, and biases.
KINDS = (
    "llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "olmo", "olmo2", "glm4",
    "granite", "exaone4", "cohere", "cohere2", "starcoder2", "gpt-neox", "ministral3", "stablelm-parallel", "phi",
    "nemotron", "apertus", "helium", "mixtral", "qwen3-moe", "qwen2-moe", "glm4-moe", "ernie4-5-moe",
)  # fmt: skip
CPU = torch.device("cpu")
IDS = torch.randint(3, 300, (2, 70), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def models(tiny):
    """Return a function from a family to its loaded model and the logits of transformers."""

    @cache
    def make(family):
        model = load(tiny(family)).model
        with torch.inference_mode():
            return model, model(IDS).logits

    return make


def filled(decoder, kind="", tokens=80, sequences=2) -> PagedCache:
    paged_cache = decoder.cache(sequences, tokens, kind)
    for sequence in range(sequences):
        paged_cache.reserve(sequence, tokens)
    return paged_cache


@torch.inference_mode()
def logits_of(decoder, held, cuts) -> torch.Tensor:
    """Logits of all tokens, computed in chunks that end at ``cuts``."""
    results, first = [], 0
    for last in (*cuts, IDS.shape[1]):
        results.append(decoder.logits(decoder.hidden(IDS[:, first:last], held)))
        first = last
    return torch.cat(results, 1)


def test_every_family_is_tested():
    own = {
        name
        for name in declared_families()
        if architecture_of({"model_type": name}).graph_if_complete is not None
    } - {"gemma3"}  # whose text tower is another type
    assert {TINY[name][0] for name in COMPUTED} == own


@pytest.mark.parametrize(
    ("family", "cuts"),
    [
        *((name, (50, 60, *range(61, 70))) for name in KINDS),
        *(thorough_case(name, (50, 60, *range(61, 70))) for name in COMPUTED if name not in KINDS),
        ("gemma3", ()),
        ("qwen3-moe", ()),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(models, family, cuts):
    model, expected = models(family)
    decoder = Decoder(model)
    result = logits_of(decoder, filled(decoder), cuts)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
@pytest.mark.parametrize("scheme", ["int4:g32:sym", "int8:row:sym"])
def test_decoder_computes_packed_experts(tiny, tmp_path, family, scheme):
    """Several sequences at once and one by one; what a step computes does not depend on what others ask."""
    quantize(str(tiny(family)), Recipe(scheme=scheme, scales="absmax"), tmp_path / "q", Settings())
    model = load(tmp_path / "q").model
    assert any(isinstance(module, PackedExperts) for module in model.modules())
    with torch.inference_mode():
        expected = model(IDS).logits
    decoder = Decoder(model)
    for cuts in ((), (60, *range(61, 70))):
        result = logits_of(decoder, filled(decoder), cuts)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scaling", [
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32, "rope_theta": 1e4},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0, 1.1, 1.2, 2, 3, 4, 5, 6],
     "original_max_position_embeddings": 32, "rope_theta": 1e4, "factor": 4.0},
])  # fmt: skip
def test_scaled_rotary_embeddings(scaling):
    from quantforge.model.skeleton import build_skeleton
    from tests.conftest import SIZES, randomize

    model = build_skeleton({"model_type": "llama", **SIZES, "rope_parameters": scaling}).to_empty(
        device="cpu"
    )
    twin = build_skeleton({"model_type": "llama", **SIZES, "rope_parameters": scaling})
    model.model.rotary_emb = twin.model.rotary_emb  # to_empty forgot what it had computed
    randomize(model)
    decoder = Decoder(model)
    with torch.inference_mode():
        expected = model(IDS).logits
    result = logits_of(decoder, filled(decoder), (60,))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@parametrize_each_value(
    ("family", ["llama", "qwen2", "gemma2", "phi3"]),
    ("scheme", [None, "int4:g32:sym", "int3:g32:asym"]),
)
def test_layers_with_the_same_input_are_joined(tiny, tmp_path, family, scheme):
    path = tiny(family)
    if scheme is not None:
        quantize(str(path), Recipe(scheme=scheme, scales="absmax"), tmp_path / "q", Settings())
        path = tmp_path / "q"
    model = load(path).model
    expected = logits_of(Decoder(model), filled(Decoder(model)), ())
    held_bytes = sum(value.nbytes for value in (*model.parameters(), *model.buffers()))
    decoder = Decoder(model, join=True)
    if family != "phi3":  # whose projections are fused as they come
        assert all(layer.qkv and layer.gate_up for layer in decoder.layers)
    torch.testing.assert_close(
        logits_of(decoder, filled(decoder), (60,)), expected, rtol=1e-4, atol=1e-4
    )
    # The parts are views of the whole, and still multiply.
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in (*model.parameters(), *model.buffers())
    }
    assert sum(storages.values()) <= held_bytes
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_dynamic_rotary_and_other_families_are_refused(models, tiny):
    model, _ = models("gpt2")
    assert not supports(model)
    with pytest.raises(RefusedError, match="gpt2"):
        Decoder(model)
    llama = load(tiny("llama")).model
    llama.model.rotary_emb.rope_type = "dynamic"
    assert not supports(llama)


# What quantized caches cost, relative to the norm of the logits: at most, and at least.
LOSSES = {
    "int8": (1e-3, 0.02),
    "fp8": (0.01, 0.07),
    "int4": (0.03, 0.2),
    "k=int8,v=int4": (0.01, 0.15),
}


@parametrize_each_value(
    ("kind", LOSSES),
    ("family", ["llama", "qwen3"]),
)
def test_quantized_cache_error_is_within_bounds(models, family, kind):
    model, expected = models(family)
    decoder = Decoder(model)
    at_once = logits_of(decoder, filled(decoder, kind), ())
    error = float((at_once - expected).norm() / expected.norm())
    assert LOSSES[kind][0] < error < LOSSES[kind][1]
    in_steps = logits_of(decoder, filled(decoder, kind), (69,))
    torch.testing.assert_close(in_steps, at_once, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("", 256), ("int8", 132), ("fp8", 132), ("int4", 80), ("k=int8,v=int4", 106)],
)
def test_cache_bytes_per_token(kind, expected):
    """Of 64 channels: 2 bytes each; 1 byte and one scale; half a byte and two pairs of 2 + 2 bytes."""
    shape = CacheShape(3, 2, 64, kind, torch.bfloat16)
    assert shape.token_bytes == 3 * 2 * expected
    paged_cache = PagedCache(shape, 2, 70, CPU)
    stored = sum(
        part.nbytes for pair in paged_cache.layers for store in pair for part in store.tensors()
    )
    assert stored == shape.token_bytes * 2 * 3 * PAGE_SIZE


@parametrize_each_value(
    ("kind", ["int8", "fp8", "int4"]),
    ("head", [64, 32, 80]),
)
def test_cached_values_round_within_half_a_step(kind, head):
    x = torch.randn(5, 3, head, generator=torch.Generator().manual_seed(1))
    result = kv.decode(kv.encode(x, kind), torch.float32)
    run = channels_per_scale(head, kind)
    runs = x.view(5, 3, -1, run)
    largest = runs.abs().amax(-1, keepdim=True)
    step = {"int8": largest / 127, "fp8": largest / 8,  # of e4m3 in its largest binade
            "int4": (runs.amax(-1, keepdim=True) - runs.amin(-1, keepdim=True)) / 15}[kind]  # fmt: skip
    assert ((result.view_as(runs) - runs).abs() <= 0.51 * step + 2e-3 * largest).all()
    assert kv.decode(kv.encode(torch.zeros(2, head), kind), torch.float32).eq(0).all()


def test_pages_are_allocated_and_released():
    paged_cache = PagedCache(CacheShape(1, 1, 8, "", torch.float32), 3, 4 * PAGE_SIZE, CPU, pages=6)
    paged_cache.reserve(0, PAGE_SIZE + 1)
    paged_cache.reserve(1, 4 * PAGE_SIZE)
    with pytest.raises(InputError, match="room for 64"):
        paged_cache.reserve(0, 2 * PAGE_SIZE + 1)
    used = paged_cache.table[1].tolist()
    assert sorted([*paged_cache.table[0, :2].tolist(), *used]) == list(range(6))
    paged_cache.release(1)
    paged_cache.reserve(2, 4 * PAGE_SIZE)
    assert set(paged_cache.table[2].tolist()) == set(used)
    with pytest.raises(InputError, match="needs a cache of 129"):
        paged_cache.reserve(2, 4 * PAGE_SIZE + 1)


def test_sequences_are_independent(models):
    model, expected = models("llama")
    decoder = Decoder(model)
    paged_cache = decoder.cache(2, 100)
    paged_cache.reserve(1, 100)  # the second sequence takes the first pages
    paged_cache.reserve(0, 80)
    result = logits_of(decoder, paged_cache, (33,))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@parametrize_each_value(
    ("kind", ["", "int8", "int4", "k=int8,v=int4"]),
    ("window", [0, 20, 200]),
)
def test_attention_of_equal_lengths_equals_the_definition(kind, window):
    paged_cache = PagedCache(CacheShape(1, 2, 64, kind, torch.float32), 3, 100, CPU)
    for part in (
        part
        for store in paged_cache.layers[0]
        for part in store.tensors()
        if part.is_floating_point()
    ):
        part.fill_(float("nan"))  # what no token has been written to
    tokens = PAGE_SIZE + 9
    new = torch.randn(2, 3 * tokens, 2, 64, generator=torch.Generator().manual_seed(4))
    paged_cache.write(0, paged_cache.slots(tokens)[0].flatten(), *new)
    paged_cache.lengths += tokens
    q = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(5))
    options = (
        q,
        *paged_cache.layers[0],
        paged_cache.table,
        paged_cache.lengths,
        ScoreOptions(0.125, 0.0, window),
    )
    torch.testing.assert_close(attend(*options), attend_reference(*options), rtol=1e-5, atol=1e-6)


# Generation


@pytest.mark.tokens
def test_greedy_tokens_follow_the_logits(models):
    model, _ = models("llama")
    decoder = Decoder(model)
    result = generate(
        decoder, [IDS[0, :20].tolist(), IDS[1, :7].tolist()], StopLimits(new_tokens=9)
    )
    for row, length, tokens in ((0, 20, result[0]), (1, 7, result[1])):
        ids = IDS[row, :length].tolist()
        for token in tokens:
            with torch.inference_mode():
                assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
    assert [len(tokens) for tokens in result] == [9, 9]


RECORDED = ("mistral", "qwen3", "gemma2", "gemma3")
CACHES = ((1, ""), (2, "int8"), (3, "fp8"), (2, "k=fp8,v=int4"))


@pytest.fixture(scope="module")
def packed(tiny, tmp_path_factory):
    """Return a function that quantizes but for some linears, once each, and loads."""

    @cache
    def make(family, ignored):
        out = tmp_path_factory.mktemp(family) / "q"
        recipe = Recipe(scheme="int4:g32:sym", scales="absmax", ignore=(ignored,))
        quantize(str(tiny(family)), recipe, out, Settings())
        return load(out, dtype=torch.bfloat16).model

    return make


@pytest.mark.skipif(best_instruction_set() is None, reason="for processors with AVX2")
@pytest.mark.parametrize(
    ("family", "cached", "ignored"),
    [
        *((*pair, "lm_head") for pair in zip(RECORDED, CACHES, strict=True)),
        *((*pair, "re:.*(v_proj|down_proj)") for pair in zip(RECORDED, CACHES[::-1], strict=True)),
    ],
)
def test_recorded_steps_give_the_same_logits(packed, family, cached, ignored):
    sequences, kind = cached
    decoder = Decoder(packed(family, ignored))
    results = []
    for graph in (None, False):
        paged_cache = decoder.cache(sequences, 60, kind)
        with torch.inference_mode():
            logits = prefill(decoder, IDS[:, :60].reshape(-1, 20)[:sequences], paged_cache, 40)
            step = DecodingStep(decoder, paged_cache, graph)
            for _ in range(30):
                logits = step(logits.argmax(-1))
                results.append(logits)
        assert (step.recorded is not None) == (graph is None)
    assert all(torch.equal(a, b) for a, b in zip(results[:30], results[30:], strict=True))


@torch.inference_mode()
def test_steps_computed_by_torch_are_not_recorded(models, monkeypatch):
    """So many rows of a dense layer are torch's."""
    monkeypatch.setattr(layer_launchers, "max_linear_rows", lambda *_: 8)
    decoder, results = Decoder(models("mistral")[0]), []
    ids = IDS.view(-1, 14)[:9]
    for graph in (None, False):
        paged_cache = filled(decoder, sequences=9)
        step = DecodingStep(decoder, paged_cache, graph)
        decoder.hidden(ids[:, :5], paged_cache)
        results.append([step(ids[:, index]) for index in range(5, 9)])
        assert step.recorded is None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_prefill_splits_prompts_into_chunks(models, monkeypatch):
    from quantforge.runtime import decoding as module

    model, expected = models("llama")
    decoder = Decoder(model)
    monkeypatch.setattr(module, "PREFILL_CHUNK_TOKENS", 32)
    chunks = []
    hidden = decoder.hidden
    monkeypatch.setattr(
        decoder, "hidden", lambda ids, c: chunks.append(ids.shape[1]) or hidden(ids, c)
    )
    with torch.inference_mode():
        paged_cache = decoder.cache(2, 80)
        result = prefill(decoder, IDS, paged_cache, 5)
        torch.testing.assert_close(result, expected[:, -1], rtol=1e-4, atol=1e-4)
        assert chunks == [16, 16, 16, 16, 6]
        assert paged_cache.length(1) == 70
        DecodingStep(decoder, paged_cache)(IDS[:, 0])
    assert paged_cache.length(1) == 71


def test_invalid_caches_are_refused(models):
    decoder = Decoder(models("llama")[0])
    with pytest.raises(UsageError, match="int5"):
        decoder.cache(1, 10, "int5")
    paged_cache = decoder.cache(2, 40)
    with pytest.raises(InputError, match="room for 40"):
        prefill(decoder, IDS, paged_cache, 5)


def test_non_finite_logits_are_an_error(tiny):
    model = load(tiny("llama")).model
    model.model.norm.weight[0] = float("inf")
    with pytest.raises(InputError, match=r"is nan|is -?inf"):
        generate(Decoder(model), [[3, 4]])
