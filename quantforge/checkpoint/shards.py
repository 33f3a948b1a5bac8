"""Shards of a result: which tensor lies where in which safetensors file, a pure function of what they hold.

The reference library writes metadata in random order. Here the header has sorted keys and is known before any tensor
exists, so that a plan gives the exact bytes of every file.

Order: names are sorted naturally (``layers.2`` before ``layers.10``), so that a shard holds a run of blocks; within a
shard wider types come first, so that every tensor is aligned to its item size although the format allows no padding
between tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from quantforge.checkpoint.safetensors import MAX_HEADER_BYTES, METADATA
from quantforge.plans import DTYPE_BITS, FilePlan, StoredTensor

# transformers before 5 refuses files without it
PT_METADATA: Mapping[str, str] = {"format": "pt"}


_DIGITS = re.compile(r"([0-9]+)")


Shards = Sequence[Sequence[StoredTensor]]


def natural(name: str) -> tuple[list[int | str], str]:
    """Return a sort key: runs of digits compare as numbers; ``01`` comes before ``1``."""
    parts = _DIGITS.split(name)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name


def plan_shards(
    tensors: Sequence[StoredTensor], max_bytes: int
) -> tuple[tuple[StoredTensor, ...], ...]:
    """Distribute tensors over files of at most ``max_bytes`` of data, in file order.

    A tensor that is larger than the limit has a file of its own. The result depends on nothing but
    the set of tensors and the limit.
    """
    shards: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in sorted(tensors, key=lambda tensor: natural(tensor.name)):
        size = tensor.nbytes
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return tuple(
        tuple(sorted(shard, key=lambda tensor: -DTYPE_BITS[tensor.dtype])) for shard in shards
    )


def shard_names(count: int) -> tuple[str, ...]:
    """Return the file names of ``count`` shards, as every loader expects them."""
    if count == 1:
        return ("model.safetensors",)
    return tuple(f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1))


def header_bytes(
    tensors: Sequence[StoredTensor], metadata: Mapping[str, str] = PT_METADATA
) -> bytes:
    """Return the first bytes of a file that holds ``tensors`` in this order: length and padded header.

    Raises:
        ValueError: a tensor is twice in it, or the header is longer than `MAX_HEADER_BYTES`.
    """
    table: dict[str, object] = {METADATA: dict(metadata)}
    start = 0
    for tensor in tensors:
        if tensor.name in table:
            raise ValueError(f"tensor {tensor.name!r} twice in one file")
        end = start + tensor.nbytes
        shape = list(tensor.shape)
        table[tensor.name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes: plan smaller shards")
    return len(text).to_bytes(8, "little") + text


def file_plans(shards: Shards) -> tuple[FilePlan, ...]:
    """Plan where everything goes in the safetensors files of these shards; errors as `header_bytes`."""
    plans = []
    for name, shard in zip(shard_names(len(shards)), shards, strict=True):
        header = header_bytes(shard)
        offset, places = len(header), []
        for tensor in shard:
            places.append((tensor, offset))
            offset += tensor.nbytes
        plans.append(FilePlan(name, offset, ((0, header),), tuple(places)))
    return tuple(plans)


def index_json(shards: Shards) -> bytes:
    """Return ``model.safetensors.index.json`` of several shards."""
    names = shard_names(len(shards))
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard)},
        "weight_map": {
            tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        },
    }
    return json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"
