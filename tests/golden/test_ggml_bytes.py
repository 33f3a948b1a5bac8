"""ggml block types equal golden bytes, the gguf package and ggml's own quantizers."""

import hashlib
import math

import gguf
import numpy
import pytest
import torch

from benchmarks.peers.ggml import quantized
from quantforge.notation import parse
from quantforge.packers.ggml import GGML_TYPES
from quantforge.packers.ggml.blocks import (
    TERNARY_BYTE_RUNS,
    decode_blocks,
    pack_blocks,
    unpack_blocks,
)
from quantforge.packers.ggml.packer import encode_rows
from quantforge.packers.lattices import LATTICES
from quantforge.packers.tensor import QuantizedTensor

# Those of lattices are in `tests/unit/packers/test_lattices.py`.
ENCODED = sorted(
    layout.grid for layout in GGML_TYPES.values() if layout.grid and layout.grid not in LATTICES
)
# Type: sha256 of the blocks of `waves`, without and with `importance`; made with ggml 0c1e57098 on x86-64.
WAVES = {
    "q4_0": ("02de73b81628b74492fad4bfde466276", "cc677c9c1e69a96eb967279b464f5ccb"),
    "q4_1": ("a6e7bd2dba66f11a4d06d6099f1cc1b5", "8b0d5922e3582668591d8939a5d15a93"),
    "q5_0": ("ccc063f1522e9a45436f7113c4e8e6e8", "6ada8f606418cdc9cea7d32cb6764c20"),
    "q5_1": ("9396a80bf824cb4867d0d22e7e946390", "ae0ebde9998baccfd9cd2dbd869ec191"),
    "q8_0": ("d5e2196ceee029fe87f8d7b19ab0c51e", "d5e2196ceee029fe87f8d7b19ab0c51e"),
    "mxfp4": ("725f02012e4bd0084d3a0f49b24dc076", "725f02012e4bd0084d3a0f49b24dc076"),
    "q2_k": ("f1dbfb8d6ab438a35c89fd15f30f90a6", "50b5c6335dfe269e19fcb7f3bed265d1"),
    "q3_k": ("ac003ee8b253c604e72bea60c31d8023", "e0c17861688766fb1d45b1f9d909ee5c"),
    "q4_k": ("671b9360e6b7d23534cededf64683162", "44db74632edd42200e6387968b719576"),
    "q5_k": ("8ca6b577aea7cf232d8f80190de00f29", "c652adac78ba38d889a216bbd1bdbb7a"),
    "q6_k": ("5ed22db66ffdc4de1407ba59e3dead50", "aa3832eef3ad119eead33f2d3f62191d"),
    "iq4_nl": ("f1f6e61f095c493f174e96316009fca4", "837335ad4815e9d927826c320d2ac6ef"),
    "iq4_xs": ("64eb7530d9bc4a1a2bcd015f27d2f51c", "c8591930b980bd0b8bb2bc311884625c"),
}
DEGENERATE = {
    "q4_0": ("a3006370a16fe283", "1c594f2bd25fad1e"),
    "q4_1": ("23f4668face1d006", "b16bbbe8a59bf44b"),
    "q5_0": ("1d620981ce0e875a", "c9f29431f1e68dfd"),
    "q5_1": ("e57618248addb964", "19d18aa1c2ccf1c6"),
    "q8_0": ("4683f8833bc22ef7", "4683f8833bc22ef7"),
    "mxfp4": ("8e14d8d9cd7f5083", "8e14d8d9cd7f5083"),
    "q2_k": ("16d25259794129aa", "16d25259794129aa"),
    "q3_k": ("23de6ba6602b9c23", "f6f5e1c6de7db55d"),
    "q4_k": ("9b2812d7766962a5", "9b2812d7766962a5"),
    "q5_k": ("d1cb7206a4049354", "d1cb7206a4049354"),
    "q6_k": ("e8fb2db21831ff0b", "954ea19efc674c42"),
    "iq4_nl": ("7e85ec52b7706964", "2052881dd0230e71"),
    "iq4_xs": ("8230601c3c3ac3f9", "f365f8a056dab8ff"),
}


def waves():
    index = torch.arange(1024, dtype=torch.int64)
    return (((index * 7919 + 104729) % 2001) - 1000).float().div(1000).unsqueeze(0)


def importance():
    return (torch.arange(1024) * 31 % 97 + 1).float() / 97


def degenerate():
    """Zeros, one value, one negative value, and a single one."""
    row = torch.zeros(1, 1024)
    row[0, 256:512], row[0, 512:768], row[0, 775] = 0.5, -0.5, 1
    return row


def mixed(generator):
    """Rows that searches find hard: tails, zeros, ties, positive values, tiny and huge ones."""
    x = torch.randn(48, 1024, generator=generator) * 0.02
    x[8:16] = torch.randn(8, 1024, generator=generator) ** 3 * 0.1
    x[16:20] = torch.rand(4, 1024, generator=generator)
    x[20:24, ::3] = 0
    x[24:28, 256:512] = 0
    x[28:32] = torch.round(torch.randn(4, 1024, generator=generator) * 4) / 8
    x[32:36] *= 1e-4
    x[36:40] *= 1e3
    return x


