"""Retrieval of a planted key: whether attention still finds in a cache what was put there long before.

A prompt is text in which a cue and a key stand, random tokens of the text, some distance before its end, where the cue
stands once more. What is measured is how likely the key is there, token by token, as if the model were to go on: only
the cache can tell it. The same prompt with another key in the first place says what a model would guess without
looking; a model too small to look back so far shows as one, since both figures are then alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.evaluation.windows import Windows

CUE, KEY = 8, 16  # tokens
BEFORE = 32  # tokens of text before the first cue
DISTANCES = tuple(2**n for n in range(5, 13))  # in tokens, from the key to the second cue
MOST_WINDOWS = 8  # from which prompts are made, one of every distance


@dataclass(frozen=True, slots=True)
class PlantedKeys:
    """Prompts of one distance, ``[prompts, tokens]``, that end in their keys, and the same with other keys planted."""

    distance: int
    ids: Tensor
    others: Tensor


def plant(windows: Windows) -> tuple[PlantedKeys, ...]:
    """Return prompts of every distance that the windows have room for, none where they are too short."""
    first = int(windows.bos is not None)
    known = torch.tensor(sorted({*windows.ids[:, first:].flatten().tolist()}))
    drawn = torch.Generator().manual_seed(0)
    found = []
    room = windows.ids.shape[1] - first - BEFORE - 2 * (CUE + KEY)
    for distance in (d for d in DISTANCES if d <= room):
        prompts: list[Tensor] = []
        others: list[Tensor] = []
        for window in windows.ids[:MOST_WINDOWS]:
            cue = _random(known, CUE, drawn)
            key, other = _random(known, KEY, drawn), _random(known, KEY, drawn)
            before, between = window[: first + BEFORE], window[first + BEFORE :][:distance]
            for made, planted in ((prompts, key), (others, other)):
                made.append(torch.cat((before, cue, planted, between, cue, key)))
        found.append(PlantedKeys(distance, torch.stack(prompts), torch.stack(others)))
    return tuple(found)


def _random(known: Tensor, count: int, drawn: torch.Generator) -> Tensor:
    return known[torch.randint(len(known), (count,), generator=drawn)]
