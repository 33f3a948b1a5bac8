"""Files in the engine that they are for: llama.cpp loads them, and computes what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import api
from quantforge.errors import InputError, RefusedError
from quantforge.evaluation.llama_cpp import LlamaCpp
from quantforge.formats.gguf.parameters import translate_parameters
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge.settings import Settings
from tests import gguf_models
from tests.thorough import mark_others_thorough, thorough_case

NO_DATA = CalibrationOptions(source="none")
IDS = [5, 9, 41, 77, 160, 23, 11, 200, 300, 7, 19, 55, 93, 111, 64, 222, 31, 14, 250, 199]


def export(model: Path, out: Path, kind: str, **values: object) -> Path:
    recipe = Recipe(format="gguf", type=kind, calibration=NO_DATA, **values)
    api.export(str(model), recipe, out, Settings())
    return out


# Kinds of graphs, or of what is written for them: biases and rope factors, tied embeddings, norms of heads, norms that
# add one beside windows, norms behind layers, linears in one matrix, matrices that are transposed, factors of a
# configuration, experts one by one and stacked, with biases, beside shared ones, latent attention, convolutions, linear
# attention, layers that differ, chunks of attention, positions that are stretched.
KINDS = (
    "llama", "llama-tied", "qwen3", "gemma3", "olmo2", "phi3-long", "gpt2", "granite", "mixtral", "granitemoe",
    "gpt_oss", "qwen2_moe", "deepseek_v3", "lfm2", "qwen3_next", "gemma4", "gemma4-moe", "llama4", "ministral3",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", mark_others_thorough(sorted({**gguf_models.FAMILIES, **gguf_models.WRITTEN}), *KINDS)
)
def test_an_exported_model_computes_in_llama_cpp_what_it_computes_in_transformers(name, tmp_path):
    model = gguf_models.make(name, tmp_path / "m")
    expected = torch.log_softmax(gguf_models.logits(model, IDS).double(), -1)
    engine = LlamaCpp(export(model, tmp_path / "x.gguf", "F32"), 64)
    found = engine.top(IDS, 40)
    assert len(found) == 40
    worst = max(abs(value - expected[token].item()) for token, value in found.items())
    assert worst < 1e-2  # the engine keeps keys and values as float16
    likeliest = max(found, key=found.get)
    assert expected.max() - expected[likeliest] < 2e-2  # unless two are nearly a tie


@pytest.mark.parametrize("cap", [None, 10.0])
def test_large_logits_are_capped_as_the_configuration_says(cap, tmp_path):
    """Where nothing is said, llama.cpp caps those of Gemma 4 all the same."""
    model = gguf_models.make("gemma4-equal", tmp_path / "m", final_logit_softcapping=cap)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 20
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    expected = torch.log_softmax(gguf_models.logits(model, IDS).double(), -1)
    found = LlamaCpp(export(model, tmp_path / "x.gguf", "F32"), 64).top(IDS, 5)
    assert max(abs(value - expected[token].item()) for token, value in found.items()) < 0.1


def computes_the_same(model: Path, out: Path) -> bool:
    """Return whether llama.cpp computes of the exported model what transformers does of the directory."""
    expected = torch.log_softmax(gguf_models.logits(model, IDS).double(), -1)
    found = LlamaCpp(export(model, out, "F32"), 64).top(IDS, 40)
    return max(abs(value - expected[token].item()) for token, value in found.items()) < 1e-2


ABSENT = "(absent)"


MULTIPLIERS = dict.fromkeys(
    ("attention_multiplier", "residual_multiplier", "logits_scaling"), ABSENT
)


@pytest.mark.parametrize(("name", "changes"), [
    ("granite", MULTIPLIERS), thorough_case("granitemoe", MULTIPLIERS),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0}}),
    ("phi3-long", {"original_max_position_embeddings": ABSENT}),
    ("phi3-long", {"rope_parameters": {**gguf_models.FAMILIES["phi3-long"][1]["rope_parameters"], "factor": 3.0}}),
    ("gpt_oss", {"rope_parameters": {}}),
    *(thorough_case(name, {"rope_parameters": {}}) for name in ("ernie4_5_moe", "minimax_m2")),
    ("deepseek_v3", {"topk_group": 2, "num_key_value_heads": 2}), thorough_case("deepseek_v2", {"n_group": 2}),
    ("gemma", {"hidden_act": "gelu"}), thorough_case("hunyuan_v1_moe", {"moe_topk": ABSENT}),
], ids=str)  # fmt: skip
def test_keys_that_are_left_out_or_null_are_what_transformers_takes_them_for(
    name, changes, tmp_path
):
    config = gguf_models.make(name, tmp_path / "m") / "config.json"
    stated = {**json.loads(config.read_text()), **changes}
    kept = {key: value for key, value in stated.items() if value != ABSENT}
    config.write_text(json.dumps(kept))
    assert computes_the_same(tmp_path / "m", tmp_path / "x.gguf")


def test_experts_without_shared_ones_are_written(tmp_path):
    model = gguf_models.make("ernie4_5_moe", tmp_path / "m", moe_num_shared_experts=0)
    assert computes_the_same(model, tmp_path / "x.gguf")


@pytest.mark.parametrize("name", [thorough_case("granitemoe"), "gpt_oss"])
def test_quantized_experts_compute_what_they_did(name, tmp_path):
    """Experts of a stack are rounded one by one and stacked again, gate and up apart."""
    model = gguf_models.make(name, tmp_path / "m")
    expected = torch.log_softmax(gguf_models.logits(model, IDS).double(), -1)
    found = LlamaCpp(export(model, tmp_path / "x.gguf", "Q8_0"), 64).top(IDS, 40)
    assert max(abs(value - expected[token].item()) for token, value in found.items()) < 0.1


_WINDOWS = ["sliding_attention", "full_attention"]


# What differs, by the model of which it is changed.
NOT_COMPUTED: dict[str, list[dict[str, Any]]] = {
    "qwen2_moe": [{"norm_topk_prob": True}, {"mlp_only_layers": [1]}, {"tie_word_embeddings": True}],
    "olmoe": [{"num_key_value_heads": 2}, {"tie_word_embeddings": True}],
    "dots1": [{"tie_word_embeddings": True}], "minimax_m2": [{"tie_word_embeddings": True}],
    "ernie4_5_moe": [{"moe_layer_end_index": 1}, {"moe_layer_interval": 2}, {"moe_norm_min": 0.6}],
    "gpt_oss": [{"attention_bias": False}, {"tie_word_embeddings": True}],
    "lfm2": [{"layer_types": ["full_attention"] * 4}], "lfm2_moe": [{"norm_topk_prob": False}],
    "deepseek_v3": [{"q_lora_rank": None}], "deepseek_v2": [{"topk_method": "group_limited_greedy"}],
    "qwen3_next": [
        {"linear_value_head_dim": 16},
        {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}],
    "glm4_moe_lite": [{"mlp_layer_types": ["sparse", "dense", "sparse"]}],
    "gemma4": [
        {"vocab_size_per_layer_input": 336}, {"layer_types": ["full_attention"] * 4},
        {"layer_types": [*_WINDOWS[::-1], *_WINDOWS]}],
    "gemma4-equal": [{"use_bidirectional_attention": "all"}, {"rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}}],
    "gemma3": [{"use_bidirectional_attention": True}],
    "ministral3": [{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
                                        "original_max_position_embeddings": 64}}],
    "llama4": [
        {"moe_layers": [0, 2]}, {"moe_layers": []}, {"no_rope_layers": [1, 0, 1, 1]}, {"no_rope_layer_interval": 2},
        {"layer_types": ["full_attention"] * 4}, {"num_hidden_layers": 3}, {"use_qk_norm": False},
        {"attention_chunk_size": 16}, {"attn_temperature_tuning": False}, {"attn_scale": 0.2}, {"floor_scale": 16},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}],
    "llama4-several": [{"use_qk_norm": True}],
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_COMPUTED)
def test_what_the_graph_of_a_family_does_not_compute_is_refused(name):
    translate_parameters(gguf_models.config(name))  # without a change it is written
    for changes in NOT_COMPUTED[name]:
        with pytest.raises(RefusedError, match="cannot be carried by a GGUF file"):
            translate_parameters(gguf_models.config(name, **changes))


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}


TURNED_OTHERWISE: dict[str, list[dict[str, Any]]] = {
    "llama-yarn": [
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        {"rope_parameters": YARN, "rope_scaling": {**YARN, "factor": 8.0}},
        {"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {**YARN, "original_max_position_embeddings": "8"}},
        {"rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 32.0}},
        {"rope_parameters": {**YARN, "rope_theta": 100.0, "original_max_position_embeddings": 3}}],
    "ministral3": [
        {"rope_parameters": {}}, {"rope_parameters": {**YARN, "llama_4_scaling_beta": -0.2}},
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5}}],
}  # fmt: skip


@pytest.mark.parametrize("name", TURNED_OTHERWISE)
def test_positions_that_the_engine_would_turn_otherwise_are_refused(name):
    for changes in TURNED_OTHERWISE[name]:
        with pytest.raises((RefusedError, InputError), match=r"config\.json"):
            translate_parameters({**gguf_models.config(name), **changes})


@pytest.mark.parametrize("changes", [
    {"rope_parameters": {**YARN, "original_max_position_embeddings": 8.0}},
    {"rope_parameters": {**YARN, "original_max_position_embeddings": 16}, "original_max_position_embeddings": 8},
    {"rope_parameters": YARN, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
], ids=str)  # fmt: skip
def test_the_original_context_is_the_one_that_transformers_takes(changes, tmp_path):
    model = gguf_models.make("llama-yarn", tmp_path / "m")
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    assert computes_the_same(model, tmp_path / "x.gguf")


def test_a_window_in_every_layer_is_told_whatever_the_list_says(tmp_path):
    changes = {"sliding_window": 8, "layer_types": ["full_attention"] * 3}
    model = gguf_models.make("ministral3", tmp_path / "m", **changes)
    made = api.plan(str(model), Recipe(format="gguf", type="Q8_0", calibration=NO_DATA))
    assert [event.kind for event in made.substitutions] == ["sliding-window-dropped"]


def test_a_range_of_frequencies_that_the_engine_rounds_is_an_event(tmp_path):
    rope = {"rope_type": "yarn", "factor": 32.0, "rope_theta": 1e4, "truncate": False,
            "original_max_position_embeddings": 64}  # fmt: skip
    model = gguf_models.make("gpt_oss", tmp_path / "m", rope_parameters=rope)
    made = api.plan(str(model), Recipe(format="gguf", type="Q8_0", calibration=NO_DATA))
    assert [event.kind for event in made.substitutions] == ["rope-approximated"]


def test_a_probability_is_found_for_every_token_even_for_the_one_that_ends_the_text(tmp_path):
    model = gguf_models.make("llama-tied", tmp_path / "m")
    ids = [*IDS[:6], 1, *IDS[6:9]]  # 1 is the end of a text
    engine = LlamaCpp(export(model, tmp_path / "x.gguf", "F32"), 64)
    expected = [
        -torch.log_softmax(gguf_models.logits(model, ids[:place]).double(), -1)[ids[place]].item()
        for place in range(1, len(ids))
    ]
    assert engine.nll(ids) == pytest.approx(expected, abs=1e-2)


# All scripts, digits, runs of spaces and newlines, contractions, emoji with joiners, bytes of every kind.
TEXT = """Hello wörld, it's 1234 + 5.6e7;
 WE'LL   see\n\n\tthe ĀβΓ 日本語 한국어 \u0440\u0443\u0441\u0441\u043a\u0438\u0439
