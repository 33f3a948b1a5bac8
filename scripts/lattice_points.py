"""Recover the points of ggml's lattice types from its decoder, and write them as `packers/lattices` reads them.

    python scripts/lattice_points.py [--check]

A block whose scale makes the step 1 (or a power of two) decodes to the very points that its codes name. So every entry
is read off blocks that count through the codes, as `gguf.quants.dequantize` decodes them; nothing is taken from a
source text. A point is stored as a number of 16 bits, whose digits (base 3, of the 4-vectors base 8) are the places of
its magnitudes in the list of the type, first weight lowest. ``--check`` compares with the file instead of writing it.
"""

from __future__ import annotations

import argparse
import sys

import gguf
import numpy
import torch

from quantforge.grids import GGML_BLOCKS
from quantforge.notation import parse
from quantforge.packers.ggml.blocks import pack_blocks
from quantforge.packers.lattices import LATTICES
from quantforge.packers.lattices.points import POINTS_FILE, STORED_TYPES, digit_values
from quantforge.packers.tensor import QuantizedTensor

BLOCK = 256


def recovered(grid: str) -> numpy.ndarray:
    """Return the points of one type as numbers, in the order of their codes."""
    lattice = LATTICES[grid]
    count = BLOCK // lattice.width
    index = torch.arange(lattice.num_points, dtype=torch.int32).view(-1, count)
    rows, groups = len(index), BLOCK // GGML_BLOCKS[grid].group_size
    parameters = {
        "d": torch.ones(rows, 1, dtype=torch.float16),
        "scales": torch.zeros(rows, groups, dtype=torch.uint8),
    }
    if grid == "iq1_s":
        parameters["shifts"] = torch.zeros_like(parameters["scales"])
    codes = index
    if lattice.points_per_code > 1:
        pairs = index.view(rows, -1, 2)
        codes = pairs[..., 0] | (pairs[..., 1] << lattice.index_bits)
    raw = pack_blocks(QuantizedTensor(codes, parameters, parse(grid))).numpy()
    kind = gguf.GGMLQuantizationType[grid.upper()]
    values = (
        gguf.quants.dequantize(raw, kind).reshape(-1, lattice.width) / lattice.step_factor
        - lattice.shift_size
    )
    known = digit_values(grid)
    digits = numpy.searchsorted(known, values.round(3))
    if not numpy.array_equal(known[digits], values):
        sys.exit(f"{grid}: values beside {known.tolist()}")
    return (digits * len(known) ** numpy.arange(lattice.width)).sum(1).astype("<u2")


def main() -> None:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    found = b"".join(recovered(grid).tobytes() for grid in STORED_TYPES)
    if not parser.parse_args().check:
        POINTS_FILE.write_bytes(found)
    elif POINTS_FILE.read_bytes() != found:
        sys.exit(f"{POINTS_FILE} is not what gguf decodes")


if __name__ == "__main__":
    main()
