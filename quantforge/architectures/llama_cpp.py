"""Families in llama.cpp: their names, what its graphs assume, and the metadata keys that it reads.

Each family's file declares a `GgufFamily`; `quantforge.formats.gguf` writes files according to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quantforge.errors import QuantForgeError

SOFTMAX_GATING, SIGMOID_GATING = 1, 2  # gating functions of routers, as numbered in GGUF
SCALINGS = ("linear", "yarn")  # kinds of rotary scaling that have metadata keys
# For graphs that also read a table of frequency divisors
SCALINGS_WITH_TABLE = (*SCALINGS, "llama3")


class GgufKeys(Protocol):
    """Access to the metadata keys of a GGUF file, named without the prefix of the architecture, and to tensor facts."""

    def get_int(self, key: str, otherwise: int | None = None) -> int:
        """Return a non-negative integer."""

    def get_float(self, key: str, otherwise: float | None = None) -> float:
        """Return a number."""

    def get_str(self, key: str) -> str:
        """Return a string, "" if the key is missing."""

    def per_layer(self, key: str, kind: type[int] | type[bool] = int) -> list[int]:
        """Return one integer or boolean for every layer."""

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor, () if it is missing."""

    def rope_divisors(self) -> list[float]:
        """Return the divisors of the rotary frequencies; [] if the file has no table of them."""

    def common_config(self) -> dict[str, Any]:
        """Return the settings of ``config.json`` for sizes that all families have, biases, and ``required_values``."""

    def llama_config(self) -> dict[str, Any]:
        """Return the settings of a llama-like ``config.json``.

        These are `common_config`, key/value heads, the MLP, ``float_keys`` and rotary embeddings.
        """

    def rope_config(self, head: int) -> dict[str, Any]:
        """Return the rotary settings of all layers, for heads with ``head`` columns."""

    def not_read_error(self, setting: str, supported: str) -> QuantForgeError:
        """Return the error for a file that no transformers configuration describes."""


