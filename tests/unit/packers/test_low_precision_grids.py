"""Codebooks, fp8 and block scales: bytes of other tools, errors, and runs of columns."""

from __future__ import annotations

import pytest
import torch

from quantforge.errors import InputError
from quantforge.notation import parse
from quantforge.numerics.threads import one_thread
from quantforge.packers import fp4, fp8, get_packer, integer, nf4
from quantforge.packers import row_encoding as rows
from quantforge.packers.nearest_levels import count_exceeded, look_up
from tests.thorough import parametrize_each_value

SCHEMES = ("nf4", "nf4:g128", "nf4:g64:sym:double", "fp4", "fp8", "fp8:tensor", "fp8:g128", "fp8:128x128",
           "fp8_e5m2:row", "nvfp4", "mxfp8", "int4:g64:min")  # fmt: skip
# Signal to noise in dB on normal weights: measured, +-0.15; NF4's are those of bitsandbytes.
DECIBELS = {"nf4": 20.72, "nf4:g128": 20.38, "fp4": 18.28, "fp8": 31.5, "fp8:tensor": 31.5, "fp8_e5m2:row": 25.6,
            "nvfp4": 20.5, "mxfp8": 30.65}  # fmt: skip


def normal(rows: int = 256, columns: int = 512, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def rounded(weight: torch.Tensor, text: str, *, search: bool = False) -> torch.Tensor:
    scheme = parse(text).with_scale(parse(text).scale or parse("int4:g64:sym:bf16").scale)
    packer = get_packer(scheme)
    parameters = packer.fit(weight, scheme, search=search)
    return packer.decode(packer.encode(weight, parameters, scheme), parameters, scheme)


def decibels(weight: torch.Tensor, result: torch.Tensor) -> float:
    return float(10 * torch.log10(weight.square().sum() / (weight - result).square().sum()))


@pytest.mark.parametrize("text", DECIBELS)
def test_errors_match_the_recorded_decibels(text):
    weight = normal(1024, 1024)
    assert decibels(weight, rounded(weight, text)) == pytest.approx(DECIBELS[text], abs=0.15)


@pytest.mark.parametrize("text", [text for text in SCHEMES if text != "fp8:tensor"])
def test_scale_search_lowers_the_error(text):
    weight = normal()
    gain = decibels(weight, rounded(weight, text, search=True)) - decibels(
        weight, rounded(weight, text)
    )
    assert 0.02 < gain < 3


@parametrize_each_value(
    ("text", SCHEMES),
    ("search", [False, True]),
)
def test_a_run_of_columns_is_coded_as_in_the_whole(text, search):
    scheme = parse(text).with_scale(parse("int4:g64:sym:bf16").scale)
    weight, packer = normal(200, 512), get_packer(scheme)
    parameters = packer.fit(weight, scheme, torch.rand(512) + 0.1, search=search)
    plain = text.endswith("double") and not search  # coded under other scales, see below
    codes = packer.encode(weight, parameters, scheme, slice(0, 512) if plain else None)
    values = packer.decode(codes, parameters, scheme)
    for columns in (slice(0, 512), slice(100, 300), slice(70, 71), slice(128, 192)):
        run = packer.encode(weight[:, columns], parameters, scheme, columns)
        assert torch.equal(run.float(), codes[:, columns].float())
        assert torch.equal(packer.decode(run, parameters, scheme, columns), values[:, columns])


@pytest.mark.parametrize(
    "text", ["nf4:g4", "nf4:g4:sym:double", "fp8:g4", "fp8:3x4", "nvfp4", "mxfp8", "int4:g4:min"]
)
def test_runs_that_end_next_to_the_border_of_a_group(text):
    scheme = parse(text).with_scale(parse("int4:g64:sym:bf16").scale)
    size, packer = scheme.group_size(0), get_packer(scheme)
    weight = normal(5, size * (size + 1)) * torch.linspace(0.1, 5, size * (size + 1))
    whole = slice(0, weight.shape[1])
    parameters = packer.fit(weight, scheme)
    codes = packer.encode(weight, parameters, scheme, whole)
    values = packer.decode(codes, parameters, scheme)
    ends = [(1, 4), (size - 1, size), (size, size + 1), (size - 1, size + 1), (size - 2, size + 1)]
    ends += [(size + 1, size + 4), (1, size**2 + 1), (0, size), (0, size + 1)]
    for columns in (slice(*pair) for pair in ends):
        run = packer.encode(weight[:, columns], parameters, scheme, columns)
        assert torch.equal(run.float(), codes[:, columns].float())
        assert torch.equal(packer.decode(run, parameters, scheme, columns), values[:, columns])


@pytest.mark.parametrize(
    ("text", "search"), [(text, at % 2 == 0) for at, text in enumerate(SCHEMES)]
)
def test_zeros_constants_and_tiny_groups_stay_finite(text, search):
    weight = torch.zeros(128, 256)
    weight[1], weight[2], weight[3, :64] = 0.5, -0.5, 1e-30
    result = rounded(weight, text, search=search)
    assert bool(result.isfinite().all())
    assert not bool(result[0].any())
    if "tensor" not in text and "128x128" not in text:
        assert result[1:3].abs().sub(0.5).abs().max() < 0.07


@pytest.mark.parametrize("grid", ["nf4", "fp4"])
@pytest.mark.parametrize("size", [64, 128])
def test_plain_blocks_equal_bitsandbytes(grid, size):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = normal(128, 512) * 0.03
    weight[3, :64], weight[4, :64] = 0, 0.25
    scheme = parse(f"{grid}:g{size}:sym:f32")
    parameters = nf4.fit(weight, scheme)
    codes = nf4.encode(weight, parameters, scheme)
    packed, state = functional.quantize_4bit(weight, blocksize=size, quant_type=grid)
    flat = codes.flatten()
    assert torch.equal(((flat[::2] << 4) | flat[1::2]).unsqueeze(1), packed)
    assert torch.equal(parameters["scales"].flatten(), state.absmax)
    assert torch.equal(nf4.codebook(grid), state.code)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        state.dtype = dtype
        values = functional.dequantize_4bit(packed, state)
        assert torch.equal(nf4.decode(codes, parameters, scheme).to(dtype), values)


@pytest.mark.parametrize("grid", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(512, 1024), (333, 448)])
def test_double_quantization_equals_bitsandbytes(grid, shape):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight, scheme = normal(*shape) * 0.03, parse(f"{grid}:g64:sym:double")
    weight[3, :64], weight[4, :64] = 0, 0.25
    parameters = nf4.fit(weight, scheme)
    codes = nf4.encode(weight, parameters, scheme)
    with one_thread():
        packed, state = functional.quantize_4bit(weight, compress_statistics=True, quant_type=grid)
    flat = codes.flatten()
    assert torch.equal(((flat[::2] << 4) | flat[1::2]).unsqueeze(1), packed)
    assert torch.equal(nf4.dynamic_map(), state.state2.code)
    assert torch.equal(parameters["nested"].flatten(), state.state2.absmax)
    assert float(parameters["offset"]) == float(state.offset)
    # The nearest level, which its kernel for CPUs misses now and then.
    scales = rows.group_absmax(weight, shape[1] // 64).flatten() - state.offset
    scaled = scales / parameters["nested"].flatten().repeat_interleave(256)[: len(scales)]
    mine = parameters["scales"].flatten()
    nearest = (scaled[:, None] - state.state2.code).abs().argmin(1)
    assert torch.equal(mine, nearest.to(torch.uint8))
    assert (mine != state.absmax).float().mean() < 0.005
    levels = nf4.dynamic_map()
    assert (levels[mine.long()] - levels[state.absmax.long()]).abs().max() < 2.0**-6
    peer_parameters = dict(parameters) | {"scales": state.absmax.view(shape[0], -1)}
    state.dtype = torch.float32
    assert torch.equal(
        nf4.decode(codes, peer_parameters, scheme), functional.dequantize_4bit(packed, state)
    )


def test_codes_after_search_use_the_decoded_scales():
    weight, scheme = normal(512, 1024) * 0.03, parse("nf4:g64:sym:double")
    errors = [
        (weight - rounded(weight, str(scheme), search=search)).square().sum()
        for search in (False, True)
    ]
    assert errors[1] < 0.95 * errors[0]
    parameters = nf4.fit(weight, scheme, search=True)
    codes = nf4.encode(weight, parameters, scheme)
    assert torch.equal(codes[:, :64], nf4.encode(weight[:, :64], parameters, scheme, slice(0, 64)))


def test_fp8_is_clamped_before_it_is_cast():
    huge = torch.tensor([[1e9, -1e9, 448.0, 464.1, 0.0, 2.0**-9, 2.0**-11, 17.0]])
    assert fp8.round_to_float8(huge, "fp8_e4m3").float().tolist() == [
        [448, -448, 448, 448, 0, 2.0**-9, 0, 16]
    ]
    assert fp8.round_to_float8(huge, "fp8_e5m2").float()[0, :2].tolist() == [57344, -57344]


def test_an_fp8_scale_beyond_its_type_is_refused():
    with pytest.raises(InputError, match="beyond the range"):
        fp8.fit(torch.full((1, 8), 3e38), parse("fp8:row:sym:f16"))
    tiny = fp8.fit(torch.full((1, 8), 1e-30), parse("fp8:row:sym:f16"))
    assert tiny["scales"].item() > 0


@pytest.mark.parametrize(("shift", "search"), [(70000, False), (-70000, False), (-70000, True)])
def test_a_minimum_beyond_its_type_is_refused(shift, search):
    weight = torch.linspace(-10, 10, 64).view(1, 64) + shift
    with pytest.raises(InputError, match=r"minimum of .* is beyond"):
        integer.fit(weight, parse("int4:g64:min:f16"), search=search)
    result = integer.fit(weight, parse("int4:g64:min:bf16"), search=search)
    assert bool(result["mins"].isfinite().all())


def test_e2m1_ties_go_to_the_even_code():
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 100.0, -0.75, -0.1])
    assert fp4.encode_e2m1(values).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 10, 0]
    signed = [code | 8 if code else 0 for code in fp4.encode_e2m1(values).tolist()[:9]]
    assert fp4.encode_e2m1(-values[:9]).tolist() == signed
    nearest = fp4.decode_e2m1(fp4.encode_e2m1(values))
    assert torch.equal(
        fp4.round_to_e2m1(torch.stack([values, -values])), torch.stack([nearest, -nearest])
    )
    assert fp4.decode_e2m1(torch.tensor([7, 15, 8, 1])).tolist() == [6, -6, 0, 0.5]


