"""The source with noise: every quantized weight is off by as much as in the artifact, in a random direction.

How far rounding moves a model depends on the model, and no fixed number of nats says it. So the divergence of an
artifact is compared with that of the source under noise of the same size, weight by weight: the artifact's own error
with random signs, inputs rounded by the same scheme with ranges of their own. Where a method kept the outputs of a
tensor nearer than chance does, the noise is made as much smaller. What is worse by far than this has errors that act
together, or computes something else than its tensors say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantforge.architectures.match import Matched, MatchedTensor, Role
from quantforge.formats import kv_scales
from quantforge.packers.input_rounding import TINY, simulate, static_scale
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.kv_cache import CachePeaks, RoundedCache, listen
from quantforge.runtime.linear import PackedLinear
from quantforge.scheme import Activation
from quantforge.verification.folded import Factors
from quantforge.verification.opening import Artifact, Original

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 0


def with_noise(
    artifact: Artifact,
    source: Original,
    factors: Factors,
    coherence: Mapping[str, float],
    caches: Mapping[int, CachePeaks],
    device: str,
) -> PreTrainedModel:
    """Load the source and disturb it; errors as `load`.

    Args:
        artifact: whose errors are taken.
        source: what is disturbed.
        factors: what was folded, so that errors are those of the source's own weights.
        coherence: by stored name, see `Deviation`.
        caches: by block, the largest keys and values, where the artifact rounds them.
        device: where it computes.
    """
    loaded = source.load(device, packed_experts=False)
    model, names = loaded.model, loaded.names
    assert names is not None
    converted: dict[str, Tensor] = {}  # what the running model holds in another form
    for tensor, found, noisy in _noisy(artifact, source, factors, coherence):
        value = noisy.to(device)
        own = source.matched.by_name.get(tensor.name)
        stored = own.stored.name if own else ""
        if own and own.expert >= 0 and own.block >= 0 and source.matched.layers:
            _set_expert(model, source.matched, own, value)
            continue
        if stored in names.places:
            names.places[stored].view(model.get_parameter(names.runtime(stored))).copy_(value)
            continue
        if own and names.sources[names.runtime(stored)].rule is not None:
            converted[stored] = value
            continue
        runtime = names.runtime(stored) if own else tensor.name
        turned = own is not None and own.transposed
        linear = _placed(model, runtime.removesuffix(".weight"), value.T if turned else value)
        if found.input is not None:
            columns = factors.columns.get(tensor.name.removesuffix(".weight"))
            _round_inputs(linear, found.input, columns, found.outlier_columns)
    for name in dict.fromkeys(map(names.runtime, converted)):
        made = names.make(
            names.sources[name],
            lambda part: converted.get(part, source.checkpoint.read(part).to(device).float()),
        )
        for parameter, value in made.items():
            model.get_parameter(parameter).copy_(value)
    for block, peaks in caches.items():
        attention = f"{source.matched.block_name(block)}.{kv_scales.ATTENTION}"
        scales = (value.to(device) for value in peaks.scales(kv_scales.HEAD))
        listen(model.get_submodule(attention), RoundedCache(*scales))
    if artifact.matched.tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model


def _noisy(
    artifact: Artifact, source: Original, factors: Factors, coherence: Mapping[str, float]
) -> Iterator[tuple[MatchedTensor, QuantizedTensor, Tensor]]:
    """Yield what the artifact holds quantized, and the source's weight with noise; arguments as `with_noise`."""
    generator = torch.Generator().manual_seed(SEED)
    for tensor in artifact.matched.tensors:
        layout, weight = artifact.layout(tensor), source.weight(tensor.name)
        if layout is None or weight is None or tensor.role is Role.FOREIGN:
            continue
        module = tensor.name.removesuffix(".weight")
        found = artifact.unpack(layout)
        if found.shape != tuple(weight.shape):
            continue
        error = found.decode() - factors.applied(module, weight)
        error *= torch.randint(0, 2, error.shape, generator=generator, dtype=torch.int8) * 2 - 1
        error *= min(1.0, coherence.get(tensor.stored.name, 1.0)) ** 0.5
        yield tensor, found, weight + factors.removed(module, error)


def _set_expert(
    model: PreTrainedModel, matched: Matched, tensor: MatchedTensor, value: Tensor
) -> None:
    """Overwrite the matrix of an expert in the stack of the running model."""
    place = matched.place(tensor)
    stack = f"{matched.block_name(tensor.block)}.{place.stack.parameter}"
    place.view(model.get_parameter(stack)).copy_(value)


def _placed(model: PreTrainedModel, name: str, value: Tensor) -> nn.Module:
    """Put a weight, as it is stored, into a module, which is replaced where it holds codes; return the module."""
    module: nn.Module = model.get_submodule(name)
    if isinstance(module, PackedLinear):
        plain = nn.Linear(value.shape[1], value.shape[0], bias=False, device="meta")
        plain.register_parameter("bias", module.bias)
        model.set_submodule(name, plain)
        module = plain
    module.weight = nn.Parameter(value.contiguous(), requires_grad=False)
    return module


def _round_inputs(
    module: nn.Module, activation: Activation, columns: Tensor | None, kept: Tensor | None
) -> None:
    """Let a module read its inputs as an engine's kernel does, in ranges that fit them."""
    fitting = activation
    if activation.grid != "nvfp4" and not activation.dynamic:
        fitting = replace(activation, dynamic=True)

    def rounded(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = args[0]
        rows = x.reshape(-1, x.shape[-1]).float()
        rows = rows if columns is None else rows / columns
        scale = None
        if fitting.grid == "nvfp4":
            peak = max(float(rows.abs().amax()), TINY)
            scale = torch.tensor([[static_scale(fitting, rows, peak, "absmax")]])
        rows = simulate(rows, fitting, scale, kept)
        rows = rows if columns is None else rows * columns
        return (rows.view(x.shape).to(x.dtype), *args[1:])

    module.register_forward_pre_hook(rounded)
