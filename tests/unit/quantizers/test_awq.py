"""AWQ preserves the function, updates statistics, and never raises the error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.architectures.match import match_tensors
from quantforge.files.reader import open_checkpoint
from quantforge.model.block import DecoderBlock, MicroBatch
from quantforge.model.block_calls import Call
from quantforge.model.block_inputs import RecordedInputs
from quantforge.model.scale_folding import expand_heads, fold_scale
from quantforge.model.statistics import Statistic, Statistics
from quantforge.model.stream import ModelStream
from quantforge.notation import parse
from quantforge.quantizers import awq
from quantforge.quantizers.awq import OutputErrorEstimator, balance_factors
from quantforge.quantizers.rtn import round_matrices
from quantforge.recipe import AwqOptions, Rounding
from quantforge.scheme import LayerScheme
from tests.conftest import VOCABULARY, Tiny
from tests.equivalence.test_stream import NO_ROWS, InFloat64
from tests.thorough import mark_others_thorough

ROWS = torch.randint(0, VOCABULARY, (4, 40), generator=torch.Generator().manual_seed(1))
ROUNDING = Rounding(awq=AwqOptions(search_samples=4))
LAYER = LayerScheme(parse("int4:g32:sym:f16"))
SCHEME = LAYER.weight
ALL = frozenset(Statistic)
# Biases everywhere, none, biases of q k v, gemma's 1 + w, fused projections, Conv1D, LayerNorm in float16.
FAMILIES = ("llama", "llama-tied", "qwen2", "gemma2", "phi3", "gpt2", "opt")


@contextmanager
def first_block(path: Path) -> Iterator[DecoderBlock]:
    checkpoint = open_checkpoint(path)
    model_layout = match_tensors(
        checkpoint.config, [e.to_stored_tensor() for e in checkpoint.entries.values()]
    )
    with ModelStream(checkpoint, model_layout, ROWS, micro_batch=2) as stream:
        yield next(iter(stream))


def observed(part: DecoderBlock) -> dict[str, Statistics]:
    return part.observe({shared.key: ALL for shared in part.inputs})


def layers_of(part: DecoderBlock, layer: LayerScheme = LAYER) -> dict[str, LayerScheme]:
    return {name: layer for shared in part.inputs for name in shared.linears}


def state(part: DecoderBlock) -> dict[str, Tensor]:
    return {name: part.parameter(name).clone() for name in part.parameters()}


def doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(doubled(item) for item in value)
    return {key: doubled(item) for key, item in value.items()} if isinstance(value, dict) else value


def in_float64(part: DecoderBlock) -> DecoderBlock:
    def wide(passage: RecordedInputs) -> RecordedInputs:
        calls = {
            rows: Call(doubled(c.args), doubled(c.kwargs)) for rows, c in passage.calls.items()
        }
        return passage._replace(calls=calls)

    batches = [
        MicroBatch(b.start, b.states.double(), wide(b.inputs)) for b in part._rows.micro_batches()
    ]
    result = copy(part)
    result.module = part.module.double()
    result._rows = NO_ROWS._replace(micro_batches=lambda: iter(batches))
    return result


def outputs(part: DecoderBlock) -> Tensor:
    with InFloat64():
        results = [b.run(part.module) for b in part._rows.micro_batches()]
    return torch.cat(results)


def plant(part: DecoderBlock) -> None:
    """Make a few channels of every activation 16 times as large and their readers 16 times as small."""
    for shared in part.inputs:
        if shared.scale_fold is not None:
            width = part.dimensions.kv if shared.heads else part.weight(shared.key).shape[1]
            scale = torch.ones(width)
            scale[3::17] = 1 / 16
            fold_scale(
                part, shared, expand_heads(part.dimensions, scale) if shared.heads else scale
            )


def own_error(part: DecoderBlock, key: str, statistics: Statistics) -> float:
    """Error of the one linear that reads an activation, rounded as the run will round it."""
    weight = part.weight(key)
    rounded = round_matrices({key: weight}, statistics, {key: SCHEME}, ROUNDING)[
        key
    ].tensor.decode()
    return float((((rounded - weight) @ statistics.hessian) * (rounded - weight)).sum())


@pytest.mark.parametrize("family", mark_others_thorough(FAMILIES, "llama", "gemma2", "gpt2"))
def test_awq_preserves_the_function_and_stored_values(tiny: Tiny, family: str) -> None:
    with first_block(tiny(family)) as part:
        plant(part)
        wide = in_float64(part)
        expected, before = outputs(wide), state(wide)
        assert expected.dtype == torch.float64
        statistics = {
            key: Statistics(result.tokens, result.squares.double(), hessian=result.hessian.double())
            for key, result in observed(wide).items()
        }
        _, events, figures = awq.apply(wide, statistics, layers_of(wide), ROUNDING)
        assert not events
        assert list(figures) == [s.key for s in wide.inputs if s.scale_fold is not None]
        changed = {
            name for name, old in before.items() if not torch.equal(old, wide.parameter(name))
        }
        scaled = {key for key, result in figures.items() if result["family"] != "none"}
        assert scaled == figures.keys()  # otherwise this shows less than it should
        assert {f"{key}.weight" for key in scaled} <= changed
        assert (outputs(wide) - expected).abs().max() <= 1e-12 * expected.abs().max()
        quantized = {f"{name}.weight" for name in layers_of(wide)}
        for name in set(wide.parameters()) - quantized:
            wide.set_parameter(name, wide.as_stored(name, wide.parameter(name)))
        assert (outputs(wide) - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_awq_updates_statistics_for_the_transformed_block(tiny: Tiny, family: str) -> None:
    with first_block(tiny(family)) as part:
        changed, _, _ = awq.apply(part, before := observed(part), layers_of(part), ROUNDING)
        again = observed(part)
    assert changed.keys() == again.keys()
    assert any(not torch.equal(changed[key].squares, before[key].squares) for key in changed)
    for key, expected in again.items():
        torch.testing.assert_close(changed[key].squares, expected.squares, rtol=1e-4, atol=0)
        size = expected.squares.sqrt()
        difference = (changed[key].hessian - expected.hessian) / size[:, None] / size
        assert difference.abs().max() < 1e-4
        assert changed[key].tokens == expected.tokens


def test_awq_never_raises_the_error_of_a_pair(tiny: Tiny) -> None:
    with first_block(tiny("llama-tied")) as part:
        statistics = observed(part)
        linear = ("self_attn.o_proj", "mlp.down_proj")
        before = {key: own_error(part, key, statistics[key]) for key in linear}
        changed, _, figures = awq.apply(part, statistics, layers_of(part), ROUNDING)
        for key in linear:
            after = own_error(part, key, changed[key])
            assert after <= before[key] * (1 + 1e-4)
            assert after / before[key] == pytest.approx(figures[key]["error"], rel=1e-2)
    assert all(result["error"] <= 1 for result in figures.values())
    assert any(result["error"] < 0.99 for result in figures.values())


def test_awq_undoes_planted_outliers(tiny: Tiny) -> None:
    """A few channels 16 times as large, their readers 16 times as small: the same function, much harder to round."""
    errors = {}
    for planted in (False, True):
        with first_block(tiny("llama-tied")) as part:
            if planted:
                plant(part)
            plain = observed(part)
            changed, _, _ = awq.apply(part, plain, layers_of(part), ROUNDING)
            key = "mlp.down_proj"
            errors[planted] = own_error(part, key, changed[key])
            scale = (plain[key].squares / changed[key].squares).sqrt()
            part.set_weight(key, part.weight(key) / scale)
            errors["plain", planted] = own_error(part, key, plain[key])
    assert errors["plain", True] > 1.5 * errors["plain", False]
    assert errors[True] < 1.1 * errors[False]


def test_unstorable_pair_is_skipped_with_an_event(tiny: Tiny) -> None:
    """Gemma's 1 + w leaves no exact factor for a key projection that is kept in bfloat16."""
    with first_block(tiny("gemma2")) as part:
        layers = layers_of(part)
        del layers["self_attn.k_proj"]
        plant(part)  # so that leaving the pair as it is loses
        before, statistics = state(part), observed(part)
        changed, events, figures = awq.apply(part, statistics, layers, ROUNDING)
        assert [(event.kind, event.where) for event in events] == [
            ("scale-fold-skipped", "model.layers.0.self_attn.q_proj")
        ]
        assert "self_attn.k_proj.weight stays BF16" in events[0].detail
        assert "self_attn.q_proj" not in figures
        for name in (
            "input_layernorm.weight",
            "self_attn.q_proj.weight",
            "self_attn.k_proj.weight",
        ):
            assert torch.equal(part.parameter(name), before[name])
        assert changed["self_attn.q_proj"] is statistics["self_attn.q_proj"]


