"""Derive the declaration of one kind of layer from one block: tensors, shared inputs, scale folds, experts.

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
from quantforge.architectures.routers import find_routers, is_indexer_weight
from quantforge.errors import RefusedError
from quantforge.model.block_calls import extra_outputs_of, hidden_states_of
from quantforge.model.derive.trial_block import (
    FoldCandidate,
    TrialBlock,
    find_scale_fold,
    holds_for_large_weights,
    is_fold_exact,
    random_scale,
)
from quantforge.model.expert_calls import parse_expert_call
from quantforge.numerics.function_mode import Function, FunctionMode

GATE_AND_UP = ("gate_proj", "up_proj")


class ModelFacts(NamedTuple):
    """Facts of a model that all kinds of its layers share.

    Attributes:
        dimensions: its sizes.
        config: configuration of the text model, which contains the number of experts.
        transposed: linears hold ``[in_features, out_features]``.
        float32_modules: names of modules that transformers keeps in float32; they are not quantized.
    """

    dimensions: Dimensions
    config: Mapping[str, Any]
    transposed: bool
    float32_modules: tuple[str, ...]


class DerivedKind(NamedTuple):
    """Declarations derived for one kind of layers.

    Attributes:
        kind: its declaration.
        slices: the fused linears of which a slice of rows takes a scale.
        unobserved: linears that were not called exactly once with one tensor.
        has_fused_attention: whether its attention uses a fused kernel.
        extra_outputs: outputs of the block other than its hidden states.
    """

    kind: LayerKind
    slices: Mapping[str, FoldCandidate]
    unobserved: tuple[str, ...]
    has_fused_attention: bool
    extra_outputs: tuple[Any, ...]


def _check_outputs(block: TrialBlock, outputs: Any) -> tuple[Any, ...] | None:
    """Return the outputs of a block other than its hidden states; None if it returns these alone.

    Raises:
        RefusedError: hidden states do not come first.
    """
    many = isinstance(outputs, tuple | list) and outputs
    states = outputs[0] if many else outputs
    if not isinstance(states, Tensor) or states.shape != block.states.shape:
        raise RefusedError(
            f"its blocks do not return hidden states first ({type(block.module).__name__})",
            "--method rtn",
        )
    return extra_outputs_of(outputs) if many else None


def derive_kind(
    block: TrialBlock,
    sizes: ModelFacts,
    shapes: Mapping[str, tuple[int, ...]],
    unstacked: Collection[str] = (),
) -> DerivedKind:
    """Derive the declaration of one kind of layers, without a name.

    Args:
        block: one block of the kind, without weights; it may have fewer experts than the model.
        sizes: facts of the model.
        shapes: shapes of the tensors of such a block in the model.
        unstacked: three-dimensional parameters that files store as one matrix per expert.

    Raises:
        RefusedError: the block does not run alone, or does not return hidden states first.
    """
    parameter_shapes = {key: tuple(value.shape) for key, value in block.module.state_dict().items()}
    with block.filled():
        observer = _observe_block(block)
        extra_outputs = _check_outputs(block, observer.returned)
        unquantized = _router_linears(sizes.config, parameter_shapes, observer) | _float32_linears(
            sizes.float32_modules, observer.linears
        )
        inputs, slices = [], {}
        for activation in observer.activations:
            linears = tuple(
                n for n in activation.linears if n not in unquantized | observer.irregular
            )
            if not linears:
                continue
            earlier = tuple(observer.linears[: observer.linears.index(activation.linears[0])])
            scale_fold = find_scale_fold(
                block,
                linears,
                activation.producers,
                earlier,
                sizes.dimensions,
                transposed=sizes.transposed,
            )
            inputs.append(_shared_input(linears, scale_fold))
            if scale_fold is not None and scale_fold.sizes:
                slices[scale_fold.scale_fold.module] = scale_fold
        mixture = _mixture_of(block, shapes)
    all_linears = {key for key, module in block.module.named_modules() if is_linear(module)}
    observed_linears = {linear for shared in inputs for linear in shared.linears}
    return DerivedKind(
        LayerKind(
            _parameters(shapes, mixture, unstacked),
            (*inputs, *mixture.inputs),
            mixture.stacks,
            mlp_activations=4,
            num_outputs=0 if extra_outputs is None else 1 + len(extra_outputs),
        ),
        slices,
        tuple(sorted(all_linears - observed_linears - unquantized)),
        observer.has_fused_attention,
        tree_map(_to_float32, extra_outputs or ()),
    )


def unify_slices(derived_kinds: Sequence[DerivedKind]) -> list[DerivedKind]:
    """Make layer kinds agree on how each fused linear is sliced.

    A family declares the slices of a linear once. A kind whose linear has another shape or other slices than in the
    first kind that has it loses its scale folds in that linear.
    """
    shapes: dict[str, tuple[str, ...]] = {}
    for item in derived_kinds:
        for parameter in item.kind.parameters:
            shapes.setdefault(parameter.name, parameter.shape)
    cuts: dict[str, tuple[object, ...]] = {}
    kinds = []
    for item in derived_kinds:
        parameter_shapes = {parameter.name: parameter.shape for parameter in item.kind.parameters}
        modules_of_other_shape = {
            name
            for name, cut in item.slices.items()
            if parameter_shapes[f"{name}.weight"] != shapes[f"{name}.weight"]
            or cuts.setdefault(name, (cut.sizes, cut.labels)) != (cut.sizes, cut.labels)
        }
        inputs = tuple(
            replace(shared, scale_fold=None, heads=False)
            if shared.scale_fold
            and shared.scale_fold.rows
            and shared.scale_fold.module in modules_of_other_shape
            else shared
            for shared in item.kind.inputs
        )
        slices = {
            name: cut for name, cut in item.slices.items() if name not in modules_of_other_shape
        }
        kinds.append(item._replace(kind=replace(item.kind, inputs=inputs), slices=slices))
    return kinds


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _parameters(
    shapes: Mapping[str, tuple[int, ...]], mixture: _ExpertDeclarations, listed: Collection[str]
) -> tuple[Parameter, ...]:
    """Declare the tensors of a block; for stacks also the matrix of every expert, or these alone if in ``listed``."""
    stacks = {stack.parameter: stack for stack in mixture.stacks}
    parameters = []
    for key, shape in shapes.items():
        if key not in listed or key not in stacks:
            parameters.append(Parameter(key, tuple(map(str, shape))))
        if key not in stacks:
            continue
        stack = stacks[key]
        rows, columns = shape[:0:-1] if stack.transposed else shape[1:]
        size = (str(rows // len(stack.linears)), str(columns))
        parameters += [
            Parameter(f"{name}.weight", size, repeated_over=str(shape[0])) for name in stack.linears
        ]
    return tuple(parameters)


def _router_linears(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], observer: _BlockObserver
) -> set[str]:
    """Return the linears that choose experts or tokens, found by shape, by name, or by the width of ``topk``."""
    router_names = {name.removesuffix(".weight") for name in find_routers(config, shapes)}
    routing_linears = {
        name
        for name in observer.linears
        if f"{name}.weight" in shapes and shapes[f"{name}.weight"][0] in observer.topk_widths
    }
    return (
        router_names
        | routing_linears
        | {name for name in observer.linears if is_indexer_weight(name)}
    )


def _float32_linears(names: Iterable[str], linears: Iterable[str]) -> set[str]:
    """Return the linears that transformers keeps in float32."""
    patterns = [re.compile(rf"(.*\.)?{name}(\..*)?") for name in names]
    return {name for name in linears if any(pattern.fullmatch(name) for pattern in patterns)}


def _shared_input(linears: tuple[str, ...], candidate: FoldCandidate | None) -> SharedInput:
    of_norm = candidate is not None and candidate.scale_fold.kind is not FoldKind.ROWS
    module = linears[0] if len(linears) == 1 and not of_norm else _common_module(linears)
    if candidate is None:
        return SharedInput(linears, module)
    return SharedInput(linears, module, candidate.scale_fold, candidate.heads)


def _common_module(linears: Iterable[str]) -> str:
    """Return the innermost module that contains all linears; for a linear directly in the block, itself."""
    names = list(linears)
    paths = zip(*(name.split(".")[:-1] for name in names), strict=False)
    common_levels = takewhile(lambda level_names: len(set(level_names)) == 1, paths)
    return ".".join(level_names[0] for level_names in common_levels) or (
        names[0] if len(names) == 1 else ""
    )


def parameter_signature(block: nn.Module) -> frozenset[tuple[str, type, tuple[int, ...]]]:
    """Return the parameters of a block with their shapes and the classes of their modules."""
    return frozenset(
        (f"{name}.{key}", type(module), tuple(value.shape))
        for name, module in block.named_modules()
        for key, value in module.named_parameters(recurse=False)
    )


@dataclass
class _ReadActivation:
    """An activation ``[tokens, in_features]`` that linears read.

    It has the names of these linears in computing order, and of the modules that returned it.
    """

    value: Tensor
    linears: list[str]
    producers: tuple[str, ...]


class _BlockObserver(FunctionMode):
    """Records what happens while a block runs.

    Attributes:
        activations: the activations that linears read, in computing order.
        linears: names of the linears, in computing order.
        irregular: linears that were called more than once, or with something else than one tensor.
        topk_widths: sizes of the axes that ``topk`` chose from: numbers of experts.
        has_fused_attention: whether attention was computed by the fused kernel.
        returned: the return value of the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.activations: list[_ReadActivation] = []
        self.linears: list[str] = []
        self.irregular: set[str] = set()
        self.topk_widths: set[int] = set()
        self.has_fused_attention = False
        self.returned: Any = None
        self._producer_outputs: list[tuple[str, Tensor]] = []

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record calls of ``topk`` and of fused attention, and compute the function."""
        if function in {torch.topk, Tensor.topk}:
            self.topk_widths.add(args[0].shape[-1])
        self.has_fused_attention |= function is nn.functional.scaled_dot_product_attention
        return function(*args, **kwargs)

    def add_hooks(self, module: nn.Module, stack: ExitStack) -> None:
        """Add hooks to the linears of a module, and to modules that multiply channels by a vector."""
        for name, child in module.named_modules():
            if is_linear(child):
                hook = partial(self._record_reader, name)
                stack.callback(child.register_forward_pre_hook(hook, with_kwargs=True).remove)
            elif isinstance(getattr(child, "weight", None), Tensor) and child.weight.dim() == 1:
                stack.callback(
                    child.register_forward_hook(partial(self._record_producer, name)).remove
                )

    def _record_reader(
        self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if name in self.linears or len(args) != 1 or kwargs:
            self.irregular.add(name)
            return
        x = _flatten_tokens(args[0])
        self.linears.append(name)
        for activation in self.activations:
            if torch.equal(activation.value, x):
                activation.linears.append(name)
                return
        producers = [key for key, y in self._producer_outputs if torch.equal(y, x)]
        self.activations.append(_ReadActivation(x, [name], tuple(producers)))

    def _record_producer(self, name: str, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() > 1:
            self._producer_outputs.append((name, _flatten_tokens(output)))


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies by a matrix that can be quantized."""
    return isinstance(module, (nn.Linear, Conv1D))


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear holds ``[in_features, out_features]``."""
    return isinstance(module, Conv1D)


def _observe_block(block: TrialBlock) -> _BlockObserver:
    """Run a block and return what was observed."""
    observer = _BlockObserver()
    with ExitStack() as stack:
        observer.add_hooks(block.module, stack)
        stack.enter_context(observer)
        observer.returned = block.run()
    return observer


def _flatten_tokens(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).clone()


@dataclass(frozen=True, slots=True)
class _Product:
    """A stacked parameter as the block multiplies by it.

    ``inputs`` ``[tokens, in_features]`` is the input of its first expert.
    """

    parameter: str
    transposed: bool
    experts: int
    out_features: int
    in_features: int
    inputs: Tensor


class _ExpertDeclarations(NamedTuple):
    """Declarations of the experts of a block.

    Attributes:
        stacks, inputs: see `LayerKind`; names have ``{}`` for the index of the expert.
    """

    stacks: tuple[Stack, ...] = ()
    inputs: tuple[SharedInput, ...] = ()


class _ExpertProductObserver(FunctionMode):
    """Records products with slices of three-dimensional parameters."""

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
            self._record_product(*pair, turned=function is nn.functional.linear)
        return result

    def _record_product(self, x: Tensor, weight: Tensor, *, turned: bool) -> None:
        name, stack = self._stacks.get(weight.untyped_storage().data_ptr(), ("", None))
        if stack is None or name in self.found or weight.dim() < 2:
            return
        experts, rows, columns = stack.shape
        matrix_shape = weight.shape[-2:]
        straight = weight.stride()[-2:] == stack.stride()[1:]
        if sorted(matrix_shape) != sorted((rows, columns)) or not (
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


def _mixture_of(block: TrialBlock, shapes: Mapping[str, tuple[int, ...]]) -> _ExpertDeclarations:
    """Return the experts of a filled block; an empty mixture where it has none that are calibrated one by one.

    ``shapes``: of its parameters in the model, which may have more experts.
    """
    watcher, calls = _ExpertProductObserver(block.module), []
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
        return _ExpertDeclarations()
    module = modules.pop()
    declarations = (
        parse_expert_call(called, args, kwargs, products[0].experts)
        for name, called, args, kwargs in calls
        if name == module
    )
    routed = next((call for call in declarations if call is not None), None)
    if routed is None:
        return _ExpertDeclarations()
    mixture = _mixture(block, products, module, str(shapes[products[0].parameter][0]))
    stacks = tuple(
        replace(stack, takes_weighted_tokens=routed.num_repeats > 0) for stack in mixture.stacks
    )
    return mixture._replace(stacks=stacks)


def _mixture(
    block: TrialBlock, products: Sequence[_Product], module: str, expert_module: str
) -> _ExpertDeclarations:
    groups: list[list[_Product]] = []
    for item in products:
        for group in groups:
            if torch.equal(group[0].inputs, item.inputs):
                group.append(item)
                break
        else:
            groups.append([item])
    *earlier_groups, last = groups
    stacks: list[Stack] = []
    inputs: list[SharedInput] = []
    scale_folds: list[ScaleFold] = []
    for group in earlier_groups:
        stack_folds = [_stack(block, item, last[0], module) for item in group]
        stacks += [stack for stack, _ in stack_folds]
        scale_folds += [scale_fold for _, scale_fold in stack_folds if scale_fold is not None]
        inputs.append(
            SharedInput(
                tuple(n for stack, _ in stack_folds for n in stack.linears),
                module,
                repeated_over=expert_module,
            )
        )
    down = [
        Stack(item.parameter, (_named(module, item),), transposed=item.transposed) for item in last
    ]
    linears = tuple(name for stack in down for name in stack.linears)
    inputs.append(
        SharedInput(
            linears, module, scale_folds[0] if scale_folds else None, repeated_over=expert_module
        )
    )
    return _ExpertDeclarations((*stacks, *down), tuple(inputs))


def _named(module: str, item: _Product) -> str:
    return f"{module}.{{}}.{item.parameter.rpartition('.')[2]}"


def _stack(
    block: TrialBlock, item: _Product, down: _Product, module: str
) -> tuple[Stack, ScaleFold | None]:
    """Return the stack of what feeds ``down``, and what of it absorbs a scale of what ``down`` reads."""
    gate, up = (f"{module}.{{}}.{name}" for name in GATE_AND_UP)
    single_stack = Stack(item.parameter, (_named(module, item),), transposed=item.transposed)
    candidates = [(single_stack, 0)] if item.out_features == down.in_features else []
    if item.out_features == 2 * down.in_features:
        interleaved = _interleaved(block, single_stack, down)
        candidates = [
            (replace(single_stack, linears=linears, interleaved=interleaved), linears.index(up))
            for linears in ((gate, up), (up, gate))
        ]
    for stack, position in candidates:
        if _folds(block, stack, position, down):
            return stack, ScaleFold(FoldKind.ROWS, stack.linears[position])
    return (candidates[0][0] if candidates else single_stack), None


def _interleaved(block: TrialBlock, stack: Stack, down: _Product) -> bool:
    """Return whether rows 0 and 1 are of one channel: with its column of ``down`` at zero, row 1 has no effect."""
    weight = block.parameter(down.parameter).clone()
    (weight[:, 0] if down.transposed else weight[:, :, 0]).zero_()
    without = hidden_states_of(block.run({down.parameter: weight}))
    changed_stack = block.parameter(stack.parameter).clone()
    for expert in range(down.experts):
        stack.matrix(changed_stack, 0, expert)[1].mul_(2)
    changes = {down.parameter: weight, stack.parameter: changed_stack}
    return bool(torch.equal(without, hidden_states_of(block.run(changes))))


def _folds(block: TrialBlock, stack: Stack, position: int, down: _Product) -> bool:
    """Return whether the rows at ``position`` take the inverse of a factor for the columns of ``down``."""
    scale = random_scale(block, down.in_features)

    def same() -> bool:
        divided = block.parameter(stack.parameter).clone()
        for expert in range(down.experts):
            stack.matrix(divided, position, expert).div_(scale[:, None])
        weight = block.parameter(down.parameter)
        multiplied = weight * (scale[:, None] if down.transposed else scale)
        return is_fold_exact(block, {stack.parameter: divided}, {down.parameter: multiplied})

    return holds_for_large_weights(block, same)
