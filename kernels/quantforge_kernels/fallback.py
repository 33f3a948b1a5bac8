"""The reference kernel in plain torch: every grid, bit width, group size, type and device.

Codes stay packed at exactly ``bits`` bits each (rows padded to a multiple of 8 columns). Widths
that do not divide a byte are split into planes that do: a 3-bit code is its low 2 bits in one
plane and its high bit in another, so all unpacking is masks and shifts of whole bytes. Inside a
row of a plane the codes are strided: byte ``j`` holds the codes ``j, j + n, j + 2n ...`` (``n``
bytes per row), which makes unpacking a concatenation instead of an interleave.

A product decodes one tile of output rows at a time, multiplies by it and discards it, so that the decoded matrix never
exists as a whole. The time to decode is negligible for very many rows of activations and dominates when
decoding one token; a caller that multiplies by the same weight repeatedly can keep the decoded tiles.

`reference_product` defines what every kernel has to compute: the product in float64 with the decoded weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge_kernels.bit_planes import PLANE_WIDTHS
from quantforge_kernels.cpu import many_rows
from quantforge_kernels.matmul_spec import (
    Kernel,
    MatmulSpec,
    PackedWeight,
    QuantParams,
    decode_lower_scales,
    decode_values,
    encode_lower_scales,
)

TILE_WEIGHTS = 1 << 18  # 1 MiB decoded: stays in the second-level cache, as measured the fastest
# Rows per step: tensors above 32 MiB get new memory from the system each time
QUANTIZE_STRIP_ROWS = 256
FLOAT8_DTYPES = {"fp8": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def pack_byte_planes(codes: Tensor, bits: int) -> list[Tensor]:
    """Pack uint8 codes ``[out, in]`` into planes of bytes that take ``bits`` bits per code in total."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
    planes, shift = [], 0
    for width in PLANE_WIDTHS[bits]:
        fields = ((padded >> shift) & (2**width - 1)).chunk(8 // width, dim=1)
        plane = fields[0].clone()
        for position, field in enumerate(fields[1:], start=1):
            plane |= field << (position * width)
        planes.append(plane)
        shift += width
    return planes


def unpack_byte_planes(planes: list[Tensor], bits: int, columns: int) -> Tensor:
    """Undo `pack_byte_planes`: return the uint8 codes ``[out, columns]``."""
    codes, shift = None, 0
    for plane, width in zip(planes, PLANE_WIDTHS[bits], strict=True):
        fields = [(plane >> position) & (2**width - 1) for position in range(0, 8, width)]
        values = torch.cat(fields, dim=1)
        codes = values if codes is None else codes | (values << shift)
        shift += width
    assert codes is not None
    return codes[:, :columns]


def prepare(codes: Tensor, parameters: QuantParams, spec: MatmulSpec) -> PackedWeight:
    """Pack the codes and keep the parameters, with the lower level of scales encoded by `encode_lower_scales`."""
    packed = {f"codes{i}": plane for i, plane in enumerate(pack_byte_planes(codes, spec.bits))}
    stored = encode_lower_scales(parameters, spec)
    return packed | {name: value.contiguous() for name, value in stored.items()}


def unpack_weight(packed: PackedWeight, spec: MatmulSpec) -> tuple[Tensor, QuantParams]:
    """Undo `prepare`: return codes and parameters, so that another kernel can prepare them."""
    codes = _unpack_codes(packed, spec, slice(None)).contiguous()
    stored = {name: value for name, value in packed.items() if not name.startswith("codes")}
    return codes, decode_lower_scales(stored, spec)


def decode_rows(packed: PackedWeight, spec: MatmulSpec, rows: slice) -> Tensor:
    """Decode some rows of the weight to float32 ``[rows, in]``."""
    values = _decode_codes(_unpack_codes(packed, spec, rows), packed, spec, rows)
    values *= _expand_parameter(packed["scales"], packed.get("d"), spec, rows)
    if spec.has_minima:
        values -= _expand_parameter(packed["mins"], packed.get("dmin"), spec, rows)
    return values


def _unpack_codes(packed: PackedWeight, spec: MatmulSpec, rows: slice) -> Tensor:
    planes = [packed[f"codes{i}"][rows] for i in range(len(PLANE_WIDTHS[spec.bits]))]
    return unpack_byte_planes(planes, spec.bits, spec.in_features)


def _decode_codes(codes: Tensor, packed: PackedWeight, spec: MatmulSpec, rows: slice) -> Tensor:
    """Return the values of the codes before scaling, with zero points subtracted."""
    if spec.grid in FLOAT8_DTYPES:
        return codes.contiguous().view(FLOAT8_DTYPES[spec.grid]).float()
    if spec.grid == "table":
        return packed["table"][codes.int()]
    values = codes.float()
    if spec.symmetric:
        return values.sub_(2.0 ** (spec.bits - 1))
    return (
        values
        if spec.has_minima
        else values.sub_(_expand_parameter(packed["zeros"], None, spec, rows))
    )


def _expand_parameter(
    parameter: Tensor, upper: Tensor | None, spec: MatmulSpec, rows: slice
) -> Tensor:
    """Return a parameter (times that of its superblock) for some rows and every column, in float32."""
    if spec.tile_rows > 1:
        row = torch.arange(spec.out_features, device=parameter.device)[rows]
        parameter = parameter[row // spec.tile_rows]
    else:
        parameter = parameter[rows]
    if upper is None:
        value = parameter.float()
    else:
        value = decode_values(parameter, spec.lower_encoding).float()
        value = value * upper[rows].float().repeat_interleave(
            spec.superblock_size // spec.group_size, dim=1
        )
    per_column = value[:, :, None].expand(-1, -1, spec.group_size).flatten(1)
    return per_column[:, : spec.in_features]


def quantize_rows(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Quantize each row of ``x`` with its own scale, so that the largest absolute value becomes the largest code.

    Returns:
        Codes (int8 or float8_e4m3fn) ``[rows, in]`` and float32 scales ``[rows, 1]``.
    """
    max_code = 127.0 if kind == "int8" else 448.0
    values = x.float()
    scales = (values.abs().amax(1, keepdim=True) / max_code).clamp(min=1e-12)
    values = (values / scales).clamp(-max_code, max_code)
    return (values.round().to(torch.int8) if kind == "int8" else values.to(torch.float8_e4m3fn)), (
        scales
    )


def _fake_quantize_rows(x: Tensor, kind: str) -> Tensor:
    """Quantize rows and decode them again, in the type of ``x``."""
    codes, scale = quantize_rows(x, kind)
    return (codes.float() * scale).to(x.dtype)


def reference_product(x: Tensor, weight: Tensor, activation: str = "") -> Tensor:
    """Return ``x weight^T`` in float64; ``activation`` names how ``x`` is quantized first, if at all."""
    if activation:
        codes, scales = quantize_rows(x, activation)
        return (codes.double() @ weight.double().T) * scales.double()
    return x.double() @ weight.double().T


def matmul(
    x: Tensor,
    packed: PackedWeight,
    spec: MatmulSpec,
    decoded_tiles: dict[int, Tensor] | None = None,
) -> Tensor:
    """Multiply tile by tile; the weight is rounded to the type of the computation (see `many_rows`).

    ``decoded_tiles`` caches decoded tiles, by their first row, from one call to the next.
    """
    result = x.new_empty(x.shape[0], spec.out_features)
    if spec.activation_kind:
        x = torch.cat(
            [
                _fake_quantize_rows(strip, spec.activation_kind)
                for strip in torch.split(x, QUANTIZE_STRIP_ROWS)
            ]
        )
    x = x.to(many_rows.compute_dtype(x))
    step = max(1, TILE_WEIGHTS // spec.in_features)
    for first in range(0, spec.out_features, step):
        rows = slice(first, first + step)
        tile = None if decoded_tiles is None else decoded_tiles.get(first)
        if tile is None:
            tile = decode_rows(packed, spec, rows).to(x.dtype)
            if decoded_tiles is not None:
                decoded_tiles[first] = tile
        result[:, rows] = x @ tile.T
    return result


# Reports name it "reference": `reference_product` and `matmul` are what the other kernels are compared with.
KERNEL = Kernel("reference", lambda _problem: True, prepare, matmul)
