"""Mixture-of-experts layers with packed weights, replacing transformers' modules of stacked 3-D parameters.

The experts modules of transformers declare what they compute: whether they have a gate, biases, or a norm after each
expert, and how gate and up are combined (`_apply_gate`, with the clamps of some families). Their forward takes hidden
states ``[tokens, hidden]`` and, for every token, the indices and routing weights of its experts. `PackedExperts`
computes the products from packed weights and delegates everything else to the module it replaces, so that no family
needs special code. Weights of experts without tokens are not read.

A stack corresponds to one 3-D parameter of transformers: one linear, or gate and up, of all experts. `PackedStack`
passes it to one kernel for grouped products. If the experts of a layer differ in their schemes, are partly
unquantized, or have static activation ranges, `SeparateStack` uses one `PackedLinear` per matrix.

Some modules take tokens that are already dispatched to all experts (`quantforge.model.expert_calls`) and do not declare
what they compute. They are probed: with small random weights, the module must return ``down(act(gate) * up)``
(`DispatchedExperts`).

If a module is not supported, its experts are decoded into the parameters of transformers: correct, but as large as the
unquantized model, and recorded as an event. Mixtures without quantized experts are filled the same way.
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
from quantforge.model.expert_calls import takes_repeated_tokens
from quantforge.model.weight_loading import parameter
from quantforge.model.weight_mapping import WeightMapping
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.kernel_weight import KernelWeight, to_kernel_weight
from quantforge.runtime.linear import PackedLinear, PackedWeights
from quantforge_kernels import fallback, grouped
from quantforge_kernels.grouped import ExpertRouting, GroupedKernel, GroupedMatmulSpec
from quantforge_kernels.layers import silu_gate
from quantforge_kernels.select import find_grouped_failure, select_grouped_kernel

Weight = Callable[[str, int], QuantizedTensor | Tensor]
# The matrices ``[out, in]`` of one expert that a stack joins, in row order.
Parts = Sequence[QuantizedTensor | Tensor]
_DECLARED_FLAGS = ("num_experts", "has_gate", "has_bias", "has_post_expert_norm")
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_NORM = "post_expert_norm"
# Modules that define the standard gate, act(gate) * up.
_STANDARD_GATE_MODULES = frozenset({"transformers.integrations.moe", __name__})
_SILU = frozenset({"SiLU", "SiLUActivation", "silu"})
# Sizes of the probe of a module of dispatched tokens
_PROBE_UNITS, _PROBE_TOKENS, _PROBE_TOLERANCE = 2, 3, 1e-4


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Access to the expert matrices ``[out, in]`` of a checkpoint.

    Attributes:
        read: returns a matrix by its stored name, quantized or plain.
        quantized: returns whether a stored matrix is quantized.
        packed: whether to keep experts packed where possible.
        dtype: type of the activations.
        device: device of the weights.
    """

    read: Callable[[str], QuantizedTensor | Tensor]
    quantized: Callable[[str], bool]
    packed: bool
    dtype: torch.dtype
    device: torch.device


def fill_experts(model: nn.Module, mapping: WeightMapping, weights: ExpertWeights) -> list[Event]:
    """Fill the experts of a model skeleton, after its plain tensors; return events for kernel and decoding fallbacks.

    Raises:
        RefusedError: expert inputs are quantized, but their module is not supported.
    """
    events, decoded = [], []
    for name, stored in _expert_matrices(mapping).items():
        quantized = [item for item in stored if weights.quantized(item)]
        packed_module = None
        if quantized and weights.packed:
            packed_module = _try_packed(model.get_submodule(name), mapping, stored, weights)
        if packed_module is None:
            _decode_experts(model, mapping, stored, weights)
            decoded += quantized if weights.packed else []
        else:
            model.set_submodule(name, packed_module)
            events += [
                Event("kernel-fallback", name, failure) for failure in packed_module.failures
            ]
    if decoded:
        total_weights = sum(
            mapping.numel(item) for source in mapping.distinct_sources() for item in source.stored
        )
        decoded_share = sum(map(mapping.numel, decoded)) / total_weights
        detail = f"{decoded_share:.0%} of all weights are experts that are decoded: their module is not understood"
        events.append(Event("kernel-fallback", decoded[0], detail))
    return events


def _expert_matrices(mapping: WeightMapping) -> dict[str, list[str]]:
    """Return the stored expert matrices, grouped by the name of the runtime module that holds them."""
    matrices: dict[str, list[str]] = defaultdict(list)
    for source in mapping.distinct_sources():
        if source.stored[0] in mapping.expert_places:
            matrices[next(iter(source.parameters)).rpartition(".")[0]] += source.stored
    return matrices


