"""Matching of tensors with declared and undeclared architectures, and refusal of bad checkpoints."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from quantforge.architectures import architecture_of, families
from quantforge.architectures.dimensions import read_dimensions
from quantforge.architectures.families import FILES, declared_families, kimi, lfm2, qwen3_next
from quantforge.architectures.match import (
    ModelLayout,
    Role,
    match_tensors,
    needs_architecture,
    resolve_tied,
)
from quantforge.errors import InputError
from quantforge.files.reader import open_checkpoint
from quantforge.model.skeleton import build_skeleton
from quantforge.plans import StoredTensor
from tests.conftest import FAMILIES, Tiny
from tests.thorough import parametrize_each_value, representative_families

Headers = dict[str, StoredTensor]
BAD_SIZES = ["32", -1, 0, math.nan, math.inf, 1.5, True, [32], 10**12]


@pytest.fixture
def headers(tiny: Tiny) -> Any:
    def read(family: str) -> tuple[dict[str, Any], Headers]:
        checkpoint = open_checkpoint(tiny(family))
        return checkpoint.config, {
            name: entry.to_stored_tensor() for name, entry in checkpoint.entries.items()
        }

    return read


def with_renamed_prefixes(stored: Headers, change: Mapping[str, str]) -> list[StoredTensor]:
    """Return the headers with prefixes of their names replaced."""
    result = []
    for tensor in stored.values():
        name = tensor.name
        for old, new in change.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        result.append(replace(tensor, name=name))
    return result


def refusal_message(config: Mapping[str, Any], stored: Iterable[StoredTensor]) -> str:
    with pytest.raises(InputError) as caught:
        match_tensors(config, stored)
    assert caught.value.hint
    return caught.value.message


def linear_names(model_layout: ModelLayout) -> set[str]:
    return {tensor.name for tensor in model_layout.tensors if tensor.role is Role.LINEAR}


VISION_PREFIX = "model.visual."  # where transformers has no class for the decoder alone
LINEARS_OUTSIDE_BLOCKS = {"lm_head", "model.per_layer_model_projection"}  # linears of no block


@pytest.mark.parametrize("family", representative_families(FAMILIES))
def test_every_tensor_and_linear_is_matched(headers: Any, family: str) -> None:
    config, stored = headers(family)
    model_layout = match_tensors(config, stored.values())
    assert {tensor.header.name for tensor in model_layout.tensors} == set(stored)
    architecture = model_layout.architecture
    assert architecture is not None
    sizes = FAMILIES[family][1]
    sizes = sizes.get("text_config", sizes)
    layers = sizes.get("n_layer") or sizes.get("num_hidden_layers")
    layers = layers or len(sizes["hybrid_override_pattern"])
    assert model_layout.blocks == layers
    assert linear_names(model_layout) == {
        f"{architecture.blocks}.{block}.{name}.weight"
        for block, kind in enumerate(model_layout.layers)
        for name in kind.linears
    }
    shared = {tensor.shared_input for tensor in model_layout.tensors if tensor.shared_input}
    assert len(shared) == sum(len(kind.inputs) for kind in model_layout.layers)
    assert all(f"{name}.weight" in stored for name in shared)


@pytest.mark.parametrize("family", representative_families(FAMILIES))
def test_declared_linears_and_shapes_match_transformers(headers: Any, family: str) -> None:
    """Nothing that could be quantized is forgotten, and what is declared has the shape of the module."""
    config, stored = headers(family)
    model_layout = match_tensors(config, stored.values())
    model = build_skeleton(config)
    result = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module).__name__ in {"Linear", "Conv1D"} and name not in LINEARS_OUTSIDE_BLOCKS
        if not name.startswith(VISION_PREFIX)
    }
    assert linear_names(model_layout) == result
    persistent_buffers = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    values = [
        *model.named_parameters(),
        *((name, model.get_buffer(name)) for name in persistent_buffers),
    ]
    shapes = {
        name: tuple(value.shape) for name, value in values if not name.startswith(VISION_PREFIX)
    }
    own = {
        tensor.name: tensor.header.shape
        for tensor in model_layout.tensors
        if tensor.role is not Role.FOREIGN
    }
    assert own == shapes


def test_planning_needs_no_torch(tiny: Tiny) -> None:
    code = (
        "import sys; from pathlib import Path; from quantforge.files.reader import open_checkpoint;"
        "from quantforge.architectures.match import match_tensors; c = open_checkpoint(Path(sys.argv[1]));"
        "match_tensors(c.config, [e.to_stored_tensor() for e in c.entries.values()]);"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code, str(tiny("phi3"))], check=False).returncode == 0
    )


def test_family_files_are_listed_and_model_types_unique() -> None:
    folder = Path(families.__file__).parent
    files = [path.stem for path in folder.glob("*.py") if "\nFAMILIES = " in path.read_text()]
    assert sorted(files) == sorted(FILES)
    modules = [import_module(f"{families.__name__}.{file}") for file in FILES]
    assert sorted(name for module in modules for name in module.FAMILIES) == sorted(
        declared_families()
    )


def test_family_declarations_are_consistent() -> None:
    for model_type in declared_families():
        check_declaration(model_type)


def check_declaration(model_type: str) -> None:
    architecture = architecture_of({"model_type": model_type})
    assert architecture is not None
    for kind in architecture.kinds:
        names = {item.name for item in kind.parameters}
        stacked = {name for stack in kind.stacks for name in stack.linears}
        for shared in kind.inputs:
            assert all(f"{name}.weight" in names or name in stacked for name in shared.linears)
            if shared.scale_fold is not None:
                assert f"{shared.scale_fold.module}.weight" in names
                labels = architecture.slice_labels.get(shared.scale_fold.module, ("",))
                assert shared.scale_fold.rows in labels
    for module, sizes in architecture.slices.items():
        assert len(sizes) == len(architecture.slice_labels[module])


# ---- kinds of layers


@pytest.mark.parametrize(
    ("declared", "attending"),
    [
        ({}, [1, 3]),
        ({"layer_types": None, "full_attn_idxs": [1, 3]}, [1, 3]),
        ({"layer_types": None}, [0, 1, 2, 3]),
    ],
)
def test_layer_kinds_are_read_from_the_configuration(
    headers: Any, declared: dict[str, Any], attending: list[int]
) -> None:
    config, stored = headers("lfm2")
    config |= declared
    architecture = architecture_of(config)
    assert architecture is not None
    layers = architecture.layer_kinds(config, architecture.dimensions(config))
    assert [i for i, kind in enumerate(layers) if kind.name == "full_attention"] == attending
    assert ("self_attn.out_proj" in layers[1].linears) == (1 in attending)
    assert ("conv.out_proj" in layers[0].linears) != (0 in attending)
    if attending == [1, 3]:
        assert match_tensors(config, stored.values()).layers == layers
    else:
        assert "model.layers.0.conv.in_proj.weight: not a tensor" in refusal_message(
            config, stored.values()
        )


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"layer_types": ["conv"] * 3}, "layer_types"),
        ({"layer_types": ["conv"] * 3 + ["sliding_attention"]}, "kinds of its 4 layers"),
        ({"layer_types": None, "full_attn_idxs": 1}, "full_attn_idxs = 1"),
        ({"intermediate_size": "192"}, "intermediate_size = '192'"),
        ({"block_multiple_of": 0}, "block_multiple_of = '0'"),
        ({"block_ffn_dim_multiplier": -1.0}, "block_ffn_dim_multiplier = '-1.0'"),
        ({"block_ffn_dim_multiplier": math.nan}, "block_ffn_dim_multiplier = 'nan'"),
        ({"intermediate_size": -3, "block_auto_adjust_ff_dim": False}, "ffn = -3"),
        ({"conv_L_cache": 0}, "conv_L_cache = 0"),
        ({"conv_L_cache": 5}, "conv.conv.weight: shape [64, 1, 3], the config asks for [64, 1, 5]"),
    ],
)
def test_bad_lfm2_sizes_and_layer_types_are_refused(
    headers: Any, declared: dict[str, Any], words: str
) -> None:
    config, stored = headers("lfm2")
    assert words in refusal_message({**config, **declared}, stored.values())


# ---- bad checkpoints


def test_missing_tensors_are_all_listed(headers: Any) -> None:
    config, stored = headers("llama")
    gone = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    message = refusal_message(
        config, [tensor for name, tensor in stored.items() if name not in gone]
    )
    assert all(f"{name}: missing" in message for name in gone)
    message = refusal_message({**config, "num_hidden_layers": 5}, stored.values())
    assert "model.layers.3.input_layernorm.weight: missing" in message
    assert "more" in message


def test_unexpected_tensors_are_refused(headers: Any) -> None:
    config, stored = headers("llama")
    extra = StoredTensor("model.layers.0.adapter.weight", "BF16", (4, 4))
    assert "model.layers.0.adapter.weight: not a tensor of llama" in refusal_message(
        config, [*stored.values(), extra]
    )
    assert "num_hidden_layers = 2" in refusal_message(
        {**config, "num_hidden_layers": 2}, stored.values()
    )
    # A bias that the configuration does not ask for.
    assert "bias" in refusal_message({**config, "mlp_bias": False}, stored.values())


def test_shapes_are_compared_with_the_configuration(headers: Any) -> None:
    config, stored = headers("llama")
    message = refusal_message({**config, "num_key_value_heads": 4}, stored.values())
    assert (
        "model.layers.0.self_attn.k_proj.weight: shape [32, 64], the config asks for [64, 64]"
        in message
    )


def test_a_tensor_stored_twice_is_refused(headers: Any) -> None:
    config, stored = headers("gpt2")
    first = next(iter(stored.values()))
    assert f"{first.name}: stored 2 times" in refusal_message(config, [*stored.values(), first])
    name = "transformer.h.0.ln_1.weight"
    alias = replace(stored[name], name="h.0.ln_1.weight")
    message = refusal_message(config, [*stored.values(), alias])
    assert "h.0.ln_1.weight: the same tensor as transformer.h.0.ln_1.weight" in message


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U8"])
def test_weights_of_non_float_dtypes_are_refused(headers: Any, dtype: str) -> None:
    """An fp8 weight read without its scale would be wrong by orders of magnitude."""
    config, stored = headers("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    stored[name] = replace(stored[name], dtype=dtype)
    assert f"{name}: type {dtype}" in refusal_message(config, stored.values())


# ---- names


def test_rotary_buffers_and_masks_are_dropped_by_declaration(headers: Any) -> None:
    config, stored = headers("llama")
    buffer = StoredTensor("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", (8,))
    model_layout = match_tensors(config, [*stored.values(), buffer])
    assert [tensor.name for tensor, _ in model_layout.dropped] == [buffer.name]
    assert model_layout.dropped[0][1] == r".*rotary_emb\.inv_freq"


def test_gpt2_without_prefix_and_with_masks_is_matched(headers: Any) -> None:
    config, stored = headers("gpt2")
    masks = [
        StoredTensor(f"h.{block}.attn.{kind}", "F32", (1, 1, 128, 128))
        for block in range(3)
        for kind in ("bias", "masked_bias")
    ]
    model_layout = match_tensors(
        config, [*with_renamed_prefixes(stored, {"transformer.": ""}), *masks]
    )
    assert len(model_layout.dropped) == 6
    assert (
        model_layout.by_name["transformer.h.1.attn.c_attn.weight"].header.name
        == "h.1.attn.c_attn.weight"
    )
    assert (
        model_layout.by_name["transformer.h.1.attn.c_attn.weight"].shared_input == "h.1.attn.c_attn"
    )
    assert model_layout.by_name["transformer.h.1.attn.c_attn.weight"].transposed
    assert model_layout.by_name["transformer.h.1.attn.c_attn.bias"].role is Role.BIAS


def test_opt_without_prefix_is_matched(headers: Any) -> None:
    config, stored = headers("opt")
    model_layout = match_tensors(
        config, with_renamed_prefixes(stored, {"model.decoder.": "decoder."})
    )
    assert (
        model_layout.by_name["model.decoder.layers.0.fc1.weight"].header.name
        == "decoder.layers.0.fc1.weight"
    )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower.",
         "multi_modal_projector.": "model.multi_modal_projector."},
    ],
)  # fmt: skip
def test_vision_tensors_of_a_multimodal_checkpoint_are_foreign(
    headers: Any, change: dict[str, str]
) -> None:
    config, stored = headers("gemma3-multimodal")
    model_layout = match_tensors(config, with_renamed_prefixes(stored, change))
    assert model_layout.model_type == "gemma3"
    assert model_layout.tied
    assert len(linear_names(model_layout)) == 21
    assert (
        len(model_layout.foreign_tensors)
        == sum("vision" in name or "projector" in name for name in stored)
        > 20
    )
    assert not any(tensor.shared_input for tensor in model_layout.foreign_tensors)


def test_missing_text_config_keys_take_family_defaults(headers: Any) -> None:
    """The published multimodal models rely on the defaults of the family."""
    config = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                        "num_hidden_layers": 1},
    }  # fmt: skip
    model = build_skeleton(config)
    stored = [
        StoredTensor(f"language_model.{name}", "BF16", tuple(parameter.shape))
        for name, parameter in model.named_parameters()
    ]
    assert match_tensors(config, stored).dimensions == read_dimensions(
        config["text_config"],
        architecture_of(config).defaults,  # type: ignore[arg-type, union-attr]
    )


def test_extra_prediction_heads_are_kept_as_foreign_tensors(headers: Any) -> None:
    config, stored = headers("qwen3")
    extra = StoredTensor("model.mtp_layers.0.proj.weight", "BF16", (64, 64))
    model_layout = match_tensors(config, [*stored.values(), extra])
    assert [tensor.name for tensor in model_layout.foreign_tensors] == [extra.name]


# ---- tied heads


def test_a_stored_tied_head_must_equal_the_embedding(headers: Any) -> None:
    config, stored = headers("llama-tied")
    embedding = stored["model.embed_tokens.weight"]
    twice = match_tensors(config, [*stored.values(), replace(embedding, name="lm_head.weight")])
    assert twice.stores_tied_head
    once = resolve_tied(
        twice, lambda first, second: {first, second} == {embedding.name, "lm_head.weight"}
    )
    assert not once.stores_tied_head
    assert "lm_head.weight" not in once.by_name
    assert [tensor.name for tensor, _ in once.dropped] == ["lm_head.weight"]
    assert resolve_tied(once, lambda *_: False) is once
    with pytest.raises(InputError, match=r"lm_head\.weight differs"):
        resolve_tied(twice, lambda *_: False)
    other = match_tensors(
        config, [*stored.values(), replace(embedding, name="lm_head.weight", dtype="F32")]
    )
    with pytest.raises(InputError, match=r"lm_head\.weight differs"):
        resolve_tied(other, lambda *_: True)


def test_a_missing_untied_head_is_refused(headers: Any) -> None:
    config, stored = headers("llama-tied")
    assert "lm_head.weight: missing" in refusal_message(
        {**config, "tie_word_embeddings": False}, stored.values()
    )
    del config["tie_word_embeddings"]  # llama's default
    assert "lm_head.weight: missing" in refusal_message(config, stored.values())


def test_a_tied_head_does_not_replace_a_missing_embedding(headers: Any) -> None:
    config, stored = headers("llama-tied")
    only = with_renamed_prefixes(stored, {"model.embed_tokens": "lm_head"})
    assert "model.embed_tokens.weight: missing" in refusal_message(config, only)


@pytest.mark.parametrize(
    ("family", "expected"), [("gpt2", True), ("gemma2", True), ("llama", False)]
)
def test_missing_tie_word_embeddings_takes_the_family_default(
    headers: Any, family: str, expected: bool
) -> None:
    config, stored = headers(family)
    config.pop("tie_word_embeddings", None)
    assert match_tensors(config, stored.values()).tied is expected
    assert "tie_word_embeddings" in refusal_message(
        {**config, "tie_word_embeddings": "yes"}, stored.values()
    )


# ---- unknown families


def test_an_unknown_family_is_matched_by_names(headers: Any) -> None:
    config, stored = headers("llama")
    declared = match_tensors(config, stored.values())
    model_layout = match_tensors({**config, "model_type": "lama"}, stored.values())
    assert model_layout.architecture is None
    assert "'lama'" in model_layout.linear_rule
    assert linear_names(model_layout) == linear_names(declared)
    assert {t.name: t.shared_input for t in model_layout.tensors} == {
        t.name: t.shared_input for t in declared.tensors
    }
    assert model_layout.blocks == 3
    error = needs_architecture(model_layout, "gptq", "blocks are called twice")
    assert "--method gptq" in error.message
    assert "'lama' is not declared" in error.message
    assert "could not be derived: blocks are called twice" in error.message
    assert "rtn" in error.hint


def test_matching_by_names_selects_only_decoder_linears() -> None:
    other_shapes = {
        "model.embed_tokens.weight": (32, 8),
        "lm_head.weight": (32, 8),
        "model.layers.0.norm.weight": (8,),
        "model.layers.0.mlp.gate.weight": (4, 8),
        "model.layers.0.mlp.experts": (4, 8, 8),
        "model.layers.0.attn.bias": (8, 8),
        "model.layers.0.rel_embed.weight": (8, 8),
        "vision_tower.layers.0.fc1.weight": (8, 8),
    }
    linear_shapes = {"model.layers.0.attn.out.weight": (8, 8), "h.11.mlp.w1.weight": (8, 8)}
    stored = [
        StoredTensor(name, "F16", shape) for name, shape in (other_shapes | linear_shapes).items()
    ]
    model_layout = match_tensors({"model_type": "new"}, stored)
    assert linear_names(model_layout) == set(linear_shapes)
    assert {tensor.header.name for tensor in model_layout.tensors} == set(
        other_shapes | linear_shapes
    )
    roles = {tensor.name: tensor.role for tensor in model_layout.tensors}
    assert roles["lm_head.weight"] is Role.HEAD
    assert roles["model.embed_tokens.weight"] is Role.EMBEDDING


def test_an_undeclared_configuration_value_is_matched_by_names(headers: Any) -> None:
    config, stored = headers("opt")
    model_layout = match_tensors({**config, "activation_function": "gelu"}, stored.values())
    assert model_layout.architecture is None
    assert "activation_function = 'gelu'" in model_layout.linear_rule
    assert len(linear_names(model_layout)) == 18


# ---- hostile configurations


@pytest.mark.parametrize("family", [kimi.attention_types, lfm2.mixer_types, qwen3_next.mixer_types])
def test_layer_types_that_are_no_list_are_refused(family: Any) -> None:
    with pytest.raises(InputError, match="layer_types = 5"):
        family({"layer_types": 5})


@parametrize_each_value(
    (
        "values",
        [
            {"layer_types": ["full_attention"] * 9},
            {"layer_types": {"a": 1}},
            {"layer_types": "full_attention"},
            {"layer_types": ["chunked_attention"] * 2},
            {"layer_types": [["full_attention"]] * 2},
            {"max_window_layers": "0"},
            {"sliding_window": 0},
            {"sliding_window": -1},
            {"sliding_window": True},
            {"sliding_window": [16]},
            {"sliding_window": 1e9},
        ],
    ),
    ("family", ["qwen2", "gemma2", "mistral"]),
    ids=str,
)
def test_bad_layer_types_and_sliding_windows_are_refused(
    headers: Any, family: str, values: dict[str, Any]
) -> None:
    config, stored = headers(family)
    match_tensors(config, stored.values())
    with pytest.raises(InputError, match=next(iter(values))):
        match_tensors(config | values, stored.values())


@parametrize_each_value(
    ("value", BAD_SIZES),
    ("key", ["hidden_size", "num_hidden_layers", "vocab_size", "num_key_value_heads"]),
    ids=str,
)
def test_impossible_sizes_are_refused_at_once(headers: Any, key: str, value: object) -> None:
    config, stored = headers("llama")
    start = time.process_time()
    message = refusal_message({**config, key: value}, stored.values())
    assert time.process_time() - start < 2
    assert f"{key} = " in message


def test_more_layers_than_any_model_are_refused_at_once(headers: Any) -> None:
    config, stored = headers("llama")
    assert "num_hidden_layers" in refusal_message(
        {**config, "num_hidden_layers": 10**7}, stored.values()
    )
    start = time.process_time()
    assert "holds 51 tensors" in refusal_message(
        {**config, "num_hidden_layers": 10_000}, stored.values()
    )
    assert time.process_time() - start < 2


def test_contradicting_or_missing_sizes_are_refused(headers: Any) -> None:
    config, stored = headers("llama")
    assert "not a multiple" in refusal_message(
        {**config, "num_key_value_heads": 3}, stored.values()
    )
    del config["hidden_size"]
    assert "hidden_size or n_embd or d_model is missing" in refusal_message(config, stored.values())


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("mixtral", {"num_experts": 7}, "contradict each other"),
        ("qwen3-moe", {"num_experts": 4, "num_local_experts": 9}, "contradict each other"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("mixtral", {"num_experts_per_tok": "2"}, r"num_experts_per_tok = '2' \(str\)"),
        ("mixtral", {"num_experts_per_tok": None}, r"num_experts_per_tok = None \(NoneType\)"),
        ("mixtral", {"num_experts_per_tok": 1.5}, r"num_experts_per_tok = 1\.5 \(float\)"),
        ("deepseek-v3", {"n_group": 0}, r"n_group = 0 \(int\)"),
        ("deepseek-v3", {"n_group": 3}, "do not fall into so many groups"),
        ("deepseek-v3", {"topk_group": 9}, r"topk_group = 9"),
        ("qwen3-moe", {"num_experts_per_tok": -1}, "num_experts_per_tok"),
        ("lfm2", {"tie_embedding": False, "tie_word_embeddings": True}, "tie_embedding"),
    ],
)
def test_contradicting_or_impossible_expert_settings_are_refused(
    tiny: Tiny, family: str, keys: dict[str, object], message: str
) -> None:
    checkpoint = open_checkpoint(tiny(family))
    stored = [entry.to_stored_tensor() for entry in checkpoint.entries.values()]
    match_tensors(checkpoint.config, stored)
    with pytest.raises(InputError, match=message):
        match_tensors({**checkpoint.config, **keys}, stored)
