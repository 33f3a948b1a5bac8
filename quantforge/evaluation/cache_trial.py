"""Trial of caches: which kinds, and on what text; refused where a model has no such caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantforge.architectures import architecture_of, text_config
from quantforge.architectures.cache_kinds import PLAIN
from quantforge.errors import RefusedError
from quantforge.evaluation.comparable import positions_of
from quantforge.evaluation.planted_key import CUE, KEY, PlantedKeys, plant
from quantforge.evaluation.windows import Windows, cut
from quantforge.formats.opening import open_model
from quantforge.formats.sources.low_precision import readable
from quantforge.runtime.cache import CacheShape
from quantforge.runtime.text_side import tokenizer_of

EDGES = tuple(2**n for n in range(6, 13))  # of ranges of positions
MOST_TOKENS = 2 * EDGES[-1]  # of a window
REQUESTS = 16  # with a cache of 16 bits: the memory that others are counted in


@dataclass(frozen=True, slots=True)
class CacheTrial:
    """Caches to try, and on what.

    Attributes:
        kinds: names, see `quantforge.architectures.cache_kinds`; that of 16 bits is not among them.
        windows: of the text, as long as positions and text allow.
        keys: prompts with a planted key, by distance, as far as windows have room.
    """

    kinds: tuple[str, ...]
    windows: Windows
    keys: tuple[PlantedKeys, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the protocol as plain data."""
        count, length = self.windows.ids.shape
        return {
            "windows": count,
            "length": length,
            "tokens_sha256": self.windows.sha256,
            "requests": REQUESTS,
            "keys": sum(len(one.ids) for one in self.keys),
            "cue_tokens": CUE,
            "key_tokens": KEY,
        }


def trial_of(
    paths: Sequence[Path], text: str, kinds: Sequence[str], tokens: int
) -> CacheTrial | None:
    """Return what caches are tried on: windows as long as the models' positions, of about ``tokens`` tokens in all.

    A text that has fewer tokens than such a window gives shorter ones; without ``kinds`` nothing is tried.

    Raises:
        InputError: the text has no window of two tokens, or a model heads that a kind cannot hold.
        RefusedError: the own decoder, whose caches these are, does not compute a model's family.
    """
    if not kinds:
        return None
    for path in paths:
        config = readable(open_model(path)).config
        family = architecture_of(config)
        if family is None or family.own_graph is None:
            raise not_ours(config.get("model_type"))
        for kind in kinds:  # which refuses heads that it cannot hold
            CacheShape(1, 1, family.dimensions(text_config(config)).head, kind, torch.bfloat16)
    tokenizer = tokenizer_of(paths[0])
    length = min(MOST_TOKENS, *map(positions_of, paths))
    there = len(tokenizer.encode(text)) + (tokenizer.bos_id is not None)
    while length > max(2, there):
        length = max(2, length // 2)
    windows = cut(tokenizer, text, max(1, tokens // length), length)
    asked = tuple(kind for kind in kinds if kind != PLAIN)
    return CacheTrial(asked, windows, plant(windows))


def not_ours(model_type: object) -> RefusedError:
    """Return the error for a model without such caches."""
    return RefusedError(
        f"--cache: model_type {model_type!r} is not computed by the own decoder, whose caches are measured",
        "leave --cache out",
    )
