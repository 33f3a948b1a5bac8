"""Options of speculation: who drafts tokens, how many in a row, and how many for one place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

from quantforge.errors import UnknownNameError, UsageError, nearest
from quantforge.files.hub import is_hub_name

NGRAM, LOOKAHEAD, MTP = "ngram", "lookahead", "mtp"
FEWER_BITS = (2, 3, 4)  # of the model itself
WORDS = (NGRAM, LOOKAHEAD, *(f"int{bits}" for bits in FEWER_BITS), MTP)
SINGLE = (LOOKAHEAD, MTP)  # draft for one text, as directories of heads do
FOR_ONE_TEXT = (  # message and hint where several texts are decoded together
    "lookahead and heads draft for a single text",
    "take --draft ngram, int2, int3, int4 or a model, or `quantforge generate`",
)
_NAMES = f"{', '.join(WORDS)}, a model, or a directory of heads"
DRAFT_TOKENS = 8
MOST_NODES = 64  # drafted tokens of a pass
_TREE = re.compile(r"[1-9][0-9]?(x[1-9][0-9]?)*")


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Options of speculation.

    Attributes:
        draft: who drafts, see `quantforge.runtime.speculation.decode`; "" is nobody.
        tokens: drafted tokens in a row, at most.
        tree: drafted tokens after each token, place by place, as ``3x2x1``; "": one for each place.

    Raises:
        UsageError: a value out of range, or an option that has no effect with the others.
    """

    draft: str = ""
    tokens: int = DRAFT_TOKENS
    tree: str = ""

    def __post_init__(self) -> None:
        given = {"--draft-tokens": self.tokens != DRAFT_TOKENS, "--draft-tree": bool(self.tree)}
        names = [name for name, there in given.items() if there]
        if names and not self.draft:
            raise UsageError(f"{names[0]}: nothing is drafted without --draft", "add --draft ngram")
        if len(names) > 1:
            raise UsageError(
                "--draft-tokens and --draft-tree: the tree determines how many tokens are drafted",
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
        """Return how many tokens are drafted after each token, place by place."""
        return shape_of(self.tree) if self.tree else (1,) * self.tokens


NO_DRAFT = DraftOptions()


def typed_draft(draft: str | None) -> str:
    """Return the value of ``--draft``, or "" where it was not given.

    Raises:
        UsageError: it is empty.
        UnknownNameError: it is neither one of `WORDS`, nor an existing path, nor a name of the hub.
    """
    if draft is None:
        return ""
    if not draft.strip():
        raise UsageError(f"--draft {draft!r}: names nobody who drafts", f"it takes {_NAMES}")
    if draft not in WORDS and not _is_model(draft):
        near = nearest(draft, WORDS)
        raise UnknownNameError(
            f"--draft {draft}: no way to draft has this name, and there is no such path",
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
    """Parse a tree such as ``3x2x1``: how many tokens are drafted after each token, place by place.

    Raises:
        UsageError: it is something else, or has more than `MOST_NODES` tokens in all.
    """
    shape = tuple(map(int, text.split("x"))) if _TREE.fullmatch(text[:200]) else ()
    if not shape or nodes_of(shape) > MOST_NODES:
        raise UsageError(
            f"not a tree of drafted tokens: {text!a:.60}",
            f"tokens after each token, place by place, at most {MOST_NODES} in all: 3x2x1",
        )
    return shape


def nodes_of(shape: Sequence[int]) -> int:
    """Return the number of tokens in a full tree."""
    return sum(accumulate(shape, mul))
