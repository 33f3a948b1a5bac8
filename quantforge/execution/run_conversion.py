"""Carry out a planned conversion: check all values, round the embedding if planned, and write every tensor.

A quantized layer is converted in four steps: its tensors are unpacked to codes and scales (`Format.unpack`), converted
to the target's scheme (`formats.convert`: int4:g128 becomes int4:g32 for GGUF by repeating each scale four times),
packed into the target's tensors (`formats.storage`: blocks of q4_0 for GGUF, with rows in llama.cpp's order), and
written.

Quantized values do not change. ``plain`` stores the decoded weights in one floating-point type: the requested one, else
the model's own if it represents every weight exactly, else float32.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quantforge.errors import RefusedError
from quantforge.events import Event
from quantforge.files.finite_values import check_finite
from quantforge.files.safetensors import torch_dtype
from quantforge.files.writer import WeightsWriter
from quantforge.formats import PLAIN, Compatibility, Verdict, load_format
from quantforge.formats.configuration import CASTABLE_DTYPES
from quantforge.formats.convert import compare_values, convert, input_parameters
from quantforge.formats.storage import Storage, get_storage
from quantforge.grids import PerGroup
from quantforge.planning.conversion import (
    ConvertedLayer,
    ExportPlan,
    requantize_hint,
    stores_group_index,
)
from quantforge.plans import Action, TensorPlan
from quantforge.progress import report_step
from quantforge.quantizers import RTN, load_rounder
from quantforge.scheme import LayerScheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor
    from quantforge.quantizers import Rounded


@dataclass(frozen=True, slots=True)
class CheckedValues:
    """Result of checking the values of a conversion.

    Attributes:
        verdict: ``"exact"``, ``"exact but for the embedding"``, or ``"inexact"`` if any layer is.
        events: events of the plan, and the loss of each inexact layer.
    """

    verdict: str
    events: tuple[Event, ...]


@dataclass(slots=True)
class RoundedTensors:
    """The tensors of `ExportPlan.tensors_to_quantize` by name, with events and with figures for the manifest."""

    tensors: dict[str, QuantizedTensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)


def check_values(conversion: ExportPlan, *, allow_inexact: bool) -> CheckedValues:
    """Check the values of each layer that headers do not decide, and of each tensor that is cast to another type.

    Args:
        conversion: the planned conversion.
        allow_inexact: whether rounding of layers is accepted.

    Raises:
        RefusedError: a value cannot be stored, or would be rounded without permission.
    """
    events = [*conversion.events]
    allow_rounding = allow_inexact or conversion.requested_dtype is not None
    verdicts: Counter[Verdict] = Counter()
    # Refuse what no option allows before what --allow-inexact would allow.
    layers = sorted(conversion.layers.values(), key=lambda layer: layer.target_scheme is None)
    for num_checked, layer in enumerate(layers):
        report_step(layer.layout.module, num_checked, len(layers))
        compatibility = layer.fit
        if compatibility.verdict is not Verdict.EXACT:
            compatibility = _layer_fit(conversion, layer)
            events += _accept_or_refuse(
                layer.layout.module, compatibility, allow_rounding=allow_rounding
            )
        verdicts[compatibility.verdict] += 1
    for tensor in conversion.plan.tensors:
        if tensor.name not in conversion.layers and _is_cast(tensor):
            value = conversion.checkpoint.read(tensor.name)
            compatibility = _cast_fit(value, tensor.outputs[0].dtype)
            events += _accept_or_refuse(tensor.name, compatibility, allow_rounding=allow_rounding)
            verdicts[compatibility.verdict] += 1
    verdict = "exact but for the embedding" if conversion.tensors_to_quantize else "exact"
    return CheckedValues("inexact" if verdicts[Verdict.INEXACT] else verdict, tuple(events))


def _layer_fit(conversion: ExportPlan, layer: ConvertedLayer) -> Compatibility:
    """Return how exactly the target represents a layer; raise `RefusedError` for scattered group indices."""
    key, target_scheme = conversion.plan.format, layer.target_scheme
    if target_scheme is None:
        compatibility = _decoded_fit(conversion, layer)
        return replace(
            compatibility, reason=f"decoded, as {key} holds none such: {compatibility.reason}"
        )
    if key == PLAIN:
        return _decoded_fit(conversion, layer)
    if layer.fit.verdict is not Verdict.DEPENDS_ON_VALUES:
        return layer.fit
    tensor, _ = _read_layer(conversion, layer)
    if tensor.scheme.granularity == PerGroup(1) != layer.layout.scheme.weight.granularity:
        raise _group_index_error(conversion, layer, target_scheme)
    compatibility = compare_values(tensor, target_scheme.weight, load_format(key).MIN_ZERO_POINT)
    if compatibility.verdict is Verdict.EXACT and target_scheme.input != layer.layout.scheme.input:
        return Compatibility(Verdict.INEXACT, layer.fit.reason)
    if compatibility.verdict is Verdict.IMPOSSIBLE:
        command = requantize_hint(conversion.checkpoint, key)
        return replace(
            compatibility, nearest="; ".join(filter(None, (compatibility.nearest, command)))
        )
    return compatibility


def _accept_or_refuse(
    name: str, compatibility: Compatibility, *, allow_rounding: bool
) -> list[Event]:
    """Return the event of an accepted inexact layer, if any; raise RefusedError if it is not accepted."""
    if compatibility.verdict is Verdict.IMPOSSIBLE or (
        compatibility.verdict is Verdict.INEXACT and not allow_rounding
    ):
        hint = compatibility.nearest or "accept rounding with --allow-inexact"
        raise RefusedError(f"{name}: {compatibility.reason}", hint, tensor=name)
    return (
        [Event("inexact", name, compatibility.reason)]
        if compatibility.verdict is Verdict.INEXACT
        else []
    )


def round_unquantized(conversion: ExportPlan, workers: int) -> RoundedTensors:
    """Round tensors that are unquantized in the source but quantized in the result (the embedding).

    Args:
        conversion: the planned conversion.
        workers: number of threads that round strips of rows in parallel.
    """
    rounded = RoundedTensors()
    for tensor in conversion.tensors_to_quantize:
        _round_in_strips(conversion, tensor, workers, rounded)
    return rounded


def _round_in_strips(
    conversion: ExportPlan, tensor: TensorPlan, workers: int, results: RoundedTensors
) -> None:
    """Round a matrix to nearest, a strip of rows at a time, and add it to ``results``."""
    from quantforge.execution.data_free import StripAssembler, StripRounding, round_in_strips
    from quantforge.model.statistics import Statistics

    assert tensor.scheme is not None
    schemes = {tensor.name: tensor.scheme.weight}
    checkpoint, strips = conversion.checkpoint, StripAssembler(tensor.matrix[0])

    def rounded(weight: Tensor) -> Rounded:
        weights = {tensor.name: weight}
        result = load_rounder(RTN).round_matrices(
            weights, Statistics(), schemes, conversion.rounding
        )
        return result[tensor.name]

    def read(first: int, last: int) -> Tensor:
        return checkpoint.read_rows(tensor.name, first, last).float()

    with closing(
        round_in_strips([StripRounding(tensor, rounded, read, strips.add)], workers)
    ) as finished:
        for _, record in finished:
            results.events += [Event(**event) for event in record["events"]]
            results.figures |= record["metrics"]
    results.tensors[tensor.name] = strips.assembled()


def write_tensors(
    conversion: ExportPlan,
    rounded: dict[str, QuantizedTensor],
    writer: WeightsWriter,
    *,
    allow_inexact: bool,
) -> None:
    """Write every tensor of a conversion that passed `check_values`.

    Args:
        conversion: the planned conversion.
        rounded: tensors from `round_unquantized` by name; each is removed once written, to free memory.
        writer: writer of the output files.
        allow_inexact: whether rounding of layers is accepted.

    Raises:
        InputError: an unquantized tensor is not finite.
    """
    storage = get_storage(conversion.plan.format)
    for number, tensor in enumerate(conversion.plan.tensors):
        report_step(tensor.name, number, len(conversion.plan.tensors))
        if tensor.action is Action.DROP:
            continue
        layer = conversion.layers.get(tensor.name)
        if tensor.name in rounded:
            outputs = storage.pack(tensor, rounded.pop(tensor.name))
        elif layer is None:
            value = conversion.checkpoint.read(tensor.name)
            check_finite(tensor.name, value)
            (output,) = tensor.outputs
            outputs = {output.name: storage.convert_unquantized(tensor, value)}
        elif layer.target_scheme is None or conversion.plan.format == PLAIN:
            outputs = {tensor.name: _decoded(conversion, layer)}
        else:
            outputs = _convert_layer(
                conversion, layer, tensor, storage, allow_inexact=allow_inexact
            )
        for name, value in outputs.items():
            writer.write(name, value)


def _convert_layer(
    conversion: ExportPlan,
    layer: ConvertedLayer,
    plan: TensorPlan,
    storage: Storage,
    *,
    allow_inexact: bool,
) -> dict[str, Tensor]:
    """Return the output tensors of a layer: unpack it, convert it to the scheme of the target, and pack it."""
    assert layer.target_scheme is not None
    target = load_format(conversion.plan.format)
    source, index = _read_layer(conversion, layer)
    if source.input != layer.target_scheme.input:  # drop measured parameters of a different input
        dropped_keys = input_parameters(source.parameters)
        kept_parameters = {
            key: value for key, value in source.parameters.items() if key not in dropped_keys
        }
        source = replace(source, parameters=kept_parameters, input=layer.target_scheme.input)
    tensor = convert(
        source, layer.target_scheme.weight, target.MIN_ZERO_POINT, allow_inexact=allow_inexact
    )
    outputs = storage.pack(plan, tensor)
    if index is not None:
        outputs[f"{layer.layout.module}{target.INFO.group_index_suffix}"] = index
    return outputs


def lossless_dtype(conversion: ExportPlan) -> tuple[str | None, str]:
    """Return the type that represents the decoded weights exactly, and why it is not the model's own.

    Returns:
        ``(None, "")`` if the planned types represent every weight, else ``("F32", reason)``.
    """
    for layer in conversion.layers.values():
        compatibility = _decoded_fit(conversion, layer)
        if compatibility.verdict is not Verdict.EXACT:
            return "F32", f"{layer.layout.module}: {compatibility.reason}"
    return None, ""


def _unpack(conversion: ExportPlan, layer: ConvertedLayer) -> QuantizedTensor:
    tensors = {name: conversion.checkpoint.read(name) for name in layer.layout.tensor_names}
    return load_format(conversion.source_format).unpack(layer.layout, tensors)


def _read_layer(
    conversion: ExportPlan, layer: ConvertedLayer
) -> tuple[QuantizedTensor, Tensor | None]:
    """Return the quantized layer and, if the target stores it unchanged, the group index of each column.

    With an index, the layer has the groups of the files, as if columns were in order. Otherwise the index is None, and
    columns that are out of order each have their own scale.
    """
    tensor = _unpack(conversion, layer)
    if not layer.has_group_index or tensor.scheme.granularity != PerGroup(1):
        return tensor, None
    source_format = load_format(conversion.source_format)
    name = f"{layer.layout.module}{source_format.INFO.group_index_suffix}"
    names = tuple(tensor_name for tensor_name in layer.layout.tensor_names if tensor_name != name)
    layout = replace(layer.layout, tensor_names=names, act_order=None)
    tensors = {tensor_name: conversion.checkpoint.read(tensor_name) for tensor_name in names}
    return source_format.unpack(layout, tensors), conversion.checkpoint.read(name)


def _group_index_error(
    conversion: ExportPlan, layer: ConvertedLayer, target_scheme: LayerScheme
) -> RefusedError:
    """Return the error for a target that cannot store the index that scatters columns over groups."""
    module, key = layer.layout.module, conversion.plan.format
    index = f"{module}{load_format(conversion.source_format).INFO.group_index_suffix}"
    message = f"{index} scatters its columns over groups (activation order: desc_act, actorder)"
    if layer.layout.act_order is None:
        return RefusedError(
            f"{message}, which config.json does not say", "add desc_act = true there", tensor=module
        )
    if stores_group_index(layer.layout, target_scheme, load_format(key)):
        hint = "--format plain decodes the weights"
        return RefusedError(
            f"{message}, and its groups would have to be split", hint, tensor=module
        )
    return RefusedError(
        f"{message}, which is not written to {key} files",
        "--format gptq or gptq_v2 keeps the index, --format plain decodes the weights",
        tensor=module,
    )


def _decoded(conversion: ExportPlan, layer: ConvertedLayer) -> Tensor:
    """Return the decoded weights of a layer, in the type and orientation in which they are written."""
    weight = _unpack(conversion, layer).decode(torch_dtype(conversion.decoded_type))
    return weight.T.contiguous() if layer.transposed else weight


def _decoded_fit(conversion: ExportPlan, layer: ConvertedLayer) -> Compatibility:
    """Return how exactly the type of decoded weights represents those of a layer."""
    return _cast_fit(_unpack(conversion, layer).decode(), conversion.decoded_type)


def _is_cast(tensor: TensorPlan) -> bool:
    """Return whether an unquantized tensor is written in a different floating-point type."""
    return (
        tensor.action is Action.KEEP
        and len(tensor.outputs) == 1
        and tensor.dtype in CASTABLE_DTYPES
        and tensor.dtype != tensor.outputs[0].dtype
    )


def _cast_fit(values: Tensor, dtype: str) -> Compatibility:
    """Return how exactly a type represents the values."""
    value = values.to(torch_dtype(dtype))
    round_tripped = value.to(values.dtype)
    num_changed = int((round_tripped != values).sum())
    if not num_changed:
        return Compatibility(Verdict.EXACT)
    if not bool(value.isfinite().all()) and bool(values.isfinite().all()):
        largest = float(values.abs().max())
        reason = f"weights up to {largest:.4g} are outside of the range of {dtype}"
        return Compatibility(Verdict.IMPOSSIBLE, reason, "--type BF16 or --type F32 holds them")
    error = float((round_tripped - values).double().norm() / values.double().norm())
    reason = f"{num_changed} of {values.numel()} weights are not {dtype} numbers (relative error {error:.1e})"
    return Compatibility(Verdict.INEXACT, reason)
