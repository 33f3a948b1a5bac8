"""Contents of GGUF files: the tensor table, where experts are one tensor, and how a model is shared out to parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantforge.architectures.match import MatchedTensor
from quantforge.errors import InputError
from quantforge.formats.gguf import mixture
from quantforge.formats.gguf.container import GgufTensor, Value, file_plan, stored_pieces
from quantforge.formats.gguf.families import Named
from quantforge.formats.gguf.metadata import split_keys
from quantforge.formats.gguf.parameters import Parameters
from quantforge.grids import SUPERBLOCKS
from quantforge.notation import parse
from quantforge.plans import Action, FilePlan, TensorPlan
from quantforge.scheme import LayerScheme


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One source tensor on its way: its name in the file and its shape as stored there."""

    tensor: MatchedTensor
    named: Named
    shape: tuple[int, ...]
    type: str
    rule: str


def split(
    keys: Mapping[str, Value], tensors: Sequence[GgufTensor], max_bytes: int | None
) -> tuple[FilePlan, ...]:
    """Plan one file, or files of at most ``max_bytes`` of data each, of which the first has all of the keys."""
    parts: list[list[GgufTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if max_bytes is not None and parts[-1] and filled + tensor.nbytes > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += tensor.nbytes
    if len(parts) == 1:
        return (file_plan("model.gguf", keys, tensors),)
    return tuple(
        file_plan(
            f"model-{number + 1:05}-of-{len(parts):05}.gguf",
            {**(keys if number == 0 else {}), **split_keys(number, len(parts), len(tensors))},
            part,
        )
        for number, part in enumerate(parts)
    )


def tensor_table(targets: Iterable[FileTensor], found: Parameters) -> list[GgufTensor]:
    """Return the tensor table in file order: experts stacked, computed tables added."""
    stacks: dict[str, list[FileTensor]] = {}
    for item in targets:
        stacks.setdefault(item.named.name, []).append(item)
    tensors = list(found.computed)
    for name, items in stacks.items():
        first = items[0]
        if first.named.expert < 0:
            given = (name, *first.named.others)
            tensors += [GgufTensor(one, first.type, first.shape) for one in given]
            continue
        experts = sorted(item.named.expert for item in items)
        if experts != list(range(found.experts)) or {item.shape for item in items} != {first.shape}:
            raise InputError(
                f"{name}: experts {experts[:8]} of {found.experts}, or their shapes differ",
                "a complete checkpoint holds every expert of every block",
                tensor=first.tensor.stored.name,
            )
        tensors.append(GgufTensor(name, first.type, (len(items), *first.shape), pieces=len(items)))
    return sorted(tensors, key=lambda tensor: mixture.order(tensor.name))


def planned(item: FileTensor, found: Parameters) -> TensorPlan:
    """Return the plan of a source tensor: its place in the table, and what is done with its rows."""
    tensor, family_heads = item.tensor, _heads(item, found)
    shape = item.shape if item.named.expert < 0 else (found.experts, *item.shape)
    pieces = 1 if item.named.expert < 0 else found.experts
    stored = stored_pieces(GgufTensor(item.named.name, item.type, shape, pieces))
    beside = [
        part
        for name in item.named.others
        for part in stored_pieces(GgufTensor(name, item.type, shape, pieces))
    ]
    grid = item.type.lower()
    return TensorPlan(
        tensor.stored.name,
        tensor.stored.dtype,
        tensor.stored.shape,
        Action.QUANTIZE if grid in SUPERBLOCKS else Action.KEEP,
        item.rule,
        LayerScheme(parse(grid)) if grid in SUPERBLOCKS else None,
        stored=(stored[max(item.named.expert, 0)], *beside),
        part=tensor.block,
        shared=tensor.shared,
        transposed=tensor.transposed,
        heads=family_heads,
        by_rows=grid in SUPERBLOCKS and not tensor.transposed,
        plus_one=found.plus_one
        and item.named.name.endswith("norm.weight")
        and not tensor.name.endswith(found.plain_norms),
        decay=tensor.name.endswith(found.decays),
        expert=tensor.expert,
    )


def _heads(item: FileTensor, found: Parameters) -> int:
    """Return the number of heads whose rows are reordered, 0 for none."""
    if not found.interleaved:
        return 0
    module = item.named.name.rpartition(".")[0]
    if module.endswith("attn_q"):
        return found.dimensions.heads
    return found.dimensions.kv_heads if module.endswith("attn_k") else 0
