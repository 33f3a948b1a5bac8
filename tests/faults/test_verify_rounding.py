"""Matrices with one rounding defect are found; those that the quantization methods make pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.grids import ScaleType
from quantforge.model.statistics import Statistics
from quantforge.notation import parse
from quantforge.packers import get_packer
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers.gptq import gptq
from quantforge.recipe import Rounding
from quantforge.runtime.cache_scales import CachePeaks
from quantforge.scheme import Activation, Scheme
from quantforge.verification.findings import Report
from quantforge.verification.forward import LayerInputs, check_input_scale, unusual_cache_scales
from quantforge.verification.rounding import (
    OFF_BY_ONE_SHIFT,
    RoundingError,
    find_damaged_part,
    measure_rounding,
    round_to_nearest,
    unusual_errors,
)
from quantforge.verification.tensors import anomalies, off_by_one
from tests.thorough import mark_others_thorough, parametrize_each_value, thorough_case

ROWS, COLUMNS, TOKENS = 96, 256, 200
SCHEMES = (
    "int2:g32:asym", "int3:g64:sym", "int4:g64:sym", "int4:g128:asym", "int8:row:sym", "int6:g64:min",
    "nf4:g64:sym", "fp8_e4m3:row:sym", "fp8_e4m3:128x128:sym", "nvfp4", "mxfp4", "q4_k", "q6_k",
)  # fmt: skip
# Symmetric, with zero points, with minima, a table, tiles, two levels of scales, superblocks.
USUAL_SCHEMES = (
    "int4:g64:sym", "int4:g128:asym", "int6:g64:min", "int8:row:sym", "nf4:g64:sym", "fp8_e4m3:128x128:sym", "nvfp4",
    "q4_k",
)  # fmt: skip
Change = Callable[[QuantizedTensor], QuantizedTensor]


def matrix() -> tuple[Tensor, Tensor]:
    """A weight whose rows and columns differ in size, and inputs that are correlated, a few of them large."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight = normal(ROWS, COLUMNS) * (1 + 0.5 * normal(ROWS, 1).abs()) / COLUMNS**0.5
    weight *= 1 + 0.3 * normal(1, COLUMNS).abs()
    inputs = normal(TOKENS, 64) @ normal(64, COLUMNS) / 8 + 0.3 * normal(TOKENS, COLUMNS)
    inputs *= (normal(COLUMNS) * 0.5).exp()
    return weight, inputs / inputs.square().mean(1, keepdim=True).sqrt()


def round_plainly(weight: Tensor, scheme: Scheme, *, search: bool = True) -> QuantizedTensor:
    packer = get_packer(scheme)
    parameters = packer.fit(weight, scheme, search=search)
    return QuantizedTensor(packer.encode(weight, parameters, scheme), parameters, scheme)


def scheme_of(text: str) -> Scheme:
    scheme = parse(text)
    assert isinstance(scheme, Scheme)
    return scheme.with_scale(ScaleType.F16)


def rounding_error(tensor: QuantizedTensor, weight: Tensor, inputs: Tensor | None) -> RoundingError:
    plain = round_to_nearest(weight, tensor.scheme)
    return measure_rounding(weight, tensor.decode(), plain, tensor, inputs)


def find_problems(tensor: QuantizedTensor, weight: Tensor, inputs: Tensor | None) -> list[str]:
    error = rounding_error(tensor, weight, inputs)
    more = 1.0 if inputs is not None else 2.0
    texts = [*unusual_errors(error, tensor.scheme, more)]
    damaged = find_damaged_part(weight, tensor.decode(), tensor, error)
    texts += [] if damaged is None else [damaged[0]]
    return [*texts, "shifted"] if abs(error.mean_shift) > OFF_BY_ONE_SHIFT else texts


@parametrize_each_value(
    ("text", SCHEMES),
    ("search", [True, False]),
)
def test_rtn_passes(text, search):
    weight, inputs = matrix()
    tensor = round_plainly(weight, scheme_of(text), search=search)
    assert find_problems(tensor, weight, inputs) == []
    assert find_problems(tensor, weight, None) == []


