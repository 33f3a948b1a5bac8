"""Tiny models of every decoder family that transformers maps, with random weights, as their authors would publish them.

A family is a ``model_type`` of transformers' tables of causal language models and of models from images and text to
text. Its configuration is the class's own default with small sizes: four layers in which every kind of layer of the
default is kept, 64 features, four experts of which two see a token. Nothing is known about single families but where
sizes depend on each other in a way that names do not say (`SPECIAL`). Weights are random bfloat16 from a seed;
`save_pretrained` writes them, hence under the names of published files.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, EXPERTS, ACTIVE, VOCABULARY = 4, 64, 4, 2, 384
# Encoders, encoder-decoders, models of sound and pictures, and drafts that read another model's keys and values.
NO_DECODERS = frozenset(
    [
        "bart",
        "bert",
        "bert-generation",
        "big_bird",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "florence2",
        "marian",
        "mbart",
        "megatron-bert",
        "musicgen",
        "musicgen_melody",
        "mvp",
        "pegasus",
        "pix2struct",
        "plbart",
        "pp_chart2table",
        "pp_formulanet",
        "prophetnet",
        "reformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "t5gemma2",
        "trocr",
        "udop",
        "vision-encoder-decoder",
        "whisper",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlnet",
        "xmod",
        "moshi",
        "pi0",
        "gemma4_assistant",
        "gemma4_unified_assistant",
    ]
)  # fmt: skip
# What a size becomes, by the name of its key: the first that matches counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r"qk_head_dim", 0),  # follows from others
    (r"(num_)?(hidden_)?layers|n_layers?|num_hidden_layers|num_decoder_layers|num_blocks", LAYERS),
    (r"hidden_size|n_embd|d_model|dim|embed_dim|hidden_dim|model_dim|word_embed_proj_dim", HIDDEN),
    (r"num_key_value_heads|.*num_key_value_heads|n_head_kv|multi_query_group_num|num_kv_heads", 2),
    (r"num_attention_heads|n_heads?|num_heads|encoder_attention_heads|.*num_attention_heads", 4),
    (r"head_dim|.*head_dim|.*head_size|attention_head_size|rotary_dim|kv_channels", 16),
    (r"moe_intermediate_size|expert_ffn_hidden_size|.*moe_intermediate_size|moe_ffn_.*|expert_hidden_size", 32),
    (r"shared_expert_intermediate_size|moe_shared_expert_intermediate_size|shared_intermediate_size", 32),
    (r".*intermediate_size.*|ffn_dim|n_inner|d_inner|ffn_hidden_size|intermediate_dim|d_ff|mlp_hidden_size", 128),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|.*_lora_rank|lora_rank.*|.*low_rank_dim|.*_rank", 32),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|num_experts", EXPERTS),
    (r"(num_)?experts_per_(tok|token)|moe_(top_?k|k)|num_experts_per_token|top_k_experts|num_selected_experts", ACTIVE),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"n_group|num_expert_group|topk_group|n_groups|mamba_n_groups|ssm_n_groups", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_dense_.*", 1),
    (r"sliding_window.*|attention_window.*|local_attention|attention_chunk_size|window_size", 32),
    (r"max_position_embeddings|n_positions|n_ctx|max_sequence_length|max_seq_len|seq_length", 512),
    (r"vocab_size|.*vocab_size.*|padded_vocab_size", VOCABULARY),
    (r"mamba_d_state|state_size|ssm_state_size|d_state", 16),
    (r"mamba_d_ssm", 128),
    (r"chunk_size|mamba_chunk_size", 32),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads|linear_num_(value|key)_heads", 4),
    (r"index_topk|index_n_heads", 16),
)  # fmt: skip
TOWER_SIZES: tuple[tuple[str, int], ...] = (
    (r".*(layers|depth|num_blocks)$|n_layer", 2),
    (r".*image_size", 28),
    (r"(temporal_)?patch_size|spatial_merge_size|.*merge.*size", 0),
    (r"text_hidden_size|out_hidden_size|output_dim|projection_dim|.*projector.*dim", HIDDEN),
    (r".*(heads|num_head)$|n_head", 2),
    (r".*intermediate.*|.*ffn.*", 64),
    (r"hidden_size|embed_dim|d_model|.*_dim$|width", 32),
    (r"vocab_size", VOCABULARY),
)
# Where sizes depend on each other, or on more than their names say.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_WINDOWS = ["sliding_attention", "full_attention"] * 2
_SECTIONS = {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        (
            "glm46v",
            "glm4v",
            "glm_ocr",
            "glmga",
            "paddleocr_vl",
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen2_5_omni_thinker",
        ),
        _SECTIONS,
    ),
    "deepseek_v2": {
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": ACTIVE,
        "n_routed_experts": EXPERTS,
    },
    # Its experts are calibrated where a token has one, as in every release.
    "llama4": {"text_config": {"num_experts_per_tok": 1}},
    "llama4_text": {"num_experts_per_tok": 1},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_head": 32},
    "cohere_compass_text": {
        "layer_types": _WINDOWS,
        "rope_parameters": dict.fromkeys(_WINDOWS, _ROPE),
    },
    "cohere_compass": {
        "text_config": {"layer_types": _WINDOWS, "rope_parameters": dict.fromkeys(_WINDOWS, _ROPE)}
    },
    "chameleon": {"vocabulary_map": {"<image>": 350}},
    "emu3": {"vocabulary_map": {"<image>": 350}, "vq_config": {"codebook_size": 64}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 32,
            "moe_num_experts": EXPERTS,
            "moe_top_k": ACTIVE,
            "hidden_size": HIDDEN,
        },
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [32, 32],
            "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
        }
    },
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "num_experts_per_tok": ACTIVE,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
        }
    },
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
    },
    "muse_spark": {
        "audio_config": {"hidden_sizes": [32] * 4, "depths": [1] * 4},
    },
    "dots3_note": {
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": HIDDEN},
        "vision_config": {"adapter_out_dim": HIDDEN},
    },
    "dots1": {
        "num_experts_per_tok": ACTIVE,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": _WINDOWS,
        "intermediate_size": [128] * LAYERS,
    },
    "glm4v_moe": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "minimax": {"block_size": 16},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "hunyuan_v1_moe": {"num_experts": EXPERTS, "moe_topk": ACTIVE},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2},
    "mistral4": {"head_dim": 32},
    "nemotron_h_omni": {
        "video_temporal_patch_size": 2,
        "vision_config": {"video_temporal_patch_size": 2},
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "step3p7": {"text_config": {"sliding_window": 32}},
    "xlstm": {"qk_dim_factor": 1.0},  # transformers' own code computes no other
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "nemotron": {"num_key_value_heads": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
}


def families() -> list[str]:
    """Return every family, sorted."""
    from transformers.models.auto import modeling_auto

    tables = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    return sorted({name for table in tables for name in table} - NO_DECODERS)


def class_of(family: str) -> Any:
    """Return the model's class: that of images and text to text if there is one, which is what is published."""
    import transformers
    from transformers.models.auto import modeling_auto

    both = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(family)
    names = both or modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    name = names if isinstance(names, str) else names[0]
    found = getattr(transformers, name)
    config = getattr(found, "config_class", None)
    if config is not None and config.model_type != family:
        name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family, name)
        found = getattr(transformers, name)
    return found