# Returns the value of a metadata key for a configuration with the family's defaults; None for no key.
ValueFunction = Callable[[Mapping[str, Any]], float | None]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """Description of a family in llama.cpp.

    Functions receive a configuration with the family's defaults.

    Attributes:
        arch: ``general.architecture``.
        permutes_qk: whether rows of q and k are reordered per head.
        norm_plus_one: whether norm weights are stored plus one.
        bias_suffixes: suffixes of the names of biases that llama.cpp's graph of the family has.
        has_experts: whether it is a mixture of experts: always, never, or the configuration key that decides.
        has_output_matrix: whether a file may have an output matrix.
        transformers_class: the transformers model class of a file that is read back; "" if files are not read back, or
            only as another family of the same ``arch``.
        activations: activations that llama.cpp's graph supports, by transformers' names; the first is the default.
        window_period: the last layer of each run of this many has full attention, the others a window; 0 if all are
            alike.
        heads_fill_width: whether the heads together have the width of the model.
        supports_window: whether llama.cpp supports a sliding window for the family.
        file_window_default: the sliding window to write if the configuration has none, for a family without
            ``supports_window``; None if files have no such key.
        softcaps: keys of softcaps (the same in file and configuration), each with its default.
        stores_vocabulary_size: whether a file has the number of tokens.
        stores_original_context: whether a file has the context length before rotary scaling.
        uses_rotary: whether positions are rotary; other positions have no keys.
        default_rope_base: rotary base if the configuration has none.
        has_sliding_rope_base: whether layers with a window have their own rotary base.
        rope_divisors_head: the dimension that is the head width of full-attention layers, if the file has a table of
            divisors for their frequencies; "" if it has none.
        reads_yarn_multiplier: whether llama.cpp reads the YaRN attention multiplier; otherwise it assumes the default.
        reads_yarn_betas: whether llama.cpp reads the YaRN betas; otherwise it assumes the defaults.
        accepts_unrounded_yarn: whether a YaRN frequency range that transformers does not round causes an event instead
            of a refusal.
        rope_scalings: kinds of rotary scaling that its graph supports.
        scaled_rope_base: returns the rotary base if scaling only changes the base; else None.
        config_window_default: default of transformers' ``sliding_window``.
        used_experts_key: the configuration key of the number of experts per token.
        size_keys: metadata keys, each with its value as an expression in dimensions of the family (``shared*inner``).
        integer_keys, float_keys, bool_keys: metadata keys, each with the configuration key of its value, or the value
            itself; missing and null values are not written. Integers and floats may also have a function.
        required_values: configuration values that llama.cpp's graph of the family assumes; any other value is refused.
        unsupported: returns a setting that llama.cpp's graph does not support and what it supports; None if it supports
            all.
        equal_sizes: pairs of dimensions that must be equal in llama.cpp's graph.
        tensor_names: names of tensors in the file, by canonical name relative to the block and without expert index, if
            gguf's own map does not know them. Several names, separated by spaces, belong to one tensor whose last
            dimension alternates between them.
        per_layer_keys: metadata keys with an integer or boolean per layer, each with a function that returns these; the
            configuration includes that of the vision tower.
        squeezed_suffixes: suffixes of canonical names of tensors whose dimensions of size one are removed.
        decay_suffixes: suffixes of canonical names of logarithmic decays, of which minus the exponential is stored.
        unshifted_norm_suffixes: suffixes of canonical names of norms that are stored without plus one in a family with
            ``norm_plus_one``.
        read_config: returns the ``config.json`` that the `GgufKeys` of a file describe; None to read them as those of a
            llama.
        epsilon_keys: the key of the norm epsilon in the file, and in the configuration.
        bias_keys: configuration keys of biases, each with a tensor that exists if the key is true.
    """

    arch: str
    permutes_qk: bool = False
    norm_plus_one: bool = False
    bias_suffixes: tuple[str, ...] = ()
    has_experts: bool | str = False
    has_output_matrix: bool = True
    transformers_class: str = ""
    activations: tuple[str, ...] = ("silu",)
    window_period: int = 0
    heads_fill_width: bool = False
    supports_window: bool = False
    file_window_default: int | None = None
    softcaps: Mapping[str, float] = field(default_factory=dict)
    stores_vocabulary_size: bool = False
    stores_original_context: bool = False
    uses_rotary: bool = True
    default_rope_base: float = 10_000.0
    has_sliding_rope_base: bool = False
    rope_divisors_head: str = ""
    reads_yarn_multiplier: bool = False
    reads_yarn_betas: bool = False
    accepts_unrounded_yarn: bool = False
    rope_scalings: tuple[str, ...] = SCALINGS
    scaled_rope_base: Callable[[Mapping[str, Any]], float | None] | None = None
    config_window_default: int | None = None
    used_experts_key: str = "num_experts_per_tok"
    size_keys: Mapping[str, str] = field(default_factory=dict)
    integer_keys: Mapping[str, str | int | ValueFunction] = field(default_factory=dict)
    float_keys: Mapping[str, str | ValueFunction] = field(default_factory=dict)
    bool_keys: Mapping[str, str | bool] = field(default_factory=dict)
    required_values: Mapping[str, object] = field(default_factory=dict)
    unsupported: Callable[[Mapping[str, Any]], tuple[str, str] | None] | None = None
    equal_sizes: tuple[tuple[str, str], ...] = ()
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    per_layer_keys: Mapping[str, Callable[[Mapping[str, Any]], Sequence[int]]] = field(
        default_factory=dict
    )
    squeezed_suffixes: tuple[str, ...] = ()
    decay_suffixes: tuple[str, ...] = ()
    unshifted_norm_suffixes: tuple[str, ...] = ()
    read_config: Callable[[GgufKeys], dict[str, Any]] | None = None
    epsilon_keys: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    bias_keys: Mapping[str, str] = field(
        default_factory=lambda: {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
    )


QKV_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
LLAMA_BIASES = (
    *QKV_BIASES,
    "attn_output.bias",
    "ffn_gate.bias",
    "ffn_up.bias",
    "ffn_down.bias",
)
NORM_BIASES = ("attn_norm.bias", "ffn_norm.bias", "output_norm.bias")
_MAX_EPSILON = 1e-5  # the largest of the released models, without visible effect on the output


def unsupported_epsilon(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a norm epsilon that llama.cpp would ignore with visible effect, and its allowed range; else None."""
    epsilon = config.get("rms_norm_eps")
    if isinstance(epsilon, int | float) and epsilon > _MAX_EPSILON:
        return f"rms_norm_eps = {epsilon:g}", f"up to {_MAX_EPSILON:g}"
    return None


def periodic_layer_types(layers: int, period: int) -> list[str]:
    """Return ``layer_types`` in which the last of each run of ``period`` layers has full attention.

    The others have a sliding window.
    """
    return [
        "full_attention" if layer % period == period - 1 else "sliding_attention"
        for layer in range(layers)
    ]


def experts_config(keys: GgufKeys) -> dict[str, Any]:
    """Return the ``config.json`` settings of the number of experts, under both names, from the keys of a file."""
    return {
        "num_local_experts": keys.get_int("expert_count"),
        "num_experts": keys.get_int("expert_count"),
        "num_experts_per_tok": keys.get_int("expert_used_count"),
    }
