"""``config.json`` from the keys of a GGUF file, so that everything else need not know that it was one.

The inverse of `parameters` and `rope`. What llama.cpp knows by heart is stated as transformers spells it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.errors import InputError, NotReadError
from quantforge.formats.gguf.families import declared_of, read_families
from quantforge.formats.gguf.file_keys import FileKeys
from quantforge.formats.gguf.parsing import GgufFile
from quantforge.formats.gguf.stated_keys import called

# Of the families that share a name in llama.cpp, the first: only a key tells whether there are experts.
_MODEL_TYPES = {
    family.arch: name
    for name, family in reversed(tuple(read_families().items()))
    if family.class_name
}


def model_type_of(file: GgufFile) -> str:
    """Return the ``model_type`` of transformers.

    Raises:
        NotReadError: an architecture that is not read.
    """
    arch = file.value("general.architecture", str)
    if arch not in _MODEL_TYPES:
        known = ", ".join(sorted(_MODEL_TYPES))
        said = f"{file.files[0]}: architecture {arch!r} is not read"
        raise NotReadError(said, f"read are {known}")
    if arch == "llama" and file.value("llama.expert_count", int, 0) > 1:
        return "mixtral"
    return _MODEL_TYPES[arch]


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the configuration, without anything about quantization.

    Raises:
        InputError: a key is missing or of a wrong type, or the file cannot be restated (`NotReadError`).
    """
    model_type = model_type_of(file)
    family = read_families()[model_type]
    read = FileKeys(file, arch := family.arch)
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise InputError(f"{file.files[0]}: no tensor 'token_embd.weight'", "is this a model file?")
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": model_type,
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float16" if declared_of(model_type).float16 else "float32",
        **_ids(file),
    }
    if arch == "gpt2":
        return config | {
            "n_embd": read.integer("embedding_length"),
            "n_layer": read.integer("block_count"),
            "n_head": read.integer("attention.head_count"),
            "n_positions": read.integer("context_length"),
            "n_inner": read.integer("feed_forward_length"),
            "layer_norm_epsilon": read.real("attention.layer_norm_epsilon"),
            "activation_function": "gelu_new",
        }
    heads, hidden = read.integer("attention.head_count"), read.integer("embedding_length")
    head_dim = read.integer("attention.key_length", hidden // heads if heads else 0)
    if not (heads and head_dim):
        raise InputError(
            f"{file.files[0]}: {heads} heads of {head_dim} columns", "the file is damaged"
        )
    config |= {
        "hidden_size": hidden,
        "num_hidden_layers": read.integer("block_count"),
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": read.integer("context_length"),
        family.epsilon[1]: read.real(family.epsilon[0]),
        **{key: f"blk.0.{name}" in file.tensors for key, name in family.bias_keys.items()},
        **family.graph,
    }
    if family.restated:
        stated: dict[str, Any] = called(family.restated, read)
        return config | stated
    whole = declared_of(model_type).defaults.get("partial_rotary_factor", 1.0) == 1.0
    config |= {
        "num_key_value_heads": read.integer("attention.head_count_kv", heads),
        "intermediate_size": read.integer("feed_forward_length"),
        **{place: read.real(key) for key, place in family.reals.items()},
    }
    return config | read.rope(head_dim, whole=whole) | _of_family(model_type, read, config)


def _ids(file: GgufFile) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {
        f"{role}_token_id": file.value(f"tokenizer.ggml.{name}_token_id", int, -1)
        for role, name in names.items()
    }
    return {key: value for key, value in found.items() if value >= 0}


def _of_family(model_type: str, read: FileKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    family, found = read_families()[model_type], dict[str, Any]()
    if period := family.period:
        found |= {
            "sliding_window": read.integer("attention.sliding_window"),
            "layer_types": [
                "full_attention" if i % period == period - 1 else "sliding_attention"
                for i in layers
            ],
        }
    if period and family.norm_plus_one:
        found |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": config["head_dim"],
        }
        if model_type == "gemma2":
            found |= {
                key: read.real(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")
            }
        else:
            base = read.real("rope.freq_base_swa", 10_000.0)
            local = {"rope_type": "default", "rope_theta": base}
            found["rope_parameters"] = {
                "full_attention": read.full_rope(),
                "sliding_attention": local,
            }
        return found
    found["hidden_act"] = family.activations[0]
    if "sliding_window" in family.graph:
        found["layer_types"] = ["full_attention" for _ in layers]
    if interval := family.no_rope_period:
        found["no_rope_layers"] = [int((i + 1) % interval != 0) for i in layers]
    if model_type == "phi3":
        found["sliding_window"] = read.integer("attention.sliding_window", 0) or None
    if model_type in {"mixtral", "qwen3_moe"}:
        found |= {
            "num_local_experts": read.integer("expert_count"),
            "num_experts": read.integer("expert_count"),
            "num_experts_per_tok": read.integer("expert_used_count"),
        }
    if model_type == "qwen3_moe":
        found |= {
            "moe_intermediate_size": read.integer("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    return found
