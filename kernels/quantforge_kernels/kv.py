"""Storage of cached keys and values: unquantized, int8, fp8 or int4.

A page holds ``PAGE_SIZE`` tokens. In the quantized kinds, a group of consecutive channels of one head of one token
shares a scale. It is computed when the token is stored and never changes, so that a token costs no more than its own
bytes:

    int8   scale = max|x| / 127, x ~ code * scale                      64 (or 32) channels per scale
    fp8    scale = max|x| / 448, x ~ float8_e4m3fn * scale             64 (or 32) channels per scale
    int4   scale = (max - min) / 15, x ~ code * scale + min            32 channels per scale

Scales and minima are float16. A byte of int4 holds channel ``j`` (low half) and channel ``j + head_dim / 2`` (high
half). If the head dimension is not a multiple of these numbers, the whole head shares one scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge_kernels.kv_row_layout import channels_per_scale, row_bytes

PAGE_SIZE = 32
MAX_CODES = {"int8": 127.0, "fp8": 448.0}
CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
MIN_SCALE = 2.0**-14  # scale


@dataclass(frozen=True, slots=True)
class EncodedKV:
    """Stored keys or values: codes ``[..., kv_heads, head_dim]``; scales and minima ``[..., kv_heads, groups]``."""

    codes: Tensor
    scales: Tensor | None = None
    minima: Tensor | None = None

    @property
    def kind(self) -> str:
        """Return the storage kind, one of `kv_row_layout.CACHE_KINDS`, which the type of the codes determines."""
        return next((kind for kind, dtype in CODE_DTYPES.items() if dtype == self.codes.dtype), "")

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that exist: codes, then scales, then minima."""
        return tuple(
            tensor for tensor in (self.codes, self.scales, self.minima) if tensor is not None
        )


def allocate(
    shape: tuple[int, ...], head_dim: int, kind: str, dtype: torch.dtype, device: torch.device
) -> EncodedKV:
    """Allocate storage for ``[*shape, head_dim]`` values, filled with zeros."""

    def zeros(width: int, tensor_dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, width, dtype=tensor_dtype, device=device)

    if not kind:
        return EncodedKV(zeros(head_dim, dtype))
    groups = head_dim // channels_per_scale(head_dim, kind)
    codes = zeros(head_dim // 2 if kind == "int4" else head_dim, CODE_DTYPES[kind])
    minima = zeros(groups, torch.float16) if kind == "int4" else None
    return EncodedKV(codes, zeros(groups, torch.float16), minima)


def expand_scale(scale: Tensor, kv_heads: int, head_dim: int, kind: str) -> Tensor:
    """Expand a calibrated scale, one number or ``[kv_heads]``, to every group of channels: ``[kv_heads, groups]``."""
    return (
        scale.float()
        .reshape(-1, 1)
        .expand(kv_heads, head_dim // channels_per_scale(head_dim, kind))
        .contiguous()
    )


def encode(x: Tensor, kind: str, scale: Tensor | None = None) -> EncodedKV:
    """Quantize ``[..., kv_heads, head_dim]``; with ``scale`` (see `expand_scale`), use it instead of computing one."""
    if not kind:
        return EncodedKV(x)
    groups = x.float().reshape(*x.shape[:-1], -1, channels_per_scale(x.shape[-1], kind))
    if kind == "int4":
        minimum = groups.amin(-1, keepdim=True).half()
        scale = ((groups.amax(-1, keepdim=True) - minimum.float()) / 15).clamp(min=MIN_SCALE).half()
        codes = ((groups - minimum.float()) / scale.float()).round().clamp(0, 15).byte().flatten(-2)
        first, second = codes.chunk(2, -1)
        return EncodedKV(first | (second << 4), scale[..., 0], minimum[..., 0])
    max_code = MAX_CODES[kind]
    if scale is None:
        scale = groups.abs().amax(-1) / max_code
    scale = scale.clamp(min=MIN_SCALE).half().expand(groups.shape[:-1])[..., None]
    values = (groups / scale.float()).clamp(-max_code, max_code).flatten(-2)
    codes = values.round().to(torch.int8) if kind == "int8" else values.to(torch.float8_e4m3fn)
    return EncodedKV(codes, scale[..., 0])


def decode(store: EncodedKV, dtype: torch.dtype) -> Tensor:
    """Decode stored keys or values to ``[..., head_dim]`` in type ``dtype``."""
    kind = store.kind
    if not kind:
        return store.codes.to(dtype)
    assert store.scales is not None
    codes = store.codes
    if kind == "int4":
        codes = torch.cat((codes & 15, codes >> 4), -1)
    values = codes.float().view(*store.scales.shape, -1)
    values = values * store.scales.float()[..., None]
    if store.minima is not None:
        values = values + store.minima.float()[..., None]
    decoded: Tensor = values.flatten(-2).to(dtype)
    return decoded


def bytes_per_token(heads: int, head_dim: int, kind: str, dtype: torch.dtype) -> int:
    """Return the bytes that the keys (or the values) of one token take in one layer."""
    return heads * row_bytes(head_dim, kind, dtype.itemsize)