@pytest.mark.parametrize(
    "text", ["int2:g32:asym", "int3:g64:sym", "int4:g64:sym", "int4:g64:min", "int8:row:sym"]
)
def test_gptq_passes(text):
    """GPTQ moves weights further than rounding does, and the outputs less."""
    weight, inputs = matrix()
    scheme = scheme_of(text)
    statistics = Statistics(tokens=TOKENS, hessian=inputs.T @ inputs / TOKENS)
    results = gptq.round_matrices({"w": weight}, statistics, {"w": scheme}, Rounding())
    tensor = results["w"].tensor
    assert rounding_error(tensor, weight, inputs).whole < 1
    assert find_problems(tensor, weight, inputs) == []
    assert find_problems(tensor, weight, None) == []


def scale_by(position: Any, factor: float) -> Change:
    def change(tensor: QuantizedTensor) -> QuantizedTensor:
        scales = tensor.parameters["scales"].clone()
        scales[position] *= factor
        return replace(tensor, parameters={**tensor.parameters, "scales": scales})

    return change


def parameters(change: Callable[[Tensor], Tensor]) -> Change:
    def changed(tensor: QuantizedTensor) -> QuantizedTensor:
        return replace(
            tensor, parameters={key: change(value) for key, value in tensor.parameters.items()}
        )

    return changed


def codes(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensor: replace(tensor, codes=change(tensor.codes.clone()))


def swap_indices(dim: int, first: int, second: int) -> Callable[[Tensor], Tensor]:
    def change(values: Tensor) -> Tensor:
        order = torch.arange(values.shape[dim])
        order[[first, second]] = order[[second, first]]
        return values.index_select(dim, order)

    return change


def set_codes(position: tuple[slice | int, slice | int], value: int) -> Callable[[Tensor], Tensor]:
    def change(values: Tensor) -> Tensor:
        values[position] = value
        return values

    return change


EVERY = slice(None)
DEFECTS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "all scales 1.05 times": (scale_by(EVERY, 1.05), ("int4:g64:sym", "int4:g128:asym", "int8:row:sym", "nf4:g64:sym")),
    "all scales 0.9 times": (scale_by(EVERY, 0.9), ("int4:g64:sym", "int4:g128:asym", "int8:row:sym", "nf4:g64:sym")),
    "a row 1.05 times": (scale_by(slice(7, 8), 1.05), ("int8:row:sym",)),
    "a row 1.3 times": (scale_by(slice(7, 8), 1.3), ("int4:g64:sym", "nf4:g64:sym", "int8:row:sym")),
    "a row twice": (scale_by(slice(7, 8), 2.0), ("int3:g64:sym",)),
    "a row of another sign": (scale_by(slice(7, 8), -1.0), ("int2:g32:asym", "int3:g64:sym", "int4:g64:sym")),
    "scales rolled by a row": (parameters(lambda v: v.roll(1, 0)), ("int3:g64:sym", "int4:g64:sym", "int8:row:sym")),
    "groups in reverse": (parameters(lambda v: v.flip(1)), ("int4:g32:sym", "int8:g32:sym")),
    "rows exchanged": (codes(swap_indices(0, 3, 4)), ("int2:g32:asym", "int4:g64:sym", "int8:row:sym")),
    "columns in pairs exchanged": (codes(lambda c: c.view(ROWS, -1, 2).flip(2).reshape(c.shape)), ("int4:g64:sym",)),
    "a column destroyed": (codes(set_codes((EVERY, 17), 7)), ("int4:g64:sym", "int8:row:sym")),
    "zero points off by one": (
        lambda found: replace(found, parameters={**found.parameters, "zeros": found.parameters["zeros"] + 1}),
        ("int4:g128:asym", "int8:g128:asym")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (name, text) if text == texts[0] else thorough_case(name, text)
        for name, (_, texts) in DEFECTS.items()
        for text in texts
    ],
)
def test_a_rounding_defect_exceeds_its_limit(name, text):
    weight, inputs = matrix()
    tensor = round_plainly(weight, scheme_of(text))
    assert find_problems(tensor, weight, inputs) == []
    assert find_problems(DEFECTS[name][0](tensor), weight, inputs) != []


def test_weights_rounded_down_are_found_despite_small_errors():
    weight, inputs = matrix()
    tensor = round_plainly(weight, scheme_of("int4:g64:sym"))
    up = tensor.decode() > weight
    lower = replace(
        tensor,
        codes=torch.where(up & (tensor.codes > tensor.codes.min()), tensor.codes - 1, tensor.codes),
    )
    error = replace(rounding_error(lower, weight, inputs), whole=1.0, scale_high=1.0, scale_low=1.0)
    (text,) = unusual_errors(error, tensor.scheme)
    assert "not rounded to nearest" in text