def _try_packed(
    module: nn.Module, mapping: WeightMapping, stored: list[str], weights: ExpertWeights
) -> PackedExperts | None:
    stack_slices = {item: mapping.expert_places[item] for item in stored}
    stacks = list(dict.fromkeys(stack_slice.stack for stack_slice in stack_slices.values()))
    by_place = {
        (stack_slice.stack.linears[stack_slice.linear_index], stack_slice.expert): item
        for item, stack_slice in stack_slices.items()
    }

    def weight(linear: str, expert: int) -> QuantizedTensor | Tensor:
        return weights.read(by_place[linear, expert])

    return packed_experts(module, stacks, weight, weights.dtype, weights.device)


def _decode_experts(
    model: nn.Module, mapping: WeightMapping, stored: list[str], weights: ExpertWeights
) -> None:
    """Decode expert matrices into the 3-D parameters of transformers, allocating those that are on the meta device."""
    for item in stored:
        module_name, _, leaf = mapping.parameter_name(item).rpartition(".")
        module = model.get_submodule(module_name)
        stack: Tensor = getattr(module, leaf)
        if stack.is_meta:
            stack = torch.empty(stack.shape, dtype=weights.dtype, device=weights.device)
            setattr(module, leaf, nn.Parameter(stack, requires_grad=False))
        value = decode_plain(weights.read(item), item, weights.dtype)
        mapping.expert_places[item].view(stack).copy_(value)


