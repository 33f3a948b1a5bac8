"""Find routers of mixtures of experts by shape: the only matrix of a module with one row per expert.

A router decides which experts compute; if it is rounded, tokens go to other experts. Names differ (``gate``,
``router``, ``wg``, ``shared_expert_gate``), and so do configuration keys. Common to all is the shape: as many rows as
the configuration declares experts, or a single one for the gate of a shared expert, and no second matrix of that shape
in the same module.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping

_EXPERT_COUNT_KEY = re.compile(r"experts?$|^n(um)?_?(local_|routed_)?experts", re.IGNORECASE)
_OTHER_EXPERT_KEY = re.compile(r"per_tok|top_?k|active|shared|group|_dim|_size", re.IGNORECASE)
_NEVER_ROUTERS = re.compile(
    r"attn|attention|mixer|mamba|(^|\.)experts\.|norm|embed|conv", re.IGNORECASE
)
_INDEXER_WEIGHTS = re.compile(r"indexer\.(\w+\.)?weights_proj(\.|$)")
_ROUTER_NAMES = re.compile(
    r"(^|\.)(router|wg|gate|shared_expert_gate|shared_gate|router\.\w+|gate\.wg)\.weight$"
)


def expert_counts(config: Mapping[str, object]) -> frozenset[int]:
    """Return every number of experts larger than 1 that a configuration declares."""
    counts: set[int] = set()
    for key, value in config.items():
        if is_expert_count_key(key):
            values = value if isinstance(value, list) else [value]
            counts |= {item for item in values if type(item) is int and item > 1}
    return frozenset(counts)


def is_indexer_weight(name: str) -> bool:
    """Return whether a linear weighs the heads of an indexer, which selects the tokens to attend to.

    It is as narrow as a router and just as sensitive.
    """
    return _INDEXER_WEIGHTS.search(name) is not None


def is_expert_count_key(key: str) -> bool:
    """Return whether a configuration key declares a number of experts."""
    return _EXPERT_COUNT_KEY.search(key) is not None and not _OTHER_EXPERT_KEY.search(key)


def is_named_router(name: str) -> bool:
    """Return whether a stored tensor has one of the names that routers have."""
    return _ROUTER_NAMES.search(name) is not None


def is_expert_stack(shape: tuple[int, ...], counts: Collection[int]) -> bool:
    """Return whether a tensor in a block has the shape of stacked experts, given the possible numbers of experts."""
    return len(shape) == 3 and shape[0] in counts and min(shape) > 1


def find_routers(config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the names of the routers among the tensors of blocks.

    Args:
        config: configuration of the decoder.
        shapes: shapes of the tensors in blocks by name, ``(out, in)`` for matrices.
    """
    counts = expert_counts(config)
    if not counts:
        return set()
    same_shape = Counter(
        (name.rpartition(".")[0].rpartition(".")[0], shape) for name, shape in shapes.items()
    )
    names = set()
    for name, shape in shapes.items():
        if len(shape) != 2 or not name.endswith(".weight") or _NEVER_ROUTERS.search(name):
            continue
        parent = name.rpartition(".")[0].rpartition(".")[0]
        is_only_one = same_shape[parent, shape] == 1
        if (shape[0] in {1, *counts} and is_only_one) or _ROUTER_NAMES.search(name):
            names.add(name)
    return names
