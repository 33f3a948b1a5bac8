"""The reference once its weights have left memory: its kept outputs, and figures of a model compared with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantforge.evaluation.block_errors import block_errors, block_states
from quantforge.evaluation.divergence import score, score_reference
from quantforge.evaluation.figures import identity, quality
from quantforge.evaluation.generated import Answering, OwnText
from quantforge.evaluation.windows import Windows
from quantforge.execution.progress import tell
from quantforge.runtime.load import Loaded


class KeptReference:
    """Scores, states and answers of the reference.

    Args:
        loaded: the reference.
        windows: what is scored.
        activations: directory for its hidden states; in memory when None.
        answering: prompts that it answers, and every model after it.

    Attributes:
        row: its own figures.
    """

    def __init__(
        self,
        loaded: Loaded,
        windows: Windows,
        activations: Path | None,
        answering: Answering | None,
    ) -> None:
        self._windows = windows
        self._scored = score_reference(loaded.model, windows, activations)
        tell("error of each block")
        self._blocks = block_states(loaded.model, windows.ids[0])
        self._own_text: OwnText | None = None
        self.row: dict[str, Any] = identity(loaded) | quality(self._scored.scores, None)
        if answering is not None:
            tell("answers to the prompts")
            self._own_text = OwnText(answering, loaded)
            self.row["generated"] = self._own_text.row()

    def compare(self, loaded: Loaded) -> dict[str, Any]:
        """Return the figures of a model; errors as `score`."""
        scores = score(loaded.model, self._windows, self._scored)
        row = identity(loaded) | quality(scores, self._scored.scores)
        tell("error of each block")
        row["block_errors"] = block_errors(loaded.model, self._blocks)
        if self._own_text is not None:
            tell("answers to the prompts")
            row["generated"] = self._own_text.compare(loaded)
        return row

    def close(self) -> None:
        """Release the hidden states."""
        self._scored.close()
