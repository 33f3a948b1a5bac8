"""Options of speculative decoding: the draft method, draft length and draft tree. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

from quantforge.errors import UnknownNameError, UsageError, nearest_hint
from quantforge.files.hub import is_hub_name

NGRAM, LOOKAHEAD, MTP = "ngram", "lookahead", "mtp"
DRAFT_BITS = (2, 3, 4)  # bits of a draft that is the model itself, quantized further
DRAFT_METHODS = (NGRAM, LOOKAHEAD, *(f"int{bits}" for bits in DRAFT_BITS), MTP)
SINGLE_TEXT = (LOOKAHEAD, MTP)  # methods that draft for one text only, as draft heads do
SINGLE_TEXT_ERROR = (  # message and hint for engines that decode several texts together
    "lookahead and heads draft for a single text",
    "take --draft ngram, int2, int3, int4 or a model, or `quantforge generate`",
)
_NAMES = f"{', '.join(DRAFT_METHODS)}, a model, or a directory of heads"
DRAFT_TOKENS = 8  # default
MAX_NODES = 64  # most drafted tokens of a pass
_TREE = re.compile(r"[1-9][0-9]?(x[1-9][0-9]?)*")


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Options of speculative decoding.

    Attributes:
        draft: draft method (one of `DRAFT_METHODS`), draft model or directory of draft heads; "" for no drafting.
        tokens: most drafted tokens in a row.
        tree: branching factors of the draft tree by depth, such as ``3x2x1``; "" for one token per position.

    Raises:
        UsageError: a value is out of range, or an option has no effect with the others.
    """

    draft: str = ""
    tokens: int = DRAFT_TOKENS
    tree: str = ""

    def __post_init__(self) -> None:
        is_set = {"--draft-tokens": self.tokens != DRAFT_TOKENS, "--draft-tree": bool(self.tree)}
        names = [name for name, value in is_set.items() if value]
        if names and not self.draft:
            raise UsageError(f"{names[0]}: nothing is drafted without --draft", "add --draft ngram")
        if len(names) > 1:
            raise UsageError(
                "--draft-tokens and --draft-tree: the tree determines how many tokens are drafted",
                "leave --draft-tokens out",
            )
        if type(self.tokens) is not int or not 1 <= self.tokens <= MAX_NODES:
            raise UsageError(f"draft_tokens = {self.tokens!r}", f"a whole number, 1 to {MAX_NODES}")
        if self.draft == LOOKAHEAD and names:
            raise UsageError(
                f"{names[0]}: --draft lookahead makes a window and trees of its own", "leave it out"
            )
        if self.tree:
            parse_tree_shape(self.tree)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the branching factors of the draft tree, by depth."""
        return parse_tree_shape(self.tree) if self.tree else (1,) * self.tokens


NO_DRAFT = DraftOptions()


def validate_draft(draft: str | None) -> str:
    """Validate the value of ``--draft``; return "" for None.

    Raises:
        UsageError: it is empty.
        UnknownNameError: it is neither a draft method, nor an existing path, nor a model name on the hub.
    """
    if draft is None:
        return ""
    if not draft.strip():
        raise UsageError(f"--draft {draft!r}: names nobody who drafts", f"it takes {_NAMES}")
    if draft not in DRAFT_METHODS and not _is_model(draft):
        suggestion = nearest_hint(draft, DRAFT_METHODS)
        raise UnknownNameError(
            f"--draft {draft}: no way to draft has this name, and there is no such path",
            f"{suggestion} " * suggestion.endswith("?") + f"it takes {_NAMES}",
        )
    return draft


def _is_model(name: str) -> bool:
    try:
        exists = Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long a name, no such home, or a null
        return False
    return exists or "/" in name or is_hub_name(name.partition("@")[0])


def parse_tree_shape(text: str) -> tuple[int, ...]:
    """Parse the branching factors of a draft tree, such as ``3x2x1``: children of each node, by depth.

    Raises:
        UsageError: the text has another form, or the tree more than `MAX_NODES` nodes.
    """
    shape = tuple(map(int, text.split("x"))) if _TREE.fullmatch(text[:200]) else ()
    if not shape or count_tree_nodes(shape) > MAX_NODES:
        raise UsageError(
            f"not a tree of drafted tokens: {text!a:.60}",
            f"tokens after each token, place by place, at most {MAX_NODES} in all: 3x2x1",
        )
    return shape


def count_tree_nodes(shape: Sequence[int]) -> int:
    """Return the number of nodes of a full tree with the given branching factors."""
    return sum(accumulate(shape, mul))
