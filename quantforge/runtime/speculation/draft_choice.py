"""Who guesses for a loaded model: copies of its text, itself ahead or in fewer bits, its heads, or another model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from quantforge.architectures.draft_kinds import EAGLE3
from quantforge.errors import InputError, UsageError
from quantforge.formats.sources.head_directory import HeadDirectory
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.speculation.draft import DraftGuesser, check_draft
from quantforge.runtime.speculation.draft_options import (
    DRAFT_TOKENS,
    LOOKAHEAD,
    MTP,
    NGRAM,
    DraftOptions,
)
from quantforge.runtime.speculation.draft_tree import DraftTreeGuesser
from quantforge.runtime.speculation.eagle3_files import read_eagle3
from quantforge.runtime.speculation.feature_guesser import FeatureGuesser, FeatureNetwork
from quantforge.runtime.speculation.guesses import Guesser
from quantforge.runtime.speculation.lookahead import LENGTH, LookaheadGuesser
from quantforge.runtime.speculation.medusa import MedusaGuesser, read_medusa
from quantforge.runtime.speculation.mtp import read_mtp
from quantforge.runtime.speculation.ngrams import NgramGuesser
from quantforge.runtime.speculation.own_draft import SCHEMES, lower_bits
from quantforge.runtime.speculation.pace import PassCosts
from quantforge.runtime.speculation.speculate import Speculation

if TYPE_CHECKING:
    from quantforge.runtime.load import Loaded


@dataclass(slots=True)
class GuessedDecoder:
    """Speculation for the texts of one model.

    Attributes:
        decoder: the model.
        guesser: makes one for a text of at most so many tokens.
        most: guesses in a row at most.
        costs: of passes, for all texts.
        cache: kind of the model's cache, as that of `StopLimits`.
        fixed: always guess as many, instead of as many as pay.
    """

    decoder: Decoder
    guesser: Callable[[int], Guesser]
    most: int = DRAFT_TOKENS
    costs: PassCosts = field(default_factory=PassCosts)
    cache: str = ""
    fixed: bool = False

    def begin(self, room: int) -> Speculation:
        """Return the speculation for a text of at most ``room`` tokens."""
        return Speculation(self.guesser(room), self.most, self.fixed, self.costs)


def drafting(
    loaded: Loaded, options: DraftOptions, load_draft: Callable[[str], Loaded | HeadDirectory]
) -> GuessedDecoder:
    """Return the speculation for a loaded model.

    Args:
        loaded: the model.
        options: who guesses, and how much.
        load_draft: loads another model, or opens heads, by name or path.

    Raises:
        InputError: the draft has another vocabulary or width, or nothing of the model can be rounded further.
        RefusedError: the own decoder does not compute the model or the draft.
        UsageError: a tree of more places than there are heads.
    """
    decoder, shape = Decoder(loaded.model, scales=loaded.kv_scales), options.shape
    if options.draft == NGRAM:
        return GuessedDecoder(decoder, lambda _: NgramGuesser(shape=shape), options.most)
    if options.draft == LOOKAHEAD:
        return GuessedDecoder(decoder, lambda _: LookaheadGuesser(), LENGTH - 1)
    if options.draft in SCHEMES:
        return _reading_along(decoder, Decoder(lower_bits(loaded.model, options.draft)), options)
    if options.draft == MTP:
        return _by_features(decoder, read_mtp(loaded), options)
    other = load_draft(options.draft)
    if isinstance(other, HeadDirectory):
        return _heads(decoder, loaded, other, options)
    smaller = Decoder(other.model, scales=other.kv_scales)
    check_draft(decoder.vocabulary, smaller.vocabulary, options.draft)
    return _reading_along(decoder, smaller, options)


def _reading_along(decoder: Decoder, draft: Decoder, options: DraftOptions) -> GuessedDecoder:
    if draft.device != decoder.device:
        raise InputError(f"the draft is on {draft.device}, the model on {decoder.device}", "")

    def guesser(room: int) -> Guesser:
        if options.shape:
            return DraftTreeGuesser(draft, room, options.shape)
        return DraftGuesser(draft, room)

    return GuessedDecoder(decoder, guesser, options.most)


def _heads(
    decoder: Decoder, loaded: Loaded, found: HeadDirectory, options: DraftOptions
) -> GuessedDecoder:
    embedding = loaded.model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    shape = options.shape or (1,) * options.tokens
    if found.kind == EAGLE3:
        network = read_eagle3(found, embedding, len(decoder.layers))
        return GuessedDecoder(
            decoder, lambda room: FeatureGuesser(network, room, shape), len(shape)
        )
    heads = read_medusa(found, embedding)
    if len(options.shape) > len(heads):
        raise UsageError(
            f"--draft-tree {options.tree}: {len(shape)} places, and {found.path} has {len(heads)} heads",
            "a guess for each place needs a head: leave the last ones out",
        )
    return GuessedDecoder(
        decoder, lambda _: MedusaGuesser(heads, shape), min(len(shape), len(heads))
    )


def _by_features(
    decoder: Decoder, network: FeatureNetwork, options: DraftOptions
) -> GuessedDecoder:
    shape = options.shape or (1,) * options.tokens
    return GuessedDecoder(decoder, lambda room: FeatureGuesser(network, room, shape), options.most)
