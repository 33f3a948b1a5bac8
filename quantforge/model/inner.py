"""The part of a model that makes final hidden states: all of it but the output layer, its towers included."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def inner_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the part of a model that returns ``last_hidden_state``; None where its class does not tell.

    Some classes (llama4) do not say which part it is. There it is the one with the same embedding and no output layer.
    """
    from transformers import PreTrainedModel as Model

    if model.base_model is not model:
        return model.base_model
    table = model.get_input_embeddings()
    for part in model.modules():
        if part is model or not isinstance(part, Model) or part.get_output_embeddings() is not None:
            continue
        if any(module is table for module in part.modules()):
            return part
    return None


def inner(model: PreTrainedModel) -> PreTrainedModel:
    """Return what `inner_of` finds in a model that was loaded, which has one."""
    found = inner_of(model)
    assert found is not None
    return found


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the output layer, of the decoder inside where the class of the model names none; None without one."""
    from transformers import PreTrainedModel as Model

    head: nn.Module | None = model.get_output_embeddings()
    if head is not None:
        return head
    table = model.get_input_embeddings()
    for part in model.modules():
        if part is not model and isinstance(part, Model) and part.get_input_embeddings() is table:
            found: nn.Module | None = part.get_output_embeddings()
            if found is not None:
                return found
    return None
