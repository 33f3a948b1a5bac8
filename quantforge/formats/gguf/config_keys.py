"""``config.json`` from the keys of a GGUF file, so that everything else can read it like a model directory.

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
from quantforge.formats.gguf.rope import FREQUENCIES, LONG, SHORT, llama3_divisors

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
        return config | family.restated(read)
    whole = declared_of(model_type).defaults.get("partial_rotary_factor", 1.0) == 1.0
    config |= {
        "num_key_value_heads": read.integer("attention.head_count_kv", heads),
        "intermediate_size": read.integer("feed_forward_length"),
        **{place: read.real(key) for key, place in family.reals.items() if isinstance(place, str)},
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


# Scaling of the frequencies as it was published: numbers that a table of divisors is compared with.
_LLAMA3 = [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 1.0, 1.0, 8192)]
_MOST_LAYERS = 1 << 16


class FileKeys:
    """The keys of one architecture, as a family's own file reads them (`quantforge.architectures.llama_cpp.Keys`)."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file, self._arch = file, arch

    def integer(self, key: str, otherwise: int | None = None) -> int:
        """Return a count; a negative one is an error."""
        return self._count(key, self.file.value(self._named(key), int, otherwise))

    def real(self, key: str, otherwise: float | None = None) -> float:
        """Return a number, rounded to what 32 bits hold."""
        value: float = self.file.value(self._named(key), float, otherwise)
        return shortest(value)

    def text(self, key: str) -> str:
        """Return a word, "" where there is none."""
        value: str = self.file.value(self._named(key), str, "")
        return value

    def of_layers(self, key: str, kind: type[int] | type[bool] = int) -> list[int]:
        """Return a number, or a truth, for every layer: of a list its items, of a single number that one for all."""
        layers = self.integer("block_count")
        found = self.file.metadata.get(self._named(key))
        if layers > _MOST_LAYERS or (found is not None and isinstance(found.value, list)):
            listed: list[Any] = self.file.value(self._named(key), list)
            if len(listed) != layers or any(type(item) is not kind for item in listed):
                raise self._damaged(key, str(listed)[:40])
            return [self._count(key, item) for item in listed]
        return [self._count(key, self.file.value(self._named(key), kind))] * layers

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor, () where there is none."""
        found = self.file.tensors.get(tensor)
        return found.shape if found else ()

    def divisors(self) -> list[float]:
        """Return by what the frequencies of rotary positions are divided; [] where no table says so."""
        if FREQUENCIES not in self.file.tensors:
            return []
        return [
            shortest(value) for value in read_tensor(self.file.tensors[FREQUENCIES].raw()).tolist()
        ]

    def not_read(self, what: str, instead: str) -> NotReadError:
        """Return the error for a file that no configuration of transformers describes."""
        return NotReadError(
            f"{self.file.files[0]}: {what} is not read (read: {instead})",
            "evaluate it with --engine llama.cpp",
        )

    def rope(self, head: int, *, whole: bool = True) -> dict[str, Any]:
        """Return the rotary positions of all layers.

        Args:
            head: the columns of one.
            whole: it turns as a whole where a configuration of the family says nothing.
        """
        file, kind = self.file, self.text("rope.scaling.type")
        base = self.real("rope.freq_base", 10_000.0)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
        width = self.integer("rope.dimension_count", head)
        if FREQUENCIES in file.tensors:
            rope |= self._llama3(base, width)
        elif LONG in file.tensors and SHORT in file.tensors:
            rope |= {
                "rope_type": "longrope",
                "long_factor": read_tensor(file.tensors[LONG].raw()).tolist(),
                "short_factor": read_tensor(file.tensors[SHORT].raw()).tolist(),
                "attention_factor": self.real("rope.scaling.attn_factor", 1.0),
                "original_max_position_embeddings": self._original(),
            }
        elif kind in {"linear", "yarn"}:
            rope |= {"rope_type": kind, "factor": self.real("rope.scaling.factor", 1.0)}
            if kind == "yarn":
                rope["original_max_position_embeddings"] = self._original()
        elif kind not in {"", "none"}:
            raise NotReadError(
                f"{file.files[0]}: rope scaling {kind!r} is not read",
                "linear, yarn, llama3 and longrope are",
            )
        if width != head or not whole:
            rope["partial_rotary_factor"] = width / head
        found: dict[str, Any] = {"rope_parameters": rope}
        if rope["rope_type"] == "longrope":
            found["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        return found

    def full_rope(self) -> dict[str, Any]:
        """Return the rotary parameters of gemma3's full attention."""
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self.real("rope.freq_base", 1e6),
        }
        if self.text("rope.scaling.type") == "linear":
            rope |= {"rope_type": "linear", "factor": self.real("rope.scaling.factor", 1.0)}
        return rope

    def _original(self) -> int:
        return self.integer("rope.scaling.original_context_length")

    def _llama3(self, base: float, width: int) -> dict[str, Any]:
        """Return the settings whose divisors are those of the table."""
        stored = read_tensor(self.file.tensors[FREQUENCIES].raw()).double()
        for factor, low, high, original in _LLAMA3:
            divisors = llama3_divisors(base, width, factor, low, high, original)
            if len(divisors) == len(stored) and all(
                abs(found - wanted) <= 1e-6 * wanted
                for found, wanted in zip(stored.tolist(), divisors, strict=True)
            ):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
        raise NotReadError(
            f"{self.file.files[0]}: {FREQUENCIES} is none of the published scalings",
            "evaluate it with --engine llama.cpp",
        )

    def _named(self, key: str) -> str:
        return f"{self._arch}.{key}"

    def _count(self, key: str, value: int) -> int:
        if not 0 <= value < 1 << 31:
            raise self._damaged(key, value)
        return value

    def _damaged(self, key: str, value: object) -> InputError:
        return InputError(
            f"{self.file.files[0]}: {self._named(key)} = {value}", "the file is damaged"
        )


def shortest(value: float) -> float:
    """Return the shortest decimal number that is the same in float32: 1e-05 and not 9.999999747378752e-06."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value
