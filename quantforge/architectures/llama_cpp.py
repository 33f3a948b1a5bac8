"""Families as llama.cpp knows them: the name, what its graph takes for granted, and the keys that it reads.

A family's file says this of its own family; `quantforge.formats.gguf` writes files by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quantforge.errors import QuantForgeError

SOFTMAX, SIGMOID = 1, 2  # how scores of routers become weights
SCALINGS = ("linear", "yarn")  # of rotary positions, which are keys
WITH_TABLE = (*SCALINGS, "llama3")  # where llama.cpp also reads divisors of the frequencies


class Keys(Protocol):
    """Keys of a GGUF file, named without the prefix of the architecture, and facts about its tensors."""

    def integer(self, key: str, otherwise: int | None = None) -> int:
        """Return a count."""

    def real(self, key: str, otherwise: float | None = None) -> float:
        """Return a number."""

    def text(self, key: str) -> str:
        """Return a word, "" where there is none."""

    def of_layers(self, key: str, kind: type[int] | type[bool] = int) -> list[int]:
        """Return a number, or a truth, for every layer."""

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor, () where there is none."""

    def divisors(self) -> list[float]:
        """Return by what the frequencies of rotary positions are divided; [] where no table says so."""

    def sizes(self) -> dict[str, Any]:
        """Return what ``config.json`` says of sizes that all families have, of biases, and of values of ``graph``."""

    def usual(self) -> dict[str, Any]:
        """Return what ``config.json`` of a llama says: `sizes`, heads of keys, the MLP, ``reals``, rotary positions."""

    def rope(self, head: int) -> dict[str, Any]:
        """Return the rotary positions of all layers, for heads of so many columns."""

    def not_read(self, what: str, instead: str) -> QuantForgeError:
        """Return the error for a file that no configuration of transformers describes."""


