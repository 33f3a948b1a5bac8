"""Derive the declaration of one kind of layer from one block: tensors, shared inputs, what absorbs a scale, experts.

The running model holds the matrices of all experts in three-dimensional parameters and multiplies by slices of them.
Which slices, in which orientation and order, is observed in the products that the block computes. A stack with twice as
many rows as the next one has columns holds gate and up; which rows are up is found by folding a scale through them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.pytorch_utils import Conv1D

from quantforge.architectures import (
    FoldKind,
    LayerKind,
    Parameter,
    ScaleFold,
    SharedInput,
    Stack,
)
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.routers import routers, weighs_an_index
from quantforge.errors import RefusedError
from quantforge.model.block_inputs import beside_of, states_of
from quantforge.model.derive.trial_block import (
    Candidate,
    TrialBlock,
    holds_louder,
    proven,
    random_scale,
    same_after,
)
from quantforge.model.expert_calls import routed_call
from quantforge.numerics.function_mode import Function, FunctionMode

GATED = ("gate_proj", "up_proj")


class Sizes(NamedTuple):
    """Facts of a model that all kinds of its layers share.

    Attributes:
        dimensions: its sizes.
        config: of the text model, which counts experts.
        transposed: linears hold ``[in_features, out_features]``.
        wide: names of modules that transformers keeps in float32, whatever the model's type: they are not rounded.
    """

    dimensions: Dimensions
    config: Mapping[str, Any]
    transposed: bool
    wide: tuple[str, ...]


class Derived(NamedTuple):
    """Declarations found for one kind of layers.

    Attributes:
        kind: its declaration.
        slices: of fused linears whose rows absorb.
        unobserved: linears that were not called exactly once with one tensor.
        fused: whether its scores have a fused kernel, as far as it has any.
        beside: what a block returned beside its hidden states.
    """

    kind: LayerKind
    slices: Mapping[str, Candidate]
    unobserved: tuple[str, ...]
    fused: bool
    beside: tuple[Any, ...]


def _beside(block: TrialBlock, found: Any) -> tuple[Any, ...] | None:
    """Return what a block returned beside its hidden states; None where it returned them alone.

    Raises:
        RefusedError: hidden states do not come first.
    """
    many = isinstance(found, tuple | list) and found
    states = found[0] if many else found
    if not isinstance(states, Tensor) or states.shape != block.states.shape:
        raise RefusedError(
            f"its blocks do not return hidden states first ({type(block.module).__name__})",
            "--method rtn",
        )
    return beside_of(found) if many else None


def derive_kind(
    block: TrialBlock,
    sizes: Sizes,
    shapes: Mapping[str, tuple[int, ...]],
    apart: Collection[str] = (),
) -> Derived:
    """Derive the declaration of one kind of layers, which has no name yet.

    Args:
        block: one of it, empty; it may have fewer experts than the model.
        sizes: of the model.
        shapes: of its tensors in the model.
        apart: parameters of three dimensions that files hold as a matrix for each expert.

    Raises:
        RefusedError: it does not run alone, or does not return hidden states first.
    """
    own = {key: tuple(value.shape) for key, value in block.module.state_dict().items()}
    with block.filled():
        seen = _watched(block)
        beside = _beside(block, seen.returned)
        kept = _routers(sizes.config, own, seen) | _wide(sizes.wide, seen.linears)
        inputs, slices = [], {}
        for activation in seen.activations:
            linears = tuple(n for n in activation.linears if n not in kept | seen.irregular)
            if not linears:
                continue
            earlier = tuple(seen.linears[: seen.linears.index(activation.linears[0])])
            scale_fold = proven(
                block,
                linears,
                activation.makers,
                earlier,
                sizes.dimensions,
                transposed=sizes.transposed,
            )
            inputs.append(_input(linears, scale_fold))
            if scale_fold is not None and scale_fold.sizes:
                slices[scale_fold.scale_fold.module] = scale_fold
        mixture = _mixture_of(block, shapes)
    all_linears = {key for key, module in block.module.named_modules() if is_linear(module)}
    observed = {linear for shared in inputs for linear in shared.linears}
    return Derived(
        LayerKind(
            _parameters(shapes, mixture, apart),
            (*inputs, *mixture.inputs),
            mixture.stacks,
            inner_copies=4,
            returned=0 if beside is None else 1 + len(beside),
        ),
        slices,
        tuple(sorted(all_linears - observed - kept)),
        seen.fused,
        tree_map(_narrow, beside or ()),
    )


def agreed(derived: Sequence[Derived]) -> list[Derived]:
    """Make layer kinds agree on how each fused linear is sliced.

    A family states the slices of a linear once. A kind whose linear has another shape or other slices than in the first
    kind that has it loses its absorbers in that linear.
    """
    shapes: dict[str, tuple[str, ...]] = {}
    for item in derived:
        for parameter in item.kind.parameters:
            shapes.setdefault(parameter.name, parameter.shape)
    cuts: dict[str, tuple[object, ...]] = {}
    found = []
    for item in derived:
        own = {parameter.name: parameter.shape for parameter in item.kind.parameters}
        odd = {
            name
            for name, cut in item.slices.items()
            if own[f"{name}.weight"] != shapes[f"{name}.weight"]
            or cuts.setdefault(name, (cut.sizes, cut.labels)) != (cut.sizes, cut.labels)
        }
        inputs = tuple(
            replace(shared, scale_fold=None, heads=False)
            if shared.scale_fold and shared.scale_fold.rows and shared.scale_fold.module in odd
            else shared
            for shared in item.kind.inputs
        )
        slices = {name: cut for name, cut in item.slices.items() if name not in odd}
        found.append(item._replace(kind=replace(item.kind, inputs=inputs), slices=slices))
    return found


def _narrow(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _parameters(
    shapes: Mapping[str, tuple[int, ...]], mixture: _Mixture, apart: Collection[str]
) -> tuple[Parameter, ...]:
    """Declare the tensors of a block: of stacks the matrix of every expert too, of those in ``apart`` it alone."""
    stacks = {stack.parameter: stack for stack in mixture.stacks}
    found = []
    for key, shape in shapes.items():
        if key not in apart or key not in stacks:
            found.append(Parameter(key, tuple(map(str, shape))))
        if key not in stacks:
            continue
        stack = stacks[key]
        rows, columns = shape[:0:-1] if stack.transposed else shape[1:]
        size = (str(rows // len(stack.linears)), str(columns))
        found += [Parameter(f"{name}.weight", size, each=str(shape[0])) for name in stack.linears]
    return tuple(found)


def _routers(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], seen: _Watched
) -> set[str]:
    """Return the linears that choose experts or tokens: by shapes, by name, or because so many are chosen among."""
    counted = {name.removesuffix(".weight") for name in routers(config, shapes)}
    chosen = {
        name
        for name in seen.linears
        if f"{name}.weight" in shapes and shapes[f"{name}.weight"][0] in seen.chosen_among
    }
    return counted | chosen | {name for name in seen.linears if weighs_an_index(name)}


def _wide(names: Iterable[str], linears: Iterable[str]) -> set[str]:
    """Return the linears that transformers keeps in float32."""
    patterns = [re.compile(rf"(.*\.)?{name}(\..*)?") for name in names]
    return {name for name in linears if any(pattern.fullmatch(name) for pattern in patterns)}


def _input(linears: tuple[str, ...], found: Candidate | None) -> SharedInput:
    of_norm = found is not None and found.scale_fold.kind is not FoldKind.ROWS
    within = linears[0] if len(linears) == 1 and not of_norm else _within(linears)
    if found is None:
        return SharedInput(linears, within)
    return SharedInput(linears, within, found.scale_fold, found.heads)


def _within(linears: Iterable[str]) -> str:
    """Return the module that holds all linears; for one that lies in the block itself, the linear."""
    names = list(linears)
    paths = zip(*(name.split(".")[:-1] for name in names), strict=False)
    common = takewhile(lambda parts: len(set(parts)) == 1, paths)
    return ".".join(parts[0] for parts in common) or (names[0] if len(names) == 1 else "")


def modules_of(block: nn.Module) -> frozenset[tuple[str, type, tuple[int, ...]]]:
    """Return a block's parameters with their shapes and the class of their module."""
    return frozenset(
        (f"{name}.{key}", type(module), tuple(value.shape))
        for name, module in block.named_modules()
        for key, value in module.named_parameters(recurse=False)
    )