@pytest.mark.parametrize("kept", ["self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"])
def test_unquantized_matrix_gets_exact_power_of_two_factors(tiny: Tiny, kept: str) -> None:
    with first_block(tiny("llama-tied")) as part:
        layers = layers_of(part)
        del layers[kept]
        before = part.weight(kept).clone()
        _, events, _ = awq.apply(part, observed(part), layers, ROUNDING)
        after = part.weight(kept)
        assert not events
        assert torch.equal(part.as_stored(f"{kept}.weight", after), after)
        powers = (after / before)[before != 0].log2()
        assert torch.equal(powers, powers.round())


def test_pairs_without_quantized_readers_are_left_alone(tiny: Tiny) -> None:
    with first_block(tiny("llama")) as part:
        before, statistics = state(part), observed(part)
        changed, events, figures = awq.apply(part, statistics, {}, ROUNDING)
        assert all(torch.equal(part.parameter(name), old) for name, old in before.items())
    assert (changed, events, figures) == (statistics, (), {})


def test_the_result_does_not_depend_on_threads(tiny: Tiny) -> None:
    results = []
    for count in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            with first_block(tiny("qwen2")) as part:
                awq.apply(part, observed(part), layers_of(part), ROUNDING)
                results.append(state(part))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_output_error_estimator_leaves_the_block_unchanged(tiny: Tiny) -> None:
    with first_block(tiny("llama-tied")) as part, torch.no_grad():
        before = state(part)
        for shared in part.inputs:
            judge = OutputErrorEstimator(part, shared, Statistics(), 4, {})
            changed = {name: part.weight(name) * 1.01 for name in shared.linears}
            calls = part.capture_calls(shared.compared_module, 4)
            module = part.module.get_submodule(shared.compared_module)

            def run(module: Any = module, calls: Any = calls) -> Tensor:
                results = [module(*call.args, **call.kwargs) for call in calls]
                return torch.cat([item[0] if isinstance(item, tuple) else item for item in results])

            expected = run()
            # A mean there
            tokens = ROWS.numel() if shared.linears == (shared.compared_module,) else 1
            error = judge(changed) * tokens
            for name, weight in changed.items():
                part.set_weight(name, weight)
            direct = float((run() - expected).double().square().sum())
            for name in shared.linears:
                part.set_weight(name, judge.weights[name])
            assert error == pytest.approx(direct, rel=1e-3)
            assert judge({name: before[f"{name}.weight"] for name in changed}) == 0
        assert all(torch.equal(part.parameter(name), old) for name, old in before.items())