# Returns the value of a key for a configuration with the family's defaults; None where there is none.
Stated = Callable[[Mapping[str, Any]], float | None]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A family as llama.cpp knows it.

    Attributes:
        arch: ``general.architecture``.
        interleaved: rows of q and k are reordered per head.
        norm_plus_one: norms are stored plus one.
        biases: endings of the names of biases that llama.cpp's graph of the family has a place for.
        experts: a mixture of experts: always, never, or where a configuration key says so.
        head: whether a file may hold an output matrix.
        class_name: of the model in transformers that a file is read back as; "" where files are not read back, or as
            those of another family of the same ``arch``.
        activations: what llama.cpp's graph computes, by transformers' names; the first where none is stated.
        period: the last of each run of so many layers sees everything, the others slide; 0 where all are alike.
        heads_fill: whether the heads fill the width of the model together.
        windowed: whether llama.cpp has a sliding window for it.
        window_key: the sliding window that a file states where the configuration has none, of a family that is not
            `windowed`; None: files have no such key.
        softcaps: keys of soft caps, in the file as in the configuration, each with its value where that has none.
        counts_vocabulary: whether a file states the number of tokens.
        original_context: whether a file states the context length before scaling.
        rotary: whether positions are rotary; of others no key says anything.
        rope_base: of the frequencies, where the configuration has none.
        sliding_base: whether layers that slide have a base of their own.
        divided_head: the dimension of a head of the layers without a window, where each of its frequencies is divided
            by a number in the file; "" where frequencies are those of the keys.
        yarn_multiplier: whether llama.cpp reads by what YaRN multiplies; it takes the usual for the others.
        yarn_betas: whether llama.cpp reads by how many turns YaRN tells frequencies apart; else it takes the usual.
        yarn_rounded: whether a range of frequencies that transformers does not round is an event, and not refused.
        scalings: kinds of scaling of rotary positions that its graph computes.
        base: returns the base of the frequencies for a configuration with the family's defaults, where its scaling
            changes nothing else; None elsewhere.
        window: of transformers' configuration, where the key is missing.
        used: key of the configuration that counts the experts which a token is sent to.
        sizes: keys of the file, each with its value in dimensions of the family (``shared*inner``).
        numbers, reals, flags: keys of the file, each with the key of the configuration that holds its value, or with
            the value itself; one that the configuration leaves out, or null, is left out. A number or a real may have
            a function, as ``lists``.
        graph: configuration values that llama.cpp's graph of the family computes; any other is refused.
        unsupported: returns, for a configuration with the family's defaults, a setting that llama.cpp's graph does not
            support and what it supports; None where it supports all.
        equal: pairs of dimensions that are the same in llama.cpp's graph.
        names: names of tensors in the file, each by its canonical name relative to the block, without the number of an
            expert; for those that gguf's own map does not know. Several names, joined by a space, are of one tensor
            whose last dimension alternates between them.
        lists: keys of the file with a number, or a truth, for each layer, each with a function that returns them for a
            configuration with the family's defaults, and with that of its vision tower.
        squeezed: endings of canonical names of tensors whose dimensions of one are left out.
        decays: endings of canonical names of logarithms, in whose place minus their exponentials are stored.
        plain_norms: endings of canonical names of norms that are not stored plus one, in a family whose others are.
        read_config: returns the ``config.json`` that the `Keys` of a file describe; None where they are read as those
            of a llama.
        epsilon: key of the norms' epsilon in the file, and in the configuration.
        bias_keys: keys of the configuration that say whether there are biases, each with a tensor that is there if so.
    """

    arch: str
    interleaved: bool = False
    norm_plus_one: bool = False
    biases: tuple[str, ...] = ()
    experts: bool | str = False
    head: bool = True
    class_name: str = ""
    activations: tuple[str, ...] = ("silu",)
    period: int = 0
    heads_fill: bool = False
    windowed: bool = False
    window_key: int | None = None
    softcaps: Mapping[str, float] = field(default_factory=dict)
    counts_vocabulary: bool = False
    original_context: bool = False
    rotary: bool = True
    rope_base: float = 10_000.0
    sliding_base: bool = False
    divided_head: str = ""
    yarn_multiplier: bool = False
    yarn_betas: bool = False
    yarn_rounded: bool = False
    scalings: tuple[str, ...] = SCALINGS
    base: Callable[[Mapping[str, Any]], float | None] | None = None
    window: int | None = None
    used: str = "num_experts_per_tok"
    sizes: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str | int | Stated] = field(default_factory=dict)
    reals: Mapping[str, str | Stated] = field(default_factory=dict)
    flags: Mapping[str, str | bool] = field(default_factory=dict)
    graph: Mapping[str, object] = field(default_factory=dict)
    unsupported: Callable[[Mapping[str, Any]], tuple[str, str] | None] | None = None
    equal: tuple[tuple[str, str], ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, Callable[[Mapping[str, Any]], Sequence[int]]] = field(default_factory=dict)
    squeezed: tuple[str, ...] = ()
    decays: tuple[str, ...] = ()
    plain_norms: tuple[str, ...] = ()
    read_config: Callable[[Keys], dict[str, Any]] | None = None
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
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
_EPSILON = 1e-5  # the largest of the releases, which does not show in what they compute


def own_epsilon(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a norm epsilon that llama.cpp would ignore with visible effect, and its allowed range; else None."""
    stated = config.get("rms_norm_eps")
    if isinstance(stated, int | float) and stated > _EPSILON:
        return f"rms_norm_eps = {stated:g}", f"up to {_EPSILON:g}"
    return None


def types_of_period(layers: int, period: int) -> list[str]:
    """Return ``layer_types`` where the last of each run of ``period`` layers sees everything and the others slide."""
    return [
        "full_attention" if layer % period == period - 1 else "sliding_attention"
        for layer in range(layers)
    ]


def experts_config(keys: Keys) -> dict[str, Any]:
    """Return the keys of ``config.json`` for the number of experts, under both names, from the `Keys` of a file."""
    return {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }
