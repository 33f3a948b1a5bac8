"""Pack codes and parameters into the bytes of ggml's blocks, and unpack them; decode any type to float32.

Every block starts on a byte and has its fields in the order of the functions below (written from the description of
the format in ggml-common.h). Codes are laid out so that one vector instruction unpacks many: the codes in a byte are
not neighbors, but half a block, or 32, apart.

A code of a lattice type is an int32: from the lowest bit, the indices of its points in the table, then the signs, one
bit per weight (1 is negative), even if the file omits the last one, which follows from an even number of negative
signs. For iq1_m the bit that chooses the shift takes the place of the signs. Parameters are ``scales`` and ``mins``, in
K-quants and lattice types integers of each group, and ``d`` and ``dmin``, float16 of a block. ``shifts`` of iq1_s is 1
if a group is lowered.
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
GGUF_CHUNK_BLOCKS = 4096  # blocks that the gguf package decodes at a time


def pack_blocks(tensor: QuantizedTensor) -> Tensor:
    """Pack a tensor into blocks, uint8 ``[rows, row_bytes]``."""
    grid, rows = tensor.scheme.grid, len(tensor.codes)
    blocks = rows * tensor.shape[1] // GGML_BLOCKS[grid].columns
    codes = tensor.codes.reshape(blocks, -1)
    parameters = {key: value.reshape(blocks, -1) for key, value in tensor.parameters.items()}
    fields = _BLOCK_CODECS[grid][0](codes, parameters)
    return (fields[0] if len(fields) == 1 else torch.cat(fields, -1)).view(rows, -1)


def unpack_blocks(raw: Tensor, scheme: Scheme) -> QuantizedTensor:
    """Unpack the blocks ``raw``, uint8 ``[rows, row_bytes]``, into codes and parameters."""
    rows = len(raw)
    blocks = raw.reshape(-1, GGML_BLOCKS[scheme.grid].block_bytes)
    codes, parameters = _BLOCK_CODECS[scheme.grid][1](blocks)
    shaped = {key: value.reshape(rows, -1) for key, value in parameters.items()}
    return QuantizedTensor(codes.reshape(rows, -1), shaped, scheme)


def decode_blocks(raw: Tensor, type_name: str) -> Tensor:
    """Dequantize ``raw`` uint8 ``[rows, row_bytes]`` of ggml's type ``type_name`` to float32 ``[rows, columns]``.

    The result is bit for bit that of ``gguf.quants.dequantize``.

    Raises:
        KeyError: `GGML_TYPES` has no such type.
        ValueError: the rows are not a multiple of the block.
    """
    ggml_type = GGML_TYPES[type_name]
    if raw.shape[-1] % ggml_type.block_bytes:
        raise ValueError(f"{raw.shape[-1]} bytes are no whole number of {type_name} blocks")
    if type_name in _UNQUANTIZED_DTYPES:
        return raw.contiguous().view(_UNQUANTIZED_DTYPES[type_name]).float()
    if ggml_type.grid is not None:
        return unpack_blocks(raw, parse(ggml_type.grid)).decode()
    return _decode_with_gguf(raw, type_name)


def _decode_with_gguf(raw: Tensor, type_name: str) -> Tensor:
    """Dequantize a type that QuantForge only reads, with the gguf package."""
    import gguf
    import numpy

    ggml_type = gguf.GGMLQuantizationType[type_name]
    blocks = raw.cpu().reshape(-1, GGML_TYPES[type_name].block_bytes)
    with numpy.errstate(all="ignore"):  # a NaN scale is for the caller to judge
        decoded = [
            gguf.quants.dequantize(chunk.numpy(), ggml_type)
            for chunk in torch.split(blocks, GGUF_CHUNK_BLOCKS)
        ]
    return torch.from_numpy(numpy.concatenate(decoded)).reshape(len(raw), -1).to(raw.device)


# Fields of blocks


def view_bytes(values: Tensor) -> Tensor:
    """View ``values`` as bytes."""
    return values.contiguous().view(torch.uint8)


def view_float16(raw: Tensor) -> Tensor:
    """View bytes as float16 numbers."""
    return raw.contiguous().view(torch.float16)


def split_bit_planes(raw: Tensor, bits: int) -> Tensor:
    """Split each byte ``[..., n]`` into ``8 / bits`` codes ``[..., 8 / bits, n]``, lowest bits first."""
    shifts = torch.arange(0, 8, bits, device=raw.device, dtype=torch.uint8)
    return (raw.unsqueeze(-2) >> shifts.unsqueeze(1)) & ((1 << bits) - 1)


def join_bit_planes(planes: Tensor, bits: int) -> Tensor:
    """Join codes ``[..., 8 / bits, n]`` to bytes ``[..., n]``, dropping higher bits; inverse of `split_bit_planes`."""
    codes = (planes & ((1 << bits) - 1)).contiguous()
    if codes.shape[-1] % 8 == 0:  # eight bytes at once: what is shifted stays inside of its byte
        codes = codes.view(torch.int64)
    packed = codes[..., 0, :].clone()
    for index in range(1, planes.shape[-2]):
        packed |= codes[..., index, :] << (bits * index)
    return packed.view(torch.uint8)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack 0 and 1 ``[blocks, 8 n]`` into bytes ``[blocks, n]``, the first in the lowest bit."""
    # Byte ``i`` of a word, times ``2^(56 - 7 i)``, is bit ``i`` of its highest byte.
    return ((bits.view(torch.int64) * 0x0102040810204080) >> 56).to(torch.uint8)