@dataclass
class _ReadActivation:
    """An activation that linears read: ``[tokens, in_features]``.

    With the linears in computing order, and the modules that return it.
    """

    value: Tensor
    linears: list[str]
    makers: tuple[str, ...]


class _Watched(FunctionMode):
    """What is observed while a block runs.

    Attributes:
        activations: in computing order.
        linears: in computing order.
        irregular: linears that were called more than once, or with something else than one tensor.
        chosen_among: the widths of what ``topk`` chose from: numbers of experts.
        fused: whether scores were computed by the fused kernel.
        returned: what the block returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.activations: list[_ReadActivation] = []
        self.linears: list[str] = []
        self.irregular: set[str] = set()
        self.chosen_among: set[int] = set()
        self.fused = False
        self.returned: Any = None
        self._made: list[tuple[str, Tensor]] = []

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Note which functions are called."""
        if function in {torch.topk, Tensor.topk}:
            self.chosen_among.add(args[0].shape[-1])
        self.fused |= function is nn.functional.scaled_dot_product_attention
        return function(*args, **kwargs)

    def listen(self, module: nn.Module, stack: ExitStack) -> None:
        """Listen to the linears of a module, and to the modules that multiply channels by a vector."""
        for name, child in module.named_modules():
            if is_linear(child):
                hook = partial(self._reads, name)
                stack.callback(child.register_forward_pre_hook(hook, with_kwargs=True).remove)
            elif isinstance(getattr(child, "weight", None), Tensor) and child.weight.dim() == 1:
                stack.callback(child.register_forward_hook(partial(self._makes, name)).remove)

    def _reads(
        self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if name in self.linears or len(args) != 1 or kwargs:
            self.irregular.add(name)
            return
        x = _flat(args[0])
        self.linears.append(name)
        for known in self.activations:
            if torch.equal(known.value, x):
                known.linears.append(name)
                return
        makers = [key for key, y in self._made if torch.equal(y, x)]
        self.activations.append(_ReadActivation(x, [name], tuple(makers)))

    def _makes(self, name: str, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() > 1:
            self._made.append((name, _flat(output)))


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies by a matrix that can be quantized."""
    return isinstance(module, (nn.Linear, Conv1D))


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear holds ``[in_features, out_features]``."""
    return isinstance(module, Conv1D)


def _watched(block: TrialBlock) -> _Watched:
    """Run a block and return what was observed."""
    found = _Watched()
    with ExitStack() as stack:
        found.listen(block.module, stack)
        stack.enter_context(found)
        found.returned = block.run()
    return found


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).clone()


@dataclass(frozen=True, slots=True)
class _Product:
    """A stack as the block multiplies by it; ``inputs`` ``[tokens, in_features]`` is what its first expert read."""

    parameter: str
    transposed: bool
    experts: int
    out_features: int
    in_features: int
    inputs: Tensor


class _Mixture(NamedTuple):
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
        self.found: dict[str, _Product] = {}
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
        self.found[name] = _Product(
            name, transposed, experts, out_features, in_features, first.reshape(-1, in_features)
        )


def _mixture_of(block: TrialBlock, shapes: Mapping[str, tuple[int, ...]]) -> _Mixture:
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
        return _Mixture()
    module = modules.pop()
    found = (
        routed_call(called, args, kwargs, products[0].experts)
        for name, called, args, kwargs in calls
        if name == module
    )
    routed = next((call for call in found if call is not None), None)
    if routed is None:
        return _Mixture()
    mixture = _mixture(block, products, module, str(shapes[products[0].parameter][0]))
    stacks = tuple(replace(stack, spread=routed.spread > 0) for stack in mixture.stacks)
    return mixture._replace(stacks=stacks)


def _mixture(block: TrialBlock, products: Sequence[_Product], module: str, each: str) -> _Mixture:
    groups: list[list[_Product]] = []
    for item in products:
        for group in groups:
            if torch.equal(group[0].inputs, item.inputs):
                group.append(item)
                break
        else:
            groups.append([item])
    *before, last = groups
    stacks: list[Stack] = []
    inputs: list[SharedInput] = []
    scale_folds: list[ScaleFold] = []
    for group in before:
        made = [_stack(block, item, last[0], module) for item in group]
        stacks += [stack for stack, _ in made]
        scale_folds += [scale_fold for _, scale_fold in made if scale_fold is not None]
        inputs.append(
            SharedInput(tuple(n for stack, _ in made for n in stack.linears), module, each=each)
        )
    down = [
        Stack(item.parameter, (_named(module, item),), transposed=item.transposed) for item in last
    ]
    linears = tuple(name for stack in down for name in stack.linears)
    inputs.append(SharedInput(linears, module, scale_folds[0] if scale_folds else None, each=each))
    return _Mixture((*stacks, *down), tuple(inputs))


def _named(module: str, item: _Product) -> str:
    return f"{module}.{{}}.{item.parameter.rpartition('.')[2]}"


def _stack(
    block: TrialBlock, item: _Product, down: _Product, module: str
) -> tuple[Stack, ScaleFold | None]:
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
            return stack, ScaleFold(FoldKind.ROWS, stack.linears[position])
    return (candidates[0][0] if candidates else alone), None


def _interleaved(block: TrialBlock, stack: Stack, down: _Product) -> bool:
    """Return whether rows 0 and 1 are of one channel: with its column of ``down`` at zero, row 1 has no effect."""
    read = block.parameter(down.parameter).clone()
    (read[:, 0] if down.transposed else read[:, :, 0]).zero_()
    without = states_of(block.run({down.parameter: read}))
    changed = block.parameter(stack.parameter).clone()
    for expert in range(down.experts):
        stack.matrix(changed, 0, expert)[1].mul_(2)
    changes = {down.parameter: read, stack.parameter: changed}
    return bool(torch.equal(without, states_of(block.run(changes))))


def _folds(block: TrialBlock, stack: Stack, position: int, down: _Product) -> bool:
    """Return whether the rows at ``position`` take the inverse of a factor for the columns of ``down``."""
    scale = random_scale(block, down.in_features)

    def same() -> bool:
        divided = block.parameter(stack.parameter).clone()
        for expert in range(down.experts):
            stack.matrix(divided, position, expert).div_(scale[:, None])
        read = block.parameter(down.parameter)
        multiplied = read * (scale[:, None] if down.transposed else scale)
        return same_after(block, {stack.parameter: divided}, {down.parameter: multiplied})

    return holds_louder(block, same)
