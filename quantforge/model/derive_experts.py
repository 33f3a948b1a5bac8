"""Derive which parameters stack the matrices of experts, and in which orientation and order.

The running model holds the matrices of all experts in three-dimensional parameters and multiplies by slices of them.
Which slices is observed in the products that the block computes. A stack with twice as many rows as the next one has
columns holds gate and up; which rows are up is found by folding a scale through them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantforge.architectures import Absorber, Absorbs, SharedInput, Stack
from quantforge.model.expert_calls import routed_call
from quantforge.model.passage import states_of
from quantforge.model.trial_block import LOUD, TrialBlock, same_after
from quantforge.numerics.function_mode import Function, FunctionMode

GATED = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Product:
    """A stack as the block multiplies by it; ``inputs`` ``[tokens, in_features]`` is what its first expert read."""

    parameter: str
    transposed: bool
    experts: int
    out_features: int
    in_features: int
    inputs: Tensor


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of a block.

    Attributes:
        stacks, inputs: as those of `LayerKind`; the names have ``{}`` for the number of the expert.
    """

    stacks: tuple[Stack, ...] = ()
    inputs: tuple[SharedInput, ...] = ()


class _Products(FunctionMode):
    """Watcher of products with slices of parameters of three dimensions."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, Product] = {}
        self._stacks = {
            value.untyped_storage().data_ptr(): (name, value)
            for name, value in block.named_parameters()
            if value.dim() == 3 and value.is_contiguous() and min(value.shape) > 1
        }

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = function(*args, **kwargs)
        pair = [value for value in args[:2] if isinstance(value, Tensor)]
        if (
            getattr(function, "__name__", "") in {"linear", "matmul", "__matmul__", "bmm", "mm"}
            and len(pair) == 2
        ):
            self._see(*pair, turned=function is nn.functional.linear)
        return result

    def _see(self, x: Tensor, weight: Tensor, *, turned: bool) -> None:
        name, stack = self._stacks.get(weight.untyped_storage().data_ptr(), ("", None))
        if stack is None or name in self.found or weight.dim() < 2:
            return
        experts, rows, columns = stack.shape
        whole = weight.shape[-2:]
        straight = weight.stride()[-2:] == stack.stride()[1:]
        if sorted(whole) != sorted((rows, columns)) or not (
            straight or weight.mT.stride()[-2:] == stack.stride()[1:]
        ):
            return
        # linear multiplies by the transpose of what it is given: [out, in]; a product by [in, out].
        transposed = straight is not turned
        out_features, in_features = (columns, rows) if transposed else (rows, columns)
        first = x[0] if x.dim() == 3 and weight.dim() == 3 else x
        self.found[name] = Product(
            name, transposed, experts, out_features, in_features, first.reshape(-1, in_features)
        )


def mixture_of(block: TrialBlock, shapes: Mapping[str, tuple[int, ...]]) -> Mixture:
    """Return the experts of a filled block; an empty mixture where it has none that are calibrated one by one.

    ``shapes``: of its parameters in the model, which may have more experts.
    """
    watcher, calls = _Products(block.module), []
    hooks = [
        child.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: calls.append((name, module, args, kwargs)),
            with_kwargs=True,
        )
        for name, child in block.module.named_modules()
        if any(value.dim() == 3 for value in child.parameters(recurse=False))
    ]
    try:
        with watcher:
            block.run()
    finally:
        for hook in hooks:
            hook.remove()
    products = list(watcher.found.values())
    modules = {item.parameter.rpartition(".")[0] for item in products}
    if not products or len(modules) != 1:
        return Mixture()
    module = modules.pop()
    found = (
        routed_call(called, args, kwargs, products[0].experts)
        for name, called, args, kwargs in calls
        if name == module
    )
    routed = next((call for call in found if call is not None), None)
    if routed is None:
        return Mixture()
    mixture = _mixture(block, products, module, str(shapes[products[0].parameter][0]))
    stacks = tuple(replace(stack, spread=routed.spread > 0) for stack in mixture.stacks)
    return replace(mixture, stacks=stacks)


def _mixture(block: TrialBlock, products: Sequence[Product], module: str, each: str) -> Mixture:
    groups: list[list[Product]] = []
    for item in products:
        same = (
            g
            for g in groups
            if g[0].inputs.shape == item.inputs.shape and torch.equal(g[0].inputs, item.inputs)
        )
        group = next(same, None)
        if group is None:
            groups.append([item])
        else:
            group.append(item)
    *before, last = groups
    stacks: list[Stack] = []
    inputs: list[SharedInput] = []
    absorbers: list[Absorber] = []
    for group in before:
        made = [_stack(block, item, last[0], module) for item in group]
        stacks += [stack for stack, _ in made]
        absorbers += [absorber for _, absorber in made if absorber is not None]
        inputs.append(
            SharedInput(tuple(n for stack, _ in made for n in stack.linears), module, each=each)
        )
    down = [
        Stack(item.parameter, (_named(module, item),), transposed=item.transposed) for item in last
    ]
    linears = tuple(name for stack in down for name in stack.linears)
    inputs.append(SharedInput(linears, module, absorbers[0] if absorbers else None, each=each))
    return Mixture((*stacks, *down), tuple(inputs))


def _named(module: str, item: Product) -> str:
    return f"{module}.{{}}.{item.parameter.rpartition('.')[2]}"


def _stack(
    block: TrialBlock, item: Product, down: Product, module: str
) -> tuple[Stack, Absorber | None]:
    """Return the stack of what feeds ``down``, and what of it absorbs a scale of what ``down`` reads."""
    gate, up = (f"{module}.{{}}.{name}" for name in GATED)
    alone = Stack(item.parameter, (_named(module, item),), transposed=item.transposed)
    candidates = [(alone, 0)] if item.out_features == down.in_features else []
    if item.out_features == 2 * down.in_features:
        interleaved = _interleaved(block, alone, down)
        candidates = [
            (replace(alone, linears=linears, interleaved=interleaved), linears.index(up))
            for linears in ((gate, up), (up, gate))
        ]
    for stack, position in candidates:
        if _folds(block, stack, position, down):
            return stack, Absorber(Absorbs.ROWS, stack.linears[position])
    return (candidates[0][0] if candidates else alone), None


def _interleaved(block: TrialBlock, stack: Stack, down: Product) -> bool:
    """Return whether rows 0 and 1 are of one channel: with its column of ``down`` at zero, row 1 has no effect."""
    read = block.parameter(down.parameter).clone()
    (read[:, 0] if down.transposed else read[:, :, 0]).zero_()
    without = states_of(block.run({down.parameter: read}))
    changed = block.parameter(stack.parameter).clone()
    for expert in range(down.experts):
        stack.matrix(changed, 0, expert)[1].mul_(2)
    changes = {down.parameter: read, stack.parameter: changed}
    return bool(torch.equal(without, states_of(block.run(changes))))


def _folds(block: TrialBlock, stack: Stack, position: int, down: Product) -> bool:
    """Return whether the rows at ``position`` take the inverse of a factor for the columns of ``down``."""
    generator = torch.Generator().manual_seed(7)
    scale = torch.rand(down.in_features, generator=generator, dtype=block.dtype)
    scale = torch.exp2(2 * scale - 1)

    def same() -> bool:
        divided = block.parameter(stack.parameter).clone()
        for expert in range(down.experts):
            stack.matrix(divided, position, expert).div_(scale[:, None])
        read = block.parameter(down.parameter)
        multiplied = read * (scale[:, None] if down.transposed else scale)
        return same_after(block, {stack.parameter: divided}, {down.parameter: multiplied})

    if not same():
        return False
    with block.louder(LOUD):
        return same()
