"""Options of speculation: who guesses, how many tokens in a row, and how many for one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

from quantforge.checkpoint.hub import is_hub_name
from quantforge.errors import UnknownNameError, UsageError, nearest

NGRAM, LOOKAHEAD, MTP = "ngram", "lookahead", "mtp"
FEWER_BITS = (2, 3, 4)  # of the model itself
WORDS = (NGRAM, LOOKAHEAD, *(f"int{bits}" for bits in FEWER_BITS), MTP)
SINGLE = (LOOKAHEAD, MTP)  # guess for one text, as directories of heads do
FOR_ONE_TEXT = (  # what is said where others guess, and what to type
    "lookahead and heads guess for a single text",
    "take --draft ngram, int2, int3, int4 or a model, or `quantforge generate`",
)
_NAMES = f"{', '.join(WORDS)}, a model, or a directory of heads"
DRAFT_TOKENS = 8
MOST_NODES = 64  # guesses of a pass


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Options of speculation.

    Attributes:
        draft: who guesses, see `quantforge.runtime.speculation.draft_choice`; "" is nobody.
        tokens: guesses in a row at most.
        tree: guesses behind each token, place by place, as ``3x2x1``; "": one for each place.

    Raises:
        UsageError: a value that means nothing, or that has no effect beside the others.
    """

    draft: str = ""
    tokens: int = DRAFT_TOKENS
    tree: str = ""

    def __post_init__(self) -> None:
        given = {"--draft-tokens": self.tokens != DRAFT_TOKENS, "--draft-tree": bool(self.tree)}
        names = [name for name, there in given.items() if there]
        if names and not self.draft:
            raise UsageError(f"{names[0]}: nothing is guessed without --draft", "add --draft ngram")
        if len(names) > 1:
            raise UsageError(
                "--draft-tokens and --draft-tree: the tree says how many",
                "leave --draft-tokens out",
            )
        if type(self.tokens) is not int or not 1 <= self.tokens <= MOST_NODES:
            raise UsageError(
                f"draft_tokens = {self.tokens!r}", f"a whole number, 1 to {MOST_NODES}"
            )
        if self.draft == LOOKAHEAD and names:
            raise UsageError(
                f"{names[0]}: --draft lookahead makes a window and trees of its own", "leave it out"
            )
        if self.tree:
            shape_of(self.tree)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a tree; none without."""
        return shape_of(self.tree) if self.tree else ()

    @property
    def most(self) -> int:
        """Return the guesses in a row at most."""
        return len(self.shape) or self.tokens


NO_DRAFT = DraftOptions()


def typed_draft(draft: str | None) -> str:
    """Return who guesses as it was typed, or "" where nothing was.

    Raises:
        UsageError: it is empty.
        UnknownNameError: it is neither one of `WORDS`, nor a path that is there, nor a name of the hub.
    """
    if draft is None:
        return ""
    if not draft.strip():
        raise UsageError(f"--draft {draft!r}: names nobody who guesses", f"it takes {_NAMES}")
    if draft not in WORDS and not _is_model(draft):
        near = nearest(draft, WORDS)
        raise UnknownNameError(
            f"--draft {draft}: nobody of that name guesses, and there is no such path",
            f"{near} " * near.endswith("?") + f"it takes {_NAMES}",
        )
    return draft


def _is_model(name: str) -> bool:
    try:
        there = Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long a name, no such home, or a null
        return False
    return there or "/" in name or is_hub_name(name.partition("@")[0])


def shape_of(text: str) -> tuple[int, ...]:
    """Return how many guesses stand behind each token, place by place, of words like ``3x2x1``.

    Raises:
        UsageError: it says something else, or more than `MOST_NODES` guesses in all.
    """
    words = text.split("x")
    if not all(word.isascii() and word.isdecimal() and int(word[:4]) for word in words):
        raise UsageError(
            f"no tree of guesses: {text!a:.60}",
            "guesses behind each token, place by place, each at least 1: 3x2x1",
        )
    shape = tuple(int(word[:4]) for word in words[: MOST_NODES + 1])
    if nodes_of(shape) > MOST_NODES:
        raise UsageError(
            f"a tree {text[:60]} has more than {MOST_NODES} guesses", "fewer in all, as 4x2x1"
        )
    return shape


def nodes_of(shape: Sequence[int]) -> int:
    """Return the guesses of a full tree of a shape."""
    return sum(accumulate(shape, mul))
