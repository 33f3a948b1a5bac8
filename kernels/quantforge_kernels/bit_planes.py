"""Weight layout of the Triton kernels: bit planes of 32-bit words, loaded 16 bytes along K at a time.

A code of ``b`` bits is split into planes whose widths divide a word (3 bits are 2 + 1, 6 are 4 + 2),
low bits first. Columns are cut into chunks of ``C``; in a plane of width ``w`` a chunk takes
``W = C w / 32`` words, and

    bits [w i, w i + w) of word j of chunk c   hold   column  c C + i W + j

Neighboring words hold neighboring columns, so that the threads of a warp, each of which loads four words of
a row at once, need neighboring activations for every field ``i``. All columns of a word belong to one
group, so that the word is multiplied by one scale. This requires a chunk size that
divides the group: the largest such power of two up to 128. If that is too small
for a whole word, chunks have 128 columns, and the kernel loads a scale per column (slow but correct).

Rows are padded to whole chunks and to 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Widths of the planes of a code, by its bits.
PLANE_WIDTHS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
MAX_CHUNK_COLUMNS = 128


def choose_chunk(bits: int, group_size: int) -> tuple[int, bool]:
    """Return the number of columns of a chunk, and whether every word lies within one group."""
    chunk = min(MAX_CHUNK_COLUMNS, group_size & -group_size)
    word_in_group = chunk * min(PLANE_WIDTHS[bits]) >= 32
    return (chunk, True) if word_in_group else (MAX_CHUNK_COLUMNS, False)


def pack_bit_planes(codes: Tensor, bits: int, chunk: int) -> list[Tensor]:
    """Pack uint8 codes ``[out, in]`` into one int32 matrix ``[out, words]`` per plane."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % chunk))
    chunks = padded.shape[1] // chunk
    planes, low_bit = [], 0
    for width in PLANE_WIDTHS[bits]:
        fields = 32 // width
        field_values = ((padded >> low_bit) & (2**width - 1)).view(
            len(codes), chunks, fields, chunk // fields
        )
        words = field_values.new_zeros(len(codes), chunks, chunk // fields, dtype=torch.int32)
        for field in range(fields):
            words |= field_values[:, :, field].int() << (width * field)
        words = words.flatten(1)
        planes.append(torch.nn.functional.pad(words, (0, -words.shape[1] % 4)).contiguous())
        low_bit += width
    return planes
