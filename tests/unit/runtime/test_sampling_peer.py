"""The sampling distribution equals that of transformers' logits processors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as peer

from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.sampling import RowSampler
from tests.unit.runtime.test_sampling import probabilities

VOCABULARY = 300


def transformers_distribution(
    logits: torch.Tensor, prompt: list[int], options: Sampling
) -> torch.Tensor:
    chain: list[Any] = [
        peer.RepetitionPenaltyLogitsProcessor(options.repetition_penalty),
        peer.TemperatureLogitsWarper(options.temperature),
    ]
    if options.logit_bias:
        bias = {(token,): value for token, value in options.logit_bias.items()}
        chain.insert(0, peer.SequenceBiasLogitsProcessor(bias))
    if options.top_k:
        chain.append(peer.TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        chain.append(peer.TopPLogitsWarper(options.top_p))
    if options.min_p:
        chain.append(peer.MinPLogitsWarper(options.min_p))
    scores = logits[None]
    for processor in chain:
        scores = processor(torch.tensor([prompt]), scores)
    return scores.softmax(-1)[0].double()


@pytest.mark.parametrize("cut", ["", "top_k", "top_p", "min_p", "all"])
def test_distribution_equals_transformers_processors(cut: str) -> None:
    """64 random cases each; where rounding decides about the token at the border of top-p, one of them may differ."""
    draw, apart = random.Random(cut), 0
    for case in range(64):
        logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(case)) * 3
        prompt = [draw.randrange(VOCABULARY) for _ in range(20)]
        expected: dict[str, Any] = {
            "temperature": draw.uniform(0.3, 2),
            "repetition_penalty": draw.uniform(0.7, 1.6),
            "logit_bias": {
                draw.randrange(VOCABULARY): draw.uniform(-5, 5) for _ in range(case % 3)
            },
        }
        if cut in {"top_k", "all"}:
            expected["top_k"] = draw.randint(1, 60)
        if cut in {"top_p", "all"}:
            expected["top_p"] = draw.uniform(0.05, 0.99)
        if cut in {"min_p", "all"}:
            expected["min_p"] = draw.uniform(0.001, 0.3)
        options = Sampling(**expected)
        result = probabilities(RowSampler(options, prompt), logits)
        apart += not torch.allclose(
            result, transformers_distribution(logits, prompt, options), rtol=1e-4, atol=1e-7
        )
    assert apart <= (cut in {"top_p", "all"})
