"""The ending of a model, from final hidden states to logits, by its own code.

Of most families it is one matrix. Others have a layer in front of it, or multiply by what no configuration names. The
model is copied without its decoder, in whose place something returns the states that it is given: what remains is the
ending alone.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from quantforge.model.inner import inner

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _States:
    """Answer of a decoder: final hidden states, and nothing else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _Given(nn.Module):
    """Module in the place of a decoder: returns what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: _States | None = None

    def forward(self, *_: Any, **__: Any) -> _States | None:
        """Return the states; arguments are not looked at."""
        return self.given


class ModelEnding:
    """Maker of logits by the code of a model, which lets go of the model's decoder.

    Raises:
        ValueError: the decoder lies within another part of the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = inner(model)
        name = next((name for name, module in model.named_children() if module is decoder), None)
        if name is None:
            raise ValueError("its decoder lies within another part")
        self._place = _Given()
        self._model = copy(model)
        vars(self._model).pop("forward", None)  # one that was put there is that of the model itself
        self._model._modules = {**model._modules, name: self._place}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[rows, vocab]`` in float32 for final hidden states ``[rows, hidden]``."""
        self._place.given = _States(hidden[None])
        try:
            ids = hidden.new_zeros((1, len(hidden))).long()
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._place.given = None
        return logits.float()