def digest(x, grid, columns):
    raw = pack_blocks(encode_rows(x, parse(grid), columns, "reference"))
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("grid", WAVES)
def test_reference_encoder_writes_the_golden_bytes(grid):
    for x, table in ((waves(), WAVES), (degenerate(), DEGENERATE)):
        for expected, columns in zip(table[grid], (None, importance()), strict=True):
            assert digest(x, grid, columns)[: len(expected)] == expected


def zeros(generator):
    """Blocks of zeros of both signs: alone, and among positive, negative and all values."""
    none = torch.where(torch.rand(24, 512, generator=generator) < 0.5, -0.0, 0.0)
    sizes = torch.randn(24, 512, generator=generator)
    some = [torch.where(sizes > 0.5, value, none) for value in (sizes, -sizes)]
    return torch.cat([none, *some, torch.where(sizes.abs() > 0.5, sizes, none)])


@pytest.mark.parametrize("grid", ENCODED)
def test_reference_encoder_equals_the_ggml_library(grid):
    """Without and with importance; zeros keep their signs; blocks of columns that are all without importance."""
    generator = torch.Generator().manual_seed(1)
    hard, signed = mixed(generator), zeros(generator)
    columns = torch.rand(1024, generator=generator) ** 4 + 1e-4
    without = columns.clone()
    without[256:512] = 0
    cases = [
        (hard, None),
        (hard, columns),
        (hard, without),
        (signed, None),
        (signed, columns[:512]),
    ]
    for x, given in cases:
        raw = pack_blocks(encode_rows(x, parse(grid), given, "reference"))
        assert torch.equal(raw, quantized(x, grid, given))


def test_type_table_equals_that_of_gguf():
    for name, layout in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType[name]
        assert layout.number == kind, name
        assert (layout.columns, layout.block_bytes) == gguf.GGML_QUANT_SIZES[kind], name


def random_bytes(name, rows=37, blocks=6):
    generator = torch.Generator().manual_seed(3)
    shape = (rows, GGML_TYPES[name].block_bytes * blocks)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def test_decoding_random_bytes_equals_gguf():
    for name in GGML_TYPES:
        raw = random_bytes(name)
        with numpy.errstate(all="ignore"):
            expected = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[name])
        expected = torch.from_numpy(expected.astype(numpy.float32))
        decoded = decode_blocks(raw, name)
        same = decoded.view(torch.int32) == expected.view(torch.int32)
        assert bool((same | (decoded.isnan() & expected.isnan())).all()), name


def test_unpack_then_pack_returns_the_same_bytes():
    for grid in {*ENCODED} - {"tq1_0"}:
        raw = random_bytes(grid.upper())
        assert torch.equal(pack_blocks(unpack_blocks(raw, parse(grid))), raw), grid


def test_packed_ternary_codes_unpack_to_the_same_codes():
    # 256 bytes stand for 243 numbers: here only the codes come back, not any bytes.
    codes = unpack_blocks(random_bytes("TQ1_0"), parse("tq1_0"))
    assert torch.equal(unpack_blocks(pack_blocks(codes), parse("tq1_0")).codes, codes.codes)


def test_five_ternary_digits_are_packed_as_rounded_up_fraction():
    numbers = torch.arange(243)
    digits = torch.stack([numbers // 3 ** (4 - index) % 3 for index in range(5)], 1)
    blocks = torch.zeros(8, 256, dtype=torch.int8)
    for block in range(8):  # 32 numbers in each; the digits of one are 32 apart
        some = digits[32 * block : 32 * block + 32].T - 1
        blocks[block, :160].view(5, 32)[:, : some.shape[1]] = some
    scales = torch.ones(8, 1, dtype=torch.float16)
    raw = pack_blocks(QuantizedTensor(blocks, {"scales": scales}, parse("tq1_0")))
    packed = raw[:, :32].flatten()[:243]
    assert packed.tolist() == [math.ceil(number * 256 / 243) for number in range(243)]
    assert sum(size for size, _ in TERNARY_BYTE_RUNS) == GGML_TYPES["TQ1_0"].block_bytes - 2
    assert sum(size * count for size, count in TERNARY_BYTE_RUNS) == 256


@pytest.mark.parametrize(
    "grid", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "tq2_0", "mxfp4"]
)
def test_reference_encoder_equals_the_gguf_python_quantizers(grid):
    x = mixed(torch.Generator().manual_seed(2))
    with numpy.errstate(all="ignore"):
        expected = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType[grid.upper()])
    assert torch.equal(
        pack_blocks(encode_rows(x, parse(grid), None, "reference")), torch.from_numpy(expected)
    )
