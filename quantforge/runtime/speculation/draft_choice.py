"""Who guesses for a loaded model: copies of its own text, the model in fewer bits, or another model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantforge.errors import InputError, UsageError
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.speculation.draft import DraftGuesser, check_draft
from quantforge.runtime.speculation.guesses import Guesser
from quantforge.runtime.speculation.ngrams import NgramGuesser
from quantforge.runtime.speculation.own_draft import SCHEMES, lower_bits
from quantforge.runtime.speculation.pace import PassCosts
from quantforge.runtime.speculation.speculate import MOST_GUESSES, Speculation

if TYPE_CHECKING:
    from quantforge.runtime.load import Loaded

NGRAM = "ngram"
MADE_HERE = (NGRAM, *SCHEMES)  # drafts that are no model of their own
MOST = 64  # guesses of a pass


@dataclass(slots=True)
class GuessedDecoder:
    """Speculation for the texts of one model.

    Attributes:
        decoder: the model.
        guesser: makes one for a text of at most so many tokens.
        most: guesses of a pass at most.
        costs: of passes, for all texts.
        cache: kind of the model's cache, as that of `StopLimits`.
    """

    decoder: Decoder
    guesser: Callable[[int], Guesser]
    most: int = MOST_GUESSES
    costs: PassCosts = field(default_factory=PassCosts)
    cache: str = ""

    def begin(self, room: int) -> Speculation:
        """Return the speculation for a text of at most ``room`` tokens."""
        return Speculation(self.guesser(room), self.most, costs=self.costs)


def drafting(
    loaded: Loaded, draft: str, most: int, load_draft: Callable[[str], Loaded]
) -> GuessedDecoder:
    """Return the speculation for a loaded model.

    Args:
        loaded: the model.
        draft: one of `MADE_HERE`, or the path of a model.
        most: guesses of a pass at most.
        load_draft: loads such a model.

    Raises:
        UsageError: ``most`` is out of range.
        InputError: the draft has another vocabulary, or nothing of the model can be rounded further.
        RefusedError: the own decoder does not compute the model or the draft.
    """
    if type(most) is not int or not 1 <= most <= MOST:
        raise UsageError(f"draft_tokens = {most!r}", f"a whole number, 1 to {MOST}")
    decoder = Decoder(loaded.model, scales=loaded.kv_scales)
    if draft == NGRAM:
        return GuessedDecoder(decoder, lambda _: NgramGuesser(), most)
    if draft in SCHEMES:
        smaller = Decoder(lower_bits(loaded.model, draft))
    else:
        other = load_draft(draft)
        smaller = Decoder(other.model, scales=other.kv_scales)
        check_draft(decoder.vocabulary, smaller.vocabulary, draft)
    if smaller.device != decoder.device:
        raise InputError(f"the draft is on {smaller.device}, the model on {decoder.device}", "")
    return GuessedDecoder(decoder, lambda room: DraftGuesser(smaller, room), most)
