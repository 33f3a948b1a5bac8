"""The layout that the Triton kernels read: bit planes of 32-bit words, loaded 16 bytes along K at a time.

A code of ``b`` bits is split into planes whose widths divide a word (3 bits are 2 + 1, 6 are 4 + 2),
the low bits first. Columns are cut into chunks of ``C``; in a plane of width ``w`` a chunk is
``W = C w / 32`` words, and

    bits [w i, w i + w) of word j of chunk c   hold   column  c C + i W + j

Neighbouring words hold neighbouring columns, so that the threads of a warp, each with four words of
a row in one 16-byte load, need neighbouring activations for every field ``i``; and a word never
leaves its group of columns, so that it is multiplied by one scale. That asks for a chunk that
divides the group: the largest power of two up to 128 that does. Groups whose power of two is too
small for a whole word take chunks of 128, and the kernel a scale per column (slow, and right).

Rows are padded to whole chunks and to 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Widths of the planes of a code, by its bits.
WIDTHS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
LARGEST_CHUNK = 128


def chunk_of(bits: int, group_size: int) -> tuple[int, bool]:
    """Return the columns of a chunk, and whether one word never spans two groups."""
    chunk = min(LARGEST_CHUNK, group_size & -group_size)
    whole = chunk * min(WIDTHS[bits]) >= 32
    return (chunk, True) if whole else (LARGEST_CHUNK, False)


def to_planes(codes: Tensor, bits: int, chunk: int) -> list[Tensor]:
    """Lay uint8 codes ``[out, in]`` out as one int32 matrix ``[out, words]`` per plane."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % chunk))
    chunks = padded.shape[1] // chunk
    planes, low = [], 0
    for width in WIDTHS[bits]:
        fields = 32 // width
        part = ((padded >> low) & (2**width - 1)).view(len(codes), chunks, fields, chunk // fields)
        words = part.new_zeros(len(codes), chunks, chunk // fields, dtype=torch.int32)
        for field in range(fields):
            words |= part[:, :, field].int() << (width * field)
        words = words.flatten(1)
        planes.append(torch.nn.functional.pad(words, (0, -words.shape[1] % 4)).contiguous())
        low += width
    return planes
