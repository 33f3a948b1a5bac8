"""A planned conversion carried out: every tensor settled before the first byte is written, then written.

What was rounded stays as it was, in other words; an embedding that is the head too is rounded where that is planned.
``plain`` takes the decoded weights in one floating-point type: the one that is asked for, else the model's own if it
holds every weight, else float32.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.checkpoint.finite_values import scan_finite
from quantforge.checkpoint.safetensors import torch_dtype
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.errors import RefusedError
from quantforge.events import Event
from quantforge.execution.progress import tell
from quantforge.formats import Fit, Verdict, format_of
from quantforge.formats.configuration import NUMBERS
from quantforge.formats.convert import convert, settle
from quantforge.formats.storage import storage_of
from quantforge.grids import PerGroup
from quantforge.planning.conversion import DECODED, Conversion, ConvertedLayer, rounding_command
from quantforge.plans import Action, TensorPlan
from quantforge.quantizers import PLAIN, rounder_of

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor
    from quantforge.quantizers import Rounded


def settle_all(conversion: Conversion, *, allow_inexact: bool, workers: int = 1) -> str:
    """Settle every layer, by its values where headers do not, and round what is to be rounded.

    Args:
        conversion: which; gets the events and what was rounded.
        allow_inexact: whether rounding of layers is accepted.
        workers: threads that round strips of the embedding side by side.

    Returns:
        ``"exact"``, ``"exact but for the embedding"``, or ``"inexact"`` if any layer is.

    Raises:
        RefusedError: a value is in the way, and it is no matter of rounding that was allowed.
    """
    verdicts: Counter[Verdict] = Counter()
    # What no rounding helps is refused before what --allow-inexact lets through.
    layers = sorted(conversion.layers.values(), key=lambda layer: layer.wanted is None)
    for done, layer in enumerate(layers):
        tell(layer.layout.module, done, len(conversion.layers))
        verdicts[_settled(conversion, layer, allow_inexact)] += 1
    for tensor in conversion.plan.tensors:
        if tensor.name not in conversion.layers and _is_cast(tensor):
            fit = _cast(tensor, conversion.checkpoint.read(tensor.name))[1]
            verdicts[_accepted(conversion, tensor.name, fit, allow_inexact=allow_inexact)] += 1
    for tensor in conversion.rounded:
        _round(conversion, tensor, workers)
    if verdicts[Verdict.INEXACT]:
        return "inexact"
    return "exact but for the embedding" if conversion.rounded else "exact"


def _round(conversion: Conversion, tensor: TensorPlan, workers: int) -> None:
    """Round a matrix that the source holds plainly to nearest, in strips of rows."""
    from quantforge.execution.data_free import RowWise, Strips, round_rows
    from quantforge.model.statistics import Statistics

    assert tensor.scheme is not None
    scheme, checkpoint, strips = (
        tensor.scheme.weight,
        conversion.checkpoint,
        Strips(tensor.matrix[0]),
    )

    def rounded(weight: Tensor) -> Rounded:
        weights, schemes = {tensor.name: weight}, {tensor.name: scheme}
        found = rounder_of(PLAIN).round_shared(weights, Statistics(), schemes, conversion.rounding)
        return found[tensor.name]

    def read(first: int, last: int) -> Tensor:
        return checkpoint.read_rows(tensor.name, first, last).float()

    with closing(round_rows([RowWise(tensor, rounded, read, strips.add)], workers)) as done:
        for _, record in done:
            conversion.events += [Event(**event) for event in record["events"]]
            conversion.figures |= record["figures"]
    conversion.made[tensor.name] = strips.whole()


def write_all(
    conversion: Conversion, writer: WeightsWriter, *, allow_inexact: bool
) -> None:  # fmt: skip
    """Write every tensor of a conversion that `settle_all` let through.

    Args:
        conversion: which.
        writer: of its files.
        allow_inexact: whether rounding is accepted.

    Raises:
        InputError: a tensor that is kept is not finite.
    """
    target, storage = format_of(conversion.plan.format), storage_of(conversion.plan.format)
    for number, tensor in enumerate(conversion.plan.tensors):
        tell(tensor.name, number, len(conversion.plan.tensors))
        layer = conversion.layers.get(tensor.name)
        if tensor.action is Action.DROP:
            continue
        if tensor.name in conversion.made:
            found = storage.pack(tensor, conversion.made.pop(tensor.name))
        elif layer is None:
            value = conversion.checkpoint.read(tensor.name)
            scan_finite(tensor.name, value)
            (stored,) = tensor.stored
            value = _cast(tensor, value)[0] if _is_cast(tensor) else value
            found = {stored.name: storage.keep(tensor, value)}
        elif layer.wanted is None or conversion.plan.format == DECODED:
            found = {tensor.name: _decoded(conversion, layer)[0]}
        else:
            source, index = _in_order(conversion, layer)
            same = convert(
                layer.with_inputs(source), layer.wanted.weight, target.LEAST_ZERO,
                allow_inexact=allow_inexact,
            )  # fmt: skip
            found = storage.pack(tensor, same)
            if index is not None:
                found[f"{layer.layout.module}{target.ABOUT.group_index}"] = index
        for name, value in found.items():
            writer.write(name, value)


def lossless_type(conversion: Conversion) -> tuple[str | None, str]:
    """Return the type in which decoded weights lose nothing, and why it is not the model's own.

    Returns:
        ``(None, "")`` where the types that the plan has hold every weight, else ``("F32", reason)``.
    """
    for layer in conversion.layers.values():
        fit = _decoded(conversion, layer)[1]
        if fit.verdict is not Verdict.EXACT:
            return "F32", f"{layer.layout.module}: {fit.reason}"
    return None, ""


def _settled(conversion: Conversion, layer: ConvertedLayer, allow_inexact: bool) -> Verdict:
    fit = layer.fit
    if fit.verdict is Verdict.EXACT:
        return fit.verdict
    if layer.wanted is None or conversion.plan.format == DECODED:
        fit = _decoded(conversion, layer)[1]
        if layer.wanted is None:
            fit = replace(
                fit, reason=f"decoded, as {conversion.plan.format} holds none such: {fit.reason}"
            )
    elif fit.verdict is Verdict.READ:
        target = format_of(conversion.plan.format)
        tensor, _ = _in_order(conversion, layer)
        if tensor.scheme.granularity == PerGroup(1) != layer.layout.scheme.weight.granularity:
            raise _out_of_order(conversion, layer)
        fit = settle(tensor, layer.wanted.weight, target.LEAST_ZERO)
        if fit.verdict is Verdict.EXACT and layer.wanted.input != layer.layout.scheme.input:
            fit = Fit(Verdict.INEXACT, layer.fit.reason)
        if fit.verdict is Verdict.IMPOSSIBLE:
            command = rounding_command(conversion.checkpoint, conversion.plan.format)
            fit = replace(fit, nearest="; ".join(filter(None, (fit.nearest, command))))
    return _accepted(conversion, layer.layout.module, fit, allow_inexact=allow_inexact)


def _accepted(conversion: Conversion, name: str, fit: Fit, *, allow_inexact: bool) -> Verdict:
    """Record accepted rounding as an event and return the verdict; raise RefusedError for what is not accepted."""
    allowed = allow_inexact or conversion.asked_type
    if fit.verdict is Verdict.IMPOSSIBLE or (fit.verdict is Verdict.INEXACT and not allowed):
        hint = fit.nearest or "accept rounding with --allow-inexact"
        raise RefusedError(f"{name}: {fit.reason}", hint, tensor=name)
    if fit.verdict is Verdict.INEXACT:
        conversion.events.append(Event("inexact", name, fit.reason))
    return fit.verdict


def _unpacked(conversion: Conversion, layer: ConvertedLayer) -> QuantizedTensor:
    stored = {name: conversion.checkpoint.read(name) for name in layer.layout.stored}
    return format_of(conversion.source_key).unpack(layer.layout, stored)


def _in_order(
    conversion: Conversion, layer: ConvertedLayer
) -> tuple[QuantizedTensor, Tensor | None]:
    """Return a tensor to restate, and the group of each column where the target keeps that as it is.

    The tensor then has the groups of the files, as if their columns were in order. Elsewhere the index is None, and
    columns that are out of order have a scale each.
    """
    tensor = _unpacked(conversion, layer)
    if not layer.plan.scattered or tensor.scheme.granularity != PerGroup(1):
        return tensor, None
    form = format_of(conversion.source_key)
    name = f"{layer.layout.module}{form.ABOUT.group_index}"
    names = tuple(one for one in layer.layout.stored if one != name)
    layout = replace(layer.layout, stored=names, scattered=None)
    stored = {one: conversion.checkpoint.read(one) for one in names}
    return form.unpack(layout, stored), conversion.checkpoint.read(name)


def _out_of_order(conversion: Conversion, layer: ConvertedLayer) -> RefusedError:
    """Return that a target has no place for the index by which columns are scattered over groups."""
    module, key = layer.layout.module, conversion.plan.format
    index = f"{module}{format_of(conversion.source_key).ABOUT.group_index}"
    what = f"{index} scatters its columns over groups (activation order: desc_act, actorder)"
    if layer.layout.scattered is None:
        return RefusedError(
            f"{what}, which config.json does not say", "add desc_act = true there", tensor=module
        )
    target = format_of(key).ABOUT
    if f"{module}{target.group_index}" in [item.name for item in layer.plan.stored]:
        hint = "--format plain decodes the weights"
        return RefusedError(f"{what}, and its groups would have to be split", hint, tensor=module)
    return RefusedError(
        f"{what}, which is not written to {key} files",
        "--format gptq or gptq_v2 keeps the index, --format plain decodes the weights",
        tensor=module,
    )


def _decoded(conversion: Conversion, layer: ConvertedLayer) -> tuple[Tensor, Fit]:
    value, fit = _cast(layer.plan, _unpacked(conversion, layer).decode())
    return (value.T.contiguous() if layer.plan.transposed else value), fit


def _is_cast(tensor: TensorPlan) -> bool:
    """Return whether a kept tensor is stored in another floating-point type than it has."""
    return (
        tensor.action is Action.KEEP
        and len(tensor.stored) == 1
        and tensor.dtype in NUMBERS
        and tensor.dtype != tensor.stored[0].dtype
    )


def _cast(tensor: TensorPlan, exact: Tensor) -> tuple[Tensor, Fit]:
    """Return numbers in the type in which they are stored, and how exactly that type holds them."""
    dtype = tensor.stored[0].dtype
    value = exact.to(torch_dtype(dtype))
    back = value.to(exact.dtype)
    changed = int((back != exact).sum())
    if not changed:
        return value, Fit(Verdict.EXACT)
    if not bool(value.isfinite().all()) and bool(exact.isfinite().all()):
        largest = float(exact.abs().max())
        reason = f"weights up to {largest:.4g} are outside of the range of {dtype}"
        return value, Fit(Verdict.IMPOSSIBLE, reason, "--type BF16 or --type F32 holds them")
    error = float((back - exact).double().norm() / exact.double().norm())
    reason = (
        f"{changed} of {exact.numel()} weights are not {dtype} numbers (relative error {error:.1e})"
    )
    return value, Fit(Verdict.INEXACT, reason)
