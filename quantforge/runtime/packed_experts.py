"""Experts of a mixture whose weights stay packed, in the place of transformers' module of stacked parameters.

transformers' experts modules say of themselves what they compute: whether there is a gate, whether there are biases, a
norm after each expert; how gate and up become one (`_apply_gate`, with the clamps of some families). Their forward
takes hidden states ``[tokens, hidden]``, and for every token the numbers and the weights of its experts.
`PackedExperts` computes the same from packed stacks and asks the module it replaces for everything that is not a
product, so that no family is named here. Of an expert without tokens no byte is read.

A stack is what transformers holds as one parameter of three dimensions: of every expert the rows of one linear, or of
gate and up. `PackedStack` gives all of them to one kernel for grouped products. Where the experts of a layer are
rounded to different schemes, or some are not rounded, or their inputs are rounded to ranges that files state,
`SeparateStack` multiplies by one `PackedLinear` after the other.

Some modules take tokens that are spread over all experts (`quantforge.model.expert_calls`) and do not say what they
compute. Such a one is tried instead: with a few random numbers in the place of its weights it has to return what
``down(act(gate) * up)`` of the same numbers is (`SpreadExperts`).

Where the module of a mixture is not understood, its experts are decoded into the parameters that transformers computes
with: right, as large as the source, and an event. Mixtures without a quantized expert are filled so, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantforge.architectures import Stack
from quantforge.errors import RefusedError
from quantforge.events import Event
from quantforge.model.expert_calls import takes_spread
from quantforge.model.weight_loading import parameter
from quantforge.model.weight_mapping import WeightMapping
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.linear import KernelWeight, PackedLinear, PackedWeights, kernel_weight
from quantforge_kernels import fallback, grouped
from quantforge_kernels.grouped import ExpertRouting, GroupedKernel, GroupedMatmulSpec
from quantforge_kernels.layers import silu_gate
from quantforge_kernels.select import find_grouped_failure, select_grouped_kernel

Weight = Callable[[str, int], QuantizedTensor | Tensor]
# The weights of one expert in a stack, ``[out, in]`` each, in the order of their rows.
Parts = Sequence[QuantizedTensor | Tensor]
_SAID = ("num_experts", "has_gate", "has_bias", "has_post_expert_norm")
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_NORM = "post_expert_norm"
# Where the gate of modules that have none of their own is defined.
_PLAIN_GATES = frozenset({"transformers.integrations.moe", __name__})
_SILU = frozenset({"SiLU", "SiLUActivation", "silu"})
_UNITS, _TOKENS, _CLOSE = 2, 3, 1e-4  # of the trial of a module of spread tokens


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Matrices of experts as a checkpoint holds them, ``[out, in]``.

    Attributes:
        read: returns one by its stored name, quantized or not.
        quantized: whether it is.
        packed: experts stay packed where they can.
        dtype: of activations.
        device: where the weights are kept.
    """

    read: Callable[[str], QuantizedTensor | Tensor]
    quantized: Callable[[str], bool]
    packed: bool
    dtype: torch.dtype
    device: torch.device


def fill_experts(model: nn.Module, mapping: WeightMapping, weights: ExpertWeights) -> list[Event]:
    """Fill the experts of a skeleton whose plain tensors are filled; return events of those that are not as meant.

    Raises:
        RefusedError: inputs of experts are rounded, in a module that is not understood.
    """
    events, decoded = [], []
    for name, stored in _expert_matrices(mapping).items():
        quantized = [item for item in stored if weights.quantized(item)]
        made = None
        if quantized and weights.packed:
            made = _packed(model.get_submodule(name), mapping, stored, weights)
        if made is None:
            _decode(model, mapping, stored, weights)
            decoded += quantized if weights.packed else []
        else:
            model.set_submodule(name, made)
            events += [Event("kernel-fallback", name, why) for why in made.failures]
    if decoded:
        whole = sum(
            mapping.weights(item) for source in mapping.distinct() for item in source.stored
        )
        share = sum(map(mapping.weights, decoded)) / whole
        what = f"{share:.0%} of all weights are experts that are decoded: their module is not understood"
        events.append(Event("kernel-fallback", decoded[0], what))
    return events


def _expert_matrices(mapping: WeightMapping) -> dict[str, list[str]]:
    """Return the stored matrices of experts by the name of the module that holds them when it runs."""
    found: dict[str, list[str]] = defaultdict(list)
    for source in mapping.distinct():
        if source.stored[0] in mapping.places:
            found[next(iter(source.parameters)).rpartition(".")[0]] += source.stored
    return found


