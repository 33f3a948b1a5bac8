"""Find the parts of a transformers model: the base model, the output layer, the list of decoder blocks."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from torch import nn

from quantforge.errors import RefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find_base_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the part of a model that returns ``last_hidden_state``, towers included; None if there is none.

    Some classes (llama4) do not declare it. Then it is the part with the same embedding and no output layer.
    """
    from transformers import PreTrainedModel as Model

    if model.base_model is not model:
        return model.base_model
    table = model.get_input_embeddings()
    for candidate in model.modules():
        if (
            candidate is model
            or not isinstance(candidate, Model)
            or candidate.get_output_embeddings() is not None
        ):
            continue
        if any(module is table for module in candidate.modules()):
            return candidate
    return None


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the base model (see `find_base_model`) of a loaded model, which always has one."""
    base = find_base_model(model)
    assert base is not None
    return base


def output_layer(model: PreTrainedModel) -> nn.Module | None:
    """Return the output layer (LM head) of a model or of the decoder inside it; None without one."""
    from transformers import PreTrainedModel as Model

    head: nn.Module | None = model.get_output_embeddings()
    if head is not None:
        return head
    table = model.get_input_embeddings()
    for submodule in model.modules():
        if (
            submodule is not model
            and isinstance(submodule, Model)
            and submodule.get_input_embeddings() is table
        ):
            layer: nn.Module | None = submodule.get_output_embeddings()
            if layer is not None:
                return layer
    return None


def block_list_name(model: PreTrainedModel) -> str:
    """Return the name of the list of decoder blocks: the longest module list within the decoder.

    Lists of modules that transformers marks as layers are preferred.

    Raises:
        RefusedError: there is none.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    decoder = model.get_decoder()
    module_lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    lists_in_decoder = {
        name: module for name, module in module_lists.items() if _is_inside(decoder, module)
    }
    # Some classes call their output layer the decoder
    module_lists = lists_in_decoder or module_lists
    marked = {
        name: len(module)
        for name, module in module_lists.items()
        if all(isinstance(item, GradientCheckpointingLayer) for item in module)
    }
    lengths = marked or {name: len(module) for name, module in module_lists.items()}
    if not lengths:
        raise RefusedError("it has no list of decoder blocks", "--method rtn")
    longest: str = max(lengths, key=lambda name: lengths[name])
    return longest


def _is_inside(decoder: nn.Module | None, module: nn.Module) -> bool:
    return decoder is None or any(module is item for item in decoder.modules())


def text_decoder(model: PreTrainedModel, blocks: str) -> nn.Module:
    """Return the text decoder: the innermost model that contains a list of blocks, given its name."""
    from transformers import PreTrainedModel as Model

    decoder: nn.Module = model
    for name in accumulate(blocks.split(".")[:-1], "{}.{}".format):
        submodule = model.get_submodule(name)
        decoder = submodule if isinstance(submodule, Model) else decoder
    return decoder
