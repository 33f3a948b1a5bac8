"""Scales of an fp8 cache: measured while calibration runs, and applied to keys and values while a model is evaluated.

The attention of transformers hands its keys, rotated, and its values to whatever stands for the cache. `CachePeaks`
stands there to measure, `RoundedCache` to round, and `listen` puts either of them there. A scale is the largest
magnitude over 448, rounded up to 8 significant bits, so that it is the same number in every type that stores it.
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
from quantforge.packers.fp8 import cast, largest

if TYPE_CHECKING:
    from quantforge.runtime.tensor_parallel import Share

GRID = "fp8_e4m3"
BITS = 8  # significant bits of a scale
LEAST = 2.0**-14  # the smallest normal float16


class CachePeaks:
    """The largest magnitude of keys and values, float32 ``[kv_heads]`` each; None before any were seen."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._turn = Lock()  # calibration rows pass a block side by side

    def update(
        self, keys: Tensor, values: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Note the largest magnitudes of ``[rows, kv_heads, tokens, head]`` by head; return both unchanged."""
        with self._turn:
            self.keys, self.values = _larger(self.keys, keys), _larger(self.values, values)
        return keys, values

    def scales(self, kind: str) -> tuple[Tensor, Tensor]:
        """Return scales of keys and values, float32: ``[kv_heads, 1, 1]`` by head, else ``[1]``.

        Raises:
            InputError: nothing was seen, or it was not finite.
        """
        return _scale(self.keys, kind), _scale(self.values, kind)


class RoundedCache:
    """Stand-in for a cache that rounds keys and values as they would be stored.

    Args:
        keys: scales, one or ``[kv_heads, 1, 1]``.
        values: likewise.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values

    def update(
        self, keys: Tensor, values: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values, both rounded."""
        return _rounded(keys, self._keys), _rounded(values, self._values)


def listen(attention: nn.Module, cache: CachePeaks | RoundedCache) -> RemovableHandle:
    """Make an attention module hand its keys and values to ``cache``, and on to the cache that it has, if any."""

    def hook(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        wrapped = kwargs.get("past_key_values")
        chosen = cache if wrapped is None else _Chain(cache, wrapped)
        return args, {**kwargs, "past_key_values": chosen}

    return attention.register_forward_pre_hook(hook, with_kwargs=True)


def listening(block: nn.Module, cache: CachePeaks | None) -> AbstractContextManager[object]:
    """Return a context in which the attention of a block hands its keys and values to ``cache``, if there is one."""
    if cache is None:
        return nullcontext()
    return listen(block.get_submodule(ATTENTION_MODULE), cache)


class _Chain:
    """Two caches in turn: one that rounds, then one that really keeps what it is given."""

    def __init__(self, first: CachePeaks | RoundedCache, second: Any) -> None:
        self._first, self._second = first, second

    def update(
        self, keys: Tensor, values: Tensor, *rest: object, **named: object
    ) -> tuple[Tensor, Tensor]:
        stored: tuple[Tensor, Tensor] = self._second.update(
            *self._first.update(keys, values), *rest, **named
        )
        return stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._second, name)


def read_scales(
    checkpoint: Checkpoint, found: KVCacheScales, device: torch.device, share: Share | None = None
) -> dict[int, tuple[Tensor, Tensor]]:
    """Read the scales of a checkpoint, by block; errors as `quantforge.formats.read_checks.require_positive`.

    With the ``share`` of a process, those of its heads.
    """

    def read(name: str) -> Tensor:
        scale = require_positive(name, checkpoint.read(name)).to(device)
        return scale if share is None else share.of_heads(scale)

    return {block: (read(keys), read(values)) for block, (keys, values) in found.names.items()}


def _larger(before: Tensor | None, x: Tensor) -> Tensor:
    peaks = x.detach().abs().amax((0, 2, 3)).float()
    return peaks if before is None else torch.maximum(before, peaks)


def _scale(peaks: Tensor | None, kind: str) -> Tensor:
    if peaks is None or not bool(peaks.isfinite().all()):
        raise InputError("keys and values of the cache were not seen, or are not finite", "")
    found = [_rounded_up(float(peak) / largest(GRID)) for peak in peaks]
    if kind == HEAD:
        return torch.tensor(found).view(-1, 1, 1)
    return torch.tensor([max(found)])


def _rounded_up(scale: float) -> float:
    scale = max(scale, LEAST)
    unit = 2.0 ** (math.frexp(scale)[1] - BITS)
    return math.ceil(scale / unit) * unit


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    step = scale.to(x.device).float()
    return (cast(x.float() / step, GRID).float() * step).to(x.dtype)
