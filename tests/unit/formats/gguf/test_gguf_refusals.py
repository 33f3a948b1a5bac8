"""Models that GGUF cannot represent are refused with a reason before a byte is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from quantforge import api
from quantforge.artifacts import manifest
from quantforge.errors import InputError, QuantForgeError, RefusedError, UsageError
from quantforge.events import Policy
from quantforge.formats.gguf.container import GgufTensor, file_plan
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.planning.gguf_plan import UNREAD
from quantforge.recipe import Recipe, Rule
from quantforge.verification.verify import verify
from tests import gguf_models
from tests.gguf_exports import (
    NO_CALIBRATION,
    WIDE,
    assert_export_refused,
    copy_with_edited_tokenizer,
    copy_with_json_values,
    export,
)


def test_families_and_settings_unsupported_by_gguf_are_refused(models, tmp_path, tiny):
    assert_export_refused(RefusedError, "model_type 'opt'.*not written", tiny("opt"), tmp_path)
    for name, values, match in (
        ("gemma2", {"query_pre_attn_scalar": 77}, "query_pre_attn_scalar = 77"),
        ("gemma3", {"layer_types": ["full_attention"] * 6}, "layer_types"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}, "no_rope_layers"),
        ("llama-tied", {"hidden_act": "relu"}, "activation 'relu'"),
        (
            "llama-tied",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope scaling 'dynamic'",
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    ):
        model = copy_with_json_values(
            models(name), tmp_path / f"{name} {match[:5]}", "config.json", **values
        )
        assert_export_refused(RefusedError, match, model, tmp_path)


@pytest.mark.parametrize(("family", "noted"), [("glm4-moe", True), ("llama", False)])
def test_a_plan_notes_gguf_files_that_cannot_be_read_back(family, noted, tiny):
    plan = api.plan(str(tiny(family)), Recipe(format="gguf", type="Q8_0", scales="absmax"))
    assert (UNREAD in plan.notes) is noted


def test_tensors_unknown_to_the_llama_cpp_graph_are_refused(tmp_path, tiny):
    assert_export_refused(
        RefusedError, r"no place in llama.cpp's gemma2: .*k_proj.bias", tiny("gemma2"), tmp_path
    )


def test_unsupported_tokenizers_are_refused(models, tmp_path):
    source = models("llama-tied")

    def with_change(name: str, change: object) -> Path:
        return copy_with_edited_tokenizer(source, tmp_path / name, change)

    split = {"type": "Split", "pattern": {"Regex": "\\d+"}, "behavior": "Isolated", "invert": False}
    odd = with_change("pre", lambda it: it.update(pre_tokenizer=split))
    assert_export_refused(RefusedError, r"unknown pre-tokenizer: \\d\+", odd, tmp_path)
    export(odd, tmp_path / "named.gguf", pre_tokenizer="qwen2")
    assert read_gguf(tmp_path / "named.gguf").value("tokenizer.ggml.pre", str) == "qwen2"
    more = with_change("more", lambda it: it["model"]["vocab"].update({"\u00e9\u00e9": 320}))
    more = copy_with_edited_tokenizer(
        more, tmp_path / "z", lambda it: it["model"]["merges"].append(["\u00e9"] * 2)
    )
    assert_export_refused(
        InputError, "'\u00e9\u00e9' has id 320, the embedding has 320 rows", more, tmp_path
    )
    wordpiece = with_change("kind", lambda it: it["model"].update(type="WordPiece"))
    assert_export_refused(RefusedError, "'WordPiece' is not written", wordpiece, tmp_path)
    normal = with_change("normal", lambda it: it.update(normalizer={"type": "Lowercase"}))
    assert_export_refused(RefusedError, "does Lowercase", normal, tmp_path)
    missing = copy_with_json_values(
        source, tmp_path / "added", "tokenizer_config.json", bos_token="<nowhere>"
    )
    assert_export_refused(
        InputError, "bos_token '<nowhere>' is not in the vocabulary", missing, tmp_path
    )
    added = {"319": {"content": "</s>"}, "321": {"content": "<tool>", "special": True}}
    lost = copy_with_json_values(
        source, tmp_path / "lost", "tokenizer_config.json", added_tokens_decoder=added
    )
    assert_export_refused(
        InputError, r"added token '<tool>' \(id 321\) is not in tokenizer.json", lost, tmp_path
    )
    bare = copy_with_json_values(source, tmp_path / "bare", "config.json")
    (bare / "tokenizer.json").unlink()
    assert_export_refused(InputError, "tokenizer.json: missing", bare, tmp_path)
    (bare / "tokenizer.json").write_text("{")
    assert_export_refused(InputError, "not JSON", bare, tmp_path)


def test_a_vocabulary_smaller_than_the_embedding_is_padded(models, tmp_path):
    model = copy_with_edited_tokenizer(
        models("llama-tied"), tmp_path / "m", lambda it: it["model"]["vocab"].popitem()
    )
    model = copy_with_edited_tokenizer(
        model, tmp_path / "n", lambda it: it["model"]["merges"].pop()
    )
    file = read_gguf(export(model, tmp_path / "x.gguf"))
    assert file.value("tokenizer.ggml.tokens", list)[319] == "[PAD319]"
    assert file.value("tokenizer.ggml.token_type", list)[319] == 5


def test_values_out_of_range_of_gguf_types_are_refused(tmp_path):
    for value, gguf_type, match in (
        (float("nan"), "Q8_0", "nan"),
        (float("inf"), "F16", "inf"),
        (1e6, "F16", "beyond the range of float16"),
    ):
        model = gguf_models.make("llama-tied", tmp_path / f"m{value}")
        from safetensors.torch import load_file, save_file

        tensors = load_file(model / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = value
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
        with pytest.raises(QuantForgeError, match=match):
            export(model, tmp_path / "x.gguf", gguf_type)
        assert not (tmp_path / "x.gguf").exists()


def test_type_options_belong_to_gguf(models):
    for values in ({"type": "Q4_K_M"}, {"pre_tokenizer": "qwen2"}):
        with pytest.raises(UsageError, match="belong to GGUF"):
            api.plan(str(models("llama-tied")), Recipe(format="bnb", **values))
    with pytest.raises(InputError, match="'type' is given beside"):
        Recipe(format="gguf", type="Q4_K_M", bits=4)
    with pytest.raises(InputError, match="--bits 7: no mixture"):
        api.plan(str(models("llama-tied")), Recipe(format="gguf", bits=7))
    plan = api.plan(
        str(models("llama-tied", **WIDE)),
        Recipe(format="gguf", scheme="q5_k", calibration=NO_CALIBRATION),
    )
    kinds = {str(tensor.scheme) for tensor in plan.tensors if tensor.scheme and tensor.block >= 0}
    assert kinds == {"q5_k", "q5_1"}  # 128 columns of the output of attention


def test_overlong_or_duplicate_tensor_names_are_refused():
    long, short = (GgufTensor("w" * length, "F32", (1,)) for length in (64, 63))
    with pytest.raises(InputError, match=r"a name of 64 bytes, llama\.cpp takes 63"):
        file_plan("x.gguf", {}, [long])
    with pytest.raises(InputError, match="twice"):
        file_plan("x.gguf", {}, [short, short])
    assert file_plan("x.gguf", {}, [short]).size


def test_missing_experts_are_refused(models, tmp_path):
    from safetensors.torch import load_file, save_file

    model = copy_with_json_values(models("mixtral"), tmp_path / "m", "config.json")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert_export_refused(
        InputError, r"layers.1.block_sparse_moe.experts.2.w1.weight: missing", model, tmp_path
    )


@pytest.mark.parametrize("gguf_type", ["Q8_0", "Q4_K_M", "Q2_K", "IQ4_XS", "Q4_0"])
def test_overflowing_scales_are_refused_and_vanishing_ones_events(gguf_type, tmp_path):
    from safetensors.torch import load_file, save_file

    for factor in (1e10, 1e-9):
        model = gguf_models.make("llama-tied", tmp_path / f"m{factor}", **WIDE)
        tensors = load_file(model / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"] *= factor
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
        out = tmp_path / f"{factor}.gguf"
        if factor > 1:
            for scales in ("absmax", "search"):
                with pytest.raises(QuantForgeError, match="up_proj"):
                    export(model, out, gguf_type, scales=scales)
                assert not out.exists()
        else:
            events = manifest.read_manifest(export(model, out, gguf_type))["events"]
            clamped = [event["where"] for event in events if event["kind"] != "substitution"]
            assert clamped == ["model.layers.0.mlp.up_proj.weight"]


def test_a_dropped_sliding_window_is_an_event(models, tmp_path):
    for number, (values, events) in enumerate((
        ({"use_sliding_window": True, "sliding_window": 16}, 1),
        ({"use_sliding_window": False, "sliding_window": 16}, 0),
        ({"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention"] * 3}, 0),
        ({"use_sliding_window": True, "sliding_window": 4096}, 0),  # longer than the context
    )):  # fmt: skip
        kinds = ["full_attention", "sliding_attention", "sliding_attention"]
        model = copy_with_json_values(
            models("qwen2"),
            tmp_path / str(number),
            "config.json",
            **{"layer_types": kinds, **values},
        )
        out = export(model, tmp_path / f"{number}.gguf")
        document = manifest.read_manifest(out)
        dropped = [item for item in document["events"] if item["kind"] == "sliding-window-dropped"]
        assert len(dropped) == events
        assert all("equal up to 16 tokens" in item["detail"] for item in dropped)
        assert number or not verify(out, model).findings
    policy = Policy(strict=True)
    assert_export_refused(
        RefusedError, "sliding-window-dropped", tmp_path / "0", tmp_path, policy=policy
    )


ABSENT = object()


@pytest.mark.parametrize(
    ("family", "values", "events"),
    [
        ("mistral", {"use_sliding_window": False, "sliding_window": 16}, 1),
        ("mistral", {"sliding_window": 16, "max_position_embeddings": ABSENT}, 1),
        ("mistral", {"sliding_window": ABSENT, "max_position_embeddings": 32768}, 1),
        ("phi3", {"sliding_window": 16}, 1),
        ("phi3", {"sliding_window": 128}, 0),
        ("mistral", {"sliding_window": ABSENT, "max_position_embeddings": 4096}, 0),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "layer_types": ABSENT,
                   "max_window_layers": 100}, 0),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "layer_types": ABSENT,
                   "max_window_layers": ABSENT}, 0),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "layer_types": ABSENT,
                   "max_window_layers": 1}, 1),
        ("qwen2", {"use_sliding_window": True, "sliding_window": ABSENT, "layer_types": ABSENT,
                   "max_window_layers": 1, "max_position_embeddings": 32768}, 1),
    ],
)  # fmt: skip
def test_sliding_window_events_follow_transformers(models, tmp_path, family, values, events):
    changes = {key: value for key, value in values.items() if value is not ABSENT}
    model = copy_with_json_values(models(family), tmp_path / "m", "config.json", **changes)
    config = json.loads((model / "config.json").read_text())
    kept = {key: value for key, value in config.items() if values.get(key) is not ABSENT}
    (model / "config.json").write_text(json.dumps(kept))
    peer = AutoConfig.from_pretrained(model)
    kinds = getattr(peer, "layer_types", None) or ["sliding_attention"]
    longer = peer.max_position_embeddings > (peer.sliding_window or 1 << 30)
    assert ("sliding_attention" in kinds and longer) == bool(events)
    plan = api.plan(str(model), Recipe(format="gguf", type="Q8_0"))
    assert [event.kind for event in plan.substitutions].count("sliding-window-dropped") == events


@pytest.mark.parametrize("value", [None, "x", "", [], {}, 1e308, -1, float("nan")], ids=str)
def test_an_epsilon_is_a_small_number(models, tmp_path, value):
    model = copy_with_json_values(
        models("llama-tied"), tmp_path / "m", "config.json", rms_norm_eps=value
    )
    with pytest.raises(InputError, match=r"rms_norm_eps|number"):
        api.plan(str(model), Recipe(format="gguf", type="Q4_K_M"))


def test_unsupported_gguf_head_and_input_schemes_are_refused(models):
    """GGUF stores no separate tied head and no quantized layer inputs."""
    tied = str(models("llama-tied"))
    for head, embedding in (("q8_0", "keep"), ("q8_0", "q6_k")):
        with pytest.raises(InputError, match="--lm-head q8_0: the head is tied to the embedding"):
            api.plan(tied, Recipe(format="gguf", bits=4, lm_head=head, embedding=embedding))
    same = Recipe(
        format="gguf", bits=4, lm_head="q8_0", embedding="q8_0", calibration=NO_CALIBRATION
    )
    types = {t.name: str(t.scheme) for t in api.plan(tied, same).tensors}
    assert types["model.embed_tokens.weight"] == "q8_0"
    inputs = Rule("down_proj", "q8_0+int8:token:dynamic")
    with pytest.raises(RefusedError, match=r"rule down_proj=.*is no type of a GGUF file"):
        api.plan(tied, Recipe(format="gguf", bits=4, rules=(inputs,)))
