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
from functools import cache
from typing import Any

from quantforge.architectures import MODEL_TYPES, Architecture, architecture_of
from quantforge.architectures.declare import WITHIN
from quantforge.architectures.llama_cpp import (
    LLAMA_BIASES,
    QKV_BIASES,
    WITH_TABLE,
    Family,
)
from quantforge.errors import RefusedError

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_INNER = re.compile(r".*?\.(\d+)\.(.*)")  # of a block
_WORDS = (
    "attn",
    "ffn",
    "indexer",
    "nextn",
    "output",
    "shortconv",
    "ssm",
    "token_embd",
)  # begin its names
_TYPED = re.compile(r"(?:re:|\*|\^)*\.?(?:blk\.(\d+|[^.]+)\.)?(\w+)(?:\.weight)?")

_TANH = ("gelu_pytorch_tanh",)
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", interleaved=True, biases=LLAMA_BIASES, class_name="LlamaForCausalLM", scalings=WITH_TABLE),
    "mistral": Family("llama", interleaved=True, biases=LLAMA_BIASES, window=4096, scalings=WITH_TABLE),
    "mixtral": Family("llama", interleaved=True, experts=True, class_name="MixtralForCausalLM", scalings=WITH_TABLE),
    "qwen2": Family("qwen2", biases=QKV_BIASES, class_name="Qwen2ForCausalLM", heads_fill=True, window=4096),
    "qwen3": Family("qwen3", class_name="Qwen3ForCausalLM", window=4096),
    "qwen3_moe": Family("qwen3moe", experts=True, class_name="Qwen3MoeForCausalLM", window=4096),
    "gemma2": Family("gemma2", norm_plus_one=True, head=False, class_name="Gemma2ForCausalLM",
                     activations=_TANH, period=2, windowed=True),
    "gemma3": Family("gemma3", norm_plus_one=True, activations=_TANH, period=6, windowed=True),
    "gemma3_text": Family("gemma3", norm_plus_one=True, class_name="Gemma3ForCausalLM",
                          activations=_TANH, period=6, windowed=True),
    "phi3": Family("phi3", class_name="Phi3ForCausalLM", heads_fill=True, scalings=("longrope",)),
    "smollm3": Family("smollm3", interleaved=True, class_name="SmolLM3ForCausalLM", no_rope_period=4),
    "gpt2": Family("gpt2", biases=("attn_qkv.bias", "attn_output.bias", "attn_norm.bias", "ffn_norm.bias",
                                   "ffn_up.bias", "ffn_down.bias", "output_norm.bias"),
                   class_name="GPT2LMHeadModel", activations=("gelu_new", *_TANH),
                   graph={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}),
}  # fmt: skip


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a configuration.

    Raises:
        RefusedError: GGUF holds no such family (or this program does not write it).
    """
    name = str(config.get("model_type", ""))
    declared = architecture_of(config)
    found = FAMILIES.get(name) or (declared.gguf if declared else None)
    if found is None:
        written = {
            *FAMILIES,
            *(key for key in MODEL_TYPES if key not in FAMILIES and _declared(key)),
        }
        raise RefusedError(
            f"model_type {name!r}: not written as GGUF",
            f"written are {', '.join(sorted(written))}; --format compressed-tensors --method rtn takes any decoder",
        )
    return found


def _declared(model_type: str) -> Family | None:
    architecture = architecture_of({"model_type": model_type})
    return architecture.gguf if architecture else None


@cache
def read_families() -> dict[str, Family]:
    """Return the families whose files are read back, by ``model_type``: of the table, dense ones, and restated ones.

    Of a model with towers, its text alone, where that has a name of its own.
    """
    own = {name: _declared(name) for name in MODEL_TYPES if name not in FAMILIES}
    read = {
        name: found
        for name, found in own.items()
        if found and found.is_read and (found.restated or not found.experts)
        if f"{name}_text" not in MODEL_TYPES
    }
    return {**FAMILIES, **read}


def declared_of(model_type: str) -> Architecture:
    """Return what is declared of a family whose files are read back."""
    found = architecture_of({"model_type": model_type})
    assert found is not None
    return found


@dataclass(frozen=True, slots=True)
class Named:
    """Name of a tensor in the file, and which expert of a stack it is (-1: no stack).

    ``others`` are the names of further ones, where the last dimension alternates between them.
    """

    name: str
    expert: int = -1
    others: tuple[str, ...] = ()


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
    """Map every name that a file of the family may have to the canonical ones: one, one per expert, or several.

    Gate and up of an expert may be one matrix, as other converters write it.
    """
    family, declared = read_families()[model_type], declared_of(model_type)
    stacks = {
        stack.parameter: stack
        for kind in declared.kinds
        for stack in kind.stacks
        if stack.parameter in kind.stored_stacks
    }
    inner = [
        (item.stored or item.name).format(number)
        for item in dict.fromkeys(item for kind in declared.kinds for item in kind.parameters)
        if item.name not in stacks  # files have the matrices of each expert by a name of their own
        for number in range(experts if item.each else 1)
    ]
    canonical = [item.name for item in declared.outer]
    canonical += [f"{declared.blocks}.{block}.{name}" for block in range(blocks) for name in inner]
    found: dict[str, list[str]] = {}
    for name, named in _named(family, blocks, dict.fromkeys(canonical)):
        if named is not None:
            found.setdefault(named.name, []).append(name)
    places = [f"{declared.blocks}.{block}" for block in range(blocks)]
    joined = {
        f"{place}.{name}": [
            f"{place}.{one.format(number)}.weight"
            for number in range(experts)
            for one in stack.linears
        ]
        for name, stack in stacks.items()
        if len(stack.linears) > 1 and not stack.transposed and not stack.interleaved
        for place in places
    }
    found |= {
        f"{named.name}.weight": joined[name]
        for name, named in _named(family, blocks, joined)
        if named is not None
    }
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
        if base.startswith(f"{WITHIN}."):  # gguf's map knows a decoder alone
            base = f"model.{base.removeprefix(f'{WITHIN}.')}"
        inner = _INNER.fullmatch(base)
        own = family.names.get(inner[2]) if inner else None
        if inner and own:
            first, *others = (f"blk.{inner[1]}.{word}" for word in own.split())
            yield name, Named(first, int(expert[2]) if expert else -1, tuple(others))
            continue
        target = mapping.get_name(base, try_suffixes=(".weight", ".bias"))
        if target is None or (target.endswith(".bias") and not target.endswith(family.biases)):
            yield name, None
        else:
            yield name, Named(target, int(expert[2]) if expert else -1)


def name_here(typed: str, canonical: Iterable[str]) -> str:
    """Return the name that a model has for what a GGUF file calls ``ffn_down`` or ``blk.3.ffn_down``; "" for none.

    Args:
        typed: a name, or a pattern of one.
        canonical: names of the model, without ``.weight``.
    """
    found = _TYPED.fullmatch(typed)
    if found is None or not (found[1] or found[2].startswith(_WORDS)):
        return ""
    import gguf  # with numpy

    block, word = found.groups()
    tables = (gguf.TensorNameMap.block_mappings_cfg, gguf.TensorNameMap.mappings_cfg)
    forms = {
        form.rpartition("{bid}.")[2]
        for table in tables
        for kind, known in table.items()
        if gguf.TENSOR_NAMES[kind].rpartition(".")[2] == word
        for form in known
    }
    meant = [
        name
        for name in dict.fromkeys(
            re.sub(r"\.experts\.\d+\.", ".experts.*.", one) for one in canonical
        )
        if ((inner := _INNER.fullmatch(name)) and inner[2].replace(".*", "") in forms)
        or name in forms
    ]
    if block and block.isdecimal():
        return next((name for name in meant if f".{block}." in name), "")
    return next((name.rpartition(".")[2] for name in meant), "")