def test_powers_of_two_are_exact_at_range_limits():
    exponents = torch.tensor([0, 1, 127, 254], dtype=torch.uint8)
    assert fp4.decode_e8m0(exponents).tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert fp4.e8m0_exponents(torch.tensor([0.0, 448.0, 449.0, 3.4e38]), "mxfp8").tolist() == [
        0,
        127,
        127,
        246,
    ]


def test_joined_matrices_share_the_nvfp4_divisor():
    from quantforge.model.statistics import Statistics
    from quantforge.quantizers import rtn
    from quantforge.recipe import Rounding

    weights = {"q": normal(32, 64), "k": normal(16, 64, seed=1) * 8}
    output = rtn.round_matrices(
        weights, Statistics(), dict.fromkeys(weights, parse("nvfp4")), Rounding(scales="absmax")
    )
    divisors = {float(result.tensor.parameters["divisor"]) for result in output.values()}
    assert len(divisors) == 1
    assert divisors.pop() == pytest.approx(448 * 6 / float(weights["k"].abs().max()))
    for name, result in output.items():
        assert result.tensor.shape == tuple(weights[name].shape)
        assert (result.tensor.decode() - weights[name]).norm() < 0.11 * weights[name].norm()


@pytest.mark.parametrize(
    "text",
    ["nf4", "fp4", "fp8", "fp8:g128", "fp8:tensor", "fp8:128x128", "fp8_e5m2", "int8:row:sym:f32",
     "int4:g128:sym:f16"],
)  # fmt: skip
def test_compiled_loops_give_the_same_codes(text, monkeypatch):
    weight = normal(160, 2176)
    weight[0] = torch.linspace(-600, 600, 2176)
    weight[1] = torch.linspace(-0.04, 0.04, 2176)
    weight[2] = 0
    scheme = parse(text).with_scale(parse("int4:g64:sym:bf16").scale)
    packer = get_packer(scheme)
    parameters = packer.fit(weight, scheme)
    plain = packer.encode(weight, parameters, scheme)
    monkeypatch.setattr(rows, "COMPILED_FROM", 1)
    assert torch.equal(packer.encode(weight, parameters, scheme).float(), plain.float())


