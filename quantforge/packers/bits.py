"""Pack integer codes of any width into the 32-bit words of a file, and unpack them.

Each row is a dense little-endian bit stream: code ``i`` occupies the bits ``i*b .. i*b + b - 1``, least significant bit
first, and the row is padded with zero bits to a whole word. With 2, 4 and 8 bits a word holds ``32/b`` codes; with 3,
5, 6 and 7 bits some codes cross a word boundary and no bit is wasted. Every integer layout that QuantForge reads or
writes is this stream along one axis of a matrix: compressed-tensors along the inputs (zero points along the outputs),
GPTQ along the inputs and then transposed, AWQ along the outputs in a permuted order.

Eight codes of ``b`` bits are exactly ``b`` bytes. So eight codes are shifted into one 64-bit integer, of which the low
``b`` bytes are kept; with 2, 4 and 8 bits a single byte is filled, which is faster. Words are assembled from bytes,
which is correct on little-endian machines, the only ones that safetensors and torch wheels support.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.grids import words_per_row

_CHUNK_CODES = 1 << 22  # codes in flight at once; bounds the temporary memory to some 20 MB


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Pack the rows of ``codes`` (uint8 ``[R, C]``) into int32 ``[R, ceil(C*bits/32)]``.

    Raises:
        ValueError: a code needs more than ``bits`` bits; it would spill into its neighbours.
    """
    num_rows, columns = codes.shape
    if codes.numel() and int(codes.max()) >> bits:
        raise ValueError(f"a code does not fit in {bits} bits: {int(codes.max())}")
    words = torch.empty(
        num_rows, words_per_row(columns, bits), dtype=torch.int32, device=codes.device
    )
    for rows in _row_chunks(num_rows, columns):
        words[rows] = _pack(codes[rows], bits)[:, : words.shape[1]]
    return words


def unpack_rows(words: Tensor, bits: int, columns: int) -> Tensor:
    """Return the codes of each row of ``words`` (int32 ``[R, W]``) as uint8 ``[R, columns]``.

    Raises:
        ValueError: ``W`` is not the number of words that ``columns`` codes take.
    """
    num_rows, num_words = words.shape
    if num_words != (expected_words := words_per_row(columns, bits)):
        raise ValueError(
            f"{columns} codes of {bits} bits take {expected_words} words, not {num_words}"
        )
    codes = torch.empty(num_rows, columns, dtype=torch.uint8, device=words.device)
    for rows in _row_chunks(num_rows, columns):
        codes[rows] = _unpack(words[rows], bits)[:, :columns]
    return codes


def to_unsigned_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes as a file stores them: uint8, with ``2^(bits-1)`` added to signed codes."""
    return codes if codes.dtype == torch.uint8 else codes.view(torch.uint8) + (1 << (bits - 1))


def to_signed_codes(codes: Tensor, bits: int) -> Tensor:
    """Convert the stored codes of a symmetric grid from uint8 to int8; the inverse of `to_unsigned_codes`."""
    return (codes - (1 << (bits - 1))).view(torch.int8)


def _row_chunks(rows: int, columns: int) -> list[slice]:
    rows_per_chunk = max(1, _CHUNK_CODES // max(1, columns))
    return [slice(first, first + rows_per_chunk) for first in range(0, rows, rows_per_chunk)]


def _pad_columns(tensor: Tensor, multiple: int) -> Tensor:
    padding = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, padding)) if padding else tensor


def _packing_unit(bits: int) -> tuple[torch.dtype, int, int]:
    """Return the integer type that codes are packed in, and how many codes and bytes one such integer holds."""
    return (torch.uint8, 8 // bits, 1) if 8 % bits == 0 else (torch.int64, 8, bits)


def _pack(codes: Tensor, bits: int) -> Tensor:
    num_rows = codes.shape[0]
    dtype, codes_per_unit, bytes_per_unit = _packing_unit(bits)
    grouped = _pad_columns(codes, 32).contiguous().view(num_rows, -1, codes_per_unit)
    packed = grouped[..., 0].to(dtype, copy=True)
    for index in range(1, codes_per_unit):
        packed |= grouped[..., index].to(dtype) << (index * bits)
    packed_bytes = packed.view(torch.uint8).view(num_rows, packed.shape[1], -1)[
        ..., :bytes_per_unit
    ]
    return packed_bytes.reshape(num_rows, -1).view(torch.int32)


def _unpack(words: Tensor, bits: int) -> Tensor:
    num_rows = words.shape[0]
    dtype, codes_per_unit, bytes_per_unit = _packing_unit(bits)
    packed_bytes = (
        _pad_columns(words, bits).contiguous().view(torch.uint8).view(num_rows, -1, bytes_per_unit)
    )
    packed = _pad_columns(packed_bytes, dtype.itemsize).contiguous().view(dtype)
    codes = torch.empty(*packed.shape, codes_per_unit, dtype=torch.uint8, device=words.device)
    for index in range(codes_per_unit):
        codes[..., index] = (packed >> (index * bits)) & ((1 << bits) - 1)
    return codes.view(num_rows, -1)
