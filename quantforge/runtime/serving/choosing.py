"""The next token of each request of a batch, by its own rule and its own generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quantforge.errors import InputError, UsageError
from quantforge.runtime.sampling import Chosen, choose_rows, log_probabilities
from quantforge.runtime.serving.entries import ServedEntry, Work
from quantforge.runtime.speculation.guess_trees import ROOT


@dataclass(slots=True)
class Followed:
    """Tokens that were chosen for a part of a step.

    Attributes:
        part: of the step.
        chosen: guesses that were right, and one token more; or what is wrong with the logits of the last.
        path: nodes of those guesses in the tree of the part.
        parted: that token had guesses, which are wrong.
    """

    part: Work
    chosen: list[Chosen | InputError] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    parted: bool = False

    def take(self, one: Chosen | InputError) -> bool:
        """Take the next token; return whether it is a guess, behind which another one follows."""
        self.chosen.append(one)
        node = self.path[-1] if self.path else ROOT
        if isinstance(one, InputError) or one.token in self.part.entry.request.stop:
            return False
        child = self.part.tree.child(node, one.token)
        if child is None:
            self.parted = bool(self.part.tree.children(node))
            return False
        self.path.append(child)
        return True


def follow(logits: Tensor, parts: Sequence[Work]) -> list[Followed]:
    """Return the next tokens of some parts of a step, each along its guesses as long as they are right.

    Args:
        logits: ``[rows, vocabulary]`` float32: for each part behind its last token, and behind each of its guesses.
        parts: those that choose.
    """
    found = [Followed(part) for part in parts]
    row, rows = 0, []
    for part in parts:
        rows.append(row)
        row += 1 + len(part.tree.tokens)
    going = list(range(len(parts)))
    while going:
        at = [rows[place] + (found[place].path or [ROOT])[-1] + 1 for place in going]
        some = logits if len(at) == len(logits) else logits[at]
        chosen = choose(some, [parts[place].entry for place in going])
        going = [place for place, one in zip(going, chosen, strict=True) if found[place].take(one)]
    return found


def choose(logits: Tensor, entries: Sequence[ServedEntry]) -> list[Chosen | InputError]:
    """Return the next token of each entry, or what is wrong with its logits.

    Args:
        logits: ``[entries, vocabulary]`` float32.
        entries: whose they are.
    """
    try:
        return [*choose_rows([entry.sampler for entry in entries], logits)]
    except InputError:  # of one of them; nothing was drawn yet
        return [_one(logits[place : place + 1], entry) for place, entry in enumerate(entries)]


def _one(logits: Tensor, entry: ServedEntry) -> Chosen | InputError:
    try:
        return choose_rows([entry.sampler], logits)[0]
    except (InputError, UsageError) as error:
        return InputError(error.message, error.hint)


def score(logits: Tensor, part: Work) -> list[Chosen]:
    """Return what the model thinks of the prompt's own tokens that follow those of a part.

    Args:
        logits: ``[tokens of the part, vocabulary]`` float32.
        part: of an entry whose request asks for it.
    """
    entry, first = part.entry, part.first + 1
    told = entry.request.ids[first : first + part.tokens]
    count = entry.request.prompt_logprobs or 0
    return log_probabilities(logits[: len(told)], told, [count] * len(told)) if told else []
