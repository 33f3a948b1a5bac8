"""Families that GGUF holds, what llama.cpp calls them, and how their tensors are turned and named.

llama.cpp builds the graph of a model from ``general.architecture`` and refuses a file that has one tensor too few or
too many. Names come from gguf's own map. What is done to tensors on the way (each of it silently wrong when missed):

* ``llama``, ``mistral``, ``mixtral``, ``smollm3``: the rows of q and k are reordered per head, because llama.cpp
  rotates neighbouring pairs where transformers rotates the two halves of a head;
* ``gemma2``, ``gemma3``: norm weights are stored plus one;
* ``gpt2``: linears are stored turned (``[out, in]``);
* ``mixtral``, ``qwen3_moe``: the experts of a block are stacked into one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.architectures import architecture_of
from quantforge.errors import RefusedError

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class Family:
    """One family: ``arch`` is llama.cpp's name of it.

    Attributes:
        arch: ``general.architecture``.
        interleaved: rows of q and k are reordered per head.
        norm_plus_one: norms are stored plus one.
        biases: endings of the names of biases that llama.cpp's graph of the family has a place for.
        experts: a mixture of experts.
        head: whether a file may hold an output matrix.
        class_name: of the model in transformers; "" where its files are read as those of another family.
        activations: what llama.cpp's graph computes, by transformers' names; the first where none is stated.
        period: the last of each run of so many layers sees everything, the others slide; 0 where all are alike.
        no_rope_period: the last of each run of so many layers has no rotary positions; 0 where all have.
        heads_fill: whether the heads fill the width of the model together.
        windowed: whether llama.cpp has a sliding window for it.
        window: of transformers' configuration, where the key is missing.
    """

    arch: str
    interleaved: bool = False
    norm_plus_one: bool = False
    biases: tuple[str, ...] = ()
    experts: bool = False
    head: bool = True
    class_name: str = ""
    activations: tuple[str, ...] = ("silu",)
    period: int = 0
    no_rope_period: int = 0
    heads_fill: bool = False
    windowed: bool = False
    window: int | None = None


_TANH = ("gelu_pytorch_tanh",)
_ATTENTION = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_LLAMA = (*_ATTENTION, "attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", interleaved=True, biases=_LLAMA, class_name="LlamaForCausalLM"),
    "mistral": Family("llama", interleaved=True, biases=_LLAMA, window=4096),
    "mixtral": Family("llama", interleaved=True, experts=True, class_name="MixtralForCausalLM"),
    "qwen2": Family("qwen2", biases=_ATTENTION, class_name="Qwen2ForCausalLM", heads_fill=True, window=4096),
    "qwen3": Family("qwen3", class_name="Qwen3ForCausalLM", window=4096),
    "qwen3_moe": Family("qwen3moe", experts=True, class_name="Qwen3MoeForCausalLM", window=4096),
    "gemma2": Family("gemma2", norm_plus_one=True, head=False, class_name="Gemma2ForCausalLM",
                     activations=_TANH, period=2, windowed=True),
    "gemma3": Family("gemma3", norm_plus_one=True, activations=_TANH, period=6, windowed=True),
    "gemma3_text": Family("gemma3", norm_plus_one=True, class_name="Gemma3ForCausalLM",
                          activations=_TANH, period=6, windowed=True),
    "phi3": Family("phi3", class_name="Phi3ForCausalLM", heads_fill=True, windowed=True),
    "smollm3": Family("smollm3", interleaved=True, class_name="SmolLM3ForCausalLM", no_rope_period=4),
    "gpt2": Family("gpt2", biases=("attn_qkv.bias", "attn_output.bias", "attn_norm.bias", "ffn_norm.bias",
                                   "ffn_up.bias", "ffn_down.bias", "output_norm.bias"),
                   class_name="GPT2LMHeadModel", activations=("gelu_new", *_TANH)),
}  # fmt: skip


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a configuration.

    Raises:
        RefusedError: GGUF holds no such family (or this program does not write it).
    """
    name = str(config.get("model_type", ""))
    if name not in FAMILIES:
        raise RefusedError(
            f"model_type {name!r}: not written as GGUF",
            f"written are {', '.join(sorted(FAMILIES))}; --format compressed-tensors --method rtn takes any decoder",
        )
    return FAMILIES[name]


@dataclass(frozen=True, slots=True)
class Named:
    """Name of a tensor in the file, and which expert of a stack it is (-1: no stack)."""

    name: str
    expert: int = -1


def names(family: Family, blocks: int, canonical: Iterable[str]) -> dict[str, Named]:
    """Map canonical names of transformers' model to names in the file.

    Raises:
        RefusedError: llama.cpp's graph of the family has no place for a tensor (all are listed).
    """
    canonical = tuple(canonical)
    found = {name: named for name, named in _named(family, blocks, canonical) if named is not None}
    lost = [name for name in canonical if name not in found]
    if lost:
        raise RefusedError(
            f"{len(lost)} tensor(s) have no place in llama.cpp's {family.arch}: {', '.join(sorted(lost)[:5])}",
            "use --format compressed-tensors",
            tensor=lost[0],
        )
    return found


def original_names(model_type: str, blocks: int, experts: int) -> dict[str, tuple[str, ...]]:
    """Map every name that a file of the family may have to the canonical ones: one, or one per expert."""
    family = FAMILIES[model_type]
    declared = architecture_of({"model_type": model_type})
    assert declared is not None
    inner = [
        (item.stored or item.name).format(number)
        for item in declared.kinds[0].parameters  # llama.cpp has no graph of a mixture with others
        for number in range(experts if item.each else 1)
    ]
    canonical = [item.name for item in declared.outer]
    canonical += [f"{declared.blocks}.{block}.{name}" for block in range(blocks) for name in inner]
    found: dict[str, list[str]] = {}
    for name, named in _named(family, blocks, canonical):
        if named is not None:
            found.setdefault(named.name, []).append(name)
    return {name: tuple(group) for name, group in found.items()}


def _named(
    family: Family, blocks: int, canonical: Iterable[str]
) -> Iterator[tuple[str, Named | None]]:
    import gguf

    numbers = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    mapping = gguf.get_tensor_name_map(numbers[family.arch], blocks)
    for name in canonical:
        expert = _EXPERT.fullmatch(name)
        base = f"{expert[1]}.{expert[3]}" if expert else name
        target = mapping.get_name(base, try_suffixes=(".weight", ".bias"))
        if target is None or (target.endswith(".bias") and not target.endswith(family.biases)):
            yield name, None
        else:
            yield name, Named(target, int(expert[2]) if expert else -1)
