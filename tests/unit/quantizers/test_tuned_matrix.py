"""A tuned linear: gradients match the decoded weight, and stored values keep their types."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from quantforge.grids import GGML_BLOCKS, ScaleType
from quantforge.notation import parse
from quantforge.packers import encode_with_importance, get_packer
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers.tuning.tuned_matrix import CODES, OFFSET_UNIT, LearnedFactor, TunedMatrix
from tests.thorough import mark_others_thorough

SCALED = [grid for grid in GGML_BLOCKS if parse(grid).has_learnable_scales]
EVEN = [key for key in SCALED if key.startswith("q")] + ["tq1_0", "tq2_0"]
TABLES = ["iq4_nl", "iq4_xs", "mxfp4", "nvfp4"]
INTEGERS = ["int3:g64:sym", "int2:g64:asym", "int8:row:sym"]


@cache
def make_tensor(grid: str, rows: int = 3) -> QuantizedTensor:
    torch.manual_seed(0)
    weight, scheme = torch.randn(rows, 512) * torch.rand(512), parse(grid)
    scheme = scheme.with_scale(ScaleType.F16)
    parameters = get_packer(scheme).fit(weight, scheme, torch.ones(512), search=True)
    codes = encode_with_importance(weight, parameters, scheme, torch.ones(512))
    return QuantizedTensor(codes, parameters, scheme)


@pytest.mark.parametrize(
    "grid",
    mark_others_thorough([*SCALED, *INTEGERS, "nvfp4"], *EVEN, *INTEGERS, "nvfp4", "iq2_xxs"),
)
def test_scale_gradients_equal_autograd_of_decoded_values(grid: str) -> None:
    tensor = make_tensor(grid)
    matrix, gradient = TunedMatrix.of(tensor, 0.0), torch.randn(tensor.shape)
    result = matrix.scale_gradients(gradient)
    assert result.keys() == matrix.scales.keys()
    assert result
    whole = (gradient.double() * tensor.decode().double()).sum()
    # Values are sums over the scales, each times something.
    assert float(sum(item.double().sum() for item in result.values())) == pytest.approx(
        float(whole), rel=1e-4, abs=1e-4
    )
    for key, one in result.items():
        parameters = {name: value.clone() for name, value in tensor.parameters.items()}
        parameters[key][1, -1] = parameters[key][1, -1].float() * 2
        moved = get_packer(tensor.scheme).decode(tensor.codes, parameters, tensor.scheme)
        change = (gradient * (moved - tensor.decode())).sum()
        assert float(one[1, -1]) == pytest.approx(float(change), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("grid", [*dict.fromkeys((*SCALED, *INTEGERS, *TABLES))])
def test_code_and_integer_gradients_equal_finite_steps(grid: str) -> None:
    tensor = make_tensor(grid)
    matrix, gradient = TunedMatrix.of(tensor, 0.1), torch.randn(tensor.shape)
    result = matrix.code_gradients(gradient)
    assert (CODES in result) == (grid in EVEN or grid in INTEGERS or grid in TABLES)
    assert ("scales" in result) == ("d" in tensor.parameters)
    assert ("mins" in result) == ("dmin" in tensor.parameters)
    for key, learned in matrix.codes.items():
        if grid in TABLES and key == CODES:
            continue
        low, high = learned.limits
        assert low <= int(learned.start.min()) <= int(learned.start.max()) <= high
        up = learned.start < high
        moved = torch.where(up, learned.start + 1, learned.start)
        changed = {**tensor.parameters, key: moved}
        decoded = get_packer(tensor.scheme).decode(
            changed.pop(CODES, tensor.codes), changed, tensor.scheme
        )
        change = (gradient * (decoded - tensor.decode())).reshape(*learned.start.shape, -1).sum(-1)
        torch.testing.assert_close(result[key][up], change[up], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("grid", TABLES)
def test_table_code_gradients_use_the_first_gap(
    grid: str,
) -> None:
    tensor = make_tensor(grid)
    matrix, gradient = TunedMatrix.of(tensor, 0.1), torch.randn(tensor.shape)
    codes, values = matrix.codes[CODES], torch.tensor(tensor.scheme.code_values).float()
    assert torch.equal(codes.stored(), tensor.codes)
    codes.offsets.fill_(OFFSET_UNIT)  # to the next value above
    moved = matrix.result().codes
    gap = values[moved.int()] - values[tensor.codes.int()]
    inside = tensor.codes != int(values.argmax())
    assert {*gap[inside].tolist()} == {*values.unique().diff().tolist()}
    change = gradient * (matrix.result().decode() - tensor.decode())
    result = matrix.code_gradients(gradient)[CODES] * gap / (values[1] - values[0])
    torch.testing.assert_close(result, change, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("grid", [*SCALED, "nvfp4"])
def test_stored_values_keep_dtypes_and_positive_scales(grid: str) -> None:
    tensor = make_tensor(grid)
    matrix = TunedMatrix.of(tensor, 0.0)
    before = matrix.result()
    assert torch.equal(before.decode(), tensor.decode())
    for scales in matrix.scales.values():
        scales.factor.data.uniform_(-0.5, 0.5)
        scales.start[0, 0] = 440.0 if tensor.scheme.has_global_scale else 6e4
        scales.factor.data[0, 0] = 0.5
        scales.start[2, 0] = 2.0**-9 if tensor.scheme.has_global_scale else 2.0**-24
        scales.factor.data[2, 0] = -0.5
    after = matrix.result()
    for key, value in after.parameters.items():
        assert value.dtype == tensor.parameters[key].dtype
        assert value.shape == tensor.parameters[key].shape
    for key in matrix.scales:
        stored = after.parameters[key].float()
        assert bool(stored.isfinite().all())
        assert bool((stored[tensor.parameters[key].float() != 0] != 0).all())
    if "divisor" in tensor.parameters:
        assert torch.equal(after.parameters["divisor"], tensor.parameters["divisor"])


def test_learned_factor_moves_like_torch_adam() -> None:
    factor = LearnedFactor.of(torch.ones(6), torch.float32, 0.01)
    other = torch.nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.Adam([other], betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(0)
    for step in range(7):
        gradient, share = torch.randn(6, generator=generator), 1 - step / 8
        factor.step(None, share)  # nothing reached it: it stays, and so does what is remembered
        factor.step(gradient, share)
        other.grad = gradient
        optimizer.param_groups[0]["lr"] = 0.01 * share
        optimizer.step()
        torch.testing.assert_close(factor.factor, other.detach(), rtol=1e-5, atol=1e-7)
