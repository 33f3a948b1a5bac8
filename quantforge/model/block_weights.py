"""The weights of one decoder block: its matrices by name, in one orientation.

A method sees ``[out_features, in_features]`` matrices; that gpt2 stores the transpose, that q, k and v of phi3 are rows
of one matrix, or that the running model holds all experts in one parameter, stays in here and in the declarations.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from quantforge.architectures import SharedInput
from quantforge.architectures.architecture import Rows
from quantforge.architectures.match import Matched, declared
from quantforge.model.experts import Experts
from quantforge.plans import StoredTensor

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class Block:
    """The weights of one decoder block.

    Attributes:
        index, name: position, and canonical name (``model.layers.3``).
        module: the transformers module, materialised.
        architecture, dimensions: the declarations of the family and the sizes of this model.
        kind: what a block of this layer consists of.
        inputs: the shared inputs, in computing order.
        experts: those of a mixture, None where the block has none, or its module holds them.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        matched: Matched,
        stored: Mapping[str, StoredTensor],
        experts: Experts | None = None,
    ) -> None:
        """Hold a block.

        Args:
            index: its position.
            module: its transformers module.
            matched: of the model.
            stored: its parameters by canonical name relative to it.
            experts: those that it has, which are read one at a time; None where the module holds them.
        """
        self.index = index
        self.name = matched.block_name(index)
        self.module = module
        self.architecture, self.dimensions = declared(matched)
        self.kind = matched.layers[index]
        self.inputs: tuple[SharedInput, ...] = self.kind.inputs
        self._places = self.kind.places()
        self._matched = matched
        self._stored = stored
        self.experts = experts

    def has(self, name: str) -> bool:
        """Return whether the block has a parameter of this name (``self_attn.q_proj.bias``)."""
        return name in self._stored

    def parameters(self) -> tuple[str, ...]:
        """Return the names of all parameters, relative to the block, as the family declares them."""
        return tuple(self._stored)

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the linears whose matrix is a tensor of its own in files, in computing order."""
        return tuple(name for name in self.kind.linears if self.has(f"{name}.weight"))

    @property
    def own_linears(self) -> tuple[str, ...]:
        """Return those of them that are modules of their own, which experts in a stack are not."""
        return tuple(name for name in self.linears if name not in self._places)

    def stack_of(self, linear: str) -> str:
        """Return the parameter that holds the matrix of a linear of an expert."""
        return self._places[linear].stack.parameter

    def is_apart(self, name: str) -> bool:
        """Return whether the module does not hold a tensor itself, so that no transform changes it.

        It holds something of every expert, and these are read one at a time; or the module has it in another form.
        """
        owner, _, leaf = name.rpartition(".")
        if self.experts is not None and owner == self.experts.path:
            return True
        held = {path for path, _ in self.module.named_modules()}
        return owner not in held or not hasattr(self.module.get_submodule(owner), leaf)

    def parameter(self, name: str) -> Tensor:
        """Return a parameter (or a stored constant) as the module holds it, e.g. ``input_layernorm.weight``.

        That of an expert is a view.
        """
        linear = name.removesuffix(".weight")
        if linear in self._places:
            return self.weight(linear)
        owner, _, leaf = name.rpartition(".")
        value: Tensor = getattr(self.module.get_submodule(owner), leaf)  # a buffer of some routers
        return value

    def set_parameter(self, name: str, value: Tensor) -> None:
        """Overwrite a parameter, in its own type and layout."""
        self.parameter(name).copy_(value)

    def weight(self, linear: str) -> Tensor:
        """Return the weight of a linear as ``[out_features, in_features]`` (a view, possibly transposed)."""
        place = self._places.get(linear)
        if place is not None and self.experts is not None:
            return self.experts.weight(place)
        if place is not None:
            return place.view(self.module.get_parameter(place.stack.parameter))
        weight = self.module.get_parameter(f"{linear}.weight")
        return weight.T if self.architecture.transposed else weight

    def set_weight(self, linear: str, value: Tensor) -> None:
        """Overwrite the weight of a linear with ``[out_features, in_features]``."""
        self.weight(linear).copy_(value)

    def rows(self, linear: str, label: str = "") -> Rows:
        """Return the rows of a slice of a fused linear (``"v"`` of a qkv projection); all rows for an empty label."""
        return self.architecture.rows(self.dimensions, linear, label)

    def stored_name(self, name: str) -> str:
        """Return the name of a parameter in the checkpoint."""
        return self._stored[name].name

    def dtype_of(self, name: str) -> str:
        """Return the type of a parameter in the checkpoint, as safetensors spells it (``BF16``)."""
        return self._stored[name].dtype

    def as_stored(self, name: str, value: Tensor) -> Tensor:
        """Round a value to the type that a parameter is stored in, and return it in its own type."""
        return value.to(TORCH_DTYPES[self.dtype_of(name)]).to(value.dtype)
