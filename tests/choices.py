"""Tests that compare generated tokens: models in float32, and no near ties, so that every processor agrees.

The last bits of logits depend on the processor, on the kernel that computes them and on the size of its batch. If they
decide which token is chosen, two correct computations generate different texts. A test that compares tokens is marked
``tokens`` (a fixture in `tests.conftest`): the verbs then load their models in float32, and the plain decoding loop,
which generates the reference text, checks each of its choices. The test fails, with the number of the token, if a
little noise on the logits would change the choice. Use another prompt, seed or length then.

``python -m tests.choices serve MODEL`` is the command line with models in float32, for tests that start a process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.cache_kinds import PLAIN
from quantforge.runtime import decoding, load
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.sampling import (
    ChosenToken,
    RowSampler,
    apply_bias_and_penalties,
    choose_tokens,
    sample_tokens,
    sampling_weights,
)
from tests import plain_loop
from tests.plain_loop import StopLimits

NOISE = 2e-4  # of logits: a hundred times the deviation of float32 computations from each other
QUANTIZED_CACHE_NOISE = 1e-2  # with a quantized KV cache, where last bits may change a code by one
NOISE_REPEATS = 8  # how often each choice is repeated, each time with other noise


def is_clear(logits: Tensor, sampler: RowSampler, noise: float) -> bool:
    """Return whether a sampler chooses the same token from logits ``[vocabulary]`` with noise; its state stays."""
    (row,) = apply_bias_and_penalties(logits[None], [sampler.options], [sampler.counts])
    random = torch.Generator().manual_seed(len(row))
    noisy = row + noise * torch.randn(NOISE_REPEATS, len(row), generator=random)
    rows = torch.cat((row[None], noisy))
    if sampler.options.greedy:
        tokens = rows.argmax(-1)
    else:
        uniform = torch.full((len(rows),), sampler.fork().uniform(), dtype=torch.float64)
        tokens = sample_tokens(sampling_weights(rows, [sampler.options] * len(rows)), uniform)
    return bool((tokens == tokens[0]).all())


class PlainChoices(list[bool]):
    """For each token that plain loops chose, in order: whether the choice is clear (see `is_clear`)."""

    @property
    def clear(self) -> int:
        """The number of clear choices before the first unclear one."""
        return self.index(False) if False in self else len(self)

    def check(self) -> None:
        """Fail if a choice is not clear."""
        assert all(self), (
            f"{self.count(False)} of {len(self)} tokens, first number {self.clear}, are nearly a tie: "
            "last bits decide, so take another prompt, seed or length (tests/choices.py)"
        )


@contextmanager
def plain_choices(noise: float = NOISE) -> Iterator[PlainChoices]:
    """Record the choices of plain loops (decoding without a draft); of nested contexts, only the innermost does."""
    found = PlainChoices()

    def choose(samplers: Sequence[RowSampler], logits: Tensor) -> list[ChosenToken]:
        assert not logits.equal(logits.bfloat16().float()), "tokens that are compared, in 16 bits"
        found.extend(is_clear(row, one, noise) for row, one in zip(logits, samplers, strict=True))
        return choose_tokens(samplers, logits)

    with pytest.MonkeyPatch.context() as patch:
        for module in (plain_loop, decoding):
            patch.setattr(module, "choose_tokens", choose)
        yield found


def plain_text(
    decoder: Decoder, ids: Sequence[int], limits: StopLimits, sampling: Sampling | None = None
) -> list[int]:
    """Return the tokens that the plain loop generates after a prompt, before the first choice that is not clear."""
    with plain_choices(NOISE if limits.cache in {"", PLAIN} else QUANTIZED_CACHE_NOISE) as choices:
        (tokens,) = plain_loop.generate(decoder, [ids], limits, sampling)
    return tokens[: choices.clear]


@contextmanager
def float32_verbs() -> Iterator[None]:
    """Make verbs load models in float32 instead of 16 bits."""

    def loaded(
        path: Any, device: str = "cpu", _dtype: Any = None, *more: Any, **options: Any
    ) -> Any:
        return original(path, device, torch.float32, *more, **options)

    original = load.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "load", loaded)
        yield


if __name__ == "__main__":
    from quantforge.cli.app import main

    with float32_verbs():
        main()
