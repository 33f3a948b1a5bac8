"""Model families that can be stored as GGUF, and the tensor names of their files.

llama.cpp builds the graph of a model from ``general.architecture`` and refuses a file that has one tensor too few or
too many. What it calls a family, and what its graph takes for granted, is in the family's own file
(`quantforge.architectures.llama_cpp.GgufFamily`). Names come from gguf's own map. What is done to tensors on the way,
each of it silently wrong when missed:

* ``GgufFamily.interleaved``: the rows of q and k are reordered per head, because llama.cpp rotates neighbouring pairs
  where transformers rotates the two halves of a head;
* ``GgufFamily.norm_plus_one``: norm weights are stored plus one;
* ``Architecture.transposed``: linears are stored turned (``[out, in]``);
* ``GgufFamily.experts``: the experts of a block are stacked into one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from quantforge.architectures import Architecture, architecture_of
from quantforge.architectures.declare import NESTED_DECODER_PREFIX
from quantforge.architectures.families import declared_families
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.errors import RefusedError

_EXPERT_NAME = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_BLOCK_NAME = re.compile(r".*?\.(\d+)\.(.*)")  # of a block
# Prefixes of GGUF's names
_GGUF_PREFIXES = ("attn", "ffn", "indexer", "nextn", "output", "shortconv", "ssm", "token_embd")
_TYPED_NAME = re.compile(r"(?:re:|\*|\^)*\.?(?:blk\.(\d+|[^.]+)\.)?(\w+)(?:\.weight)?")


def family_of(config: Mapping[str, Any]) -> GgufFamily:
    """Return the GGUF family of a configuration.

    Raises:
        RefusedError: GGUF holds no such family (or this program does not write it).
    """
    declared = architecture_of(config)
    if declared is None or declared.gguf is None:
        supported_types = sorted(
            name for name in declared_families() if declared_architecture(name).gguf is not None
        )
        raise RefusedError(
            f"model_type {str(config.get('model_type', ''))!r}: not written as GGUF",
            f"written are {', '.join(supported_types)}; --format compressed-tensors --method rtn takes any decoder",
        )
    return declared.gguf


@cache
def model_type_by_arch() -> dict[str, str]:
    """Return the ``model_type`` to use when reading a file, by llama.cpp's architecture name.

    Of several families of one name, the first; of a model with towers, its text alone where that has its own type.
    """
    model_types: dict[str, str] = {}
    for name in declared_families():
        family = declared_architecture(name).gguf
        if (
            family is not None
            and family.transformers_class
            and f"{name}_text" not in declared_families()
        ):
            model_types.setdefault(family.arch, name)
    return model_types


def declared_architecture(model_type: str) -> Architecture:
    """Return the architecture declared for a ``model_type``."""
    architecture = architecture_of({"model_type": model_type})
    assert architecture is not None
    return architecture


@dataclass(frozen=True, slots=True)
class GgufName:
    """Name of a tensor in the file, and its index in a stack of experts (-1 if it is not stacked).

    ``others`` are the names of further ones, where the last dimension alternates between them.
    """

    name: str
    expert: int = -1
    others: tuple[str, ...] = ()


def gguf_names(family: GgufFamily, blocks: int, canonical: Iterable[str]) -> dict[str, GgufName]:
    """Map canonical names of transformers' model to names in the GGUF file.

    Raises:
        RefusedError: llama.cpp's graph of the family has no place for a tensor (all are listed).
    """
    canonical = tuple(canonical)
    names = {
        name: gguf_name
        for name, gguf_name in _map_names(family, blocks, canonical)
        if gguf_name is not None
    }
    unnamed = [name for name in canonical if name not in names]
    if unnamed:
        raise RefusedError(
            f"{len(unnamed)} tensor(s) have no place in llama.cpp's {family.arch}: {', '.join(sorted(unnamed)[:5])}",
            "use --format compressed-tensors",
            tensor=unnamed[0],
        )
    return names


def canonical_names(model_type: str, blocks: int, experts: int) -> dict[str, tuple[str, ...]]:
    """Map each GGUF name of a family to its canonical names: one, one per expert, or several.

    Gate and up of an expert may be one matrix, as other converters write it.
    """
    declared = declared_architecture(model_type)
    family = family_of({"model_type": model_type})
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
        for number in range(experts if item.repeated_over else 1)
    ]
    canonical = [item.name for item in declared.outer_parameters]
    canonical += [f"{declared.blocks}.{block}.{name}" for block in range(blocks) for name in inner]
    names: dict[str, list[str]] = {}
    for name, gguf_name in _map_names(family, blocks, dict.fromkeys(canonical)):
        if gguf_name is not None:
            names.setdefault(gguf_name.name, []).append(name)
    block_paths = [f"{declared.blocks}.{block}" for block in range(blocks)]
    joined = {
        f"{block_path}.{name}": [
            f"{block_path}.{linear.format(number)}.weight"
            for number in range(experts)
            for linear in stack.linears
        ]
        for name, stack in stacks.items()
        if len(stack.linears) > 1 and not stack.transposed and not stack.interleaved
        for block_path in block_paths
    }
    names |= {
        f"{gguf_name.name}.weight": joined[name]
        for name, gguf_name in _map_names(family, blocks, joined)
        if gguf_name is not None
    }
    return {name: tuple(group) for name, group in names.items()}


def _map_names(
    family: GgufFamily, blocks: int, canonical: Iterable[str]
) -> Iterator[tuple[str, GgufName | None]]:
    import gguf

    numbers = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    mapping = gguf.get_tensor_name_map(numbers[family.arch], blocks)
    for name in canonical:
        expert = _EXPERT_NAME.fullmatch(name)
        base = f"{expert[1]}.{expert[3]}" if expert else name
        if base.startswith(f"{NESTED_DECODER_PREFIX}."):  # gguf's map knows a decoder alone
            base = f"model.{base.removeprefix(f'{NESTED_DECODER_PREFIX}.')}"
        inner = _BLOCK_NAME.fullmatch(base)
        gguf_stems = family.tensor_names.get(inner[2]) if inner else None
        if inner and gguf_stems:
            first, *other_names = (f"blk.{inner[1]}.{stem}" for stem in gguf_stems.split())
            yield name, GgufName(first, int(expert[2]) if expert else -1, tuple(other_names))
            continue
        target = mapping.get_name(base, try_suffixes=(".weight", ".bias"))
        if target is None or (
            target.endswith(".bias") and not target.endswith(family.bias_suffixes)
        ):
            yield name, None
        else:
            yield name, GgufName(target, int(expert[2]) if expert else -1)


def name_from_gguf(gguf_name: str, canonical: Iterable[str]) -> str:
    """Return the model's name for a GGUF name such as ``ffn_down`` or ``blk.3.ffn_down``; "" if there is none.

    Args:
        gguf_name: a name, or a pattern of one.
        canonical: names of the model, without ``.weight``.
    """
    match = _TYPED_NAME.fullmatch(gguf_name)
    if match is None or not (match[1] or match[2].startswith(_GGUF_PREFIXES)):
        return ""
    import gguf  # with numpy

    block, suffix = match.groups()
    tables = (gguf.TensorNameMap.block_mappings_cfg, gguf.TensorNameMap.mappings_cfg)
    forms = {
        pattern.rpartition("{bid}.")[2]
        for table in tables
        for kind, known_patterns in table.items()
        if gguf.TENSOR_NAMES[kind].rpartition(".")[2] == suffix
        for pattern in known_patterns
    }
    possible_names = [
        name
        for name in dict.fromkeys(
            re.sub(r"\.experts\.\d+\.", ".experts.*.", candidate) for candidate in canonical
        )
        if ((inner := _BLOCK_NAME.fullmatch(name)) and inner[2].replace(".*", "") in forms)
        or name in forms
    ]
    if block and block.isdecimal():
        return next((name for name in possible_names if f".{block}." in name), "")
    return next((name.rpartition(".")[2] for name in possible_names), "")
