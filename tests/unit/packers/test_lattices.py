"""ggml's lattice types against gguf's decoder and ggml's quantizer, with search and error feedback."""

from __future__ import annotations

import hashlib

import gguf
import numpy
import pytest
import torch
from torch import Tensor

from benchmarks.peers.ggml import quantized
from quantforge.errors import InputError
from quantforge.grids import GGML_BLOCKS
from quantforge.model.statistics import Statistics
from quantforge.notation import parse
from quantforge.packers.ggml.blocks import decode_blocks, pack_blocks, unpack_blocks
from quantforge.packers.lattices import LATTICES, NEED_IMPORTANCE, packer
from quantforge.packers.lattices.points import decode_values, lattice_points
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers import rtn
from quantforge.quantizers.gptq import gptq
from quantforge.recipe import GptqOptions, Rounding
from tests.thorough import mark_others_thorough

GRIDS = sorted(LATTICES)
# sha256 of ggml's blocks of `rows` with their importances, where its tables alone take seconds to make; the others are
# made here. With ggml 0c1e57098 on x86-64.
BLOCKS = {
    "iq1_m": "85a049cbc555900352867df4c8f351eb",
    "iq1_s": "e8cbc670f71d511f4b24fb6abea2fac9",
    "iq2_s": "79aad341fb288ec0c08ac89872784025",
    "iq2_xs": "1412b896eaff41958a88bf4a4033b7a9",
}
ROWS = "a7e098bef90660793e18ae399f833f6f"  # of the rows and importances themselves


