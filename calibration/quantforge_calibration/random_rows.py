"""Rows of tokens drawn evenly from the vocabulary, in the place of a few rows of a text.

A quantizer that makes up for one column's error with others relies on how activations go together in the calibration
text. On text of another kind they go together otherwise, and some of what was gained is lost. Rows in which tokens
follow each other at random are like no text, and show what is true of the model on all of them: a few of these cost
little on the text that was given, and take much of the loss on others away.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quantforge_calibration.sampler import Sample, digest, duplicated
from quantforge_calibration.tokenizer import TextTokenizer


def with_random_rows(sample: Sample, share: float, tokenizer: TextTokenizer, seed: int) -> Sample:
    """Replace some rows by random tokens, spread evenly over the sample; rows with images stay.

    Args:
        sample: rows of text.
        share: of its rows, from 0 to 1; a part of a row is none.
        tokenizer: of the model; its special and added tokens, and those past the embedding, are not drawn.
        seed: decides which tokens are drawn.

    Returns:
        The sample with the first id of each row as it was, where all rows begin with the same.
    """
    images = sample.images
    of_text = [i for i in range(len(sample.ids)) if images is None or images.rows[i] is None]
    count = int(len(of_text) * share)
    drawn = torch.tensor(tokenizer.ordinary_ids() if count else [])
    if not len(drawn):
        return sample
    rows = [of_text[-(-(2 * i + 1) * len(of_text) // (2 * count)) - 1] for i in range(count)]
    alike = len(sample.ids) > 1 and bool((sample.ids[:, 0] == sample.ids[0, 0]).all())
    first = int(alike or tokenizer.bos_id is not None)
    shape = count, sample.ids.shape[1] - first
    generator = torch.Generator().manual_seed(seed)
    ids = sample.ids.clone()
    ids[rows, first:] = drawn[torch.randint(len(drawn), shape, generator=generator)]
    report = replace(
        sample.report,
        random_rows=count,
        tokens_used=sample.report.tokens_used - shape[0] * shape[1],
        duplicated_rows=duplicated(ids, images),
        digest=digest(ids, images),
    )
    return replace(sample, ids=ids, report=report)
