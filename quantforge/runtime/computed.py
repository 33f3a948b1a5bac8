"""Which models the own decoder computes: those of families whose record says how their blocks compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantforge.architectures import Architecture, architecture_of
from quantforge.runtime.rotary import STATIC_ROTARY, kinds_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def supports(model: PreTrainedModel) -> bool:
    """Return whether `Decoder` computes this model."""
    inner: Any = model.base_model
    return computed(model) is not None and set(kinds_of(inner.rotary_emb)) <= STATIC_ROTARY


def computed(model: PreTrainedModel) -> Architecture | None:
    """Return the declarations of a model of a family that `Decoder` computes, else None."""
    found = architecture_of({"model_type": model.config.model_type})
    return found if found is not None and found.own_graph is not None else None