def rows(count: int = 8, columns: int = 512) -> tuple[Tensor, Tensor]:
    """Return rows that searches find hard (tails, ties, zeros, tiny, huge values), and importances, some of them 0."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, columns, generator=draw) * 0.02
    x[1] = torch.randn(columns, generator=draw) ** 3 * 0.1
    x[2] = torch.rand(columns, generator=draw)
    x[3, ::3] = 0
    x[4, 256:] = 0
    x[5] = torch.round(torch.randn(columns, generator=draw) * 4) / 8
    x[6] *= 1e-4
    x[7] *= 1e3
    importance = torch.rand(columns, generator=draw) ** 2 + 0.01
    importance[5:40] = 0
    return x, importance


@pytest.mark.parametrize("grid", GRIDS)
def test_random_bytes_decode_as_gguf_and_round_trip(grid: str) -> None:
    draw = torch.Generator().manual_seed(0)
    size = GGML_BLOCKS[grid].block_bytes
    raw = torch.randint(0, 256, (64, 2 * size), dtype=torch.uint8, generator=draw)
    tensor = unpack_blocks(raw, parse(grid))
    assert torch.equal(pack_blocks(tensor), raw)
    with numpy.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[grid.upper()])
    finite = ~numpy.isnan(expected)
    assert finite.mean() > 0.9
    result = decode_blocks(raw, grid.upper()).numpy()
    assert numpy.array_equal(result.view(numpy.int32)[finite], expected.view(numpy.int32)[finite])
    part = packer.decode(
        tensor.codes[:, 40 // tensor_width(grid) : 304 // tensor_width(grid)],
        tensor.parameters,
        tensor.scheme,
        slice(40, 304),
    )
    assert numpy.array_equal(part.numpy(), result[:, 40:304], equal_nan=True)


def tensor_width(grid: str) -> int:
    return LATTICES[grid].weights_per_code


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:32]


@pytest.mark.parametrize("grid", GRIDS)
def test_reference_encoder_writes_ggml_bytes(grid: str) -> None:
    x, importance = rows()
    for row_importance in (importance, None):
        if row_importance is None and grid in NEED_IMPORTANCE:
            with pytest.raises(InputError, match="without an importance"):
                packer.encode_rows(x, parse(grid))
            continue
        # Ties of IQ1_M between columns of importance 0 fall otherwise.
        weights = importance.clamp(min=1e-3) if grid == "iq1_m" else row_importance
        mine = pack_blocks(packer.encode_rows(x, parse(grid), weights))
        if grid in BLOCKS:
            assert digest(x, importance) == ROWS
            assert digest(mine) == BLOCKS[grid]
        else:
            assert torch.equal(mine, quantized(x, grid, weights))


def lost(x: Tensor, decoded: Tensor, importance: Tensor) -> float:
    return float(((x - decoded).square() * packer.error_weights(x, importance)).sum())


@pytest.mark.parametrize("grid", GRIDS)
def test_search_loses_less_than_ggml(grid: str) -> None:
    draw = torch.Generator().manual_seed(2)
    x, importance = torch.randn(16, 512, generator=draw), torch.rand(512, generator=draw) + 0.1
    parameters = packer.fit(x, parse(grid), importance, search=True)
    codes = packer.encode_weighted(x, parameters, parse(grid), importance)
    mine = lost(x, packer.decode(codes, parameters, parse(grid)), importance)
    ggml_loss = lost(x, packer.encode_rows(x, parse(grid), importance).decode(), importance)
    assert 0.8 < mine / ggml_loss < 0.99


@pytest.mark.parametrize("grid", mark_others_thorough(GRIDS, *GRIDS[::2]))
def test_nearest_search_is_rarely_beaten_by_brute_force(grid: str) -> None:
    lattice, draw = LATTICES[grid], torch.Generator().manual_seed(3)
    width = lattice.weights_per_code
    root = torch.linalg.cholesky(torch.eye(width) + 0.3 * torch.ones(width, width)).contiguous()
    every = torch.arange(lattice.num_points, dtype=torch.int32)
    t = torch.randn(64, width, generator=draw) * float(lattice_points(grid).std()) * 1.2
    step, none = torch.ones(64), torch.zeros(64)
    codes = packer.nearest_in_metric(t, step, none, grid, root)
    result = ((t - decode_values(codes, grid)) @ root).square().sum(1)
    best = torch.full((64,), torch.inf)
    masks = (
        range(1 << width)
        if lattice.signs and width * lattice.num_points < 3000 and lattice.points_per_code == 1
        else [0]
    )
    if lattice.points_per_code == 2:
        return  # 2^31 vectors
    for mask in masks:
        if lattice.signs == "even" and mask.bit_count() % 2:
            continue
        for turn in range(2 if lattice.shift_per_code else 1):
            q = decode_values((every | (mask | turn) << lattice.sign_shift).unsqueeze(1), grid)
            best = torch.minimum(best, ((t @ root).unsqueeze(1) - q @ root).square().sum(2).amin(1))
    if len(masks) > 1 or not lattice.signs:
        assert float((result / best).mean()) < 1.02
        assert float((result / best).min()) > 0.999


@pytest.mark.parametrize("grid", GRIDS)
def test_panel_error_feedback_lowers_the_error(grid: str) -> None:
    draw = torch.Generator().manual_seed(4)
    weight, inputs = torch.randn(24, 256, generator=draw), torch.randn(768, 256, generator=draw)
    inputs = inputs @ torch.randn(256, 256, generator=draw)
    hessian = inputs.T @ inputs / len(inputs)
    statistics, schemes = Statistics(tokens=768, hessian=hessian), {"w": parse(grid)}
    errors = []
    for method, refine in ((rtn, 0), (gptq, 0), (gptq, 2)):
        rounding = Rounding("search", GptqOptions(refine=refine))
        result = method.round_matrices({"w": weight}, statistics, schemes, rounding)["w"].tensor
        assert isinstance(result, QuantizedTensor)
        assert torch.equal(
            unpack_blocks(pack_blocks(result), parse(grid)).decode(), result.decode()
        )
        error = weight - result.decode()
        errors.append(float((error @ hessian * error).sum()))
    plain, unrefined, refined = errors
    assert unrefined < 0.7 * plain
    assert 0.3 * unrefined < refined < 0.97 * unrefined
