"""Guided Hessians: each strip of rows uses its own, and runs resume with the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge import plan
from quantforge.errors import InputError, IntegrityError, UsageError
from quantforge.execution import guide
from quantforge.files.reader import open_checkpoint
from quantforge.model.statistics import Statistics
from quantforge.quantizers.gptq import gptq
from quantforge.quantizers.guidance import backward
from quantforge.quantizers.guidance.gradients import OutputGradients
from quantforge.quantizers.guidance.token_weights import TokenWeights, clip_largest
from quantforge.verification.verify import verify
from tests.conftest import Tiny
from tests.runs import CALIBRATION, StopError, crash_after, fast_recipe, file_digests, quantize
from tests.thorough import thorough_case


class Seen:
    """What GPTQ was given, and what the backward pass handed over, of one run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounded: list[tuple[dict[str, Tensor], Tensor]] = []
        self.gradients: dict[str, list[OutputGradients]] = {}
        round_matrices, write = gptq.round_matrices, TokenWeights.__call__

        def rounding(weights: Any, statistics: Statistics, *rest: Any) -> Any:
            assert statistics.hessian is not None
            copies = {name: weight.clone() for name, weight in weights.items()}
            self.rounded.append((copies, statistics.hessian.clone()))
            return round_matrices(weights, statistics, *rest)

        def writing(weights: TokenWeights, seen: OutputGradients) -> None:
            self.gradients.setdefault(seen.name, []).append(seen)
            write(weights, seen)

        monkeypatch.setattr(gptq, "round_matrices", rounding)
        monkeypatch.setattr(TokenWeights, "__call__", writing)

    def hessian(self, linear: str, rows: slice) -> Tensor:
        """Return the guided Hessian of some rows by the textbook, float64."""
        seen = self.gradients[linear]
        inputs = torch.cat([part.inputs for part in seen]).flatten(0, 1).double()
        gradients = torch.cat([part.gradients for part in seen]).flatten(0, 1)[:, rows]
        weights = gradients.double().square().mean(1)
        kept = weights.sort().values[len(weights) - 1 - len(weights) // 1000]
        weights = weights.clamp(max=kept)
        return (inputs * weights[:, None]).T @ inputs / weights.sum()


def test_each_row_strip_uses_its_own_guided_hessian(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    quantize(tiny("llama"), tmp_path / "out", fast_recipe("gptq", bits=4, guided_hessians=3))
    assert len(seen.rounded) % 3 == 0
    names = {name for weights, _ in seen.rounded for name in weights}
    assert len(seen.rounded) == 3 * len(names)
    at = dict.fromkeys(names, 0)
    hessians: dict[str, list[Tensor]] = {}
    for weights, hessian in seen.rounded:
        ((name, weight),) = weights.items()
        rows = slice(at[name], at[name] + len(weight))
        expected = seen.hessian(name.removesuffix(".weight"), rows)
        assert float((hessian - expected).norm() / expected.norm()) < 1e-5
        at[name] = rows.stop
        hessians.setdefault(name, []).append(hessian)
    for first, second, third in hessians.values():
        assert min((first - second).norm(), (second - third).norm()) > 0.01 * first.norm()


def test_matrices_with_joint_parameters_are_rounded_together(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    recipe = fast_recipe("gptq", scheme="NVFP4", guided_hessians=2, rules=())
    quantize(tiny("llama"), tmp_path / "out", recipe)
    groups = [sorted(name.split(".")[-2] for name in weights) for weights, _ in seen.rounded]
    assert ["k_proj", "q_proj", "v_proj"] in groups
    assert ["gate_proj", "up_proj"] in groups
    assert len(groups) % 4 == 0  # two strips are not made of a matrix under one divisor


def error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    difference = weight.double() - rounded.double()
    return float((difference @ hessian * difference).sum())


def test_guidance_lowers_guided_error_and_raises_plain_error(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = replace(CALIBRATION, samples=24, length=32)
    errors: dict[str, list[float]] = {"guided": [], "plain": []}
    decoded: dict[int, dict[str, Tensor]] = {}
    shared = gptq.round_matrices

    def keeping(strips: int) -> Callable[..., Any]:
        def rounding(weights: Any, *rest: Any) -> Any:
            result = shared(weights, *rest)
            for name, one in result.items():
                decoded.setdefault(strips, {})[name] = one.tensor.decode()
            return result

        return rounding

    for strips in (0, 1):
        seen = Seen(monkeypatch) if strips else None
        monkeypatch.setattr(gptq, "round_matrices", keeping(strips))
        recipe = fast_recipe("gptq", bits=3, guided_hessians=strips, calibration=calibration)
        quantize(tiny("llama"), tmp_path / str(strips), recipe)
        monkeypatch.setattr(gptq, "round_matrices", shared)
    assert seen is not None
    source = open_checkpoint(tiny("llama"))
    for name in decoded[0]:
        linear, weight = name.removesuffix(".weight"), source.read(name).float()
        inputs = torch.cat([part.inputs for part in seen.gradients[linear]]).flatten(0, 1).double()
        plain, guided = inputs.T @ inputs, seen.hessian(linear, slice(None))
        for kind, hessian in (("guided", guided), ("plain", plain)):
            one, two = (error(weight, decoded[strips][name], hessian) for strips in (0, 1))
            errors[kind].append(two / one)
    mean = {kind: sum(ratios) / len(ratios) for kind, ratios in errors.items()}
    assert 0.3 < mean["guided"] < 0.98
    assert 1.02 < mean["plain"] < 3


@pytest.mark.parametrize(
    ("family", "choices"),
    [
        ("gpt2", {"bits": 4}),
        thorough_case("phi3", {"scheme": "W8A8_STATIC"}),
        ("llama", {"type": "Q4_0"}),
    ],
)
def test_threads_and_activation_storage_give_the_same_bytes(
    tiny: Tiny, tmp_path: Path, family: str, choices: dict[str, Any]
) -> None:
    recipe = fast_recipe("gptq", guided_hessians=2, **choices)
    results = []
    for number, settings in enumerate(({"threads": 1}, {"threads": 3, "activations": "disk"})):
        out = tmp_path / f"{number}.gguf" if "type" in choices else tmp_path / str(number)
        quantize(tiny(family), out, recipe, **settings)
        results.append(out.read_bytes() if out.is_file() else file_digests(out))
        assert not (tmp_path / f".{out.name}.qf").exists()
    assert results[0] == results[1]


GUIDED = fast_recipe("gptq", bits=4, guided_hessians=2)


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing stopped."""
    out = tmp_path_factory.mktemp("guided") / "whole"
    quantize(tiny("llama"), out, GUIDED, threads=1)
    return out


@pytest.mark.parametrize("part", ["outer", "token weights", "block 0"])
def test_resume_after_interruption_writes_the_same_bytes(
    tiny: Tiny, tmp_path: Path, whole: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StopError):
        quantize(tiny("llama"), tmp_path / "out", GUIDED, progress=crash_after(part))
    passes, run = [], backward._BackwardStream.run

    def counted(*arguments: Any) -> Any:
        passes.append(1)
        return run(*arguments)

    monkeypatch.setattr(backward._BackwardStream, "run", counted)
    again = quantize(tiny("llama"), tmp_path / "out", GUIDED, threads=3, activations="disk")
    assert again.resumed
    assert len(passes) == (part == "outer")
    assert file_digests(tmp_path / "out") == file_digests(whole)


@pytest.mark.thorough
def test_guided_run_after_transform_resumes_with_the_same_bytes(tiny: Tiny, tmp_path: Path) -> None:
    recipe = fast_recipe("smooth+gptq", guided_hessians=2, scheme="W8A8_STATIC", kv_cache="fp8")
    quantize(tiny("llama"), tmp_path / "whole", recipe, threads=1)
    with pytest.raises(StopError):
        quantize(tiny("llama"), tmp_path / "out", recipe, progress=crash_after("block 0"))
    assert quantize(tiny("llama"), tmp_path / "out", recipe, threads=3).resumed
    assert file_digests(tmp_path / "out") == file_digests(tmp_path / "whole")
    report = verify(tmp_path / "out", tiny("llama"))
    assert not [item for item in report.findings if item.level == "error"]


def test_guided_hessian_after_transform_is_of_the_transformed_block(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Column factors divide what the first block reads: its diagonal times their squares is that of the source."""
    results: dict[str, Tensor] = {}
    shared = gptq.round_matrices

    def rounding(weights: Any, statistics: Statistics, *rest: Any) -> Any:
        assert statistics.hessian is not None
        results.update({name: statistics.hessian.diagonal().clone() for name in weights})
        return shared(weights, statistics, *rest)

    monkeypatch.setattr(gptq, "round_matrices", rounding)
    diagonals = {}
    for method in ("gptq", "awq+gptq"):
        results.clear()
        recipe = fast_recipe(method, bits=3, guided_hessians=1)
        quantize(tiny("llama"), tmp_path / method, recipe)
        diagonals[method] = dict(results)
    name = "model.layers.0.self_attn.q_proj.weight"
    norm = "model.layers.0.input_layernorm.weight"
    source = open_checkpoint(tiny("llama")).read(norm).float()
    factors = source / open_checkpoint(tmp_path / "awq+gptq").read(norm).float()
    assert float(factors.std()) > 0.01
    expected = diagonals["gptq"][name] / factors.square()
    assert float((diagonals["awq+gptq"][name] - expected).norm() / expected.norm()) < 1e-3


def test_resume_refuses_damaged_token_weights(tiny: Tiny, tmp_path: Path) -> None:
    recipe = fast_recipe("gptq", bits=4, guided_hessians=1)
    with pytest.raises(StopError):
        quantize(tiny("llama"), tmp_path / "out", recipe, progress=crash_after("token weights"))
    file = tmp_path / ".out.qf" / "journal" / guide.TOKEN_WEIGHTS_FILE
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        IntegrityError, match=r"token_weights\.f32.*are not what the interrupted run"
    ):
        quantize(tiny("llama"), tmp_path / "out", recipe)


@pytest.mark.parametrize(
    ("family", "choices", "error", "words"),
    [
        ("llama", {"method": "rtn", "bits": 4}, UsageError, "--method rtn does not take guided"),
        ("llama", {"method": "awq", "bits": 4}, UsageError, "awq.rtn does not take guided"),
        (
            "llama",
            {"method": "gptq", "bits": 4, "guided_hessians": 1000},
            UsageError,
            r"proj has \d\d rows",
        ),
        (
            "mixtral",
            {"method": "gptq", "bits": 4, "calibration": replace(CALIBRATION, expert_tokens="all")},
            UsageError,
            "--expert-tokens all sends every token",
        ),
    ],
)
def test_guided_hessians_refuse_unsupported_runs(
    tiny: Tiny, tmp_path: Path, family: str, choices: dict[str, Any], error: type[Exception], words: str
) -> None:  # fmt: skip
    method = choices.pop("method")
    with pytest.raises(error, match=words) as raised:
        quantize(
            tiny(family), tmp_path / "out", fast_recipe(method, **{"guided_hessians": 1} | choices)
        )
    assert "--guided-hessians" in str(raised.value.hint)  # type: ignore[attr-defined]
    assert not any(tmp_path.iterdir())


def test_overflowing_gradients_name_the_linear(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = TokenWeights.__call__

    def overflowing(weights: TokenWeights, seen: OutputGradients) -> None:
        if "layers.1" in seen.name:
            seen = replace(seen, gradients=seen.gradients * 1e25)
        write(weights, seen)

    monkeypatch.setattr(TokenWeights, "__call__", overflowing)
    with pytest.raises(InputError, match=r"model\.layers\.1\.\S+: the squares .* row 0"):
        quantize(tiny("llama"), tmp_path / "out", fast_recipe("gptq", bits=4, guided_hessians=1))
    assert not any(tmp_path.iterdir())


def test_rows_without_gradient_are_an_event(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = TokenWeights.of

    def blind(weights: TokenWeights, linear: str) -> Tensor:
        result = of(weights, linear)
        if linear.endswith("layers.0.self_attn.v_proj"):
            result[..., 1] = 0
        return result

    monkeypatch.setattr(TokenWeights, "of", blind)
    outcome = quantize(
        tiny("llama"), tmp_path / "out", fast_recipe("gptq", bits=4, guided_hessians=2)
    )
    events = [event for event in outcome.events if event.kind == "no-gradient"]
    assert [event.where for event in events] == ["model.layers.0.self_attn.v_proj.weight"]
    assert "strip 2 of 2" in events[0].detail


def test_guided_run_works_with_one_calibration_row(tiny: Tiny, tmp_path: Path) -> None:
    recipe = fast_recipe(
        "gptq", bits=4, guided_hessians=2, calibration=replace(CALIBRATION, samples=1)
    )
    outcome = quantize(tiny("llama"), tmp_path / "out", recipe)
    assert {event.kind for event in outcome.events} >= {"few-calibration-tokens"}
    document = json.loads((tmp_path / "out" / "quantforge.manifest.json").read_text())
    assert "guided_hessians = 2" in document["recipe"]
    figures = [item for item in document["tensors"] if item["action"] == "quantize"]
    assert all(0 < item["error"] < 1 and "rtn_rows" in item for item in figures)


def test_largest_token_weights_are_clipped(tiny: Tiny) -> None:
    weights = torch.arange(1, 4001.0).view(4, 1000)
    assert torch.equal(clip_largest(weights), weights.clamp(max=3996))
    assert torch.equal(clip_largest(weights[:1, :10]), weights[:1, :10])
    sent = torch.cat([torch.zeros(4, 1000), weights], 1)  # 0 where a token is sent elsewhere
    assert torch.equal(clip_largest(sent), sent.clamp(max=3996))


def test_plan_includes_the_option(tiny: Tiny) -> None:
    assert plan(tiny("llama"), fast_recipe("gptq", bits=4, guided_hessians=2)).guided_hessians == 2
