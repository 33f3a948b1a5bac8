"""One text with speculation: guess, check all guesses in one pass, keep those that are what the model chooses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from quantforge.errors import InputError
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.generate import StopLimits, check_prompts
from quantforge.runtime.sampling import Chosen, Sampling
from quantforge.runtime.speculation.draft_options import DRAFT_TOKENS
from quantforge.runtime.speculation.growing_text import GrowingText
from quantforge.runtime.speculation.guess_trees import GuessTree
from quantforge.runtime.speculation.guesses import Guesser, Speculated, WatchingGuesser
from quantforge.runtime.speculation.pace import GuessPace, PassCosts


@dataclass(slots=True)
class Speculation:
    """Speculation for one text.

    Attributes:
        guesser: guesses.
        most: guesses in a row at most.
        fixed: always as many, instead of as many as pay.
        costs: of passes, for this text and others after it.
        counts: what came of it, renewed while tokens are yielded.
    """

    guesser: Guesser
    most: int = DRAFT_TOKENS
    fixed: bool = False
    costs: PassCosts = field(default_factory=PassCosts)
    counts: Speculated = field(default_factory=Speculated)


@torch.inference_mode()
def speculate(
    decoder: Decoder,
    prompt: Sequence[int],
    speculation: Speculation,
    limits: StopLimits | None = None,
    sampling: Sampling | None = None,
) -> Iterator[Chosen]:
    """Yield the tokens that `generate` gives for one prompt, each pass's as soon as they are known.

    Raises:
        InputError: as `generate`; or what a draft computes is no number.
    """
    limits, sampling = limits or StopLimits(), sampling or Sampling()
    check_prompts(decoder, [prompt], limits.new_tokens)
    guesser = speculation.guesser
    watching = guesser if isinstance(guesser, WatchingGuesser) else None
    text = GrowingText(decoder, prompt, limits, sampling, watching)
    pace = GuessPace(speculation.most, fixed=speculation.fixed, costs=speculation.costs)
    left = limits.new_tokens
    one = text.first()
    yield one
    left -= 1
    while left and one.token not in limits.stop:
        began = time.perf_counter()
        most = min(pace.guesses(), left - 1)
        tree = _guessed(guesser, text, most)
        found, parted = text.advance(tree)
        pace.took(most if tree.probes else tree.depth, time.perf_counter() - began)
        empty = tree.probes > 0 and not tree.guesses and not tree.early
        pace.judged(len(found) - 1, parted=parted or empty)
        speculation.counts.count(tree, len(found) - 1, parted=parted)
        for one in found:
            yield one
            left -= 1
            if one.token in limits.stop:
                break


def _guessed(guesser: Guesser, text: GrowingText, most: int) -> GuessTree:
    if not most:
        return GuessTree()
    try:
        return guesser.guess(text.history, most, text.sampler)
    except InputError as error:  # in the words of a model, which is not to blame
        raise InputError(
            f"the draft: {error.message}", "it is damaged: take another one, or leave --draft out"
        ) from error
