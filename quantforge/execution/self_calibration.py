"""Calibration rows that the model writes itself: no text is needed, and the text is in the model's own distribution.

Each row begins with the token that begins texts (or ends them, where there is none) and is sampled at temperature 1,
the distribution that the model was trained to have. Rows are sampled together, from a seeded generator of our own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quantforge.architectures.configuration import embedding_rows
from quantforge.errors import InputError
from quantforge.formats.opening import open_model, tokenizer_folder
from quantforge.numerics.products import cutting
from quantforge.recipe import CalibrationOptions
from quantforge_calibration.tokenizer import load_tokenizer

BATCH = 32  # rows sampled together


def own_rows(model: Path, options: CalibrationOptions, device: str) -> Callable[[int, int], Tensor]:
    """Return the function that samples ``[rows, length]`` token ids; the model is loaded when it is called.

    The whole model is in memory while it samples (its size is what `plan` says for this source).
    """

    def sample(rows: int, length: int) -> Tensor:
        from quantforge.runtime.load import load

        with tokenizer_folder(model) as (folder, _):
            tokenizer = load_tokenizer(folder, embedding_rows(open_model(model).config))
        first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if first is None:
            raise InputError(
                "calibration 'self': the tokenizer has neither a token that begins texts nor one that ends them",
                "use --calibration builtin or a file",
            )
        loaded = load(model, device=device)
        generator = torch.Generator().manual_seed(options.seed)
        batches = [
            _sample(loaded.model, min(BATCH, rows - start), length, first, generator, device)
            for start in range(0, rows, BATCH)
        ]
        return torch.cat(batches)

    return sample


@torch.inference_mode()
def _sample(
    model: torch.nn.Module,
    rows: int,
    length: int,
    first: int,
    generator: torch.Generator,
    device: str,
) -> Tensor:
    ids = torch.full((rows, 1), first, dtype=torch.int64, device=device)
    cache = None
    while ids.shape[1] < length:
        with cutting():
            result = model(
                input_ids=ids[:, -1:], past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        cache = result.past_key_values
        chances = result.logits[:, -1].float().softmax(-1).cpu()
        drawn = torch.multinomial(chances, 1, generator=generator).to(device)
        ids = torch.cat((ids, drawn), dim=1)
    return ids.cpu()
