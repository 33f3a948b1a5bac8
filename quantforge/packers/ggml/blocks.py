"""Codes and parameters as the bytes of ggml's blocks, and back; float32 weights from any of them.

Every block starts on a byte and has its fields in the order of the functions below (ggml-common.h; restated from the
format, not from code). Codes are laid out so that one vector instruction unpacks many: a byte never holds neighbours,
but weights half a block, or 32, apart.

A code of a lattice type is an int32: the places of its points in the table, lowest bits first, then the signs, one bit
for each weight (1 is negative), even where the file leaves the last one out, since their number is even; of iq1_m in
their place the bit that chooses the shift. Parameters are ``scales`` and ``mins``, in K-quants and lattice types
integers of each group, and ``d`` and ``dmin``, float16 of a block. ``shifts`` of iq1_s is 1 where a group is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quantforge.grids import GGML_BLOCKS
from quantforge.notation import parse
from quantforge.packers.ggml import GGML_TYPES
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme

BlockParams = Mapping[str, Tensor]
BlockFields = tuple[Tensor, dict[str, Tensor]]  # codes [..., columns] and parameters [..., groups]

_UNQUANTIZED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
GGUF_CHUNK_BLOCKS = 4096  # of the types that gguf decodes


def pack_blocks(tensor: QuantizedTensor) -> Tensor:
    """Return the rows of ``tensor`` as uint8 ``[rows, row_bytes]``."""
    grid, rows = tensor.scheme.grid, len(tensor.codes)
    blocks = rows * tensor.shape[1] // GGML_BLOCKS[grid].columns
    codes = tensor.codes.reshape(blocks, -1)
    parameters = {key: value.reshape(blocks, -1) for key, value in tensor.parameters.items()}
    fields = _BLOCK_CODECS[grid][0](codes, parameters)
    return (fields[0] if len(fields) == 1 else torch.cat(fields, -1)).view(rows, -1)


def unpack_blocks(raw: Tensor, scheme: Scheme) -> QuantizedTensor:
    """Return the rows ``raw`` uint8 ``[rows, row_bytes]`` as codes and parameters."""
    rows = len(raw)
    blocks = raw.reshape(-1, GGML_BLOCKS[scheme.grid].block_bytes)
    codes, parameters = _BLOCK_CODECS[scheme.grid][1](blocks)
    shaped = {key: value.reshape(rows, -1) for key, value in parameters.items()}
    return QuantizedTensor(codes.reshape(rows, -1), shaped, scheme)


def decode_blocks(raw: Tensor, type_name: str) -> Tensor:
    """Decode ``raw`` uint8 ``[rows, row_bytes]`` of ggml's type ``type_name`` to float32 ``[rows, columns]``.

    The result is bit for bit that of ``gguf.quants.dequantize``.

    Raises:
        KeyError: no such type in `GGML_TYPES`.
        ValueError: blocks do not fill the rows.
    """
    kind = GGML_TYPES[type_name]
    if raw.shape[-1] % kind.block_bytes:
        raise ValueError(f"{raw.shape[-1]} bytes are no whole number of {type_name} blocks")
    if type_name in _UNQUANTIZED_DTYPES:
        return raw.contiguous().view(_UNQUANTIZED_DTYPES[type_name]).float()
    if kind.grid is not None:
        return unpack_blocks(raw, parse(kind.grid)).decode()
    return _decode_with_gguf(raw, type_name)


def _decode_with_gguf(raw: Tensor, type_name: str) -> Tensor:
    """Decode types that are only ever read."""
    import gguf
    import numpy

    kind = gguf.GGMLQuantizationType[type_name]
    blocks = raw.cpu().reshape(-1, GGML_TYPES[type_name].block_bytes)
    with numpy.errstate(all="ignore"):  # a NaN scale is for the caller to judge
        parts = [
            gguf.quants.dequantize(part.numpy(), kind)
            for part in torch.split(blocks, GGUF_CHUNK_BLOCKS)
        ]
    return torch.from_numpy(numpy.concatenate(parts)).reshape(len(raw), -1).to(raw.device)


# Fields of blocks


def view_bytes(values: Tensor) -> Tensor:
    """Return the bytes of ``values``."""
    return values.contiguous().view(torch.uint8)


def view_float16(raw: Tensor) -> Tensor:
    """Return the float16 numbers that bytes hold."""
    return raw.contiguous().view(torch.float16)


def split_bit_planes(raw: Tensor, bits: int) -> Tensor:
    """Split each byte ``[..., n]`` into ``8 / bits`` codes ``[..., 8 / bits, n]``, lowest bits first."""
    shifts = torch.arange(0, 8, bits, device=raw.device, dtype=torch.uint8)
    return (raw.unsqueeze(-2) >> shifts.unsqueeze(1)) & ((1 << bits) - 1)


def join_bit_planes(split_bit_planes: Tensor, bits: int) -> Tensor:
    """Undo `split_bit_planes`: ``[..., 8 / bits, n]`` to bytes ``[..., n]``; higher bits of the codes are cut off."""
    codes = (split_bit_planes & ((1 << bits) - 1)).contiguous()
    if codes.shape[-1] % 8 == 0:  # eight bytes at once: what is shifted stays inside of its byte
        codes = codes.view(torch.int64)
    joined = codes[..., 0, :].clone()
    for index in range(1, split_bit_planes.shape[-2]):
        joined |= codes[..., index, :] << (bits * index)
    return joined.view(torch.uint8)


def join_bits(ones: Tensor) -> Tensor:
    """Join ``[blocks, 8 n]`` of 0 and 1 to bytes ``[blocks, n]``, the first in the lowest bit."""
    # Byte ``i`` of a word, times ``2^(56 - 7 i)``, is bit ``i`` of its highest byte.
    return ((ones.view(torch.int64) * 0x0102040810204080) >> 56).to(torch.uint8)


def join_nibbles(codes: Tensor) -> Tensor:
    """Join codes ``[blocks, 32 n]`` to bytes ``[blocks, 16 n]``: codes ``j`` and ``j + 16`` of each 32 share a byte."""
    join_crumbs = codes.view(torch.int64).view(len(codes), -1, 2, 2)  # eight bytes at once
    return (
        (join_crumbs[:, :, 1] << 4).bitwise_or_(join_crumbs[:, :, 0]).flatten(1).view(torch.uint8)
    )


def split_nibbles(raw: Tensor) -> Tensor:
    """Undo `join_nibbles`."""
    return split_bit_planes(raw.reshape(len(raw), -1, 16), 4).flatten(1)


def join_scale_nibbles(scales: Tensor) -> Tensor:
    """Join integers ``[blocks, 2 n]`` below 16 to bytes ``[blocks, n]``: two neighbours share a byte."""
    return join_bit_planes(scales.view(len(scales), -1, 2, 1), 4).flatten(1)


def split_scale_nibbles(raw: Tensor) -> Tensor:
    """Undo `join_scale_nibbles`."""
    return split_bit_planes(raw.unsqueeze(-1), 4).flatten(1)


def add_center(codes: Tensor, middle: int) -> Tensor:
    """Shift signed codes to the unsigned ones that are stored."""
    return (codes + middle).view(torch.uint8)


def subtract_center(codes: Tensor, middle: int) -> Tensor:
    """Undo `add_center`."""
    return codes.view(torch.int8) - middle


def join_crumbs(codes: Tensor) -> Tensor:
    """Join the low two bits of codes: in each half of a block, four codes that are 32 apart share a byte."""
    return join_bit_planes(codes.view(-1, 2, 4, 32), 2).flatten(1)


def split_crumbs(raw: Tensor) -> Tensor:
    """Undo `join_crumbs`."""
    return split_bit_planes(raw.reshape(-1, 2, 32), 2).flatten(1)


# Blocks of 32: [scale] [minimum] [fifth bits] [nibbles]


def _append_nibbles(fields: Sequence[Tensor], codes: Tensor) -> list[Tensor]:
    """Return blocks that begin with ``fields`` and end with the low four bits of ``codes`` ``[blocks, 32]``."""
    # In one pass where fields are of 16 bits: joining fields of a few bytes takes longer than packing.
    if codes.device.type == "cpu" and fields[0].dtype == torch.float16:
        from quantforge.packers.ggml import row_loops

        head = torch.cat([*fields], -1)
        words = torch.empty(len(codes), head.shape[1] + 8, dtype=torch.uint16)
        arrays = (head.view(torch.uint16), codes.contiguous().view(torch.uint16), words)
        row_loops.join_nibbles(*(part.numpy() for part in arrays))
        return [words.view(torch.uint8)]
    return [*map(view_bytes, fields), join_nibbles(codes)]


def _block_head(parameters: BlockParams) -> list[Tensor]:
    """Return what a block begins with, in the order of the file: its scale, or exponent, then its minimum."""
    return [parameters[key] for key in ("scales", "exponents", "mins") if key in parameters]


def _pack_nibbles(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    """Pack codes from 0 to 15 after their scale, and minimum: q4_1, iq4_nl, mxfp4."""
    return _append_nibbles(_block_head(parameters), codes)


def _pack_q4_0(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    return _append_nibbles([parameters["scales"]], add_center(codes, 8))


def _pack_five_bits(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    words = codes.view(torch.int64)  # eight bytes at once: what is shifted stays inside of its byte
    high = join_bits((words >> 4).bitwise_and_(0x0101010101010101))
    low = (words & 0x0F0F0F0F0F0F0F0F).view(torch.uint8)
    return _append_nibbles([*_block_head(parameters), high.view(torch.float16)], low)


def _unpack_q4_0(raw: Tensor) -> BlockFields:
    return subtract_center(split_nibbles(raw[:, 2:]), 8), {"scales": view_float16(raw[:, :2])}


def _unpack_q4_1(raw: Tensor) -> BlockFields:
    parameters = {"scales": view_float16(raw[:, :2]), "mins": view_float16(raw[:, 2:4])}
    return split_nibbles(raw[:, 4:]), parameters


def _pack_q5_0(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    return _pack_five_bits(add_center(codes, 16), parameters)


def _unpack_five_bits(raw: Tensor) -> Tensor:
    high = split_bit_planes(raw[:, :4].reshape(-1, 4, 1), 1).flatten(1)
    return split_nibbles(raw[:, 4:]) | (high << 4)


def _unpack_q5_0(raw: Tensor) -> BlockFields:
    return subtract_center(_unpack_five_bits(raw[:, 2:]), 16), {"scales": view_float16(raw[:, :2])}


def _unpack_q5_1(raw: Tensor) -> BlockFields:
    return _unpack_five_bits(raw[:, 4:]), {
        "scales": view_float16(raw[:, :2]),
        "mins": view_float16(raw[:, 2:4]),
    }


def _pack_q8_0(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    return [view_bytes(parameters["scales"]), view_bytes(codes)]


def _unpack_q8_0(raw: Tensor) -> BlockFields:
    return raw[:, 2:].view(torch.int8), {"scales": view_float16(raw[:, :2])}


def _unpack_iq4_nl(raw: Tensor) -> BlockFields:
    return split_nibbles(raw[:, 2:]), {"scales": view_float16(raw[:, :2])}


def _unpack_mxfp4(raw: Tensor) -> BlockFields:
    return split_nibbles(raw[:, 1:]), {"exponents": raw[:, :1]}


# K-quants: blocks of 256


def _pack_q2_k(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    scales = parameters["scales"] | (parameters["mins"] << 4)
    return [scales, join_crumbs(codes), view_bytes(parameters["d"]), view_bytes(parameters["dmin"])]


def _unpack_q2_k(raw: Tensor) -> BlockFields:
    scales, codes, halves = torch.split(raw, [16, 64, 4], 1)
    halves = view_float16(halves)
    parameters = {"d": halves[:, :1], "dmin": halves[:, 1:]}
    return split_crumbs(codes), parameters | {"scales": scales & 15, "mins": scales >> 4}


def _pack_q3_k(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    codes = add_center(codes, 4)
    scales = add_center(parameters["scales"], 32)
    low = join_bit_planes(scales.view(-1, 2, 8), 4)
    high = join_bit_planes((scales >> 4).view(-1, 4, 4), 2)
    mask = join_bit_planes((codes >> 2).view(-1, 8, 32), 1)
    return [mask, join_crumbs(codes), low, high, view_bytes(parameters["d"])]


def _unpack_q3_k(raw: Tensor) -> BlockFields:
    mask, codes, low, high, half = torch.split(raw, [32, 64, 8, 4, 2], 1)
    codes = split_crumbs(codes) | (split_bit_planes(mask, 1).flatten(1) << 2)
    scales = split_bit_planes(low, 4).flatten(1) | (split_bit_planes(high, 2).flatten(1) << 4)
    return subtract_center(codes, 4), {
        "d": view_float16(half),
        "scales": subtract_center(scales, 32),
    }


def _pack_six_bits(parameters: BlockParams) -> Tensor:
    """Pack eight scales and eight minima of 6 bits in 12 bytes.

    The two top bits of the last four of each lie in the bytes of the first four.
    """
    scales, mins = parameters["scales"], parameters["mins"]
    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    second = mins[:, :4] | ((mins[:, 4:] >> 4) << 6)
    return torch.cat([first, second, (scales[:, 4:] & 15) | (mins[:, 4:] << 4)], 1)


def _unpack_six_bits(raw: Tensor) -> dict[str, Tensor]:
    first, second, low = torch.split(raw, 4, 1)
    scales = torch.cat([first & 63, (low & 15) | ((first >> 6) << 4)], 1)
    return {
        "scales": scales,
        "mins": torch.cat([second & 63, (low >> 4) | ((second >> 6) << 4)], 1),
    }


def _join_low_nibbles(codes: Tensor) -> Tensor:
    """Join the low 4 bits of codes: of each 64, two that are 32 apart share a byte."""
    return join_bit_planes(codes.view(-1, 4, 2, 32), 4).flatten(1)


def _pack_q4_k(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    halves = [view_bytes(parameters["d"]), view_bytes(parameters["dmin"])]
    return [*halves, _pack_six_bits(parameters), _join_low_nibbles(codes)]


def _unpack_q4_k(raw: Tensor) -> BlockFields:
    halves = view_float16(raw[:, :4])
    parameters = {"d": halves[:, :1], "dmin": halves[:, 1:]} | _unpack_six_bits(raw[:, 4:16])
    return split_bit_planes(raw[:, 16:].reshape(-1, 4, 32), 4).flatten(1), parameters


def _pack_q5_k(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    *head, low = _pack_q4_k(codes, parameters)
    return [*head, join_bit_planes((codes >> 4).view(-1, 8, 32), 1), low]


def _unpack_q5_k(raw: Tensor) -> BlockFields:
    low, parameters = _unpack_q4_k(torch.cat([raw[:, :16], raw[:, 48:]], 1))
    return low | (split_bit_planes(raw[:, 16:48], 1).flatten(1) << 4), parameters


def _pack_q6_k(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    codes = add_center(codes, 32)
    low = join_bit_planes(codes.view(-1, 2, 2, 64), 4).flatten(1)
    high = join_bit_planes((codes >> 4).view(-1, 2, 4, 32), 2).flatten(1)
    return [low, high, view_bytes(parameters["scales"]), view_bytes(parameters["d"])]


def _unpack_q6_k(raw: Tensor) -> BlockFields:
    low, high, scales, half = torch.split(raw, [128, 64, 16, 2], 1)
    codes = split_bit_planes(low.reshape(-1, 2, 64), 4).flatten(1)
    codes = codes | (split_bit_planes(high.reshape(-1, 2, 32), 2).flatten(1) << 4)
    return subtract_center(codes, 32), {
        "d": view_float16(half),
        "scales": scales.contiguous().view(torch.int8),
    }


# IQ4_XS and the ternary types


def _pack_iq4_xs(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    scales = add_center(parameters["scales"], 32)
    high = join_bit_planes((scales >> 4).view(-1, 2, 4, 1), 2).flatten(1)
    return [view_bytes(parameters["d"]), high, join_scale_nibbles(scales), join_nibbles(codes)]


def _unpack_iq4_xs(raw: Tensor) -> BlockFields:
    half, high, low, codes = torch.split(raw, [2, 2, 4, 128], 1)
    scales = split_scale_nibbles(low)
    scales = scales | (split_bit_planes(high.reshape(-1, 2, 1), 2).flatten(1) << 4)
    return split_nibbles(codes), {"d": view_float16(half), "scales": subtract_center(scales, 32)}


def _pack_tq2_0(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    return [join_crumbs(add_center(codes, 1)), view_bytes(parameters["scales"])]


def _unpack_tq2_0(raw: Tensor) -> BlockFields:
    return subtract_center(split_crumbs(raw[:, :64]), 1), {"scales": view_float16(raw[:, 64:])}


TERNARY_BYTE_RUNS = (
    (32, 5),
    (16, 5),
    (4, 4),
)  # bytes, and digits in each; the digits are as far apart


def _pack_tq1_0(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    """Pack five digits of base 3 (at the end four) in a byte, as a binary fraction.

    Digit ``i`` is the integer part of ``3^(i+1) byte / 256``.
    """
    digits, numbers, start = add_center(codes, 1), [], 0
    for size, count in TERNARY_BYTE_RUNS:
        run = digits[:, start : start + size * count].view(torch.int32)  # four bytes at once
        run = run.view(-1, count, size // 4)
        number = run[:, 0] * 81
        for index in range(1, count):
            number += run[:, index] * 3 ** (4 - index)
        numbers.append(number)
        start += size * count
    fractions = torch.cat(numbers, 1).view(torch.uint8).int().mul_(256).add_(242)
    fractions = fractions.mul_(8631) >> 21  # divided by 243, for all that occur
    return [fractions.to(torch.uint8), view_bytes(parameters["scales"])]


def _unpack_tq1_0(raw: Tensor) -> BlockFields:
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=raw.device).unsqueeze(1)
    digits = []
    for part, (_, count) in zip(
        torch.split(raw[:, :52], [32, 16, 4], 1), TERNARY_BYTE_RUNS, strict=True
    ):
        moved = part.unsqueeze(1) * powers[:count]  # the integer part drops out modulo 256
        digits.append(((moved.int() * 3) >> 8).to(torch.int8).flatten(1) - 1)
    return torch.cat(digits, 1), {"scales": view_float16(raw[:, 52:])}


# The lattice types

_SIGN_SHIFTS = (0, 7, 14, 21)  # places of four runs of 7 signs in a word
_UNIT_SHIFTS, _SCALE_SHIFTS = (0, 4, 8, 12), (0, 3, 6, 9)


def _low_byte(codes: Tensor) -> Tensor:
    return (codes & 255).to(torch.uint8)


def _view_uint16(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.int16).int() & 0xFFFF


def _uint16_bytes(values: Tensor) -> Tensor:
    return view_bytes(values.to(torch.int16))


def _view_int32(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.int32)


def _split_fields(values: Tensor, places: tuple[int, ...]) -> Tensor:
    """Return ``values`` ``[..., n]`` moved down by each of ``places``, ``[..., n, places]``."""
    return values.unsqueeze(-1) >> torch.tensor(places, dtype=values.dtype, device=values.device)


def _join_fields(values: Tensor, places: tuple[int, ...]) -> Tensor:
    """Undo `_split_fields` of fields that do not overlap."""
    moved = values.int() << torch.tensor(places, dtype=torch.int32, device=values.device)
    return moved.sum(-1, dtype=torch.int32)


def _add_signs(index: Tensor, seven: Tensor, place: int) -> Tensor:
    """Join indices with signs of which the eighth makes the number of negative ones even."""
    odd = seven ^ (seven >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1
    return index | ((seven | (odd << 7)) << place)


def _join_sign_words(codes: Tensor, scales: Tensor, place: int) -> Tensor:
    """Return for each 32 weights the bytes of a word: four times 7 signs, and the scale above."""
    signs = _join_fields(((codes >> place) & 127).view(len(codes), -1, 4), _SIGN_SHIFTS)
    return view_bytes(signs | (scales.int() << 28))


def _split_sign_words(raw: Tensor) -> tuple[Tensor, Tensor]:
    words = _view_int32(raw)
    signs = (_split_fields(words, _SIGN_SHIFTS) & 127).flatten(1)
    return signs, ((words >> 28) & 15).to(torch.uint8)


def _pack_iq2_xxs(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    words = _join_sign_words(codes, parameters["scales"], 8).view(len(codes), -1, 4)
    index = _low_byte(codes).view(len(codes), -1, 4)
    return [view_bytes(parameters["d"]), torch.cat([index, words], 2).flatten(1)]


def _unpack_iq2_xxs(raw: Tensor) -> BlockFields:
    parts = raw[:, 2:].reshape(len(raw), 8, 2, 4)
    signs, scales = _split_sign_words(parts[:, :, 1].flatten(1))
    codes = _add_signs(parts[:, :, 0].flatten(1).int(), signs, 8)
    return codes, {"d": view_float16(raw[:, :2]), "scales": scales}


def _pack_iq2_xs(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    return [
        view_bytes(parameters["d"]),
        _uint16_bytes(codes & 0xFFFF),
        join_scale_nibbles(parameters["scales"]),
    ]


def _unpack_iq2_xs(raw: Tensor) -> BlockFields:
    half, stored, scales = torch.split(raw, [2, 64, 8], 1)
    words = _view_uint16(stored)
    codes = _add_signs(words & 511, words >> 9, 9)
    return codes, {"d": view_float16(half), "scales": split_scale_nibbles(scales)}


def _pack_iq2_s(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    high = _low_byte(_join_fields(((codes >> 8) & 3).view(len(codes), -1, 4), (0, 2, 4, 6)))
    signs = _low_byte(codes >> 10)
    return [
        view_bytes(parameters["d"]),
        _low_byte(codes),
        signs,
        high,
        join_scale_nibbles(parameters["scales"]),
    ]


def _unpack_iq2_s(raw: Tensor) -> BlockFields:
    half, low, signs, high, scales = torch.split(raw, [2, 32, 32, 8, 8], 1)
    top = (_split_fields(high.int(), (0, 2, 4, 6)) & 3).flatten(1)
    codes = low.int() | (top << 8) | (signs.int() << 10)
    return codes, {"d": view_float16(half), "scales": split_scale_nibbles(scales)}


def _pack_iq3_xxs(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    index = _low_byte(_split_fields(codes, (0, 8)).flatten(1))
    return [view_bytes(parameters["d"]), index, _join_sign_words(codes, parameters["scales"], 16)]


def _unpack_iq3_xxs(raw: Tensor) -> BlockFields:
    signs, scales = _split_sign_words(raw[:, 66:])
    codes = _add_signs(_view_uint16(raw[:, 2:66]), signs, 16)
    return codes, {"d": view_float16(raw[:, :2]), "scales": scales}


def _pack_iq3_s(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    high = _low_byte(_join_fields(((codes >> 8) & 1).view(len(codes), -1, 8), tuple(range(8))))
    signs = _low_byte(_join_fields(((codes >> 9) & 15).view(len(codes), -1, 2), (0, 4)))
    return [
        view_bytes(parameters["d"]),
        _low_byte(codes),
        high,
        signs,
        join_scale_nibbles(parameters["scales"]),
    ]


def _unpack_iq3_s(raw: Tensor) -> BlockFields:
    half, low, high, signs, scales = torch.split(raw, [2, 64, 8, 32, 4], 1)
    top = (_split_fields(high.int(), tuple(range(8))) & 1).flatten(1)
    negative = (_split_fields(signs.int(), (0, 4)) & 15).flatten(1)
    codes = low.int() | (top << 8) | (negative << 9)
    return codes, {"d": view_float16(half), "scales": split_scale_nibbles(scales)}


def _pack_iq1_s(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    high = _join_fields((codes >> 8).view(len(codes), -1, 4), (0, 3, 6, 9))
    high |= (parameters["scales"].int() << 12) | (parameters["shifts"].int() << 15)
    return [view_bytes(parameters["d"]), _low_byte(codes), _uint16_bytes(high)]


def _unpack_iq1_s(raw: Tensor) -> BlockFields:
    high = _view_uint16(raw[:, 34:])
    top = (_split_fields(high, (0, 3, 6, 9)) & 7).flatten(1)
    parameters = {
        "d": view_float16(raw[:, :2]),
        "scales": ((high >> 12) & 7).to(torch.uint8),
        "shifts": (high >> 15).to(torch.uint8),
    }
    return raw[:, 2:34].int() | (top << 8), parameters


def _pack_iq1_m(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    high = _low_byte(_join_fields((codes >> 8).view(len(codes), -1, 2), (0, 4)))
    scales = _join_fields(parameters["scales"].view(len(codes), 4, 4), _SCALE_SHIFTS)
    unit = _view_uint16(view_bytes(parameters["d"]))
    scales |= (_split_fields(unit, _UNIT_SHIFTS) & 15).flatten(1) << 12
    return [_low_byte(codes), high, _uint16_bytes(scales)]


def _unpack_iq1_m(raw: Tensor) -> BlockFields:
    low, high, stored = torch.split(raw, [32, 16, 8], 1)
    top = (_split_fields(high.int(), (0, 4)) & 15).flatten(1)
    words = _view_uint16(stored)
    unit = _join_fields(words >> 12, _UNIT_SHIFTS).unsqueeze(1)
    scales = (_split_fields(words, _SCALE_SHIFTS) & 7).flatten(1).to(torch.uint8)
    return low.int() | (top << 8), {"d": view_float16(_uint16_bytes(unit)), "scales": scales}


# By the name of the scheme: how fields are made of codes and parameters, and these of blocks.
_BLOCK_CODECS: Mapping[
    str, tuple[Callable[[Tensor, BlockParams], list[Tensor]], Callable[[Tensor], BlockFields]]
] = {
    "q4_0": (_pack_q4_0, _unpack_q4_0),
    "q4_1": (_pack_nibbles, _unpack_q4_1),
    "q5_0": (_pack_q5_0, _unpack_q5_0),
    "q5_1": (_pack_five_bits, _unpack_q5_1),
    "q8_0": (_pack_q8_0, _unpack_q8_0),
    "q2_k": (_pack_q2_k, _unpack_q2_k),
    "q3_k": (_pack_q3_k, _unpack_q3_k),
    "q4_k": (_pack_q4_k, _unpack_q4_k),
    "q5_k": (_pack_q5_k, _unpack_q5_k),
    "q6_k": (_pack_q6_k, _unpack_q6_k),
    "iq4_nl": (_pack_nibbles, _unpack_iq4_nl),
    "iq4_xs": (_pack_iq4_xs, _unpack_iq4_xs),
    "tq1_0": (_pack_tq1_0, _unpack_tq1_0),
    "tq2_0": (_pack_tq2_0, _unpack_tq2_0),
    "mxfp4": (_pack_nibbles, _unpack_mxfp4),
    "iq1_s": (_pack_iq1_s, _unpack_iq1_s),
    "iq1_m": (_pack_iq1_m, _unpack_iq1_m),
    "iq2_xxs": (_pack_iq2_xxs, _unpack_iq2_xxs),
    "iq2_xs": (_pack_iq2_xs, _unpack_iq2_xs),
    "iq2_s": (_pack_iq2_s, _unpack_iq2_s),
    "iq3_xxs": (_pack_iq3_xxs, _unpack_iq3_xxs),
    "iq3_s": (_pack_iq3_s, _unpack_iq3_s),
}
