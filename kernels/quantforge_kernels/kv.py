"""Keys and values of a cache, as they are stored: 16 or 32 bits, int8, fp8, or int4.

A page holds ``PAGE`` tokens. Quantized kinds share a scale among a run of channels of one head of
one token, written once and never changed, so that a token costs no more than its own bytes:

    int8   scale = max|x| / 127, x ~ code * scale                      run of 64 (or 32)
    fp8    scale = max|x| / 448, x ~ float8_e4m3fn * scale             run of 64 (or 32)
    int4   scale = (max - min) / 15, x ~ code * scale + min            run of 32

Scales and minima are float16. A byte of int4 holds channel ``j`` (low) and ``j + head / 2`` (high).
A head of another width is one run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge_kernels.kv_runs import row_bytes, run_of

PAGE = 32
MOST = {"int8": 127.0, "fp8": 448.0}
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
SMALLEST = 2.0**-14  # scale


@dataclass(frozen=True, slots=True)
class Store:
    """Codes ``[..., kv_heads, head]``, and scales and minima ``[..., kv_heads, runs]`` or nothing."""

    codes: Tensor
    scales: Tensor | None = None
    lows: Tensor | None = None

    @property
    def kind(self) -> str:
        """Return how it stores, one of `kv_runs.KINDS`: the type of the codes says so."""
        return next((kind for kind, dtype in CODES.items() if dtype == self.codes.dtype), "")

    def each(self) -> tuple[Tensor, ...]:
        """Return the tensors that are there."""
        return tuple(part for part in (self.codes, self.scales, self.lows) if part is not None)


def empty(
    shape: tuple[int, ...], head: int, kind: str, dtype: torch.dtype, device: torch.device
) -> Store:
    """Allocate a store of ``[*shape, head]`` values (zeros)."""

    def zeros(width: int, kind_of: torch.dtype) -> Tensor:
        return torch.zeros(*shape, width, dtype=kind_of, device=device)

    if not kind:
        return Store(zeros(head, dtype))
    runs = head // run_of(head, kind)
    codes = zeros(head // 2 if kind == "int4" else head, CODES[kind])
    lows = zeros(runs, torch.float16) if kind == "int4" else None
    return Store(codes, zeros(runs, torch.float16), lows)


def spread(scale: Tensor, kv_heads: int, head: int, kind: str) -> Tensor:
    """Expand a scale measured beforehand, one or ``[kv_heads]``, to every run: ``[kv_heads, runs]``."""
    return scale.float().reshape(-1, 1).expand(kv_heads, head // run_of(head, kind)).contiguous()


def encode(x: Tensor, kind: str, scale: Tensor | None = None) -> Store:
    """Quantize ``[..., kv_heads, head]``; with a ``scale`` of `spread` nothing is measured."""
    if not kind:
        return Store(x)
    runs = x.float().reshape(*x.shape[:-1], -1, run_of(x.shape[-1], kind))
    if kind == "int4":
        low = runs.amin(-1, keepdim=True).half()
        scale = ((runs.amax(-1, keepdim=True) - low.float()) / 15).clamp(min=SMALLEST).half()
        codes = ((runs - low.float()) / scale.float()).round().clamp(0, 15).byte().flatten(-2)
        first, second = codes.chunk(2, -1)
        return Store(first | (second << 4), scale[..., 0], low[..., 0])
    most = MOST[kind]
    if scale is None:
        scale = runs.abs().amax(-1) / most
    scale = scale.clamp(min=SMALLEST).half().expand(runs.shape[:-1])[..., None]
    values = (runs / scale.float()).clamp(-most, most).flatten(-2)
    codes = values.round().to(torch.int8) if kind == "int8" else values.to(torch.float8_e4m3fn)
    return Store(codes, scale[..., 0])


def decode(store: Store, dtype: torch.dtype) -> Tensor:
    """Return the values ``[..., head]``."""
    kind = store.kind
    if not kind:
        return store.codes.to(dtype)
    assert store.scales is not None
    codes = store.codes
    if kind == "int4":
        codes = torch.cat((codes & 15, codes >> 4), -1)
    values = codes.float().view(*store.scales.shape, -1)
    values = values * store.scales.float()[..., None]
    if store.lows is not None:
        values = values + store.lows.float()[..., None]
    decoded: Tensor = values.flatten(-2).to(dtype)
    return decoded


def token_bytes(heads: int, head: int, kind: str, dtype: torch.dtype) -> int:
    """Return the bytes of the keys, or of the values, of one token of one layer."""
    return heads * row_bytes(head, kind, dtype.itemsize)
