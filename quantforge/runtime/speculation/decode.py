"""Speculative decoding of one text: draft, compute all drafted tokens in one pass, keep what the model chooses.

Who drafts is chosen by name (`speculative_decoder`), how many tokens in a row from what passes have cost so far
(`Pace`). A pass with k drafted tokens brings ``(1 - a^(k+1)) / (1 - a)`` tokens for the cost of k+1 rows. The
acceptance a is a running mean over the drafted tokens that were judged. The cost of each width is the median of its
last passes, without the first one, which prepares what later ones use; widths in between are interpolated. The k with
the most tokens per second is taken. If that is 0 the loop is the plain one, and only now and then a pass with one
drafted token asks whether that has changed. What is chosen here changes the time, never the text.
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
from quantforge.runtime.decoding import CHUNK_TOKENS, Step, prefill
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.ragged_attention import Span
from quantforge.runtime.sampling import Chosen, RowSampler
from quantforge.runtime.speculation.draft_model import SCHEMES, ModelDrafter, lower_bits
from quantforge.runtime.speculation.drafter import Computed, Drafter, FeatureDrafter, cache_of_text
from quantforge.runtime.speculation.eagle3 import Eagle3Layer
from quantforge.runtime.speculation.lookahead import LENGTH, LookaheadDrafter
from quantforge.runtime.speculation.medusa import MedusaDrafter, read_medusa
from quantforge.runtime.speculation.mtp import MtpLayer, read_mtp
from quantforge.runtime.speculation.ngrams import NgramDrafter
from quantforge.runtime.speculation.options import LOOKAHEAD, MTP, NGRAM, DraftOptions
from quantforge.runtime.speculation.tree import DraftTree
from quantforge.runtime.speculation.verify import (
    SpeculationCounts,
    Verified,
    expected_tokens,
    verify,
)

if TYPE_CHECKING:
    from quantforge.runtime.load import Loaded

MEMORY = 0.9  # of a running mean, per drafted token that was judged
OPTIMISM = 0.6  # acceptance that is assumed before anything was judged, as if of PRIOR tokens
PRIOR = 2.0
WIDTHS = (1, 2, 4, 8, 16, 32)  # drafted tokens of a pass; each width has programs of its own
REVIEWED = 8  # plain steps between two looks at whether drafting would pay
REMEMBERED = 5  # passes of a width
FIRST_DRAFT = 2
FIRST_PAUSE, LONGEST_PAUSE = 16, 128  # plain steps before drafting is tried again


@dataclass(slots=True)
class SpeculativeDecoder:
    """A model, and who drafts for its texts.

    Attributes:
        decoder: the model.
        drafter: makes one for a text of at most so many tokens.
        most: drafted tokens in a row, at most.
        fixed: always draft as many, instead of as many as pay.
    """

    decoder: Decoder
    drafter: Callable[[int], Drafter]
    most: int
    fixed: bool = False
    _paces: dict[int, Pace] = field(default_factory=dict)

    def pace(self, texts: int) -> Pace:
        """Return the pace of passes over about so many texts."""
        size = 1 << (texts - 1).bit_length()
        return self._paces.setdefault(size, Pace(self.most, fixed=self.fixed))


def speculative_decoder(
    loaded: Loaded, options: DraftOptions, load_draft: Callable[[str], Loaded | DraftHeadDirectory]
) -> SpeculativeDecoder:
    """Return a loaded model with a drafter.

    Args:
        loaded: the model.
        options: who drafts, and how much.
        load_draft: loads another model, or opens heads, by name or path.

    Raises:
        InputError: the draft has another vocabulary or width, or nothing of the model can be rounded further.
        RefusedError: the own decoder does not compute the model or the draft.
        UsageError: a tree of more places than there are heads.
    """
    decoder, shape = Decoder(loaded.model, scales=loaded.kv_scales), options.shape
    if options.draft == NGRAM:
        return SpeculativeDecoder(decoder, lambda _: NgramDrafter(shape), len(shape))
    if options.draft == LOOKAHEAD:
        return SpeculativeDecoder(decoder, lambda _: LookaheadDrafter(), LENGTH - 1)
    if options.draft in SCHEMES:
        return _with_model(decoder, Decoder(lower_bits(loaded.model, options.draft)), options)
    if options.draft == MTP:
        return _with_network(decoder, read_mtp(loaded), shape)
    other = load_draft(options.draft)
    if not isinstance(other, DraftHeadDirectory):
        return _with_model(decoder, Decoder(other.model, scales=other.kv_scales), options)
    embedding = loaded.model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    if other.kind == EAGLE3:
        return _with_network(decoder, Eagle3Layer(other, embedding, len(decoder.layers)), shape)
    heads = read_medusa(other, embedding)
    if options.tree and len(shape) > len(heads):
        raise UsageError(
            f"--draft-tree {options.tree}: {len(shape)} places, and {other.path} has {len(heads)} heads",
            "each place needs a head: leave the last ones out",
        )
    most = min(len(shape), len(heads))
    return SpeculativeDecoder(decoder, lambda _: MedusaDrafter(heads, shape), most)


def _with_model(decoder: Decoder, draft: Decoder, options: DraftOptions) -> SpeculativeDecoder:
    if decoder.vocabulary != draft.vocabulary:
        raise InputError(
            f"{options.draft} knows {draft.vocabulary} tokens, the model {decoder.vocabulary}",
            "a draft has the tokenizer of its model: take a smaller one of the same family, or int2",
        )
    if draft.device != decoder.device:
        raise InputError(f"the draft is on {draft.device}, the model on {decoder.device}", "")
    shape = options.shape
    return SpeculativeDecoder(decoder, lambda room: ModelDrafter(draft, room, shape), len(shape))


def _with_network(
    decoder: Decoder, network: Eagle3Layer | MtpLayer, shape: tuple[int, ...]
) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        decoder, lambda room: FeatureDrafter(network, room, shape), len(shape)
    )


class SpeculativeText:
    """Text of a model that grows by passes; iterate over its new tokens, which are those of the plain loop.

    Args:
        speculative: the model and who drafts.
        prompt: token ids; at least one.
        new_tokens: that follow; at least one.
        sampling: how they are chosen.
        cache: kind of the cache, see `quantforge.cache_kinds`.

    Attributes:
        counts: what came of drafted tokens.

    Raises:
        InputError: logits of the model or of a draft are not finite; while it is iterated over.
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
        most = len(prompt) + new_tokens
        self._cache = cache_of_text(partial(self._decoder.cache, kind=cache), most)
        self._history = list(prompt)  # all of it but the last token is in the cache
        self._sampler = RowSampler(sampling or Sampling(), prompt)
        self._drafter, self._pace = speculative.drafter(most), speculative.pace(1)
        self._steps: dict[int, tuple[CacheView, Step]] = {}
        self.counts = SpeculationCounts()

    @torch.inference_mode()
    def __iter__(self) -> Iterator[Chosen]:
        left, chosen = self._new_tokens, self._advance(DraftTree())[1]
        yield from chosen
        while left := left - len(chosen):
            began = time.perf_counter()
            most = min(self._pace.tokens(), left - 1)
            tree = self._draft(most) if most else DraftTree()
            verified, chosen = self._advance(tree)
            self._pace.took(most if tree.probes else tree.depth, time.perf_counter() - began)
            useless = tree.probes > 0 and not tree.drafted
            self._pace.judged(len(verified.path), missed=verified.missed or useless)
            self.counts.count(verified)
            yield from chosen

    def _draft(self, most: int) -> DraftTree:
        try:
            return self._drafter.draft(self._history, most, self._sampler)
        except InputError as error:  # in the words of a model, which is not to blame
            raise InputError(
                f"the draft: {error.message}",
                "it is damaged: take another one, or leave --draft out",
            ) from error

    def _advance(self, tree: DraftTree) -> tuple[Verified, list[Chosen]]:
        """Compute what of the text is not in the cache, and a tree after it; append the tokens that follow."""
        start = self._cache.length(0)
        tokens = torch.tensor([*self._history[start:], *tree.tokens], device=self._decoder.device)
        new = len(self._history) - start
        states: list[Tensor] = []
        if self._drafter.taps is not None or not tree.is_chain:
            states = self._states(tokens, None if tree.is_chain else tree.mask(root=True))
            logits = self._decoder.logits(states[0][new - 1 :])
        elif start:
            logits = self._step(tokens, start)
        else:
            logits = prefill(self._decoder, tokens[None], self._cache, self._new_tokens)
        (verified,) = verify(logits, [self._sampler], [tree], [frozenset()])
        for one in verified.chosen:
            if isinstance(one, InputError):
                raise one
            self._history.append(one.token)
        self._cache.keep_path(0, start + new - 1, [0, *(node + 1 for node in verified.path)])
        if self._drafter.taps is not None:
            rows = [*range(new), *(new + node for node in verified.path)]
            hidden, *features = (part[rows] for part in states)
            following = tuple(self._history[start + 1 :])
            self._drafter.observe(Computed(tree, logits, hidden, tuple(features), following))
        return verified, cast("list[Chosen]", verified.chosen)

    def _step(self, tokens: Tensor, start: int) -> Tensor:
        """Return logits of tokens in a row, computed by recorded programs as if each belonged to another sequence.

        All of them are written before any is attended to, and each sees those before it.
        """
        width = len(tokens)
        if width not in self._steps:
            view = self._cache.view(width)
            view.show(self._cache, [0])
            self._steps[width] = view, Step(self._decoder, view)
        view, step = self._steps[width]
        view.lengths.copy_(torch.arange(start, start + width))
        return step(tokens)

    def _states(self, tokens: Tensor, mask: Tensor | None) -> list[Tensor]:
        """Return final states ``[tokens, hidden]`` of tokens, and the inputs of blocks that the drafter reads."""
        parts = []
        for ids in torch.split(tokens, CHUNK_TOKENS):
            taps: dict[int, Tensor | None] = dict.fromkeys(self._drafter.taps or ())
            span = Span(0, len(ids), None if mask is None else mask.to(ids.device))
            hidden = self._decoder.hidden_of(ids, [span], self._cache, taps)
            parts.append([hidden, *(part for part in taps.values() if part is not None)])
        return [torch.cat(rows) for rows in zip(*parts, strict=True)]


