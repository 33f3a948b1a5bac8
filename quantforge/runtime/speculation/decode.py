"""Speculative decoding of one text: draft tokens, verify all of them in one pass, keep those the model chooses.

The draft method is chosen by name (`speculative_decoder`), the number of drafted tokens from measured times
(`DraftLengthController`). A pass with k drafted tokens yields ``(1 - a^(k+1)) / (1 - a)`` tokens for the cost of k+1
rows. The acceptance rate a is a running mean over the judged tokens. The cost of each k is the median time of its last
passes, without the first one, which includes one-time setup; values in between are interpolated. The k with the most
tokens per second is used. If that is 0, decoding is plain, and one token is drafted from time to time to check whether
drafting pays again. This choice changes the speed, never the text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from quantforge.architectures.draft_heads import EAGLE3
from quantforge.errors import InputError, UsageError
from quantforge.formats.sources.head_directory import DraftHeadDirectory
from quantforge.runtime.cache import CacheView
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import PREFILL_CHUNK_TOKENS, DecodingStep, prefill
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.ragged_attention import Span
from quantforge.runtime.sampling import ChosenToken, RowSampler
from quantforge.runtime.speculation.draft_model import DRAFT_SCHEMES, ModelDrafter, quantize_draft
from quantforge.runtime.speculation.draft_options import LOOKAHEAD, MTP, NGRAM, DraftOptions
from quantforge.runtime.speculation.drafter import Drafter, PassOutputs, allocate_text_cache
from quantforge.runtime.speculation.eagle3 import Eagle3Layer
from quantforge.runtime.speculation.hidden_state_drafter import HiddenStateDrafter
from quantforge.runtime.speculation.lookahead import NGRAM_LENGTH, LookaheadDrafter
from quantforge.runtime.speculation.medusa import MedusaDrafter, read_medusa
from quantforge.runtime.speculation.mtp import MtpLayer, read_mtp
from quantforge.runtime.speculation.ngrams import NgramDrafter
from quantforge.runtime.speculation.tree import DraftTree
from quantforge.runtime.speculation.verify_drafts import (
    SpeculationCounts,
    VerifiedDraft,
    expected_tokens,
    verify,
)

if TYPE_CHECKING:
    from quantforge.runtime.load import Loaded

ACCEPTANCE_DECAY = 0.9  # decay of the running mean, per judged token
PRIOR_ACCEPTANCE = 0.6  # assumed acceptance rate before any token was judged
PRIOR_TOKENS = 2.0  # weight of this prior, in judged tokens
DRAFT_LENGTHS = (1, 2, 4, 8, 16, 32)  # candidates; each needs compiled programs of its own
REVIEW_INTERVAL = 8  # plain steps between two checks of whether drafting would pay
TIMED_PASSES = 5  # last passes of each draft length whose times are kept
INITIAL_LENGTH = 2
INITIAL_PAUSE, MAX_PAUSE = 16, 128  # plain steps before drafting is tried again


@dataclass(slots=True)
class SpeculativeDecoder:
    """A model with a draft method.

    Attributes:
        decoder: the model.
        drafter: creates a drafter for a text of at most the given number of tokens.
        most: most drafted tokens in a row.
        fixed: always draft ``most`` tokens, instead of adapting their number to the measured speed.
    """

    decoder: Decoder
    drafter: Callable[[int], Drafter]
    most: int
    fixed: bool = False
    _paces: dict[int, DraftLengthController] = field(default_factory=dict)

    def pace(self, texts: int) -> DraftLengthController:
        """Return the draft length controller for passes over about ``texts`` texts."""
        size = 1 << (texts - 1).bit_length()
        return self._paces.setdefault(size, DraftLengthController(self.most, fixed=self.fixed))


def speculative_decoder(
    loaded: Loaded, options: DraftOptions, load_draft: Callable[[str], Loaded | DraftHeadDirectory]
) -> SpeculativeDecoder:
    """Set up speculative decoding for a loaded model.

    Args:
        loaded: the model.
        options: draft method, draft length and tree.
        load_draft: loads a draft model, or opens a directory of draft heads, by name or path.

    Raises:
        InputError: the draft has another vocabulary or hidden size, or no linear of the model can be quantized further.
        RefusedError: QuantForge's decoder does not support the model or the draft.
        UsageError: the draft tree is deeper than there are heads.
    """
    decoder, shape = Decoder(loaded.model, scales=loaded.kv_scales), options.shape
    if options.draft == NGRAM:
        return SpeculativeDecoder(decoder, lambda _: NgramDrafter(shape), len(shape))
    if options.draft == LOOKAHEAD:
        return SpeculativeDecoder(decoder, lambda _: LookaheadDrafter(), NGRAM_LENGTH - 1)
    if options.draft in DRAFT_SCHEMES:
        return _with_draft_model(
            decoder, Decoder(quantize_draft(loaded.model, options.draft)), options
        )
    if options.draft == MTP:
        return _with_draft_network(decoder, read_mtp(loaded), shape)
    draft = load_draft(options.draft)
    if not isinstance(draft, DraftHeadDirectory):
        return _with_draft_model(decoder, Decoder(draft.model, scales=draft.kv_scales), options)
    embedding = loaded.model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    if draft.kind == EAGLE3:
        return _with_draft_network(
            decoder, Eagle3Layer(draft, embedding, len(decoder.layers)), shape
        )
    heads = read_medusa(draft, embedding)
    if options.tree and len(shape) > len(heads):
        raise UsageError(
            f"--draft-tree {options.tree}: {len(shape)} places, and {draft.path} has {len(heads)} heads",
            "each place needs a head: leave the last ones out",
        )
    max_length = min(len(shape), len(heads))
    return SpeculativeDecoder(decoder, lambda _: MedusaDrafter(heads, shape), max_length)


def _with_draft_model(
    decoder: Decoder, draft: Decoder, options: DraftOptions
) -> SpeculativeDecoder:
    if decoder.vocabulary != draft.vocabulary:
        raise InputError(
            f"{options.draft} knows {draft.vocabulary} tokens, the model {decoder.vocabulary}",
            "a draft has the tokenizer of its model: take a smaller one of the same family, or int2",
        )
    if draft.device != decoder.device:
        raise InputError(f"the draft is on {draft.device}, the model on {decoder.device}", "")
    shape = options.shape
    return SpeculativeDecoder(decoder, lambda room: ModelDrafter(draft, room, shape), len(shape))


def _with_draft_network(
    decoder: Decoder, network: Eagle3Layer | MtpLayer, shape: tuple[int, ...]
) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        decoder, lambda room: HiddenStateDrafter(network, room, shape), len(shape)
    )


class SpeculativeCompletion:
    """Speculative decoding of one prompt; iterating yields the new tokens, the same as in plain decoding.

    Args:
        speculative: the model and its draft method.
        prompt: token ids of the prompt; at least one.
        new_tokens: number of new tokens; at least one.
        sampling: sampling options.
        cache: kind of the KV cache, see `quantforge.cache_kinds`.

    Attributes:
        counts: statistics of drafted and accepted tokens.

    Raises:
        InputError: during iteration, if logits of the model or the draft are not finite.
    """

    def __init__(
        self,
        speculative: SpeculativeDecoder,
        prompt: Sequence[int],
        new_tokens: int,
        sampling: Sampling | None = None,
        cache: str = "",
    ) -> None:
        self._decoder, self._new_tokens = speculative.decoder, new_tokens
        max_tokens = len(prompt) + new_tokens
        self._cache = allocate_text_cache(partial(self._decoder.cache, kind=cache), max_tokens)
        self._history = list(prompt)  # all of it but the last token is in the cache
        self._sampler = RowSampler(sampling or Sampling(), prompt)
        self._drafter, self._pace = speculative.drafter(max_tokens), speculative.pace(1)
        self._steps: dict[int, tuple[CacheView, DecodingStep]] = {}
        self.counts = SpeculationCounts()

    @torch.inference_mode()
    def __iter__(self) -> Iterator[ChosenToken]:
        remaining, chosen_tokens = self._new_tokens, self._advance(DraftTree())[1]
        yield from chosen_tokens
        while remaining := remaining - len(chosen_tokens):
            start_time = time.perf_counter()
            max_drafted = min(self._pace.next_length(), remaining - 1)
            tree = self._draft(max_drafted) if max_drafted else DraftTree()
            verified, chosen_tokens = self._advance(tree)
            self._pace.record_time(
                max_drafted if tree.probes else tree.depth, time.perf_counter() - start_time
            )
            no_draft = tree.probes > 0 and not tree.drafted
            self._pace.record_acceptance(len(verified.path), missed=verified.missed or no_draft)
            self.counts.count(verified)
            yield from chosen_tokens

    def _draft(self, max_drafted: int) -> DraftTree:
        try:
            return self._drafter.draft(self._history, max_drafted, self._sampler)
        except InputError as error:  # its message names the model, but the draft is at fault
            raise InputError(
                f"the draft: {error.message}",
                "it is damaged: take another one, or leave --draft out",
            ) from error

    def _advance(self, tree: DraftTree) -> tuple[VerifiedDraft, list[ChosenToken]]:
        """Compute the uncached tokens of the text and a draft tree; append the accepted tokens and the next one."""
        start = self._cache.length(0)
        tokens = torch.tensor([*self._history[start:], *tree.tokens], device=self._decoder.device)
        new_tokens = len(self._history) - start
        states: list[Tensor] = []
        if self._drafter.taps is not None or not tree.is_chain:
            states = self._states(tokens, None if tree.is_chain else tree.mask(root=True))
            logits = self._decoder.logits(states[0][new_tokens - 1 :])
        elif start:
            logits = self._step(tokens, start)
        else:
            logits = prefill(self._decoder, tokens[None], self._cache, self._new_tokens)
        (verified,) = verify(logits, [self._sampler], [tree], [frozenset()])
        for token in verified.chosen:
            if isinstance(token, InputError):
                raise token
            self._history.append(token.token)
        self._cache.keep_tree_path(
            0, start + new_tokens - 1, [0, *(node + 1 for node in verified.path)]
        )
        if self._drafter.taps is not None:
            rows = [*range(new_tokens), *(new_tokens + node for node in verified.path)]
            hidden, *features = (tensor[rows] for tensor in states)
            next_tokens = tuple(self._history[start + 1 :])
            self._drafter.observe(PassOutputs(tree, logits, hidden, tuple(features), next_tokens))
        return verified, cast("list[ChosenToken]", verified.chosen)

    def _step(self, tokens: Tensor, start: int) -> Tensor:
        """Compute logits of consecutive tokens with a recorded decoding step, as if each was a sequence of its own.

        Their keys and values are all written before attention runs, so each token sees the ones before it.
        """
        count = len(tokens)
        if count not in self._steps:
            view = self._cache.view(count)
            view.select(self._cache, [0])
            self._steps[count] = view, DecodingStep(self._decoder, view)
        view, step = self._steps[count]
        view.lengths.copy_(torch.arange(start, start + count))
        return step(tokens)

    def _states(self, tokens: Tensor, mask: Tensor | None) -> list[Tensor]:
        """Compute the final hidden states ``[tokens, hidden]`` and the block inputs that the drafter reads."""
        step_states = []
        for ids in torch.split(tokens, PREFILL_CHUNK_TOKENS):
            taps: dict[int, Tensor | None] = dict.fromkeys(self._drafter.taps or ())
            span = Span(0, len(ids), None if mask is None else mask.to(ids.device))
            hidden = self._decoder.hidden_of_spans(ids, [span], self._cache, taps)
            step_states.append([hidden, *(tap for tap in taps.values() if tap is not None)])
        return [torch.cat(rows) for rows in zip(*step_states, strict=True)]


class DraftLengthController:
    """Controller that adapts the number of drafted tokens in a row to measured times and the acceptance rate.

    Args:
        most: most drafted tokens in a row.
        fixed: always draft ``most`` tokens.
    """

    def __init__(self, max_length: int, *, fixed: bool = False) -> None:
        self._max_length, self._fixed = max_length, fixed
        self._accepted_weight, self._judged_weight = PRIOR_ACCEPTANCE * PRIOR_TOKENS, PRIOR_TOKENS
        self._seconds: dict[
            int, deque[float]
        ] = {}  # times of the last passes, by number of drafted tokens
        self._pause, self._plain_steps = INITIAL_PAUSE, 0

    def next_length(self) -> int:
        """Return how many tokens to draft in the next pass."""
        if self._fixed:
            return self._max_length
        if self._plain_steps % REVIEW_INTERVAL:  # nothing was judged since drafting stopped paying
            self._plain_steps += 1
            return 0
        costs = {k: median(times) for k, times in sorted(self._seconds.items()) if times}
        if 0 not in costs:  # the plain step is measured first, then some pass
            return 0
        if len(costs) == 1:
            return min(self._max_length, INITIAL_LENGTH)
        acceptance = self._accepted_weight / self._judged_weight
        candidates = {0, self._max_length, *(k for k in DRAFT_LENGTHS if k < self._max_length)}
        tokens_per_second = {
            k: expected_tokens(acceptance, k) / _estimated_seconds(k, costs)
            for k in sorted(candidates)
        }
        best = max(tokens_per_second, key=lambda k: tokens_per_second[k])
        if best:
            self._pause, self._plain_steps = INITIAL_PAUSE, 0
            return best
        if self._plain_steps < self._pause:
            self._plain_steps += 1
            return 0
        self._pause, self._plain_steps = min(2 * self._pause, MAX_PAUSE), 0
        return 1

    def record_time(self, drafted: int, seconds: float) -> None:
        """Record the time of a pass, drafting included; the first pass of each draft length is ignored."""
        if drafted in self._seconds:
            self._seconds[drafted].append(seconds)
        else:
            self._seconds[drafted] = deque(maxlen=TIMED_PASSES)

    def record_acceptance(self, accepted: int, *, missed: bool) -> None:
        """Record how many drafted tokens of a pass were accepted, and whether one was rejected."""
        for accepted_token in [1] * accepted + [0] * missed:
            self._accepted_weight = ACCEPTANCE_DECAY * self._accepted_weight + accepted_token
            self._judged_weight = ACCEPTANCE_DECAY * self._judged_weight + 1


def _estimated_seconds(drafted: int, seconds: dict[int, float]) -> float:
    """Estimate the seconds of a pass by linear interpolation between measured draft lengths, or extrapolation."""
    lengths = list(seconds)
    upper_length = next(
        (index for index, k in enumerate(lengths) if k >= drafted), len(lengths) - 1
    )
    lower_length, upper_length = lengths[max(0, upper_length - 1)], lengths[max(1, upper_length)]
    slope = max(
        0.0, (seconds[upper_length] - seconds[lower_length]) / (upper_length - lower_length)
    )  # never cheaper by drafting more
    return seconds[lower_length] + slope * (drafted - lower_length)
