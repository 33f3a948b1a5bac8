"""ggml grids: stored parameters, nearest codes, and a search that beats ggml's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.errors import InputError
from quantforge.grids import GGML_BLOCKS
from quantforge.notation import parse
from quantforge.packers import get_packer
from quantforge.packers.ggml import GGML_TYPES, row_loops
from quantforge.packers.ggml import search as searching
from quantforge.packers.ggml.blocks import pack_blocks, unpack_blocks
from quantforge.packers.ggml.grid import CODE_RANGES, LANES, SCALE_RANGES, group_steps
from quantforge.packers.ggml.packer import decode, encode, encode_rows, fit
from tests.thorough import mark_others_thorough

ENCODED = sorted(CODE_RANGES)
# One of each kind of block: a scale, a minimum, superblocks with minima and without, a table, digits, exponents.
BLOCKS = ("q5_0", "q4_1", "q4_k", "q6_k", "iq4_xs", "tq1_0", "mxfp4")
# Relative squared error of normal weights under an importance, as measured: much less would be a mistake too.
ERRORS = {
    "iq4_nl": 0.004568, "iq4_xs": 0.004638, "mxfp4": 0.01213, "q2_k": 0.04942, "q3_k": 0.01745,
    "q4_0": 0.005732, "q4_1": 0.003951, "q4_k": 0.004041, "q5_0": 0.001407, "q5_1": 0.0009178,
    "q5_k": 0.001001, "q6_k": 0.0002125, "q8_0": 2.177e-05, "tq1_0": 0.1933, "tq2_0": 0.1933,
}  # fmt: skip


def matrix(rows=70, columns=512, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def importance(columns=512):
    return torch.rand(columns, generator=torch.Generator().manual_seed(9)) ** 3 + 1e-3


def error(weight, tensor, columns):
    lost = ((tensor.decode() - weight).square() * columns).sum()
    return float(lost / (weight.square() * columns).sum())


@pytest.mark.parametrize("grid", ENCODED)
def test_search_error_matches_the_recorded_value(grid):
    weight, columns = matrix(), importance()
    result = error(weight, encode_rows(weight, parse(grid), columns), columns)
    assert result == pytest.approx(ERRORS[grid], rel=0.04)


@pytest.mark.parametrize("grid", mark_others_thorough(ENCODED, *ENCODED[::2]))
def test_search_beats_ggml_under_the_same_objective(grid):
    weight, columns = matrix(), importance()
    weights = columns * (weight.square() + weight.square().mean(1, keepdim=True)).sqrt()
    ours = error(weight, encode_rows(weight, parse(grid), columns), weights)
    reference_error = error(weight, encode_rows(weight, parse(grid), columns, "reference"), weights)
    assert 0.2 * reference_error < ours < 0.998 * reference_error, ours / reference_error


@pytest.mark.parametrize("grid", sorted(SCALE_RANGES))
def test_short_search_without_importance_loses_little(grid):
    weight = matrix()
    equal = torch.ones(weight.shape[1])
    weights = (weight.square() + weight.square().mean(1, keepdim=True)).sqrt()
    brief = error(weight, encode_rows(weight, parse(grid)), weights)
    full = error(weight, encode_rows(weight, parse(grid), equal), weights)
    reference_error = error(weight, encode_rows(weight, parse(grid), None, "reference"), weights)
    assert full < brief < 1.02 * full
    assert brief < 0.98 * reference_error


@pytest.mark.parametrize("grid", ENCODED)
def test_torch_search_equals_the_compiled_search(grid, monkeypatch):
    weight, columns = matrix(), importance()
    compiled = encode_rows(weight, parse(grid), columns)
    monkeypatch.setattr(searching, "_use_compiled_loops", lambda x: False)
    plain = encode_rows(weight, parse(grid), columns)
    same = (compiled.codes == plain.codes).float().mean()
    assert same > 0.99  # sums in another order decide a few near ties otherwise
    assert error(weight, plain, columns) == pytest.approx(
        error(weight, compiled, columns), rel=1e-3
    )


@pytest.mark.parametrize("grid", BLOCKS)
def test_the_compiled_encoder_equals_the_one_in_torch(grid):
    weight = matrix()
    parameters = fit(weight, parse(grid), search=True)
    whole = slice(0, weight.shape[1])
    codes = encode(weight, parameters, parse(grid))
    assert torch.equal(codes, encode(weight, parameters, parse(grid), whole))
    assert codes.dtype == CODE_RANGES[grid].dtype


@pytest.mark.parametrize("grid", BLOCKS)
def test_ggml_encoding_of_column_runs_equals_the_whole(grid):
    weight, scheme = matrix(5), parse(grid)
    parameters = fit(weight, scheme, importance(), search=True)
    codes = encode(weight, parameters, scheme)
    values = decode(codes, parameters, scheme)
    for columns in (
        slice(0, 1),
        slice(17, 18),
        slice(511, 512),
        slice(31, 33),
        slice(250, 300),
        slice(256, 512),
    ):
        part = encode(weight[:, columns], parameters, scheme, columns)
        assert torch.equal(part, codes[:, columns])
        assert torch.equal(decode(part, parameters, scheme, columns), values[:, columns])


@pytest.mark.parametrize("grid", BLOCKS)
def test_encoded_codes_are_the_nearest(grid):
    weight, scheme = matrix(3), parse(grid)
    parameters = fit(weight, scheme, search=True)
    codes = encode(weight, parameters, scheme)
    lost = (decode(codes, parameters, scheme) - weight).abs()
    limits = CODE_RANGES[grid]
    for move in (-1, 1):
        other = (codes.int() + move).clamp(limits.low, limits.high).to(codes.dtype)
        assert bool(
            ((decode(other, parameters, scheme) - weight).abs() >= lost * (1 - 1e-5) - 1e-9).all()
        )


@pytest.mark.parametrize("grid", BLOCKS)
def test_rows_are_encoded_independently(grid):
    weight, columns = matrix(130), importance()
    together = pack_blocks(encode_rows(weight, parse(grid), columns))
    alone = pack_blocks(encode_rows(weight[65:67], parse(grid), columns))
    assert torch.equal(together[65:67], alone)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        raw = pack_blocks(encode_rows(matrix(3, 65536), parse("q4_k"), importance(65536)))
    finally:
        torch.set_num_threads(before)
    expected = pack_blocks(encode_rows(matrix(3, 65536), parse("q4_k"), importance(65536)))
    assert torch.equal(raw, expected)


@pytest.mark.parametrize("grid", ENCODED)
def test_fitted_parameters_equal_their_stored_values(grid):
    scheme = parse(grid)
    tensor = encode_rows(matrix(2), scheme)
    again = unpack_blocks(pack_blocks(tensor), scheme)
    assert torch.equal(again.codes, tensor.codes)
    for key, value in tensor.parameters.items():
        assert torch.equal(again.parameters[key], value)
        assert again.parameters[key].dtype == value.dtype


@pytest.mark.parametrize("grid", ENCODED)
def test_zeros_stay_zeros(grid):
    weight = matrix(2)
    weight[0] = 0
    weight[1, :256] = 0
    for search in ("search", "reference"):
        values = encode_rows(weight, parse(grid), importance(), search).decode()
        assert not values[0].any()
        assert not values[1, :256].any()
        assert values[1, 256:].any()


@pytest.mark.parametrize("grid", ["q4_0", "q4_1", "q4_k", "q6_k", "iq4_xs"])
def test_constant_rows_are_encoded(grid):
    for value in (0.5, -0.5):
        decoded = encode_rows(torch.full((2, 256), value), parse(grid)).decode()
        assert torch.allclose(decoded, torch.tensor(value), rtol=2e-3)


@pytest.mark.parametrize("grid", sorted({*ENCODED} - {"mxfp4"}))
def test_a_scale_beyond_float16_is_refused(grid):
    weight = matrix(2)
    weight[1, 300] = 3e8
    with pytest.raises(InputError, match="float16"):
        fit(weight, parse(grid), search=True)
    with pytest.raises(InputError, match="float16"):
        fit(weight, parse(grid))


@pytest.mark.parametrize("grid", BLOCKS)
def test_tiny_weights_do_not_vanish(grid):
    weight = matrix(2) * 2e-5  # 4e-7: units of superblocks are below float16's numbers
    assert encode_rows(weight, parse(grid)).decode().any(1).all()


@pytest.mark.parametrize("grid", ENCODED)
def test_packer_lookup_and_byte_count(grid):
    scheme = parse(grid)
    packer = get_packer(scheme)
    tensor = encode_rows(matrix(3), scheme)
    assert torch.equal(packer.decode(tensor.codes, tensor.parameters, scheme), tensor.decode())
    raw = pack_blocks(tensor)
    assert raw.shape == (3, GGML_TYPES[grid.upper()].row_bytes(512))
    assert raw.numel() * 8 == scheme.bits_per_weight(tensor.shape) * 3 * 512


@given(st.sampled_from(ENCODED), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_any_codes_and_parameters_round_trip(grid, rows, blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    limits, scheme = CODE_RANGES[grid], parse(grid)
    tensor = unpack_blocks(
        torch.randint(
            0,
            256,
            (rows, blocks * GGML_BLOCKS[grid].block_bytes),
            dtype=torch.uint8,
            generator=generator,
        ),
        scheme,
    )
    if not grid.startswith("tq"):  # two bits hold one code more than three digits do
        assert limits.low <= tensor.codes.min()
        assert tensor.codes.max() <= limits.high
    step, offset = group_steps(tensor.parameters, grid)
    assert step.shape == scheme.parameter_shape(tensor.shape)
    assert (offset is None) == scheme.symmetric
    again = unpack_blocks(pack_blocks(tensor), scheme)
    assert torch.equal(again.codes, tensor.codes)


def test_panels_are_wide_enough_for_a_cache_line():
    assert LANES % row_loops.CACHE_LINE_FLOATS == 0
    assert all(
        block.group_size % row_loops.CACHE_LINE_FLOATS == 0 for block in GGML_BLOCKS.values()
    )