def decode_plain(value: QuantizedTensor | Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Decode a weight to a plain tensor; raise RefusedError if its inputs are quantized, which would be lost."""
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
    """Create packed experts that replace a module of transformers; None if the module is not supported.

    Args:
        module: the transformers module, with biases and norms filled, but not its 3-D parameters.
        stacks: the linears that each 3-D parameter consists of.
        weight: returns the matrix ``[out, in]`` of a linear (as named in the stack) of an expert.
        dtype: type of the activations.
        device: device of the weights.
    """
    by_leaf = {stack.parameter.rpartition(".")[2]: stack for stack in stacks}
    gated = as_gated_experts(module, by_leaf)
    experts: Any = module if gated is None else gated
    if not is_supported(experts) or _stacked_parameters(experts) != by_leaf.keys():
        return None
    packed_stacks = {}
    for leaf, stack in by_leaf.items():

        def parts(
            expert: int, linears: Sequence[str] = stack.linears
        ) -> list[QuantizedTensor | Tensor]:
            return [weight(linear, expert) for linear in linears]

        packed_stacks[leaf] = create_stack(parts, experts.num_experts, dtype, device)
    input_projection = by_leaf[input_projection_name(experts)]
    interleaved = len(input_projection.linears) if input_projection.interleaved else 1
    experts_class = PackedExperts if gated is None else DispatchedExperts
    return experts_class(
        experts, packed_stacks[input_projection_name(experts)], packed_stacks[_DOWN], interleaved
    )


class PackedExperts(nn.Module):
    """Experts with packed weights, with the forward signature of the transformers module that it replaces.

    Args:
        module: the transformers module (`is_supported` must hold), with biases filled.
        input_projection: input projection: gate and up, or up alone.
        down: output projection.
        interleaved: number of linears whose rows alternate in the input projection; 1 if they are concatenated.

    Attributes:
        num_experts: number of experts.
    """

    def __init__(
        self,
        module: Any,
        input_projection: PackedStack | SeparateStack,
        down: PackedStack | SeparateStack,
        interleaved: int = 1,
    ) -> None:
        super().__init__()
        self.num_experts: int = module.num_experts
        for name in _stacked_parameters(module):
            delattr(module, name)
        self.module = module
        self.input_projection = input_projection
        self.down = down
        self._interleaved = interleaved
        self._input_projection_name = input_projection_name(module)
        self._silu = _is_silu(module)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return ``[tokens, hidden]``: for every token the sum of its experts' outputs, times their routing weights."""
        owners = ExpertRouting(top_k_index, self.num_experts)
        inner = self.input_projection(hidden_states, owners)
        if self._interleaved > 1:
            inner = inner.unflatten(1, (self._interleaved, -1)).transpose(1, 2).flatten(1)
        inner = self._with_bias(inner, self._input_projection_name, owners)
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
        """Return the reasons why preferred kernels are not used; empty if all are."""
        failures = (self.input_projection.failure, self.down.failure)
        return [failure for failure in failures if failure is not None]

    def _with_bias(self, y: Tensor, name: str, owners: ExpertRouting) -> Tensor:
        if not self.module.has_bias:
            return y
        bias: Tensor = getattr(self.module, f"{name}_bias")
        return y + bias[owners.expert_of_pair]


def is_supported(module: Any) -> bool:
    """Return whether a module declares what it computes, as transformers' experts do, and has no other parameters."""
    if not all(hasattr(module, name) for name in _DECLARED_FLAGS):
        return False
    if not hasattr(module, "_apply_gate" if module.has_gate else "act_fn"):
        return False
    stacked = {input_projection_name(module), _DOWN}
    biases = {f"{name}_bias" for name in stacked} if module.has_bias else set()
    own_parameters = {
        name for name, _ in module.named_parameters() if not name.startswith(f"{_NORM}.")
    }
    return own_parameters == stacked | biases and bool(module.has_post_expert_norm) == hasattr(
        module, _NORM
    )


def input_projection_name(module: Any) -> str:
    """Return the name of the input projection parameter."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def _stacked_parameters(module: Any) -> set[str]:
    """Return the names of the 3-D parameters of a module."""
    return {name for name, value in module.named_parameters(recurse=False) if value.dim() == 3}


def _is_silu(module: Any) -> bool:
    """Return whether the module computes ``silu(gate) * up`` with the gate first, for which there is a fused kernel."""
    is_standard_gate = (
        module.has_gate and type(module)._apply_gate.__module__ in _STANDARD_GATE_MODULES
    )
    if not is_standard_gate:
        return False
    return getattr(module.act_fn, "__name__", type(module.act_fn).__name__) in _SILU


class DispatchedExperts(PackedExperts):
    """Packed experts for modules whose input and output are already dispatched, ``[experts * tokens, hidden]``."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Apply each expert to its own rows; rows of zeros are skipped."""
        rows = hidden_states.reshape(self.num_experts, -1, hidden_states.shape[1])
        experts, tokens = (rows != 0).any(-1).nonzero(as_tuple=True)
        out = torch.zeros_like(rows)
        if len(experts):
            ones = rows.new_ones(len(experts), 1)
            out[experts, tokens] = super().forward(rows[experts, tokens], experts[:, None], ones)
        return out.flatten(0, 1)


class GatedExperts(nn.Module):
    """Adapter that gives a module the declarations of standard transformers experts; shares its parameters."""

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


def as_gated_experts(module: Any, stacks: Mapping[str, Stack]) -> GatedExperts | None:
    """Wrap a module of dispatched tokens as `GatedExperts`; None if it is another kind or computes something else.

    Args:
        module: the transformers module.
        stacks: the linears of its parameters, by parameter name; it may have no others.
    """
    if not takes_repeated_tokens(module) or stacks.keys() != {_GATE_UP, _DOWN}:
        return None
    if {name for name, _ in module.named_parameters()} != stacks.keys():
        return None
    if not hasattr(module, "act_fn") or type(getattr(module, "num_experts", None)) is not int:
        return None
    return GatedExperts(module) if _computes_gated_mlp(module, stacks) else None


def _computes_gated_mlp(module: Any, stacks: Mapping[str, Stack]) -> bool:
    original = dict(module.named_parameters(recurse=False))
    width = original[_DOWN].shape[2 if stacks[_DOWN].transposed else 1]
    random = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> Tensor:
        random_values: Tensor = torch.randn(shape, generator=random)
        return random_values / math.sqrt(shape[-1])

    trial_weights = {
        _GATE_UP: numbers(2 * _PROBE_UNITS, width),
        _DOWN: numbers(width, _PROBE_UNITS),
    }
    states = numbers(_PROBE_TOKENS, width) * math.sqrt(width)
    gate, up = (
        states @ stacks[_GATE_UP].rows_of(trial_weights[_GATE_UP], position).T
        for position in (0, 1)
    )
    for name, matrix in trial_weights.items():
        stored = matrix.T if stacks[name].transposed else matrix
        setattr(module, name, parameter(stored.contiguous()[None]))
    try:
        with torch.no_grad():
            output, expected = module(states), (module.act_fn(gate) * up) @ trial_weights[_DOWN].T
    except RuntimeError:
        return False
    finally:
        for name, value in original.items():
            setattr(module, name, value)
    return output.shape == expected.shape and torch.allclose(
        output, expected, _PROBE_TOLERANCE, _PROBE_TOLERANCE
    )


def needs_host_sync(model: nn.Module) -> bool:
    """Return whether the host must know the expert routing during a step, so that no CUDA graph can be captured."""
    return any(
        isinstance(module, SeparateStack)
        or (isinstance(module, PackedStack) and module.chosen.needs_host_sync)
        or holds_experts(module)
        for module in model.modules()
    )


def holds_experts(module: nn.Module) -> bool:
    """Return whether a transformers module holds expert weights in 3-D parameters."""
    stacked = any(value.dim() == 3 for value in module.parameters(recurse=False))
    return stacked and type(getattr(module, "num_experts", None)) is int


# ---- stacks of experts' matrices


class MixedSchemesError(Exception):
    """The matrices of a stack differ in their schemes, so that one grouped kernel cannot multiply them."""


class PackedStack(PackedWeights):
    """Packed matrices ``[out, in]`` of all experts in one scheme, multiplied by one grouped kernel.

    Args:
        parts: returns the matrices of an expert.
        experts: number of experts.
        dtype: type of the activations.
        device: device of the weights.

    Attributes:
        problem: description of the product for the kernels.
        chosen: the selected kernel.
        failure: why the preferred kernel is not used, or None.

    Raises:
        MixedSchemesError: the matrices differ in their schemes.
    """

    def __init__(
        self,
        parts_of_expert: Callable[[int], Parts],
        experts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        first = join_rows(parts_of_expert(0), dtype, device)
        self.problem = GroupedMatmulSpec(first.problem, experts)
        self.chosen: GroupedKernel = select_grouped_kernel(self.problem)
        self.failure = self._trial_failure(first)
        if self.failure is not None:
            self.failure = f"{self.chosen.name}: {self.failure}"
            self.chosen = grouped.make_looped_kernel(fallback.KERNEL)
        # Decoded tiles of each expert
        self._decoded_tiles: dict[int, dict[int, Tensor]] | None = None

        def weights() -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
            for expert in range(experts):
                weight = first if expert == 0 else join_rows(parts_of_expert(expert), dtype, device)
                if weight.problem != first.problem:
                    raise MixedSchemesError
                yield weight.codes, weight.parameters

        try:
            packed = grouped.prepare_stacked(weights(), self.problem, self.chosen)
        except ValueError as error:
            raise MixedSchemesError(str(error)) from error
        self.store_packed(packed)

    def _trial_failure(self, first: KernelWeight) -> str | None:
        """Try the kernel on the first matrix; return why it fails, or None."""
        if self.chosen.base_kernel is fallback.KERNEL:
            return None
        single_problem = replace(self.problem, num_matrices=1)
        packed = grouped.prepare_stacked(
            iter([(first.codes, first.parameters)]), single_problem, self.chosen
        )
        return find_grouped_failure(self.chosen, packed, single_problem)

    def forward(self, x: Tensor, owners: ExpertRouting) -> Tensor:
        """Multiply ``x`` ``[rows, in]``; return one row per (token, expert) pair, ``[pairs, out]``."""
        if self._decoded_tiles is None:
            return self.chosen.matmul(x, owners, self.packed, self.problem)
        experts_per_token = len(owners.expert_of_pair) // max(1, len(x))
        y = x.new_empty(len(owners.expert_of_pair), self.problem.matrix_spec.out_features)
        for expert, pairs in owners.pairs_by_expert():
            tiles = self._decoded_tiles.setdefault(expert, {})
            expert_weight = grouped.select_matrix(self.packed, expert)
            y[pairs] = fallback.matmul(
                x[pairs // experts_per_token], expert_weight, self.problem.matrix_spec, tiles
            )
        return y

    @property
    def weights(self) -> int:
        """Return the number of weights of all experts."""
        matrix_spec = self.problem.matrix_spec
        return self.problem.num_matrices * matrix_spec.out_features * matrix_spec.in_features

    def round_inputs(self, bits: int) -> bool:
        """Switch to a kernel that rounds activations, if one exists for the layout or replaces the fallback kernel."""
        problem = replace(
            self.problem, matrix_spec=replace(self.problem.matrix_spec, input_bits=bits)
        )
        kernel, packed = select_grouped_kernel(problem), self.packed
        if kernel is self.chosen:
            return False
        if kernel.base_kernel.prepare is not self.chosen.base_kernel.prepare:
            if self.chosen.base_kernel is not fallback.KERNEL:
                return False
            packed_matrices = (
                grouped.select_matrix(packed, number) for number in range(problem.num_matrices)
            )
            packed = grouped.prepare_stacked(
                (
                    fallback.unpack_weight(packed_matrix, self.problem.matrix_spec)
                    for packed_matrix in packed_matrices
                ),
                problem,
                kernel,
            )
        single_weight = {
            name: value if name in grouped.SHARED_TENSORS else value[:1]
            for name, value in packed.items()
        }
        if (
            find_grouped_failure(kernel, single_weight, replace(problem, num_matrices=1))
            is not None
        ):
            return False
        self.problem, self.chosen = problem, kernel
        self.store_packed(packed)
        return True

    def cache_decoded(self, enabled: bool) -> None:
        """Enable or disable caching of the tiles that the fallback kernel decodes."""
        self._decoded_tiles = {} if enabled and self.chosen.base_kernel is fallback.KERNEL else None


class SeparateStack(nn.Module):
    """Matrices of all experts as separate linear layers, for mixed schemes; takes the arguments of `PackedStack`."""

    def __init__(
        self,
        parts_of_expert: Callable[[int], Parts],
        experts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._width = 0  # of a result
        layers = []
        for expert in range(experts):
            matrices = parts_of_expert(expert)
            self._width = sum(matrix.shape[0] for matrix in matrices)
            layers.append(
                nn.ModuleList(_create_linear(matrix, dtype, device) for matrix in matrices)
            )
        self.experts = nn.ModuleList(layers)

    @property
    def failure(self) -> str | None:
        """Return the first reason why a layer does not use its preferred kernel, or None."""
        layers = (linear.failure for linear in self.modules() if isinstance(linear, PackedLinear))
        return next((failure for failure in layers if failure is not None), None)

    def forward(self, x: Tensor, owners: ExpertRouting) -> Tensor:
        """Multiply ``x`` ``[rows, in]``; return one row per (token, expert) pair, ``[pairs, out]``."""
        experts_per_token = len(owners.expert_of_pair) // max(1, len(x))
        y = x.new_empty(len(owners.expert_of_pair), self._width)
        for expert, pairs in owners.pairs_by_expert():
            rows = x[pairs // experts_per_token]
            y[pairs] = torch.cat(
                [linear(rows) for linear in self._layers_of_expert(expert)], dim=-1
            )
        return y

    def _layers_of_expert(self, expert: int) -> nn.ModuleList:
        layers = self.experts[expert]
        assert isinstance(layers, nn.ModuleList)
        return layers


def create_stack(
    parts_of_expert: Callable[[int], Parts], experts: int, dtype: torch.dtype, device: torch.device
) -> PackedStack | SeparateStack:
    """Create a `PackedStack` if all experts have the same scheme, else a `SeparateStack`."""
    try:
        return PackedStack(parts_of_expert, experts, dtype, device)
    except MixedSchemesError:
        return SeparateStack(parts_of_expert, experts, dtype, device)


def join_rows(matrices: Parts, dtype: torch.dtype, device: torch.device) -> KernelWeight:
    """Concatenate the rows of several quantized matrices into one kernel weight.

    Raises:
        MixedSchemesError: a matrix is plain or has another scheme, or its rows do not fill whole tiles.
    """
    packed = [matrix for matrix in matrices if isinstance(matrix, QuantizedTensor)]
    weights = [to_kernel_weight(matrix, dtype, device) for matrix in packed]
    for tensor, weight in zip(packed, weights, strict=True):
        if tensor.outlier_columns is not None or (
            tensor.input and not weight.problem.activation_kind
        ):
            raise MixedSchemesError
    problems = {replace(weight.problem, out_features=0) for weight in weights}
    if len(packed) < len(matrices) or len(problems) > 1:
        raise MixedSchemesError
    if len(weights) == 1:
        return weights[0]
    tile = weights[0].problem.tile_rows
    if any(weight.problem.out_features % tile for weight in weights[:-1]):
        raise MixedSchemesError
    rows = sum(weight.problem.out_features for weight in weights)
    parameters = {}
    for name, value in weights[0].parameters.items():
        values = [weight.parameters[name] for weight in weights]
        if name in grouped.SHARED_TENSORS and not all(
            torch.equal(value, other) for other in values
        ):
            raise MixedSchemesError
        if len({other.dtype for other in values}) > 1:
            raise MixedSchemesError
        parameters[name] = value if name in grouped.SHARED_TENSORS else torch.cat(values)
    codes = torch.cat([weight.codes for weight in weights])
    return KernelWeight(replace(weights[0].problem, out_features=rows), codes, parameters)


def _create_linear(
    weight: QuantizedTensor | Tensor, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    if isinstance(weight, QuantizedTensor):
        return PackedLinear(weight, None, dtype, device)
    unpacked = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    unpacked.weight = nn.Parameter(weight.to(device, dtype), requires_grad=False)
    return unpacked