@pytest.mark.parametrize(
    ("text", "kind"),
    [("nvfp4", torch.uint8), ("mxfp4", torch.uint8), ("mxfp8", torch.float8_e4m3fn)],
)
def test_block_codes_have_the_dtype_for_packing(text, kind):
    scheme = parse(text)
    packer = get_packer(scheme)
    assert packer.encode(normal(), packer.fit(normal(), scheme), scheme).dtype == kind


def test_level_lookup_and_widening_match_torch():
    thresholds = nf4._thresholds("nf4")
    edges = torch.tensor([*thresholds, 0.0, torch.inf, -torch.inf, torch.nan])
    values = torch.cat([edges, edges.nextafter(torch.tensor(9.0)), torch.randn(98)]).view(2, -1)
    above = (values.unsqueeze(-1) > torch.tensor(thresholds)).sum(-1)
    assert torch.equal(count_exceeded(values, thresholds).long(), above)
    assert torch.equal(count_exceeded(values.T, thresholds).long(), above.T)
    assert torch.equal(look_up(torch.arange(16) * 0.5, above.T), above.T * 0.5)
    for dtype in fp8.DTYPES.values():
        codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(dtype)
        torch.testing.assert_close(
            fp8.to_float32(codes), codes.float(), rtol=0, atol=0, equal_nan=True
        )