class Pace:
    """Adaptive number of drafted tokens in a row.

    Args:
        most: at most.
        fixed: always draft as many.
    """

    def __init__(self, most: int, *, fixed: bool = False) -> None:
        self._most, self._fixed = most, fixed
        self._right, self._judged = OPTIMISM * PRIOR, PRIOR
        self._seconds: dict[int, deque[float]] = {}  # of passes by drafted tokens
        self._pause, self._waited = FIRST_PAUSE, 0

    def tokens(self) -> int:
        """Return how many tokens to draft for the next pass."""
        if self._fixed:
            return self._most
        if self._waited % REVIEWED:  # nothing was judged since drafting did not pay
            self._waited += 1
            return 0
        costs = {k: median(taken) for k, taken in sorted(self._seconds.items()) if taken}
        if 0 not in costs:  # the plain step is measured first, then some pass
            return 0
        if len(costs) == 1:
            return min(self._most, FIRST_DRAFT)
        acceptance = self._right / self._judged
        tried = {0, self._most, *(k for k in WIDTHS if k < self._most)}
        rates = {k: expected_tokens(acceptance, k) / _cost(k, costs) for k in sorted(tried)}
        best = max(rates, key=lambda k: rates[k])
        if best:
            self._pause, self._waited = FIRST_PAUSE, 0
            return best
        if self._waited < self._pause:
            self._waited += 1
            return 0
        self._pause, self._waited = min(2 * self._pause, LONGEST_PAUSE), 0
        return 1

    def took(self, drafted: int, seconds: float) -> None:
        """Note what a pass took, drafting included; the first of its width is not counted."""
        if drafted in self._seconds:
            self._seconds[drafted].append(seconds)
        else:
            self._seconds[drafted] = deque(maxlen=REMEMBERED)

    def judged(self, accepted: int, *, missed: bool) -> None:
        """Note how many drafted tokens of a pass were right, and whether one was wrong."""
        for right in [1] * accepted + [0] * missed:
            self._right = MEMORY * self._right + right
            self._judged = MEMORY * self._judged + 1


def _cost(drafted: int, costs: dict[int, float]) -> float:
    """Return seconds of a pass, on the line through the two measured widths around it, or through the last two."""
    widths = list(costs)
    high = next((place for place, k in enumerate(widths) if k >= drafted), len(widths) - 1)
    low, high = widths[max(0, high - 1)], widths[max(1, high)]
    slope = max(0.0, (costs[high] - costs[low]) / (high - low))  # never cheaper by drafting more
    return costs[low] + slope * (drafted - low)
