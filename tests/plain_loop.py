"""The plain decoding loop: prefill the prompts, then one token per sequence and step. Faster loops are held to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import DecodingStep, prefill
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.sampling import RowSampler, choose_tokens


@dataclass(frozen=True, slots=True)
class StopLimits:
    """New tokens at most, tokens that end a sequence, and the kind of the cache."""

    new_tokens: int = 32
    stop: frozenset[int] = frozenset()
    cache: str = ""


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    limits: StopLimits | None = None,
    sampling: Sampling | None = None,
) -> list[list[int]]:
    """Return the new tokens of each prompt, its stop token included; each is computed by itself."""
    limits, sampling = limits or StopLimits(), sampling or Sampling()
    return [_generate_for_prompt(decoder, list(prompt), limits, sampling) for prompt in prompts]


def _generate_for_prompt(
    decoder: Decoder, prompt: list[int], limits: StopLimits, sampling: Sampling
) -> list[int]:
    cache = decoder.cache(1, len(prompt) + limits.new_tokens, limits.cache)
    sampler, step = RowSampler(sampling, prompt), DecodingStep(decoder, cache)
    ids = torch.tensor([prompt], device=decoder.device)
    logits = prefill(decoder, ids, cache, limits.new_tokens)
    found: list[int] = []
    while True:
        found.append(choose_tokens([sampler], logits.float())[0].token)
        if found[-1] in limits.stop or len(found) == limits.new_tokens:
            return found
        logits = step(torch.tensor(found[-1:], device=decoder.device))