def join_nibbles(codes: Tensor) -> Tensor:
    """Join codes ``[blocks, 32 n]`` to bytes ``[blocks, 16 n]``: codes ``j`` and ``j + 16`` of each 32 share a byte."""
    pairs = codes.view(torch.int64).view(len(codes), -1, 2, 2)  # eight bytes at once
    return (pairs[:, :, 1] << 4).bitwise_or_(pairs[:, :, 0]).flatten(1).view(torch.uint8)


def split_nibbles(raw: Tensor) -> Tensor:
    """Split bytes into codes; the inverse of `join_nibbles`."""
    return split_bit_planes(raw.reshape(len(raw), -1, 16), 4).flatten(1)


def join_scale_nibbles(scales: Tensor) -> Tensor:
    """Join integers ``[blocks, 2 n]`` below 16 to bytes ``[blocks, n]``; two neighbors share a byte."""
    return join_bit_planes(scales.view(len(scales), -1, 2, 1), 4).flatten(1)


def split_scale_nibbles(raw: Tensor) -> Tensor:
    """Split bytes into integers below 16; the inverse of `join_scale_nibbles`."""
    return split_bit_planes(raw.unsqueeze(-1), 4).flatten(1)


def add_center(codes: Tensor, center: int) -> Tensor:
    """Convert signed codes to the stored unsigned ones."""
    return (codes + center).view(torch.uint8)


def subtract_center(codes: Tensor, center: int) -> Tensor:
    """Convert stored unsigned codes to signed ones."""
    return codes.view(torch.int8) - center


def pack_two_bits(codes: Tensor) -> Tensor:
    """Pack the low two bits of codes: in each half of a block, four codes that are 32 apart share a byte."""
    return join_bit_planes(codes.view(-1, 2, 4, 32), 2).flatten(1)


def unpack_two_bits(raw: Tensor) -> Tensor:
    """Unpack codes of two bits; the inverse of `pack_two_bits`."""
    return split_bit_planes(raw.reshape(-1, 2, 32), 2).flatten(1)


# Blocks of 32: [scale] [minimum] [fifth bits] [nibbles]


def _append_nibbles(fields: Sequence[Tensor], codes: Tensor) -> list[Tensor]:
    """Return blocks that start with ``fields`` and end with the low four bits of ``codes`` ``[blocks, 32]``."""
    # In one pass where fields are of 16 bits: joining fields of a few bytes takes longer than packing.
    if codes.device.type == "cpu" and fields[0].dtype == torch.float16:
        from quantforge.packers.ggml import row_loops

        header = torch.cat([*fields], -1)
        block_words = torch.empty(len(codes), header.shape[1] + 8, dtype=torch.uint16)
        arrays = (header.view(torch.uint16), codes.contiguous().view(torch.uint16), block_words)
        row_loops.join_nibbles(*(array.numpy() for array in arrays))
        return [block_words.view(torch.uint8)]
    return [*map(view_bytes, fields), join_nibbles(codes)]


def _block_header(parameters: BlockParams) -> list[Tensor]:
    """Return the fields at the start of a block: its scale or exponent, then its minimum."""
    return [parameters[key] for key in ("scales", "exponents", "mins") if key in parameters]


