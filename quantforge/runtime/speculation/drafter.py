"""Interface of a drafter: it proposes the next tokens of one text, and may read what the model computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Computed:
    """What the model computed in a pass: of the prompt, or of the last token and a tree after it.

    Attributes:
        tree: of the pass; empty for the prompt.
        logits: ``[nodes + 1, vocabulary]``, after the last token of the text and after each node.
        hidden: ``[tokens, hidden]`` of what stays in the text (what was new in it, and the drafted tokens that were
            right), after the last norm.
        features: inputs of some blocks likewise, in the order of `Drafter.taps`.
        following: the token of the text that follows each of these.
    """

    tree: DraftTree
    logits: Tensor
    hidden: Tensor
    features: tuple[Tensor, ...]
    following: tuple[int, ...]


class Drafter(ABC):
    """Drafter of one text; it may keep state.

    Attributes:
        taps: blocks of the model whose inputs it reads in `observe`; None: it reads nothing that the model computes.
    """

    taps: tuple[int, ...] | None = None

    @abstractmethod
    def draft(self, history: Sequence[int], most: int, sampler: RowSampler) -> DraftTree:
        """Draft how ``history`` may continue: at most ``most`` tokens in a row, and `MOST_NODES` in all, or none.

        Args:
            history: prompt and completion so far; longer at each call.
            most: at least 1.
            sampler: what will choose the tokens; it must be forked, not advanced.
        """

    def observe(self, computed: Computed) -> None:  # noqa: B027 (few drafters read passes)
        """Read a pass, with drafted tokens or without; not called where `taps` is None."""