def _packed(
    module: nn.Module, mapping: WeightMapping, stored: list[str], weights: ExpertWeights
) -> PackedExperts | None:
    places = {item: mapping.places[item] for item in stored}
    stacks = list(dict.fromkeys(place.stack for place in places.values()))
    by_place = {
        (place.stack.linears[place.position], place.expert): item for item, place in places.items()
    }

    def weight(linear: str, expert: int) -> QuantizedTensor | Tensor:
        return weights.read(by_place[linear, expert])

    return packed_experts(module, stacks, weight, weights.dtype, weights.device)


def _decode(
    model: nn.Module, mapping: WeightMapping, stored: list[str], weights: ExpertWeights
) -> None:
    """Write the matrices of experts into the stacks that transformers computes with, made where they are empty."""
    for item in stored:
        module_name, _, leaf = mapping.runtime(item).rpartition(".")
        module = model.get_submodule(module_name)
        stack: Tensor = getattr(module, leaf)
        if stack.is_meta:
            stack = torch.empty(stack.shape, dtype=weights.dtype, device=weights.device)
            setattr(module, leaf, nn.Parameter(stack, requires_grad=False))
        value = plainly(weights.read(item), item, weights.dtype)
        mapping.places[item].view(stack).copy_(value)


def plainly(value: QuantizedTensor | Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Return a weight decoded; raise RefusedError where its inputs are rounded, which a plain weight does not do."""
    if isinstance(value, Tensor):
        return value
    if value.input is not None:
        raise RefusedError(
            f"{name}: its inputs are rounded, which is not computed in the module that holds it here",
            "measure it in an engine that loads it (see `quantforge plan`)",
        )
    return value.decode(dtype)


def packed_experts(
    module: nn.Module,
    stacks: Sequence[Stack],
    weight: Weight,
    dtype: torch.dtype,
    device: torch.device,
) -> PackedExperts | None:
    """Return packed experts to replace a module of transformers; None where the module is not understood.

    Args:
        module: its biases and norms are filled, its stacks are not.
        stacks: which linears each of its parameters of three dimensions consists of; of the names the last part counts.
        weight: returns the matrix ``[out, in]`` of a linear (as the stack names it) of an expert.
        dtype: of activations.
        device: where the weights are kept.
    """
    by_leaf = {stack.parameter.rpartition(".")[2]: stack for stack in stacks}
    spread = gated_spread(module, by_leaf)
    experts: Any = module if spread is None else spread
    if not understood(experts) or _stacked(experts) != by_leaf.keys():
        return None
    made = {}
    for leaf, stack in by_leaf.items():

        def parts(
            expert: int, linears: Sequence[str] = stack.linears
        ) -> list[QuantizedTensor | Tensor]:
            return [weight(linear, expert) for linear in linears]

        made[leaf] = stack_of(parts, experts.num_experts, dtype, device)
    opening = by_leaf[opening_name(experts)]
    turns = len(opening.linears) if opening.interleaved else 1
    kind = PackedExperts if spread is None else SpreadExperts
    return kind(experts, made[opening_name(experts)], made[_DOWN], turns)


class PackedExperts(nn.Module):
    """Experts with packed weights; its forward is that of the module it replaces.

    Args:
        module: of transformers, for which `understood` holds; biases are filled.
        opening: the products of hidden states: gate and up, or up alone.
        down: the products of what lies between.
        interleaved: so many linears of ``opening`` alternate row by row in the module; 1: they follow one another.

    Attributes:
        num_experts: how many there are.
    """

    def __init__(
        self,
        module: Any,
        opening: PackedStack | SeparateStack,
        down: PackedStack | SeparateStack,
        interleaved: int = 1,
    ) -> None:
        super().__init__()
        self.num_experts: int = module.num_experts
        for name in _stacked(module):
            delattr(module, name)
        self.module = module
        self.opening = opening
        self.down = down
        self._interleaved = interleaved
        self._open = opening_name(module)
        self._silu = _is_silu(module)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return ``[tokens, hidden]``: of every token the sum of its experts' results by their weights."""
        owners = ExpertRouting(top_k_index, self.num_experts)
        inner = self.opening(hidden_states, owners)
        if self._interleaved > 1:
            inner = inner.unflatten(1, (self._interleaved, -1)).transpose(1, 2).flatten(1)
        inner = self._with_bias(inner, self._open, owners)
        if self._silu:
            inner = silu_gate(*inner.chunk(2, dim=-1))
        elif self.module.has_gate:
            inner = self.module._apply_gate(inner)
        else:
            inner = self.module.act_fn(inner)
        out = self._with_bias(self.down(inner, owners), _DOWN, owners)
        if self.module.has_post_expert_norm:
            out = self.module.post_expert_norm(out)
        out = out * top_k_weights.reshape(-1, 1)
        return out.view(len(hidden_states), -1, out.shape[1]).sum(1).to(hidden_states.dtype)

    @property
    def failures(self) -> list[str]:
        """Return why products are not those of the kernel meant for them; empty where all are."""
        found = (self.opening.failure, self.down.failure)
        return [why for why in found if why is not None]

    def _with_bias(self, y: Tensor, name: str, owners: ExpertRouting) -> Tensor:
        if not self.module.has_bias:
            return y
        bias: Tensor = getattr(self.module, f"{name}_bias")
        return y + bias[owners.expert_of_pair]


def understood(module: Any) -> bool:
    """Return whether a module says what it computes, in the terms of transformers' experts, and holds nothing else."""
    if not all(hasattr(module, name) for name in _SAID):
        return False
    if not hasattr(module, "_apply_gate" if module.has_gate else "act_fn"):
        return False
    stacked = {opening_name(module), _DOWN}
    biases = {f"{name}_bias" for name in stacked} if module.has_bias else set()
    mine = {name for name, _ in module.named_parameters() if not name.startswith(f"{_NORM}.")}
    return mine == stacked | biases and bool(module.has_post_expert_norm) == hasattr(module, _NORM)


def opening_name(module: Any) -> str:
    """Return the name of the parameter that hidden states are multiplied by."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def _stacked(module: Any) -> set[str]:
    """Return the names of the parameters of three dimensions."""
    return {name for name, value in module.named_parameters(recurse=False) if value.dim() == 3}


def _is_silu(module: Any) -> bool:
    """Return whether what lies between the products is ``silu(gate) * up``, gate first: there is one program for it."""
    plain = module.has_gate and type(module)._apply_gate.__module__ in _PLAIN_GATES
    if not plain:
        return False
    return getattr(module.act_fn, "__name__", type(module.act_fn).__name__) in _SILU


class SpreadExperts(PackedExperts):
    """Packed experts that take and return ``[experts * tokens, hidden]``."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Return what each expert makes of the rows that are its own."""
        rows = hidden_states.reshape(self.num_experts, -1, hidden_states.shape[1])
        experts, tokens = (rows != 0).any(-1).nonzero(as_tuple=True)
        out = torch.zeros_like(rows)
        if len(experts):
            ones = rows.new_ones(len(experts), 1)
            out[experts, tokens] = super().forward(rows[experts, tokens], experts[:, None], ones)
        return out.flatten(0, 1)


class GatedExperts(nn.Module):
    """Experts in the words of those modules of transformers that say what they compute; it holds their parameters."""

    has_gate, has_bias, has_post_expert_norm = True, False, False

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.num_experts: int = module.num_experts
        self.act_fn: nn.Module = module.act_fn
        for name, value in module.named_parameters(recurse=False):
            self.register_parameter(name, value)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        product: Tensor = self.act_fn(gate) * up
        return product


def gated_spread(module: Any, stacks: Mapping[str, Stack]) -> GatedExperts | None:
    """Return experts that take spread tokens in other words; None where a module is no such, or computes otherwise.

    Args:
        module: of transformers.
        stacks: by the names of its parameters, of which it has no others.
    """
    if not takes_spread(module) or stacks.keys() != {_GATE_UP, _DOWN}:
        return None
    if {name for name, _ in module.named_parameters()} != stacks.keys():
        return None
    if not hasattr(module, "act_fn") or type(getattr(module, "num_experts", None)) is not int:
        return None
    return GatedExperts(module) if _is_gated(module, stacks) else None


def _is_gated(module: Any, stacks: Mapping[str, Stack]) -> bool:
    kept = dict(module.named_parameters(recurse=False))
    width = kept[_DOWN].shape[2 if stacks[_DOWN].transposed else 1]
    random = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> Tensor:
        drawn: Tensor = torch.randn(shape, generator=random)
        return drawn / math.sqrt(shape[-1])

    tried = {_GATE_UP: numbers(2 * _UNITS, width), _DOWN: numbers(width, _UNITS)}
    states = numbers(_TOKENS, width) * math.sqrt(width)
    gate, up = (states @ stacks[_GATE_UP].share(tried[_GATE_UP], position).T for position in (0, 1))
    for name, matrix in tried.items():
        turned = matrix.T if stacks[name].transposed else matrix
        setattr(module, name, parameter(turned.contiguous()[None]))
    try:
        with torch.no_grad():
            found, expected = module(states), (module.act_fn(gate) * up) @ tried[_DOWN].T
    except RuntimeError:
        return False
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
    return found.shape == expected.shape and torch.allclose(found, expected, _CLOSE, _CLOSE)


def waits(model: nn.Module) -> bool:
    """Return whether the host has to know which experts a token is sent to, so that no CUDA graph holds a step."""
    return any(
        isinstance(module, SeparateStack)
        or (isinstance(module, PackedStack) and module.chosen.needs_host_sync)
        or holds_experts(module)
        for module in model.modules()
    )


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module of transformers holds the weights of experts, in parameters of three dimensions."""
    stacked = any(value.dim() == 3 for value in module.parameters(recurse=False))
    return stacked and type(getattr(module, "num_experts", None)) is int


# ---- stacks of experts' matrices


class DifferentError(Exception):
    """Matrices of a stack are not one problem of the kernels."""


class PackedStack(PackedWeights):
    """Matrices ``[out, in]`` of all experts, of one scheme.

    Args:
        parts: returns the weights of an expert.
        experts: how many there are.
        dtype: of activations.
        device: where they are kept.

    Attributes:
        problem: what is multiplied.
        chosen: the kernel.
        failure: why the kernel that was meant for it does not multiply it, or None.

    Raises:
        DifferentError: they are not of one scheme.
    """

    def __init__(
        self,
        parts: Callable[[int], Parts],
        experts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        first = joined(parts(0), dtype, device)
        self.problem = GroupedMatmulSpec(first.problem, experts)
        self.chosen: GroupedKernel = select_grouped_kernel(self.problem)
        self.failure = self._tried(first)
        if self.failure is not None:
            self.failure = f"{self.chosen.name}: {self.failure}"
            self.chosen = grouped.make_looped_kernel(fallback.KERNEL)
        self._tiles: dict[int, dict[int, Tensor]] | None = None  # decoded tiles of each expert

        def weights() -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
            for expert in range(experts):
                weight = first if expert == 0 else joined(parts(expert), dtype, device)
                if weight.problem != first.problem:
                    raise DifferentError
                yield weight.codes, weight.parameters

        try:
            packed = grouped.prepare_stacked(weights(), self.problem, self.chosen)
        except ValueError as error:
            raise DifferentError(str(error)) from error
        self.hold(packed)

    def _tried(self, first: KernelWeight) -> str | None:
        """Return why the kernel fails on the first matrix alone; None where it does not."""
        if self.chosen.base_kernel is fallback.KERNEL:
            return None
        alone = replace(self.problem, num_matrices=1)
        packed = grouped.prepare_stacked(
            iter([(first.codes, first.parameters)]), alone, self.chosen
        )
        return find_grouped_failure(self.chosen, packed, alone)

    def forward(self, x: Tensor, owners: ExpertRouting) -> Tensor:
        """Multiply ``x`` ``[rows, in]``; return ``[pairs, out]`` in the order of the owners' pairs."""
        if self._tiles is None:
            return self.chosen.matmul(x, owners, self.packed, self.problem)
        each = len(owners.expert_of_pair) // max(1, len(x))
        y = x.new_empty(len(owners.expert_of_pair), self.problem.matrix_spec.out_features)
        for expert, pairs in owners.pairs_by_expert():
            kept = self._tiles.setdefault(expert, {})
            part = grouped.select_matrix(self.packed, expert)
            y[pairs] = fallback.matmul(x[pairs // each], part, self.problem.matrix_spec, kept)
        return y

    @property
    def weights(self) -> int:
        """Return the number of weights of all experts."""
        each = self.problem.matrix_spec
        return self.problem.num_matrices * each.out_features * each.in_features

    def round_inputs(self, bits: int) -> bool:
        """Round activations, by a kernel of the same layout or in place of the fallback; return whether one does."""
        problem = replace(
            self.problem, matrix_spec=replace(self.problem.matrix_spec, input_bits=bits)
        )
        chosen, packed = select_grouped_kernel(problem), self.packed
        if chosen is self.chosen:
            return False
        if chosen.base_kernel.prepare is not self.chosen.base_kernel.prepare:
            if self.chosen.base_kernel is not fallback.KERNEL:
                return False
            each = (grouped.select_matrix(packed, number) for number in range(problem.num_matrices))
            packed = grouped.prepare_stacked(
                (fallback.unpack_weight(one, self.problem.matrix_spec) for one in each),
                problem,
                chosen,
            )
        alone = {
            name: value if name in grouped.SHARED_TENSORS else value[:1]
            for name, value in packed.items()
        }
        if find_grouped_failure(chosen, alone, replace(problem, num_matrices=1)) is not None:
            return False
        self.problem, self.chosen = problem, chosen
        self.hold(packed)
        return True

    def keep_decoded(self, keep: bool) -> None:
        """Keep what the fallback kernel decodes for the products that follow, or let go of it."""
        self._tiles = {} if keep and self.chosen.base_kernel is fallback.KERNEL else None


class SeparateStack(nn.Module):
    """Matrices of all experts, each in linear layers of its own; arguments as those of `PackedStack`."""

    def __init__(
        self,
        parts: Callable[[int], Parts],
        experts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._width = 0  # of a result
        layers = []
        for expert in range(experts):
            given = parts(expert)
            self._width = sum(part.shape[0] for part in given)
            layers.append(nn.ModuleList(_linear(part, dtype, device) for part in given))
        self.experts = nn.ModuleList(layers)

    @property
    def failure(self) -> str | None:
        """Return why a layer is not multiplied by the kernel meant for it, the first such reason."""
        found = (part.failure for part in self.modules() if isinstance(part, PackedLinear))
        return next((why for why in found if why is not None), None)

    def forward(self, x: Tensor, owners: ExpertRouting) -> Tensor:
        """Multiply as `PackedStack` does."""
        each = len(owners.expert_of_pair) // max(1, len(x))
        y = x.new_empty(len(owners.expert_of_pair), self._width)
        for expert, pairs in owners.pairs_by_expert():
            rows = x[pairs // each]
            y[pairs] = torch.cat([part(rows) for part in self._of(expert)], dim=-1)
        return y

    def _of(self, expert: int) -> nn.ModuleList:
        found = self.experts[expert]
        assert isinstance(found, nn.ModuleList)
        return found


def stack_of(
    parts: Callable[[int], Parts], experts: int, dtype: torch.dtype, device: torch.device
) -> PackedStack | SeparateStack:
    """Return the matrices of all experts for one kernel if they are of one scheme, else each in a layer of its own."""
    try:
        return PackedStack(parts, experts, dtype, device)
    except DifferentError:
        return SeparateStack(parts, experts, dtype, device)


def joined(parts: Parts, dtype: torch.dtype, device: torch.device) -> KernelWeight:
    """Return the rows of some matrices as those of one weight.

    Raises:
        DifferentError: one is not quantized, or to another scheme; or rows do not fill whole tiles of it.
    """
    packed = [part for part in parts if isinstance(part, QuantizedTensor)]
    weights = [kernel_weight(part, dtype, device) for part in packed]
    for tensor, one in zip(packed, weights, strict=True):
        if tensor.outlier_columns is not None or (tensor.input and not one.problem.activation_kind):
            raise DifferentError
    problems = {replace(one.problem, out_features=0) for one in weights}
    if len(packed) < len(parts) or len(problems) > 1:
        raise DifferentError
    if len(weights) == 1:
        return weights[0]
    tile = weights[0].problem.tile_rows
    if any(one.problem.out_features % tile for one in weights[:-1]):
        raise DifferentError
    whole = sum(one.problem.out_features for one in weights)
    parameters = {}
    for name, value in weights[0].parameters.items():
        values = [one.parameters[name] for one in weights]
        if name in grouped.SHARED_TENSORS and not all(
            torch.equal(value, other) for other in values
        ):
            raise DifferentError
        if len({other.dtype for other in values}) > 1:
            raise DifferentError
        parameters[name] = value if name in grouped.SHARED_TENSORS else torch.cat(values)
    codes = torch.cat([one.codes for one in weights])
    return KernelWeight(replace(weights[0].problem, out_features=whole), codes, parameters)


def _linear(part: QuantizedTensor | Tensor, dtype: torch.dtype, device: torch.device) -> nn.Module:
    if isinstance(part, QuantizedTensor):
        return PackedLinear(part, None, dtype, device)
    plain = nn.Linear(part.shape[1], part.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(part.to(device, dtype), requires_grad=False)
    return plain
