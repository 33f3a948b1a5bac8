"""Entries of one layer of a cache: keys and values put into their places, and read back from pages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantforge.runtime.cache_layout import CacheShape
from quantforge_kernels import kv
from quantforge_kernels.cpu import layer_launchers
from quantforge_kernels.kv import Store

Pools = tuple[Store, Store]  # of keys, and of values
LayerScales = Mapping[int, tuple[Tensor, Tensor]]  # by layer, measured scales of keys and values
RunScales = tuple[Tensor | None, Tensor | None]  # of keys and values, see `kv.spread`


def spread_scales(
    scales: LayerScales, shape: CacheShape, device: torch.device
) -> dict[int, RunScales]:
    """Return by layer the measured scales for every run; None where keys, or values, are not in fp8."""

    def spread(scale: Tensor, kind: str) -> Tensor | None:
        if kind != "fp8":
            return None
        return kv.spread(scale.to(device), shape.kv_heads, shape.head, kind)

    first, second = shape.kinds
    return {
        layer: (spread(keys, first), spread(values, second))
        for layer, (keys, values) in scales.items()
    }


def write_entries(
    pools: Pools, given: tuple[Tensor, Tensor], slots: Tensor, scales: RunScales
) -> None:
    """Store keys and values ``[tokens, kv_heads, head]`` at ``slots`` ``[tokens]``."""
    kinds = pools[0].kind, pools[1].kind
    if layer_launchers.accepts_cache(given[0].shape[2], kinds, *given):
        layer_launchers.store(given, pools, slots, scales)
        return
    for store, new, scale in zip(pools, given, scales, strict=True):
        encoded = kv.encode(new, store.kind, scale)
        for pool, part in zip(store.each(), encoded.each(), strict=True):
            raw_bytes(pool).view(-1, *raw_bytes(pool).shape[2:])[slots] = raw_bytes(part)


def read_pages(pools: Pools, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return pages ``[sequences, pages]``, decoded: ``[sequences, pages * PAGE, kv_heads, head]`` each."""
    table, found = table.long(), []
    for store in pools:
        parts = [raw_bytes(part)[table].view(part.dtype).flatten(1, 2) for part in store.each()]
        found.append(kv.decode(Store(*parts), dtype))
    return found[0], found[1]


def raw_bytes(values: Tensor) -> Tensor:
    """View float8 as bytes: torch neither scatters nor gathers it everywhere."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values
