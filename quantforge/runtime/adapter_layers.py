"""Low-rank adapters (LoRA) on a model with packed weights, computed as in PEFT.

Each adapted linear returns ``W x + scaling * B (A x)``. This is for evaluation only: the decoder of text generation
joins linears and ignores adapters.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantforge.errors import InputError, UsageError
from quantforge.files.finite_values import check_finite
from quantforge.files.safetensors import TensorEntry, read_tensor
from quantforge.formats.sources.adapter import Adapter, LowRankUpdate, open_adapter
from quantforge.runtime.load import Loaded


def open_correction(path: Path) -> Adapter:
    """Open a low-rank adapter that corrects a quantized model.

    Raises:
        InputError: as `open_adapter` does.
        UsageError: the adapter changes more than linears.
    """
    adapter = open_adapter(path)
    unsupported = [
        change
        for change in adapter.low_rank_updates.values()
        if change.embedding or change.magnitude or change.bias
    ]
    if adapter.replaced_tensors or unsupported:
        raise UsageError(
            f"--correction {path}: it changes more than products of linears",
            "merge it into the source: --adapter DIR",
        )
    return adapter


def add_adapter(loaded: Loaded, adapter: Adapter) -> Loaded:
    """Add a low-rank adapter to the linears of a loaded model; return the model with updated sizes.

    Raises:
        InputError: the model has no such linear, or one of another shape; or a value is not finite.
    """
    added_bytes = 0
    for module, change in adapter.low_rank_updates.items():
        linear = _find_linear(loaded.model, module, change, adapter.path)
        a, b = (_load_factor(entry, loaded) for entry in (change.a, change.b))
        linear.register_forward_hook(_LowRankHook(a, b, change.scaling))
        added_bytes += change.a.nbytes + change.b.nbytes
    ranks = "/".join(
        map(str, sorted({change.a.shape[0] for change in adapter.low_rank_updates.values()}))
    )
    size = loaded.weight_bytes + added_bytes
    return replace(
        loaded,
        scheme=f"{loaded.scheme} + rank {ranks}",
        bits_per_weight_total=loaded.bits_per_weight_total * size / loaded.weight_bytes,
        weight_bytes=size,
        held_bytes=loaded.held_bytes + added_bytes,
        read_bytes=loaded.read_bytes + added_bytes,
    )


class _LowRankHook:
    """Forward hook that adds the low-rank product to the output of a linear."""

    def __init__(self, a: Tensor, b: Tensor, scaling: float) -> None:
        self._a, self._b, self._scaling = a, b, scaling

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        projected = functional.linear(inputs[0].to(self._a), self._a)
        return output + (self._scaling * functional.linear(projected, self._b)).to(output)


def _find_linear(model: nn.Module, name: str, change: LowRankUpdate, path: Path) -> nn.Module:
    module: nn.Module | None = dict(model.named_modules()).get(name)
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else ()
    if type(module).__name__ == "Conv1D":  # [in, out]
        shape = shape[::-1]
    if module is None or shape != change.shape:
        shape_text = f"has {list(shape)}" if shape else "has no such linear"
        raise InputError(
            f"{path}: the adapter changes {name} {list(change.shape)}, the model {shape_text}",
            "the adapter is of another model",
        )
    return module


def _load_factor(entry: TensorEntry, loaded: Loaded) -> Tensor:
    value = read_tensor(entry)
    check_finite(entry.name, value, entry.file)
    return value.to(next(loaded.model.parameters()).device, torch.float32)