def test_a_destroyed_column_dominates_the_column_errors():
    """A destroyed column has nearly all of the error; errors that cancel are not charged to a column."""
    weight, inputs = matrix()
    tensor = round_plainly(weight, scheme_of("int4:g64:sym"))
    bad = codes(set_codes((EVERY, 17), 7))(tensor)
    apart = rounding_error(bad, weight, inputs)
    assert int(apart.columns.argmax()) == 17
    other = torch.cat((apart.columns[:17], apart.columns[18:]))
    assert float(apart.columns[17]) > 20 * float(other.max())


def roll_group(values: Tensor) -> Tensor:
    values[7, 64:128] = values[7, 64:128].roll(1)
    return values


@pytest.mark.parametrize("text", ["int2:g64:sym", "int3:g64:sym"])
def test_rtn_of_uniform_weights_passes(text):
    weight = 2 * torch.rand(64, 256, generator=torch.Generator().manual_seed(1)) - 1
    tensor = round_plainly(weight, scheme_of(text), search=False)
    assert find_problems(tensor, weight, None) == []


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_zero_rows_columns_and_matrices_pass(scale):
    """Rows, columns and whole matrices of zeros; beside them others may be large or small."""
    weight, inputs = matrix()
    for position in ((EVERY, slice(32, 96)), (slice(0, 48), EVERY), (EVERY, EVERY)):
        weight[position] = 0
        tensor = round_plainly(weight * scale, scheme_of("int4:g32:sym"))
        assert find_problems(tensor, weight * scale, inputs) == []


def test_gptq_of_weights_on_the_grid_passes():
    """Plain rounding loses nothing of them; GPTQ moves them as it moves any."""
    weight, inputs = matrix()
    scheme = scheme_of("int4:g64:sym")
    weight = round_plainly(weight, scheme, search=False).decode()
    statistics = Statistics(tokens=TOKENS, hessian=inputs.T @ inputs / TOKENS)
    tensor = gptq.round_matrices({"w": weight}, statistics, {"w": scheme}, Rounding())["w"].tensor
    assert torch.equal(round_to_nearest(weight, scheme), weight)
    assert find_problems(tensor, weight, inputs) == []
    assert find_problems(tensor, weight, None) == []
    halved = scale_by(EVERY, 0.7)(tensor)
    assert find_problems(halved, weight, inputs) != []


@pytest.mark.parametrize(
    ("text", "search"),
    [
        (text, at % 2 == 0) if text in USUAL_SCHEMES else thorough_case(text, at % 2 == 0)
        for at, text in enumerate(SCHEMES)
    ],
)
def test_ternary_weights_pass(text, search):
    """Plain rounding may lose nothing of them, where another scale of 8 bits loses a few percent."""
    weight, inputs = matrix()
    weight = 0.2393 * weight.sign() * (weight.abs() > weight.abs().mean())
    tensor = round_plainly(weight, scheme_of(text), search=search)
    assert find_problems(tensor, weight, inputs) == []


def test_one_damaged_group_is_located():
    weight, inputs = matrix()
    tensor = round_plainly(weight, scheme_of("int4:g64:sym"))
    for change, proven in ((scale_by((7, slice(1, 2)), 1.5), False), (codes(roll_group), True)):
        bad = change(tensor)
        damage = find_damaged_part(weight, bad.decode(), bad, rounding_error(bad, weight, inputs))
        assert damage is not None
        assert damage[0].startswith("row 7, columns 64 to 127: ")
        assert damage[1] is proven


def test_input_scales_must_match_the_range_of_the_source(tmp_path):
    weight, inputs = matrix()
    peaks = inputs.abs().amax(0)
    source_inputs = LayerInputs({"w": Statistics(peaks=peaks, sample=inputs)})
    for grid, limit in (("int8", 127.0), ("fp8_e4m3", 448.0)):
        fitting = peaks.max() / limit
        for share, wrong in (
            (1.0, 0),
            (0.6, 0),
            (2.0, 0),
            (0.2, 0),
            (0.05, 1),
            (0.01, 1),
            (1e5, 1),
            (0.0, 1),
        ):
            tensor = replace(
                round_plainly(weight, scheme_of("int8:row:sym")),
                input=Activation(grid, "tensor", dynamic=False),
            )
            scale = {"input_scale": (fitting * share).view(1, 1)}
            tensor = replace(tensor, parameters={**tensor.parameters, **scale})
            report = Report(tmp_path)
            check_input_scale(report, "w", tensor, source_inputs, None, {})
            assert len(report.findings) == wrong, (grid, share)


