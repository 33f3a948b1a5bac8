"""Carry out a planned conversion: check every value, round the embedding where that is planned, write every tensor.

A quantized layer goes through four steps: its tensors in the source are unpacked to codes and scales (`Format.unpack`),
restated in the target's scheme (`formats.convert`: int4:g128 becomes int4:g32 for GGUF, each scale four times), packed
into the target's tensors (`formats.storage`: GGUF's blocks, here q4_0, with rows in llama.cpp's order), and written.

What was rounded keeps its values. ``plain`` takes the decoded weights in one floating-point type: the one that is asked
for, else the model's own if it holds every weight, else float32.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quantforge.errors import RefusedError
from quantforge.events import Event
from quantforge.execution.progress import tell
from quantforge.files.finite_values import scan_finite
from quantforge.files.safetensors import torch_dtype
from quantforge.files.writer import WeightsWriter
from quantforge.formats import PLAIN, Compatibility, Verdict, load_format
from quantforge.formats.configuration import CASTABLE_DTYPES
from quantforge.formats.convert import compare_values, convert, input_parameters
from quantforge.formats.storage import Storage, get_storage
from quantforge.grids import PerGroup
from quantforge.planning.conversion import (
    Conversion,
    ConvertedLayer,
    rounding_command,
    stores_index,
)
from quantforge.plans import Action, TensorPlan
from quantforge.quantizers import RTN, rounder_of
from quantforge.scheme import LayerScheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor
    from quantforge.quantizers import Rounded


@dataclass(frozen=True, slots=True)
class CheckedValues:
    """What the values of a conversion tell of it.

    Attributes:
        verdict: ``"exact"``, ``"exact but for the embedding"``, or ``"inexact"`` if any layer is.
        events: of the plan, and what is lost of each layer.
    """

    verdict: str
    events: tuple[Event, ...]


@dataclass(slots=True)
class RoundedTensors:
    """The tensors of `Conversion.to_round`, by name, with the events of their rounding and figures for the manifest."""

    tensors: dict[str, QuantizedTensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)


def check_values(conversion: Conversion, *, allow_inexact: bool) -> CheckedValues:
    """Check by its values every layer that headers do not settle, and every tensor that is cast to another type.

    Args:
        conversion: which.
        allow_inexact: whether rounding of layers is accepted.

    Raises:
        RefusedError: a value is in the way, and it is no matter of rounding that was allowed.
    """
    events = [*conversion.events]
    allowed = allow_inexact or conversion.asked_type is not None
    verdicts: Counter[Verdict] = Counter()
    # What no rounding helps is refused before what --allow-inexact lets through.
    layers = sorted(conversion.layers.values(), key=lambda layer: layer.wanted is None)
    for done, layer in enumerate(layers):
        tell(layer.layout.module, done, len(layers))
        fit = layer.fit
        if fit.verdict is not Verdict.EXACT:
            fit = _layer_fit(conversion, layer)
            events += _accepted(layer.layout.module, fit, allowed=allowed)
        verdicts[fit.verdict] += 1
    for tensor in conversion.plan.tensors:
        if tensor.name not in conversion.layers and _is_cast(tensor):
            value = conversion.checkpoint.read(tensor.name)
            fit = _cast_fit(value, tensor.outputs[0].dtype)
            events += _accepted(tensor.name, fit, allowed=allowed)
            verdicts[fit.verdict] += 1
    verdict = "exact but for the embedding" if conversion.to_round else "exact"
    return CheckedValues("inexact" if verdicts[Verdict.INEXACT] else verdict, tuple(events))


def _layer_fit(conversion: Conversion, layer: ConvertedLayer) -> Compatibility:
    """Return how exactly the target holds the numbers of a layer; raise `RefusedError` for scattered columns."""
    key, wanted = conversion.plan.format, layer.wanted
    if wanted is None:
        fit = _decoded_fit(conversion, layer)
        return replace(fit, reason=f"decoded, as {key} holds none such: {fit.reason}")
    if key == PLAIN:
        return _decoded_fit(conversion, layer)
    if layer.fit.verdict is not Verdict.DEPENDS_ON_VALUES:
        return layer.fit
    tensor, _ = _read_layer(conversion, layer)
    if tensor.scheme.granularity == PerGroup(1) != layer.layout.scheme.weight.granularity:
        raise _out_of_order(conversion, layer, wanted)
    fit = compare_values(tensor, wanted.weight, load_format(key).MIN_ZERO_POINT)
    if fit.verdict is Verdict.EXACT and wanted.input != layer.layout.scheme.input:
        return Compatibility(Verdict.INEXACT, layer.fit.reason)
    if fit.verdict is Verdict.IMPOSSIBLE:
        command = rounding_command(conversion.checkpoint, key)
        return replace(fit, nearest="; ".join(filter(None, (fit.nearest, command))))
    return fit


def _accepted(name: str, fit: Compatibility, *, allowed: bool) -> list[Event]:
    """Return the event of accepted rounding, if any; raise RefusedError for what is not accepted."""
    if fit.verdict is Verdict.IMPOSSIBLE or (fit.verdict is Verdict.INEXACT and not allowed):
        hint = fit.nearest or "accept rounding with --allow-inexact"
        raise RefusedError(f"{name}: {fit.reason}", hint, tensor=name)
    return [Event("inexact", name, fit.reason)] if fit.verdict is Verdict.INEXACT else []


def round_plain(conversion: Conversion, workers: int) -> RoundedTensors:
    """Round what the source holds plainly and the result in codes: the embedding, or nothing.

    Args:
        conversion: which.
        workers: threads that round strips of rows side by side.
    """
    found = RoundedTensors()
    for tensor in conversion.to_round:
        _round_in_strips(conversion, tensor, workers, found)
    return found


def _round_in_strips(
    conversion: Conversion, tensor: TensorPlan, workers: int, found: RoundedTensors
) -> None:
    """Round a matrix to nearest, a strip of rows at a time, and add it to ``found``."""
    from quantforge.execution.data_free import RowWise, Strips, round_rows
    from quantforge.model.statistics import Statistics

    assert tensor.scheme is not None
    schemes = {tensor.name: tensor.scheme.weight}
    checkpoint, strips = conversion.checkpoint, Strips(tensor.matrix[0])

    def rounded(weight: Tensor) -> Rounded:
        weights = {tensor.name: weight}
        result = rounder_of(RTN).round_shared(weights, Statistics(), schemes, conversion.rounding)
        return result[tensor.name]

    def read(first: int, last: int) -> Tensor:
        return checkpoint.read_rows(tensor.name, first, last).float()

    with closing(round_rows([RowWise(tensor, rounded, read, strips.add)], workers)) as done:
        for _, record in done:
            found.events += [Event(**event) for event in record["events"]]
            found.figures |= record["figures"]
    found.tensors[tensor.name] = strips.whole()


def write_all(
    conversion: Conversion,
    rounded: dict[str, QuantizedTensor],
    writer: WeightsWriter,
    *,
    allow_inexact: bool,
) -> None:
    """Write every tensor of a conversion that `check_values` let through.

    Args:
        conversion: which.
        rounded: the tensors that were rounded for it, by name; each is taken out as it is written.
        writer: of its files.
        allow_inexact: whether rounding is accepted.

    Raises:
        InputError: a tensor that is kept is not finite.
    """
    storage = get_storage(conversion.plan.format)
    for number, tensor in enumerate(conversion.plan.tensors):
        tell(tensor.name, number, len(conversion.plan.tensors))
        if tensor.action is Action.DROP:
            continue
        layer = conversion.layers.get(tensor.name)
        if tensor.name in rounded:
            outputs = storage.pack(tensor, rounded.pop(tensor.name))
        elif layer is None:
            value = conversion.checkpoint.read(tensor.name)
            scan_finite(tensor.name, value)
            (output,) = tensor.outputs
            outputs = {output.name: storage.convert_unquantized(tensor, value)}
        elif layer.wanted is None or conversion.plan.format == PLAIN:
            outputs = {tensor.name: _decoded(conversion, layer)}
        else:
            outputs = _layer_outputs(
                conversion, layer, tensor, storage, allow_inexact=allow_inexact
            )
        for name, value in outputs.items():
            writer.write(name, value)


def _layer_outputs(
    conversion: Conversion,
    layer: ConvertedLayer,
    plan: TensorPlan,
    storage: Storage,
    *,
    allow_inexact: bool,
) -> dict[str, Tensor]:
    """Return the output tensors of a layer: unpacked, restated in the scheme of the target, and packed."""
    assert layer.wanted is not None
    target = load_format(conversion.plan.format)
    source, index = _read_layer(conversion, layer)
    if source.input != layer.wanted.input:  # measured parameters of another input are dropped
        dropped = input_parameters(source.parameters)
        kept = {key: value for key, value in source.parameters.items() if key not in dropped}
        source = replace(source, parameters=kept, input=layer.wanted.input)
    tensor = convert(
        source, layer.wanted.weight, target.MIN_ZERO_POINT, allow_inexact=allow_inexact
    )
    outputs = storage.pack(plan, tensor)
    if index is not None:
        outputs[f"{layer.layout.module}{target.INFO.group_index_suffix}"] = index
    return outputs


def lossless_type(conversion: Conversion) -> tuple[str | None, str]:
    """Return the type in which decoded weights lose nothing, and why it is not the model's own.

    Returns:
        ``(None, "")`` where the types that the plan has hold every weight, else ``("F32", reason)``.
    """
    for layer in conversion.layers.values():
        fit = _decoded_fit(conversion, layer)
        if fit.verdict is not Verdict.EXACT:
            return "F32", f"{layer.layout.module}: {fit.reason}"
    return None, ""


def _unpack(conversion: Conversion, layer: ConvertedLayer) -> QuantizedTensor:
    tensors = {name: conversion.checkpoint.read(name) for name in layer.layout.tensor_names}
    return load_format(conversion.source_key).unpack(layer.layout, tensors)


def _read_layer(
    conversion: Conversion, layer: ConvertedLayer
) -> tuple[QuantizedTensor, Tensor | None]:
    """Return a tensor to restate, and the group of each column where the target keeps that as it is.

    The tensor then has the groups of the files, as if their columns were in order. Elsewhere the index is None, and
    columns that are out of order have a scale each.
    """
    tensor = _unpack(conversion, layer)
    if not layer.scattered or tensor.scheme.granularity != PerGroup(1):
        return tensor, None
    form = load_format(conversion.source_key)
    name = f"{layer.layout.module}{form.INFO.group_index_suffix}"
    names = tuple(one for one in layer.layout.tensor_names if one != name)
    layout = replace(layer.layout, tensor_names=names, act_order=None)
    tensors = {one: conversion.checkpoint.read(one) for one in names}
    return form.unpack(layout, tensors), conversion.checkpoint.read(name)


def _out_of_order(
    conversion: Conversion, layer: ConvertedLayer, wanted: LayerScheme
) -> RefusedError:
    """Return that a target has no place for the index by which columns are scattered over groups."""
    module, key = layer.layout.module, conversion.plan.format
    index = f"{module}{load_format(conversion.source_key).INFO.group_index_suffix}"
    what = f"{index} scatters its columns over groups (activation order: desc_act, actorder)"
    if layer.layout.act_order is None:
        return RefusedError(
            f"{what}, which config.json does not say", "add desc_act = true there", tensor=module
        )
    if stores_index(layer.layout, wanted, load_format(key)):
        hint = "--format plain decodes the weights"
        return RefusedError(f"{what}, and its groups would have to be split", hint, tensor=module)
    return RefusedError(
        f"{what}, which is not written to {key} files",
        "--format gptq or gptq_v2 keeps the index, --format plain decodes the weights",
        tensor=module,
    )


def _decoded(conversion: Conversion, layer: ConvertedLayer) -> Tensor:
    """Return the decoded weights of a layer, in the type and the orientation in which they are written."""
    weight = _unpack(conversion, layer).decode(torch_dtype(conversion.decoded_type))
    return weight.T.contiguous() if layer.transposed else weight


def _decoded_fit(conversion: Conversion, layer: ConvertedLayer) -> Compatibility:
    """Return how exactly the type of decoded weights holds those of a layer."""
    return _cast_fit(_unpack(conversion, layer).decode(), conversion.decoded_type)


def _is_cast(tensor: TensorPlan) -> bool:
    """Return whether a kept tensor is written in another floating-point type than it has."""
    return (
        tensor.action is Action.KEEP
        and len(tensor.outputs) == 1
        and tensor.dtype in CASTABLE_DTYPES
        and tensor.dtype != tensor.outputs[0].dtype
    )


def _cast_fit(exact: Tensor, dtype: str) -> Compatibility:
    """Return how exactly a type holds numbers."""
    value = exact.to(torch_dtype(dtype))
    back = value.to(exact.dtype)
    changed = int((back != exact).sum())
    if not changed:
        return Compatibility(Verdict.EXACT)
    if not bool(value.isfinite().all()) and bool(exact.isfinite().all()):
        largest = float(exact.abs().max())
        reason = f"weights up to {largest:.4g} are outside of the range of {dtype}"
        return Compatibility(Verdict.IMPOSSIBLE, reason, "--type BF16 or --type F32 holds them")
    error = float((back - exact).double().norm() / exact.double().norm())
    reason = (
        f"{changed} of {exact.numel()} weights are not {dtype} numbers (relative error {error:.1e})"
    )
    return Compatibility(Verdict.INEXACT, reason)
