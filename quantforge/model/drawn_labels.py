"""Labels that a model draws for itself: one for each position, from what it predicts there.

A draw is decided by the seed, the number of the calibration row, the position and the logits there, never by which rows
are computed together: a counter-based generator (Philox) has the seed and the row for its key, and the position for its
counter.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DRAWN = 1 << 22  # logits of which labels are drawn at a time, in float64


def draw_labels(logits: Tensor, seed: int, first: int) -> Tensor:
    """Draw a label for each position from ``logits`` ``[rows, length, vocab]``: int64 ``[rows, length]``.

    ``first`` is the number of the row of ``logits[0]``.
    """
    step = max(1, DRAWN // logits.shape[2])
    labels = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    for index, row in enumerate(logits):
        key = np.array([seed % 2**64, first + index], dtype=np.uint64)
        drawn = np.random.Generator(np.random.Philox(key=key)).random(len(row))
        uniform = torch.from_numpy(drawn).to(logits.device)
        for start in range(0, len(row), step):
            run = slice(start, start + step)
            chances = row[run].double().softmax(-1).cumsum(-1)
            wanted = uniform[run, None] * chances[:, -1:]
            found = torch.searchsorted(chances, wanted, right=True)[:, 0]
            labels[index, run] = found.clamp(max=logits.shape[2] - 1)
    return labels
