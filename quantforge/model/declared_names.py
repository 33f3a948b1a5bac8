"""Names of a declared family: its declarations are the bridge, and no rule of transformers is asked.

But for other towers, which are not declared: where the whole model is built, transformers' rules say which of their
parameters each stored tensor is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quantforge.architectures import Place
from quantforge.architectures.expert_sets import has_single_experts
from quantforge.architectures.match import Matched, MatchedTensor, Role, match
from quantforge.model.conversion import Source
from quantforge.model.names import Names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DeclaredNames(Names):
    """The bridge between a matched checkpoint and the decoder that its declarations describe; `Names` otherwise."""

    def __init__(self, model: PreTrainedModel, matched: Matched) -> None:
        self._matched = matched
        self._own = [tensor for tensor in matched.tensors if tensor.role is not Role.FOREIGN]
        super().__init__(model, [tensor.stored for tensor in self._own])

    def _resolve(self) -> None:
        if getattr(self._model.config, "text_config", None) is not None:
            towers = Names(self._model, [tensor.stored for tensor in self._matched.foreign])
            self.sources |= towers.sources
            self._runtime |= {
                name: towers.runtime(name) for source in towers.distinct() for name in source.stored
            }
            self._shapes |= {name: towers.shape(name) for name in self._runtime}
        stacks: dict[str, list[str]] = defaultdict(list)
        for tensor in self._own:
            if tensor.expert >= 0:
                stacks[self._stack(tensor)].append(tensor.stored.name)
            elif tensor.name in self._wanted:
                self._add(tensor.name, None, [tensor.stored.name], [""])
        for parameter, stored in stacks.items():
            self.sources[parameter] = Source({parameter: self._wanted[parameter]}, tuple(stored))
            self._runtime |= dict.fromkeys(stored, parameter)

    def _stack(self, tensor: MatchedTensor) -> str:
        block = self._matched.block_name(tensor.block)
        return f"{block}.{self._matched.place(tensor).stack.parameter}"

    @cached_property
    def places(self) -> dict[str, Place]:
        """Return where the stored matrices of experts lie in stacks of the running model, by stored name."""
        return {
            tensor.stored.name: self._matched.place(tensor)
            for tensor in self._own
            if tensor.expert >= 0
        }


def names_of(model: PreTrainedModel, matched: Matched, config: Mapping[str, Any]) -> Names:
    """Return the bridge of a checkpoint: by its declarations, or by transformers' rules where it has none.

    Those rules know no single experts of a family that publishes stacks: for such files declarations are derived.

    Raises:
        InputError: tensors have no place in the model.
        RefusedError: no declarations can be derived; the message says why.
    """
    if matched.architecture is not None and not matched.architecture.converted:
        return DeclaredNames(model, matched)
    stored = [tensor.stored for tensor in matched.tensors]
    names = Names(model, stored)
    if not has_single_experts(names.left_over):
        return names
    from quantforge.model.derive_checkpoint import derive_for

    return DeclaredNames(model, match(config, stored, derive_for(config, stored)))