def test_output_moments_of_a_sub_block_are_reused(tiny: Tiny) -> None:
    captured: list[str] = []
    with first_block(tiny("llama")) as part, torch.no_grad():
        capture, moments = part.capture_calls, dict[str, Tensor]()
        part.capture_calls = lambda name, rows: captured.append(name) or capture(name, rows)  # type: ignore
        for shared in part.inputs:
            first = OutputErrorEstimator(part, shared, Statistics(), 4, moments)
            alone = OutputErrorEstimator(part, shared, Statistics(), 4, {})
            changed = {name: part.weight(name) * 1.01 for name in shared.linears}
            assert first.estimate(changed) == pytest.approx(alone.estimate(changed), rel=1e-5)
        assert captured == [
            "self_attn", "self_attn", "self_attn.o_proj", "mlp", "mlp", "mlp.down_proj",
        ]  # fmt: skip
        assert not moments


def test_equal_candidate_factors_are_evaluated_once(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = []
    monkeypatch.setattr(
        OutputErrorEstimator, "estimate", lambda *_: 1.0
    )  # the first exponent wins: 0
    monkeypatch.setattr(
        OutputErrorEstimator,
        "__call__",
        lambda self, weights: judged.append(weights) or float(len(judged)),
    )
    with first_block(tiny("llama")) as part:
        _, _, figures = awq.apply(part, observed(part), layers_of(part), ROUNDING)
        assert len(judged) <= 2 * len(figures)  # as it is, and by the weights' own magnitude


@pytest.mark.parametrize(("columns", "rows"), [(256, 2048), (2048, 256), (1 << 14, 128)])
def test_wider_matrices_are_tried_on_fewer_rows(columns: int, rows: int) -> None:
    assert awq.tried_row_count(columns) == rows


def test_balance_factors_minimise_the_modelled_error() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator) ** 3
    importance = torch.rand(64, generator=generator) ** 4 + 1e-3

    def model(scale: Tensor) -> float:
        groups = (weight * scale).abs().view(48, 2, 32).norm(8, dim=-1).square().sum(0)
        return float((groups * (importance / scale.square()).view(2, 32).sum(1)).sum())

    result = balance_factors(weight, importance, 32, torch.ones(64))
    assert model(result) < 0.6 * model(torch.ones(64))
    for column in range(0, 64, 7):  # no neighbour is better
        for factor in (0.8, 1.25):
            other = result.clone()
            other[column] *= factor
            assert model(other) > 0.999 * model(result)
    planted = torch.ones(64)
    planted[::9] = 32
    moved = balance_factors(weight / planted, importance * planted.square(), 32, planted)
    torch.testing.assert_close(moved, result * planted, rtol=1e-3, atol=0)


def test_tied_columns_share_a_factor() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, importance = (
        torch.randn(16, 8, generator=generator),
        torch.rand(8, generator=generator) + 0.1,
    )
    result = balance_factors(
        weight, importance, 8, torch.ones(8), lambda sums: sums.view(2, 4).sum(0).repeat(2)
    )
    assert torch.equal(result[:4], result[4:])
    assert result[:4].std() > 0.01
