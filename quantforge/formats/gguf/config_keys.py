"""``config.json`` from the keys of a GGUF file, so that everything else need not know that it was one.

The inverse of `parameters` and `rope`. What llama.cpp knows by heart is stated as transformers spells it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from quantforge.checkpoint.safetensors import read_tensor
from quantforge.errors import InputError, NotReadError
from quantforge.formats.gguf.families import declared_of, read_families
from quantforge.formats.gguf.parsing import GgufFile
from quantforge.formats.gguf.rope_keys import FREQUENCIES, LONG, SHORT, llama3_divisors

# Of the families that share a name in llama.cpp, the first: only a key tells whether there are experts.
_MODEL_TYPES = {
    family.arch: name
    for name, family in reversed(tuple(read_families().items()))
    if family.class_name
}
# Scaling of the frequencies as it was published: factors and lengths that a table of divisors is compared with.
_LLAMA3 = [(factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0)]


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
    read = _Keys(file, arch := family.arch)
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
        "num_key_value_heads": read.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": read.integer("feed_forward_length"),
        "max_position_embeddings": read.integer("context_length"),
        family.epsilon[1]: read.real(family.epsilon[0]),
        **{key: f"blk.0.{name}" in file.tensors for key, name in family.bias_keys.items()},
        **{stated: read.real(key) for key, stated in family.reals.items()},
        **family.graph,
    }
    return config | _rope(file, read, config) | _of_family(model_type, read, config)


class _Keys:
    """The keys of one architecture."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self._file, self._arch = file, arch

    def integer(self, key: str, otherwise: int | None = None) -> int:
        """Return a count; a negative one is an error."""
        value: int = self._file.value(f"{self._arch}.{key}", int, otherwise)
        if not 0 <= value < 1 << 31:
            raise InputError(
                f"{self._file.files[0]}: {self._arch}.{key} = {value}", "the file is damaged"
            )
        return value

    def real(self, key: str, otherwise: float | None = None) -> float:
        """Return a number, rounded to what 32 bits hold."""
        value: float = self._file.value(f"{self._arch}.{key}", float, otherwise)
        return shortest(value)

    def text(self, key: str) -> str:
        """Return a word, "" where there is none."""
        value: str = self._file.value(f"{self._arch}.{key}", str, "")
        return value


def shortest(value: float) -> float:
    """Return the shortest decimal number that is the same in float32: 1e-05 and not 9.999999747378752e-06."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value


def _ids(file: GgufFile) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {
        f"{role}_token_id": file.value(f"tokenizer.ggml.{name}_token_id", int, -1)
        for role, name in names.items()
    }
    return {key: value for key, value in found.items() if value >= 0}


def _rope(file: GgufFile, read: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    base = read.real("rope.freq_base", 10_000.0)
    kind = read.text("rope.scaling.type")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    width = read.integer("rope.dimension_count", config["head_dim"])
    if FREQUENCIES in file.tensors:
        rope |= _llama3(file, base, width)
    elif LONG in file.tensors and SHORT in file.tensors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": read_tensor(file.tensors[LONG].raw()).tolist(),
            "short_factor": read_tensor(file.tensors[SHORT].raw()).tolist(),
            "attention_factor": read.real("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": read.integer(
                "rope.scaling.original_context_length"
            ),
        }
    elif kind in {"linear", "yarn"}:
        rope |= {"rope_type": kind, "factor": read.real("rope.scaling.factor", 1.0)}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = read.integer(
                "rope.scaling.original_context_length"
            )
    elif kind not in {"", "none"}:
        raise NotReadError(
            f"{file.files[0]}: rope scaling {kind!r} is not read",
            "linear, yarn, llama3 and longrope are",
        )
    partial = declared_of(config["model_type"]).defaults.get("partial_rotary_factor", 1.0)
    if width != config["head_dim"] or partial != 1.0:
        rope["partial_rotary_factor"] = width / config["head_dim"]
    found: dict[str, Any] = {"rope_parameters": rope}
    if "original_max_position_embeddings" in rope and rope["rope_type"] == "longrope":
        found["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return found


def _llama3(file: GgufFile, base: float, width: int) -> dict[str, Any]:
    """Return the settings whose divisors are those of the table."""
    stored = read_tensor(file.tensors[FREQUENCIES].raw()).double()
    for factor, low, high, original in _LLAMA3:
        divisors = llama3_divisors(base, width, factor, low, high, original)
        if len(divisors) == len(stored) and all(
            abs(found - wanted) <= 1e-6 * wanted
            for found, wanted in zip(stored.tolist(), divisors, strict=True)
        ):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    raise NotReadError(
        f"{file.files[0]}: {FREQUENCIES} is none of the published scalings",
        "evaluate it with --engine llama.cpp",
    )


def _of_family(model_type: str, read: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
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
                "full_attention": _full_rope(read),
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


def _full_rope(read: _Keys) -> dict[str, Any]:
    """Return the rotary parameters of gemma3's full attention."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": read.real("rope.freq_base", 1e6)}
    if read.text("rope.scaling.type") == "linear":
        rope |= {"rope_type": "linear", "factor": read.real("rope.scaling.factor", 1.0)}
    return rope