def _pack_nibbles(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    """Pack codes from 0 to 15 after their scale and minimum: q4_1, iq4_nl, mxfp4."""
    return _append_nibbles(_block_header(parameters), codes)


def _pack_q4_0(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    return _append_nibbles([parameters["scales"]], add_center(codes, 8))


def _pack_five_bits(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    words = codes.view(torch.int64)  # eight bytes at once: what is shifted stays inside of its byte
    high_bits = pack_bits((words >> 4).bitwise_and_(0x0101010101010101))
    low_nibbles = (words & 0x0F0F0F0F0F0F0F0F).view(torch.uint8)
    return _append_nibbles([*_block_header(parameters), high_bits.view(torch.float16)], low_nibbles)


def _unpack_q4_0(raw: Tensor) -> BlockFields:
    return subtract_center(split_nibbles(raw[:, 2:]), 8), {"scales": view_float16(raw[:, :2])}


def _unpack_q4_1(raw: Tensor) -> BlockFields:
    parameters = {"scales": view_float16(raw[:, :2]), "mins": view_float16(raw[:, 2:4])}
    return split_nibbles(raw[:, 4:]), parameters


def _pack_q5_0(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    return _pack_five_bits(add_center(codes, 16), parameters)


def _unpack_five_bits(raw: Tensor) -> Tensor:
    high_bits = split_bit_planes(raw[:, :4].reshape(-1, 4, 1), 1).flatten(1)
    return split_nibbles(raw[:, 4:]) | (high_bits << 4)


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
    return [
        scales,
        pack_two_bits(codes),
        view_bytes(parameters["d"]),
        view_bytes(parameters["dmin"]),
    ]


def _unpack_q2_k(raw: Tensor) -> BlockFields:
    scales, codes, units = torch.split(raw, [16, 64, 4], 1)
    units = view_float16(units)
    parameters = {"d": units[:, :1], "dmin": units[:, 1:]}
    return unpack_two_bits(codes), parameters | {"scales": scales & 15, "mins": scales >> 4}


def _pack_q3_k(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    codes = add_center(codes, 4)
    scales = add_center(parameters["scales"], 32)
    low_scales = join_bit_planes(scales.view(-1, 2, 8), 4)
    high_scales = join_bit_planes((scales >> 4).view(-1, 4, 4), 2)
    top_bits = join_bit_planes((codes >> 2).view(-1, 8, 32), 1)
    return [top_bits, pack_two_bits(codes), low_scales, high_scales, view_bytes(parameters["d"])]


def _unpack_q3_k(raw: Tensor) -> BlockFields:
    top_bits, codes, low_scales, high_scales, d = torch.split(raw, [32, 64, 8, 4, 2], 1)
    codes = unpack_two_bits(codes) | (split_bit_planes(top_bits, 1).flatten(1) << 2)
    scales = split_bit_planes(low_scales, 4).flatten(1) | (
        split_bit_planes(high_scales, 2).flatten(1) << 4
    )
    return subtract_center(codes, 4), {
        "d": view_float16(d),
        "scales": subtract_center(scales, 32),
    }


def _pack_six_bits(parameters: BlockParams) -> Tensor:
    """Pack eight scales and eight minima of 6 bits into 12 bytes.

    The top two bits of the last four scales and minima are stored in the bytes of the first four.
    """
    scales, mins = parameters["scales"], parameters["mins"]
    first_scales = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    first_mins = mins[:, :4] | ((mins[:, 4:] >> 4) << 6)
    return torch.cat([first_scales, first_mins, (scales[:, 4:] & 15) | (mins[:, 4:] << 4)], 1)


def _unpack_six_bits(raw: Tensor) -> dict[str, Tensor]:
    first_scales, first_mins, low_nibbles = torch.split(raw, 4, 1)
    scales = torch.cat([first_scales & 63, (low_nibbles & 15) | ((first_scales >> 6) << 4)], 1)
    return {
        "scales": scales,
        "mins": torch.cat([first_mins & 63, (low_nibbles >> 4) | ((first_mins >> 6) << 4)], 1),
    }


def _join_low_nibbles(codes: Tensor) -> Tensor:
    """Join the low 4 bits of codes: in each run of 64, two codes that are 32 apart share a byte."""
    return join_bit_planes(codes.view(-1, 4, 2, 32), 4).flatten(1)


def _pack_q4_k(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    units = [view_bytes(parameters["d"]), view_bytes(parameters["dmin"])]
    return [*units, _pack_six_bits(parameters), _join_low_nibbles(codes)]


def _unpack_q4_k(raw: Tensor) -> BlockFields:
    units = view_float16(raw[:, :4])
    parameters = {"d": units[:, :1], "dmin": units[:, 1:]} | _unpack_six_bits(raw[:, 4:16])
    return split_bit_planes(raw[:, 16:].reshape(-1, 4, 32), 4).flatten(1), parameters


def _pack_q5_k(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    *header, low_nibbles = _pack_q4_k(codes, parameters)
    return [*header, join_bit_planes((codes >> 4).view(-1, 8, 32), 1), low_nibbles]


def _unpack_q5_k(raw: Tensor) -> BlockFields:
    low_codes, parameters = _unpack_q4_k(torch.cat([raw[:, :16], raw[:, 48:]], 1))
    return low_codes | (split_bit_planes(raw[:, 16:48], 1).flatten(1) << 4), parameters


def _pack_q6_k(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    codes = add_center(codes, 32)
    low_nibbles = join_bit_planes(codes.view(-1, 2, 2, 64), 4).flatten(1)
    high_bits = join_bit_planes((codes >> 4).view(-1, 2, 4, 32), 2).flatten(1)
    return [low_nibbles, high_bits, view_bytes(parameters["scales"]), view_bytes(parameters["d"])]


def _unpack_q6_k(raw: Tensor) -> BlockFields:
    low_nibbles, high_bits, scales, d = torch.split(raw, [128, 64, 16, 2], 1)
    codes = split_bit_planes(low_nibbles.reshape(-1, 2, 64), 4).flatten(1)
    codes = codes | (split_bit_planes(high_bits.reshape(-1, 2, 32), 2).flatten(1) << 4)
    return subtract_center(codes, 32), {
        "d": view_float16(d),
        "scales": scales.contiguous().view(torch.int8),
    }


# IQ4_XS and the ternary types


def _pack_iq4_xs(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    scales = add_center(parameters["scales"], 32)
    high_scales = join_bit_planes((scales >> 4).view(-1, 2, 4, 1), 2).flatten(1)
    return [
        view_bytes(parameters["d"]),
        high_scales,
        join_scale_nibbles(scales),
        join_nibbles(codes),
    ]


def _unpack_iq4_xs(raw: Tensor) -> BlockFields:
    d, high_scales, low_scales, codes = torch.split(raw, [2, 2, 4, 128], 1)
    scales = split_scale_nibbles(low_scales)
    scales = scales | (split_bit_planes(high_scales.reshape(-1, 2, 1), 2).flatten(1) << 4)
    return split_nibbles(codes), {"d": view_float16(d), "scales": subtract_center(scales, 32)}


def _pack_tq2_0(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    return [pack_two_bits(add_center(codes, 1)), view_bytes(parameters["scales"])]


def _unpack_tq2_0(raw: Tensor) -> BlockFields:
    return subtract_center(unpack_two_bits(raw[:, :64]), 1), {"scales": view_float16(raw[:, 64:])}


# Number of bytes, and of digits in each; the digits of a byte are that many weights apart.
TERNARY_BYTE_RUNS = ((32, 5), (16, 5), (4, 4))


def _pack_tq1_0(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    """Pack five ternary digits (in the last bytes four) into a byte, as a binary fraction.

    Digit ``i`` is the integer part of ``3^(i+1) byte / 256``.
    """
    digits, values, first = add_center(codes, 1), [], 0
    for size, count in TERNARY_BYTE_RUNS:
        digit_run = digits[:, first : first + size * count].view(torch.int32)  # four bytes at once
        digit_run = digit_run.view(-1, count, size // 4)
        value = digit_run[:, 0] * 81
        for index in range(1, count):
            value += digit_run[:, index] * 3 ** (4 - index)
        values.append(value)
        first += size * count
    fractions = torch.cat(values, 1).view(torch.uint8).int().mul_(256).add_(242)
    fractions = fractions.mul_(8631) >> 21  # divided by 243, for all that occur
    return [fractions.to(torch.uint8), view_bytes(parameters["scales"])]


def _unpack_tq1_0(raw: Tensor) -> BlockFields:
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=raw.device).unsqueeze(1)
    digits = []
    for run_bytes, (_, count) in zip(
        torch.split(raw[:, :52], [32, 16, 4], 1), TERNARY_BYTE_RUNS, strict=True
    ):
        shifted = run_bytes.unsqueeze(1) * powers[:count]  # the integer part drops out modulo 256
        digits.append(((shifted.int() * 3) >> 8).to(torch.int8).flatten(1) - 1)
    return torch.cat(digits, 1), {"scales": view_float16(raw[:, 52:])}


# The lattice types

_SIGN_SHIFTS = (0, 7, 14, 21)  # bit positions of four runs of 7 signs in a word
_UNIT_SHIFTS, _SCALE_SHIFTS = (0, 4, 8, 12), (0, 3, 6, 9)


def _low_byte(codes: Tensor) -> Tensor:
    return (codes & 255).to(torch.uint8)


def _view_uint16(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.int16).int() & 0xFFFF


def _uint16_bytes(values: Tensor) -> Tensor:
    return view_bytes(values.to(torch.int16))


def _view_int32(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.int32)


def _split_fields(values: Tensor, shifts: tuple[int, ...]) -> Tensor:
    """Return ``values`` ``[..., n]`` shifted right by each of ``shifts``, ``[..., n, len(shifts)]``."""
    return values.unsqueeze(-1) >> torch.tensor(shifts, dtype=values.dtype, device=values.device)


def _join_fields(values: Tensor, shifts: tuple[int, ...]) -> Tensor:
    """Join fields that do not overlap; the inverse of `_split_fields`."""
    shifted = values.int() << torch.tensor(shifts, dtype=torch.int32, device=values.device)
    return shifted.sum(-1, dtype=torch.int32)


def _append_signs(index: Tensor, seven_signs: Tensor, sign_shift: int) -> Tensor:
    """Add 8 sign bits to indices; the eighth is chosen so that the number of negative signs is even."""
    parity = seven_signs ^ (seven_signs >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    return index | ((seven_signs | (parity << 7)) << sign_shift)


def _pack_signs_and_scales(codes: Tensor, scales: Tensor, sign_shift: int) -> Tensor:
    """Return the bytes of one word per 32 weights: four runs of 7 signs, and the scale in the top bits."""
    signs = _join_fields(((codes >> sign_shift) & 127).view(len(codes), -1, 4), _SIGN_SHIFTS)
    return view_bytes(signs | (scales.int() << 28))


def _unpack_signs_and_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    words = _view_int32(raw)
    signs = (_split_fields(words, _SIGN_SHIFTS) & 127).flatten(1)
    return signs, ((words >> 28) & 15).to(torch.uint8)


def _pack_iq2_xxs(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    words = _pack_signs_and_scales(codes, parameters["scales"], 8).view(len(codes), -1, 4)
    index = _low_byte(codes).view(len(codes), -1, 4)
    return [view_bytes(parameters["d"]), torch.cat([index, words], 2).flatten(1)]


def _unpack_iq2_xxs(raw: Tensor) -> BlockFields:
    word_pairs = raw[:, 2:].reshape(len(raw), 8, 2, 4)
    signs, scales = _unpack_signs_and_scales(word_pairs[:, :, 1].flatten(1))
    codes = _append_signs(word_pairs[:, :, 0].flatten(1).int(), signs, 8)
    return codes, {"d": view_float16(raw[:, :2]), "scales": scales}


def _pack_iq2_xs(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    return [
        view_bytes(parameters["d"]),
        _uint16_bytes(codes & 0xFFFF),
        join_scale_nibbles(parameters["scales"]),
    ]


def _unpack_iq2_xs(raw: Tensor) -> BlockFields:
    d, code_bytes, scales = torch.split(raw, [2, 64, 8], 1)
    words = _view_uint16(code_bytes)
    codes = _append_signs(words & 511, words >> 9, 9)
    return codes, {"d": view_float16(d), "scales": split_scale_nibbles(scales)}


def _pack_iq2_s(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    high_bits = _low_byte(_join_fields(((codes >> 8) & 3).view(len(codes), -1, 4), (0, 2, 4, 6)))
    signs = _low_byte(codes >> 10)
    return [
        view_bytes(parameters["d"]),
        _low_byte(codes),
        signs,
        high_bits,
        join_scale_nibbles(parameters["scales"]),
    ]


def _unpack_iq2_s(raw: Tensor) -> BlockFields:
    d, low_bytes, signs, high_bits, scales = torch.split(raw, [2, 32, 32, 8, 8], 1)
    high_index = (_split_fields(high_bits.int(), (0, 2, 4, 6)) & 3).flatten(1)
    codes = low_bytes.int() | (high_index << 8) | (signs.int() << 10)
    return codes, {"d": view_float16(d), "scales": split_scale_nibbles(scales)}


def _pack_iq3_xxs(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    index = _low_byte(_split_fields(codes, (0, 8)).flatten(1))
    return [
        view_bytes(parameters["d"]),
        index,
        _pack_signs_and_scales(codes, parameters["scales"], 16),
    ]


def _unpack_iq3_xxs(raw: Tensor) -> BlockFields:
    signs, scales = _unpack_signs_and_scales(raw[:, 66:])
    codes = _append_signs(_view_uint16(raw[:, 2:66]), signs, 16)
    return codes, {"d": view_float16(raw[:, :2]), "scales": scales}


def _pack_iq3_s(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    high_bits = _low_byte(_join_fields(((codes >> 8) & 1).view(len(codes), -1, 8), tuple(range(8))))
    signs = _low_byte(_join_fields(((codes >> 9) & 15).view(len(codes), -1, 2), (0, 4)))
    return [
        view_bytes(parameters["d"]),
        _low_byte(codes),
        high_bits,
        signs,
        join_scale_nibbles(parameters["scales"]),
    ]


def _unpack_iq3_s(raw: Tensor) -> BlockFields:
    d, low_bytes, high_bits, signs, scales = torch.split(raw, [2, 64, 8, 32, 4], 1)
    high_index = (_split_fields(high_bits.int(), tuple(range(8))) & 1).flatten(1)
    sign_bits = (_split_fields(signs.int(), (0, 4)) & 15).flatten(1)
    codes = low_bytes.int() | (high_index << 8) | (sign_bits << 9)
    return codes, {"d": view_float16(d), "scales": split_scale_nibbles(scales)}


def _pack_iq1_s(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    group_words = _join_fields((codes >> 8).view(len(codes), -1, 4), (0, 3, 6, 9))
    group_words |= (parameters["scales"].int() << 12) | (parameters["shifts"].int() << 15)
    return [view_bytes(parameters["d"]), _low_byte(codes), _uint16_bytes(group_words)]


def _unpack_iq1_s(raw: Tensor) -> BlockFields:
    group_words = _view_uint16(raw[:, 34:])
    high_index = (_split_fields(group_words, (0, 3, 6, 9)) & 7).flatten(1)
    parameters = {
        "d": view_float16(raw[:, :2]),
        "scales": ((group_words >> 12) & 7).to(torch.uint8),
        "shifts": (group_words >> 15).to(torch.uint8),
    }
    return raw[:, 2:34].int() | (high_index << 8), parameters


def _pack_iq1_m(codes: Tensor, parameters: BlockParams) -> list[Tensor]:
    high_bits = _low_byte(_join_fields((codes >> 8).view(len(codes), -1, 2), (0, 4)))
    scales = _join_fields(parameters["scales"].view(len(codes), 4, 4), _SCALE_SHIFTS)
    d_bits = _view_uint16(view_bytes(parameters["d"]))
    scales |= (_split_fields(d_bits, _UNIT_SHIFTS) & 15).flatten(1) << 12
    return [_low_byte(codes), high_bits, _uint16_bytes(scales)]


def _unpack_iq1_m(raw: Tensor) -> BlockFields:
    low_bytes, high_bits, scale_bytes = torch.split(raw, [32, 16, 8], 1)
    high_index = (_split_fields(high_bits.int(), (0, 4)) & 15).flatten(1)
    words = _view_uint16(scale_bytes)
    d_bits = _join_fields(words >> 12, _UNIT_SHIFTS).unsqueeze(1)
    scales = (_split_fields(words, _SCALE_SHIFTS) & 7).flatten(1).to(torch.uint8)
    return low_bytes.int() | (high_index << 8), {
        "d": view_float16(_uint16_bytes(d_bits)),
        "scales": scales,
    }


# For each scheme, functions that pack codes and parameters into fields and that unpack blocks.
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
