"""Routers of mixtures of experts, by what they are: the one matrix of a module with a row for every expert.

A router decides which experts compute; rounded, it sends tokens elsewhere. Names differ (``gate``, ``router``, ``wg``,
``shared_expert_gate``), and so do the keys of configurations; what all have in common is the shape: as many rows as
the configuration counts experts, or a single one for the gate of a shared expert, and no second matrix of that shape
beside it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping

_COUNT = re.compile(r"experts?$|^n(um)?_?(local_|routed_)?experts", re.IGNORECASE)
_NO_COUNT = re.compile(r"per_tok|top_?k|active|shared|group|_dim|_size", re.IGNORECASE)
_ELSEWHERE = re.compile(
    r"attn|attention|mixer|mamba|(^|\.)experts\.|norm|embed|conv", re.IGNORECASE
)
_WEIGHS = re.compile(r"indexer\.(\w+\.)?weights_proj(\.|$)")
_NAMES = re.compile(
    r"(^|\.)(router|wg|gate|shared_expert_gate|shared_gate|router\.\w+|gate\.wg)\.weight$"
)


def experts_of(config: Mapping[str, object]) -> frozenset[int]:
    """Return every number of experts that a configuration states, larger than 1."""
    found: set[int] = set()
    for key, value in config.items():
        if counts_experts(key):
            values = value if isinstance(value, list) else [value]
            found |= {item for item in values if type(item) is int and item > 1}
    return frozenset(found)


def weighs_an_index(name: str) -> bool:
    """Return whether a linear weighs the heads of an indexer: as narrow as a router, it decides what is attended to."""
    return _WEIGHS.search(name) is not None


def counts_experts(key: str) -> bool:
    """Return whether a key of a configuration states a number of experts."""
    return _COUNT.search(key) is not None and not _NO_COUNT.search(key)


def is_named_router(name: str) -> bool:
    """Return whether a stored tensor has one of the names that routers have."""
    return _NAMES.search(name) is not None


def is_stack(shape: tuple[int, ...], counts: Collection[int]) -> bool:
    """Return whether a tensor inside of a block has the shape of stacked experts, of which there are ``counts``."""
    return len(shape) == 3 and shape[0] in counts and min(shape) > 1


def routers(config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the names of the routers among the tensors inside of blocks.

    Args:
        config: of the decoder.
        shapes: of the tensors inside of its blocks by name, ``(out, in)`` for matrices.
    """
    counts = experts_of(config)
    if not counts:
        return set()
    alike = Counter(
        (name.rpartition(".")[0].rpartition(".")[0], shape) for name, shape in shapes.items()
    )
    found = set()
    for name, shape in shapes.items():
        if len(shape) != 2 or not name.endswith(".weight") or _ELSEWHERE.search(name):
            continue
        parent = name.rpartition(".")[0].rpartition(".")[0]
        alone = alike[parent, shape] == 1
        if (shape[0] in {1, *counts} and alone) or _NAMES.search(name):
            found.add(name)
    return found