def test_cache_scales_must_match_the_range_of_the_source():
    peaks = CachePeaks()
    keys = torch.randn(1, 2, 5, 8)
    peaks.update(keys, 3 * keys)
    fitting = peaks.scales("fp8_head")
    assert [*unusual_cache_scales(fitting, peaks)] == []
    assert [*unusual_cache_scales((fitting[0] * 20, fitting[1]), peaks)] == []
    assert [which for which, _ in unusual_cache_scales((fitting[0], fitting[1] / 4), peaks)] == [1]
    assert [which for which, _ in unusual_cache_scales((fitting[0] * 1e4, fitting[1]), peaks)] == [
        0
    ]


@pytest.mark.parametrize("kind", ["fp8", "fp8_head"])
def test_any_cache_scale_passes_for_zero_keys(kind):
    seen = CachePeaks()
    values = torch.randn(1, 2, 5, 8)
    seen.update(torch.zeros_like(values), values)
    assert [*unusual_cache_scales(seen.scales(kind), seen)] == []


@pytest.mark.parametrize("text", mark_others_thorough(SCHEMES, *USUAL_SCHEMES))
def test_rtn_passes_without_a_source(text):
    weight, _ = matrix()
    weight[:, 5] = 0  # a column that never learned anything
    tensor = round_plainly(weight, scheme_of(text))
    assert [*anomalies(tensor, tensor.decode())] == []


def test_constant_codes_are_found_without_a_source():
    weight, _ = matrix()
    tensor = round_plainly(weight, scheme_of("int4:g64:sym"))
    for position, what in (((EVERY, 17), "column 17"), ((9, EVERY), "row 9")):
        bad = codes(set_codes(position, 5))(tensor)
        assert [text.startswith(what) for _, text in anomalies(bad, bad.decode())] == [True]


@pytest.mark.parametrize(
    "text", ["int4:g64:sym", "nvfp4", "mxfp4", "mxfp8", "q4_k", "nf4:g64:sym:double"]
)
def test_one_huge_scale_is_found_without_a_source(text):
    """The decoded weights of a group are scaled, however its scale is stored."""
    weight, _ = matrix()
    tensor = round_plainly(weight, scheme_of(text))
    assert [*anomalies(tensor, tensor.decode())] == []
    value = tensor.decode()
    value[7, :32] *= 2.0**16
    assert [check for check, _ in anomalies(tensor, value)] == ["scale"]


def test_one_huge_exponent_is_found_without_a_source():
    """Of types whose scales are powers of two, the exponent is what is stored."""
    weight, _ = matrix()
    weight[:60] = 0  # more than half of all groups have no scale to speak of
    for text in ("mxfp4", "mxfp8"):
        tensor = round_plainly(weight, scheme_of(text))
        assert [*anomalies(tensor, tensor.decode())] == []
        bad = parameters(set_codes((70, 3), int(tensor.parameters["exponents"][70, 3]) + 16))(
            tensor
        )
        assert [check for check, _ in anomalies(bad, bad.decode())] == ["scale"]


def test_norm_gain_off_by_one_is_found_but_growth_passes():
    for count in (1, 2, 4, 7, 24):
        rising = torch.linspace(0.05, 3, count).tolist()
        assert not any(off_by_one(rising, index) for index in range(count))
    folded = [1.12, 0.71, 1.3, 1.81]  # as AWQ leaves them
    for gains in ([0.5, 1.5] * 6, folded):
        assert not any(off_by_one(gains, index) for index in range(len(gains)))
    for gains in ([1.0, 1.02, 0.98, 1.05], torch.linspace(0.05, 3, 12).tolist()):
        for position in range(len(gains)):
            for step in (-1.0, 1.0):
                wrong = [*gains[:position], gains[position] + step, *gains[position + 1 :]]
                flagged = [index for index in range(len(gains)) if off_by_one(wrong, index)]
                assert flagged == [position]
