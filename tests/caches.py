"""Paged caches with random entries, for attention."""

from __future__ import annotations

import torch

from quantforge.cache_kinds import PLAIN, parse_cache_kind
from quantforge_kernels import kv
from quantforge_kernels.kv import PAGE_SIZE
from tests.triton_kernels import DEVICE


def random_paged_cache(dtype, groups, head, lengths, kind, pages=4):
    """Queries, pools, a table that is out of order, lengths; what lies beyond a sequence is no number."""
    count, kinds = pages * len(lengths), parse_cache_kind(kind or PLAIN)
    q = _random(len(lengths), groups[0], head, dtype=dtype)
    pools = [
        kv.encode(_random(count, PAGE_SIZE, groups[1], head, dtype=dtype, seed=i), kinds[i - 1])
        for i in (1, 2)
    ]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    table = order.view(len(lengths), pages).int().to(DEVICE)
    for row, length in zip(table.tolist(), lengths, strict=True):
        for pool in pools:
            spoiled = pool.scales if pool.kind else pool.codes
            for page in range(pages):
                spoiled[row[page], max(0, min(PAGE_SIZE, length - page * PAGE_SIZE)) :] = float(
                    "nan"
                )
    return q, *pools, table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)
