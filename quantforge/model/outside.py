"""A model of transformers around its blocks: which modules these are, and what each of them gets beside the states.

Everything outside of the blocks is filled with random numbers, of embeddings a few rows; the blocks are stand-ins. What
a block returns is learnt from the block itself the first time that one of its kind is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from quantforge.errors import RefusedError
from quantforge.model.inner import head_of, inner_of
from quantforge.model.loading import parameter
from quantforge.model.skeleton import as_refusals
from quantforge.model.standins import Call, StandIn, parted
from quantforge.model.state_layout import StateLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS = 32  # of embeddings
LENGTH = 13  # of a row of tokens: the size of nothing else
LARGEST = 1 << 26  # elements of a tensor outside of the blocks, embeddings apart
# What a block returns beside its hidden states, given its index and what reaches it; None: they are returned alone.
Learn = Callable[[int, Tensor, Call], tuple[Any, ...] | None]


class SeenByBlock(NamedTuple):
    """Arguments of a block."""

    states: Tensor
    call: Call


class Outside:
    """A model whose blocks are stand-ins.

    Attributes:
        name: of the list of blocks; ``blocks`` are its modules.
        hidden: the width of the states, once the model was run.
        layout: of the states, once the model was run.
        last_norm: the first norm that is computed behind the blocks, once the model was run; "" without one.

    Args:
        model: a skeleton; its list of blocks is changed.

    Raises:
        RefusedError: the model has no list of decoder blocks, or its blocks are not run one after another.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.name = blocks_of(model)
        found = model.get_submodule(self.name)
        assert isinstance(found, nn.ModuleList)  # for the type checker
        self.blocks = list(found)
        self._standins = [_Learning(block) for block in self.blocks]
        for index, standin in enumerate(self._standins):
            found[index] = standin
        self.hidden = 0
        self.last_norm = ""
        self._generator = torch.Generator().manual_seed(1)
        self._fill()

    def calls(self, returned: Learn, *, seed: int = 0, factor: float = 1.0) -> list[SeenByBlock]:
        """Run the model on random tokens; return what reaches every block.

        Args:
            returned: is asked for each block by its index.
            seed: of the tokens.
            factor: of the hidden states that a block returns, to those that reach it.

        Raises:
            RefusedError: a block is called twice, or never.
        """
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, ROWS, (2, LENGTH), generator=generator)
        order: list[int] = []
        for index, standin in enumerate(self._standins):
            standin.prepare(index, order, returned, factor)
        with torch.no_grad(), self._listening(order), as_refusals("the model around its blocks"):
            (inner_of(self._model) or self._model)(input_ids=ids, use_cache=False)
        if order != list(range(len(self.blocks))):
            raise RefusedError(
                f"its {len(self.blocks)} blocks are not called once each, in order: {str(order)[:60]}",
                "--method rtn",
            )
        first = self._standins[0].states
        self.layout = StateLayout.of(first.shape, 2, LENGTH)
        self.hidden = first.shape[-1]
        return [SeenByBlock(standin.states, standin.call) for standin in self._standins]

    @contextmanager
    def _listening(self, order: list[int]) -> Iterator[None]:
        """Note the first norm behind the last block."""

        def see(name: str, *_: object) -> None:
            if len(order) == len(self.blocks) and not self.last_norm:
                self.last_norm = name

        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                weight = getattr(module, "weight", None)
                if isinstance(weight, Tensor) and weight.dim() == 1:
                    hook = module.register_forward_pre_hook(partial(see, name))
                    stack.callback(hook.remove)
            yield

    def _fill(self) -> None:
        for module in self._model.modules():
            for name, value in module.named_parameters(recurse=False):
                if isinstance(module, nn.Embedding):
                    module.padding_idx = None
                    shape = torch.Size(
                        (min(value.shape[0], max(ROWS, 2 * LENGTH)), *value.shape[1:])
                    )
                elif value.numel() > LARGEST or module is head_of(self._model):
                    continue
                else:
                    shape = value.shape
                real = 0.5 + torch.rand(shape, generator=self._generator)
                setattr(module, name, parameter(real))


class _Learning(StandIn):
    """Stand-in that asks how its block returns states before it returns any."""

    def prepare(self, index: int, order: list[int], returned: Learn, factor: float) -> None:
        self._told = (index, order, returned, factor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        index, order, returned, factor = self._told
        order.append(index)
        self.states, self.call = parted(args, kwargs)
        beside = returned(index, self.states, self.call)
        self.returned = 0 if beside is None else 1 + len(beside)
        self.beside = beside or ()
        return self.wrapped(self.states * factor)


def blocks_of(model: PreTrainedModel) -> str:
    """Return the name of the list of decoder blocks: the longest within the decoder.

    Modules that transformers marks as layers come before others.

    Raises:
        RefusedError: there is none.
    """
    decoder = model.get_decoder()
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    inside = {name: module for name, module in lists.items() if _within(decoder, module)}
    lists = inside or lists  # some classes call their output layer the decoder
    marked = {
        name: len(module)
        for name, module in lists.items()
        if all(isinstance(item, GradientCheckpointingLayer) for item in module)
    }
    lengths = marked or {name: len(module) for name, module in lists.items()}
    if not lengths:
        raise RefusedError("it has no list of decoder blocks", "--method rtn")
    longest: str = max(lengths, key=lambda name: lengths[name])
    return longest


def _within(decoder: nn.Module | None, module: nn.Module) -> bool:
    return decoder is None or any(module is item for item in decoder.modules())
