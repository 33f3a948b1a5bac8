"""Scales of fp8 KV caches: measured during calibration, and applied to keys and values during evaluation.

The attention of transformers passes its rotated keys and its values to a cache object. `CachePeaks` takes the place of
the cache to record magnitudes, `RoundedCache` to round the values, and `attach_cache` installs either of them. A scale
is the largest magnitude divided by 448, rounded up to 8 significant bits, so that every storage type represents it
exactly.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantforge.errors import InputError
from quantforge.files.reader import Checkpoint
from quantforge.formats.kv_scales import ATTENTION_MODULE, HEAD, KVCacheScales
from quantforge.formats.read_checks import require_positive
from quantforge.packers.fp8 import max_value, round_to_float8

if TYPE_CHECKING:
    from quantforge.runtime.tensor_parallel import TensorParallelRank

GRID = "fp8_e4m3"
SCALE_BITS = 8  # significant bits of a scale
MIN_SCALE = 2.0**-14  # the smallest normal float16


class CachePeaks:
    """Observer of the largest magnitudes of keys and values, float32 ``[kv_heads]`` each; None before any update."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._lock = Lock()  # several threads compute calibration rows

    def update(
        self, keys: Tensor, values: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Update the largest magnitudes per head from ``[rows, kv_heads, tokens, head]``; return both unchanged."""
        with self._lock:
            self.keys, self.values = (
                _update_peaks(self.keys, keys),
                _update_peaks(self.values, values),
            )
        return keys, values

    def scales(self, kind: str) -> tuple[Tensor, Tensor]:
        """Return the scales of keys and values, float32: ``[kv_heads, 1, 1]`` per head, else ``[1]``.

        Raises:
            InputError: no values were observed, or they were not finite.
        """
        return _scales_from_peaks(self.keys, kind), _scales_from_peaks(self.values, kind)


class RoundedCache:
    """Replacement for a cache that rounds keys and values to the stored precision.

    Args:
        keys: scales of keys, one or ``[kv_heads, 1, 1]``.
        values: scales of values, in the same form.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values

    def update(
        self, keys: Tensor, values: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values rounded to fp8."""
        return _round_to_fp8(keys, self._keys), _round_to_fp8(values, self._values)


def attach_cache(attention: nn.Module, cache: CachePeaks | RoundedCache) -> RemovableHandle:
    """Make an attention module pass its keys and values through ``cache`` before its own cache, if it has one."""

    def hook(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        wrapped = kwargs.get("past_key_values")
        attached = cache if wrapped is None else _Chain(cache, wrapped)
        return args, {**kwargs, "past_key_values": attached}

    return attention.register_forward_pre_hook(hook, with_kwargs=True)


def attached_cache(block: nn.Module, cache: CachePeaks | None) -> AbstractContextManager[object]:
    """Context manager in which the attention of a block passes its keys and values through ``cache``, unless None."""
    if cache is None:
        return nullcontext()
    return attach_cache(block.get_submodule(ATTENTION_MODULE), cache)


class _Chain:
    """Chain of two caches: the first one transforms keys and values, the second one stores them."""

    def __init__(self, first: CachePeaks | RoundedCache, second: Any) -> None:
        self._first, self._second = first, second

    def update(
        self, keys: Tensor, values: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        stored: tuple[Tensor, Tensor] = self._second.update(
            *self._first.update(keys, values), *args, **kwargs
        )
        return stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._second, name)


def read_cache_scales(
    checkpoint: Checkpoint,
    names: KVCacheScales,
    device: torch.device,
    rank: TensorParallelRank | None = None,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Read the KV cache scales of a checkpoint, by block; with ``rank``, only those of the heads of this process.

    Raises as `quantforge.formats.read_checks.require_positive` does.
    """

    def read(name: str) -> Tensor:
        scale = require_positive(name, checkpoint.read(name)).to(device)
        return scale if rank is None else rank.slice_heads(scale)

    return {block: (read(keys), read(values)) for block, (keys, values) in names.names.items()}


def _update_peaks(previous: Tensor | None, x: Tensor) -> Tensor:
    peaks = x.detach().abs().amax((0, 2, 3)).float()
    return peaks if previous is None else torch.maximum(previous, peaks)


def _scales_from_peaks(peaks: Tensor | None, kind: str) -> Tensor:
    if peaks is None or not bool(peaks.isfinite().all()):
        raise InputError("keys and values of the cache were not seen, or are not finite", "")
    scales = [_round_up_scale(float(peak) / max_value(GRID)) for peak in peaks]
    if kind == HEAD:
        return torch.tensor(scales).view(-1, 1, 1)
    return torch.tensor([max(scales)])


def _round_up_scale(scale: float) -> float:
    scale = max(scale, MIN_SCALE)
    unit = 2.0 ** (math.frexp(scale)[1] - SCALE_BITS)
    return math.ceil(scale / unit) * unit


def _round_to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    step = scale.to(x.device).float()
    return (round_to_float8(x.float() / step, GRID).float() * step).to(x.dtype)
