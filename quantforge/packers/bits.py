"""A dense little-endian bit stream: how integer codes lie in the 32-bit words of a file.

Code ``i`` of a row occupies bits ``i*b .. i*b + b - 1`` of the row's stream, least significant bit
first, and the row is padded with zero bits to a whole word. For 2, 4 and 8 bits that puts ``32/b``
codes in a word; for 3, 5, 6 and 7 bits some codes cross a word boundary and no bit is wasted. Every
integer layout that we read or write is this stream along one axis of a matrix: compressed-tensors
along the inputs (zero points along the outputs), GPTQ along the inputs and then transposed, AWQ
along the outputs in a permuted order.

The one fact that makes it short: eight codes of ``b`` bits are exactly ``b`` bytes. So eight codes
are shifted into one 64-bit integer and its low ``b`` bytes are kept; 2, 4 and 8 bits fill a single
byte, which is faster. Words are assembled from bytes, which equals arithmetic on a little-endian
machine, the only kind that safetensors and torch wheels are made for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.grids import words_per_row

_CHUNK = 1 << 22  # codes in flight at once; bounds the temporary memory to some 20 MB


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Pack the rows of ``codes`` (uint8 ``[R, C]``) into int32 ``[R, ceil(C*bits/32)]``.

    Raises:
        ValueError: a code needs more than ``bits`` bits; it would spill into its neighbours.
    """
    rows, columns = codes.shape
    if codes.numel() and int(codes.max()) >> bits:
        raise ValueError(f"a code does not fit in {bits} bits: {int(codes.max())}")
    words = torch.empty(rows, words_per_row(columns, bits), dtype=torch.int32, device=codes.device)
    for chunk in _chunks(rows, columns):
        words[chunk] = _pack(codes[chunk], bits)[:, : words.shape[1]]
    return words


def unpack_rows(words: Tensor, bits: int, columns: int) -> Tensor:
    """Return the codes of each row of ``words`` (int32 ``[R, W]``) as uint8 ``[R, columns]``.

    Raises:
        ValueError: ``W`` is not the number of words that ``columns`` codes take.
    """
    rows, width = words.shape
    if width != (needed := words_per_row(columns, bits)):
        raise ValueError(f"{columns} codes of {bits} bits take {needed} words, not {width}")
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=words.device)
    for chunk in _chunks(rows, columns):
        codes[chunk] = _unpack(words[chunk], bits)[:, :columns]
    return codes


def unsigned(codes: Tensor, bits: int) -> Tensor:
    """Return codes as a file stores them: uint8, a signed code shifted by ``2^(bits-1)``."""
    return codes if codes.dtype == torch.uint8 else codes.view(torch.uint8) + (1 << (bits - 1))


def signed(codes: Tensor, bits: int) -> Tensor:
    """Undo `unsigned` for a symmetric grid: uint8 to int8."""
    return (codes - (1 << (bits - 1))).view(torch.int8)


def _chunks(rows: int, columns: int) -> list[slice]:
    step = max(1, _CHUNK // max(1, columns))
    return [slice(start, start + step) for start in range(0, rows, step)]


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _lane(bits: int) -> tuple[torch.dtype, int, int]:
    """Return the integer type that codes are gathered in, the number of its codes and of its bytes that are kept."""
    return (torch.uint8, 8 // bits, 1) if 8 % bits == 0 else (torch.int64, 8, bits)


def _pack(codes: Tensor, bits: int) -> Tensor:
    rows = codes.shape[0]
    kind, count, kept = _lane(bits)
    lanes = _padded(codes, 32).contiguous().view(rows, -1, count)
    joined = lanes[..., 0].to(kind, copy=True)
    for index in range(1, count):
        joined |= lanes[..., index].to(kind) << (index * bits)
    octets = joined.view(torch.uint8).view(rows, joined.shape[1], -1)[..., :kept]
    return octets.reshape(rows, -1).view(torch.int32)


def _unpack(words: Tensor, bits: int) -> Tensor:
    rows = words.shape[0]
    kind, count, kept = _lane(bits)
    octets = _padded(words, bits).contiguous().view(torch.uint8).view(rows, -1, kept)
    joined = _padded(octets, kind.itemsize).contiguous().view(kind)
    codes = torch.empty(*joined.shape, count, dtype=torch.uint8, device=words.device)
    for index in range(count):
        codes[..., index] = (joined >> (index * bits)) & ((1 << bits) - 1)
    return codes.view(rows, -1)