हिन्दी العربية ไทย 🚀 👩‍👩‍👧 ½ € \u00a0 x--->y ''quoted'' don't I'VE\r\n  end  """


@pytest.mark.parametrize(
    "kind", ["gpt-2", "llama-bpe", "dbrx", "qwen2", "smollm", "tekken", "gpt-4o", "qwen35"]
)
def test_the_engine_makes_the_same_tokens_of_a_text_of_all_scripts(kind, tmp_path):
    model = gguf_models.make("llama-tied", tmp_path / "m")
    tokenizer = gguf_models.byte_level_tokenizer(kind)
    tokenizer.save(str(model / "tokenizer.json"))
    engine = LlamaCpp(export(model, tmp_path / "x.gguf", "F16"), 64)
    # llama.cpp's tekken cuts before combining marks, which that tokenizer does not.
    text = TEXT if kind != "tekken" else "".join(c for c in TEXT if not category(c).startswith("M"))
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(expected) < len(text.encode())  # merges apply
    assert engine.tokenize(text) == expected


@pytest.mark.parametrize("prefix", [True, False])
def test_the_engine_makes_the_same_tokens_with_a_vocabulary_of_sentencepiece(prefix, tmp_path):
    model = gguf_models.make("llama-tied", tmp_path / "m", vocab_size=500)
    tokenizer = gguf_models.sentencepiece_tokenizer(prefix=prefix)
    tokenizer.save(str(model / "tokenizer.json"))
    engine = LlamaCpp(export(model, tmp_path / "x.gguf", "F16"), 64)
    expected = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert engine.tokenize(TEXT) == expected


DEMO = Path(__file__).parents[2] / "models" / "demo"


# Superblocks with and without minima, blocks of 32, values of a table.
@pytest.mark.parametrize(
    "kind", [thorough_case("Q3_K_M"), "Q4_K_M", thorough_case("Q5_0"), thorough_case("IQ4_XS")]
)
def test_the_engine_continues_as_we_decode_the_same_file(kind, tmp_path):
    from quantforge.runtime.load import load

    out = export(DEMO, tmp_path / "x.gguf", kind, scales="absmax")
    engine = LlamaCpp(out, 64)
    loaded = load(out)
    prompt = [320, 549, 1805, 951]
    with torch.no_grad():
        logits = loaded.model(torch.tensor([prompt])).logits[0, -1].double()
    expected = torch.log_softmax(logits, -1)
    found = engine.top(prompt, 20)
    # The engine rounds activations to 8 bits; its weights are ours to the bit.
    assert max(abs(value - expected[token].item()) for token, value in found.items()) < 0.25
    ours = list(prompt)
    for _ in range(6):
        with torch.no_grad():
            logits = loaded.model(torch.tensor([ours])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        token = engine.top(ours, 1)
        assert next(iter(token)) == int(logits.argmax()) or first - second < 0.25
        ours.append(int(logits.argmax()))


@pytest.mark.parametrize(
    "kind", [thorough_case("IQ1_M"), "IQ2_XXS", thorough_case("IQ2_M"), thorough_case("IQ3_XXS")]
)
def test_the_engine_computes_what_mixtures_of_lattices_decode_to(kind, tmp_path):
    from quantforge.runtime.load import load

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    model = gguf_models.make("llama-tied", tmp_path / "m", **sizes)
    out, text = tmp_path / "x.gguf", CalibrationOptions(samples=6, length=32)
    # The quick way to such a file: how good its values are does not count here.
    recipe = Recipe(method="rtn", scales="reference", format="gguf", type=kind, calibration=text)
    api.quantize(str(model), recipe, out, Settings())
    loaded = load(out)
    assert any("lattice" in event.detail for event in loaded.events)
    with torch.no_grad():
        logits = loaded.model(torch.tensor([IDS])).logits[0, -1].double()
    expected = torch.log_softmax(logits, -1)
    found = LlamaCpp(out, 64).top(IDS, 20)
    assert max(abs(value - expected[token].item()) for token, value in found.items()) < 0.25


def test_the_engine_computes_what_a_tuned_file_decodes_to(tmp_path, monkeypatch):
    from quantforge.quantizers import tuning as tuning_bounds
    from quantforge.quantizers.tuning.tuning_stream import TuningStream
    from quantforge.runtime.load import load

    monkeypatch.setattr(tuning_bounds, "MAX_CODE_RATE", 1.0)  # a few steps change codes, too
    figures = iter(range(100, 0, -1))  # and the epoch passes for better
    monkeypatch.setattr(TuningStream, "_error", lambda *_: float(next(figures)))
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model = gguf_models.make("llama-tied", tmp_path / "m", **sizes)
    files = {}
    for epochs in (0, 1):
        files[epochs] = tmp_path / f"{epochs}.gguf"
        text = CalibrationOptions(samples=16, length=32)
        recipe = Recipe(method="gptq", type="Q3_K_M", tune=epochs, calibration=text)
        api.quantize(str(model), recipe, files[epochs], Settings())
    with torch.no_grad():
        logits = load(files[1]).model(torch.tensor([IDS])).logits[0, -1].double()
    expected = torch.log_softmax(logits, -1)
    found = LlamaCpp(files[1], 64).top(IDS, 20)
    assert max(abs(value - expected[token].item()) for token, value in found.items()) < 0.25
    assert found != LlamaCpp(files[0], 64).top(IDS, 20)


def test_the_engine_computes_what_a_rounded_tied_embedding_decodes_to(tmp_path):
    from quantforge.runtime.load import load

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model = gguf_models.make("llama-tied", tmp_path / "m", torch.float16, **sizes)
    wanted = Recipe(method="rtn", scheme="int4:g32:sym", scales="absmax", calibration=NO_DATA)
    api.quantize(str(model), wanted, tmp_path / "q", Settings())
    moved = api.export(tmp_path / "q", format="gguf", out=tmp_path / "x.gguf")
    assert moved.verdict == "exact but for the embedding"
    with torch.no_grad():
        logits = load(moved.out).model(torch.tensor([IDS])).logits[0, -1].double()
    expected = torch.log_softmax(logits, -1)
    found = LlamaCpp(moved.out, 64).top(IDS, 20)
    assert max(abs(value - expected[token].item()) for token, value in found.items()) < 0.25


def test_parts_and_tied_models_load(tmp_path):
    export(DEMO, tmp_path / "x.gguf", "Q8_0", max_shard_bytes=1_500_000)
    first = min(tmp_path.glob("x-00001-of-*.gguf"))
    whole = LlamaCpp(export(DEMO, tmp_path / "y.gguf", "Q8_0"), 64)
    answers = []
    for engine in (whole, LlamaCpp(first, 64)):
        ids = [320, 549]
        for _ in range(8):
            ids += engine.top(ids, 1)
        answers.append(ids)
    assert answers[0] == answers[1]


def test_a_file_that_the_engine_does_not_load_is_an_error_and_not_a_crash(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(InputError, match="does not load"):
        LlamaCpp(tmp_path / "x.gguf", 64)