def configuration(family: str) -> Any:
    """Return the small configuration of a family.

    Raises:
        Exception: whatever the class says to sizes that do not fit together.
    """
    from transformers import CONFIG_MAPPING

    values = _small(CONFIG_MAPPING[family], text=True)
    _merge(values, SPECIAL.get(family, {}))
    return CONFIG_MAPPING[family](**values)


def _merge(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def _small(cls: Any, *, text: bool) -> dict[str, Any]:
    """Return what to pass to a class of configurations so that the model is small."""
    default = cls()
    values: dict[str, Any] = {}
    for key in getattr(cls, "sub_configs", {}):
        part = getattr(default, key, None)
        if part is not None and not isinstance(part, dict):
            is_text = (
                text and re.search(r"text|llm|decoder|thinker|language|talker", key) is not None
            )
            values[key] = _small(type(part), text=is_text)
            if hasattr(part, "model_type"):
                values[key]["model_type"] = part.model_type
    stated = {key: value for key, value in default.to_dict().items() if key not in values}
    sizes = SIZES if text else TOWER_SIZES
    reverse = {to: key for key, to in getattr(cls, "attribute_map", {}).items()}
    for key, value in stated.items():
        if type(value) is int and value > 0:
            size = _size(key, sizes)
            if size == -1 and key in reverse:
                size = _size(reverse[key], sizes)
            if size > 0 and not (value < size and size <= 4):
                values[key] = size
        if re.search(r"token_(id|index)$", key) and isinstance(value, int | list):
            values[key] = _token(key)
    if text and "head_dim" in stated and stated["head_dim"] is None:
        values["head_dim"] = 16  # some classes say None, and their models cannot be built from it
    if not text and any(
        isinstance(value, list) and len(value) == stated.get("num_hidden_layers", 0)
        for value in stated.values()
    ):
        values.pop("num_hidden_layers", None)  # sizes are listed for each layer
    if not text and stated.get("per_layer_config"):
        values["per_layer_config"] = {}
    _heads(default, values)
    _rope(stated.get("rope_parameters"), values)
    lists = {
        key: value
        for key, value in stated.items()
        if isinstance(value, list) and value and all(isinstance(v, str) for v in value)
        and len(value) == getattr(default, "num_hidden_layers", -1)
    }  # fmt: skip
    values |= {key: _all_kinds(value) for key, value in lists.items() if text}
    return values


def _heads(default: Any, values: dict[str, Any]) -> None:
    """Give as many heads to keys as to queries where the family does, as latent attention has to."""
    stated = default.to_dict()
    heads, shared = (stated.get(f"num_{name}_heads", 0) for name in ("attention", "key_value"))
    if "num_key_value_heads" in values and heads == shared:
        values["num_key_value_heads"] = values.get("num_attention_heads", heads)


def _rope(rope: Any, values: dict[str, Any]) -> None:
    """Share the smaller half of a head among time, height and width where the family has such sections."""
    if not isinstance(rope, dict) or not isinstance(rope.get("mrope_section"), list):
        return
    width = values.get("head_dim") or HIDDEN // values.get("num_attention_heads", 4)
    half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    count = len(rope["mrope_section"])
    sections = [half // count] * (count - 1)
    values["rope_parameters"] = {**rope, "mrope_section": [half - sum(sections), *sections]}


def _size(key: str, sizes: tuple[tuple[str, int], ...]) -> int:
    return next((size for pattern, size in sizes if re.fullmatch(pattern, key)), -1)


def _token(key: str) -> int:
    """Return a token that the vocabulary has: ends as the tokenizer says, others behind its tokens."""
    known = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    if key in known:
        return known[key]
    return 330 + sum(map(ord, key)) % 50


def _all_kinds(kinds: list[str]) -> list[str]:
    """Return as many kinds as there are layers, every one among them, the first ones in their order."""
    found = kinds[:LAYERS]
    missing = [kind for kind in dict.fromkeys(kinds) if kind not in found]
    return [*found[: LAYERS - len(missing)], *missing][:LAYERS]


def build(family: str, seed: int = 0) -> Any:
    """Return the model with random bfloat16 weights."""
    import torch

    torch.manual_seed(seed)
    config = configuration(family)
    model = class_of(family)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in _parameters(model):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            gain = "norm" in name or ".ln_" in name or "layernorm" in name
            base = float(gain and name.endswith("weight")) * float(parameter.flatten()[0] != 0)
            parameter.data.copy_(base + 0.1 * noise if gain else parameter.float() + 0.02 * noise)
        else:
            parameter.data.copy_(noise / parameter.shape[-1] ** 0.5)
    return model.to(torch.bfloat16)


def _parameters(model: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.numel():
            yield name, parameter


def write(family: str, directory: Path, tokenizer: Any = None, dtype: str = "bfloat16") -> Path:
    """Build a family and write it as it would be published; the directory is returned.

    In float32 the values are those of bfloat16.
    """
    import torch

    model = build(family).to(getattr(torch, dtype))
    with contextlib.suppress(AttributeError):
        model.generation_config.pad_token_id = 1
    model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return directory
