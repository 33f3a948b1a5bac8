"""Tuning of mixtures: gradients equal those of the whole model, and runs resume."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantforge.errors import RefusedError
from quantforge.events import Policy
from quantforge.files.reader import open_checkpoint
from quantforge.model.experts import RoutedTokens
from quantforge.quantizers.tuning.tuned_block import TunedBlock
from quantforge.quantizers.tuning.tuning_stream import TuningResult, TuningStream
from quantforge.verification.verify import verify
from tests.conftest import Tiny, make_tiny
from tests.runs import CALIBRATION, StopError, crash_after, fast_recipe, file_digests, quantize
from tests.thorough import thorough_case

ROWS = replace(CALIBRATION, samples=8, length=24)
MOST = 1e-4  # of the norm


def tuned(**choices: Any) -> Any:
    options = {
        "method": "gptq",
        "scheme": "int2:g32:asym",
        "tune": 2,
        "calibration": ROWS,
        **choices,
    }
    return fast_recipe(**options)


def first_step(
    model: Path, out: Path, patch: pytest.MonkeyPatch
) -> tuple[list[TunedBlock], Tensor, list[Tensor | None]]:
    """The blocks, rows and gradients of the first step of a run, which ends there."""
    steps: list[tuple[list[TunedBlock], Tensor, list[Tensor | None]]] = []
    gradients = TuningStream._gradients

    def noted(
        stream: Any, blocks: list[TunedBlock], states: Any, rows: list[int], *share: float
    ) -> Any:
        steps.append((blocks, stream._rows[rows], gradients(stream, blocks, states, rows, *share)))
        raise StopError

    patch.setattr(TuningStream, "_gradients", noted)
    with pytest.raises(StopError):
        quantize(model, out, tuned())
    return steps[0]


def short(directory: Path, family: str) -> Path:
    return make_tiny(family, directory / "m", num_hidden_layers=2)


def in_memory(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def matrix_of(model: Any, block: TunedBlock, linear: str, *, gradient: bool) -> Tensor:
    """A matrix of the whole model, or its gradient, as a view."""
    expert_slice = block.decoder_block.kind.expert_slices().get(linear)
    name = f"{linear}.weight" if expert_slice is None else expert_slice.stack.parameter
    value = model.get_parameter(f"{block.decoder_block.name}.{name}")
    value = value.grad if gradient else value.data
    return value if expert_slice is None else expert_slice.view(value)


@pytest.mark.parametrize("family", ["qwen2-moe", thorough_case("mixtral"), "gpt-oss"])
def test_gradients_are_those_of_the_whole_model(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    blocks, rows, result = first_step(tiny(family), tmp_path / "out", monkeypatch)
    source, model = in_memory(tiny(family)), in_memory(tiny(family))
    with torch.no_grad():
        for block in blocks:
            for linear in block.matrices:
                matrix_of(model, block, linear, gradient=False).copy_(
                    block.matrices[linear].weight()
                )
            for name, gains in block.gains.items():
                model.get_parameter(f"{block.decoder_block.name}.{name}").copy_(
                    gains.stored().float()
                )
    for row in rows.split(1):
        with torch.no_grad():
            reference = source(row).logits.log_softmax(-1)
        own = model(row).logits.log_softmax(-1)
        (reference.exp() * (reference - own)).sum().backward()
    compared = iter(result)
    experts = 0
    for block in blocks:
        for linear, matrix in block.matrices.items():
            (scales,) = matrix.scales.values()
            # The factor of a group: the sum over its weights of gradient times weight.
            gradient = matrix_of(model, block, linear, gradient=True) / rows.numel()
            products = (gradient * block.matrices[linear].weight()).reshape(*scales.start.shape, -1)
            nearly(next(compared), products.sum(-1), linear)
            experts += ".experts." in linear
        for name, gains in block.gains.items():
            whole = model.get_parameter(f"{block.decoder_block.name}.{name}")
            expected = whole.grad * (gains.start + gains.offset) / rows.numel()
            nearly(next(compared), expected, name)
    assert experts >= 24
    assert not [*compared]


def nearly(result: Tensor | None, expected: Tensor, name: str) -> None:
    if result is None:  # an expert without tokens
        assert not bool(expected.any()), name
        return
    assert result.shape == expected.shape, name
    assert float((result - expected).norm()) <= MOST * float(expected.norm()) + 1e-9, name


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family", ["gpt-oss", thorough_case("mixtral"), thorough_case("deepseek-v32")]
)
def test_tuned_mixture_after_awq_verifies(tmp_path: Path, family: str) -> None:
    model = short(tmp_path, family)
    quantize(model, tmp_path / "out", tuned(method="awq+gptq", tune=1))
    report = verify(tmp_path / "out", model, forward=False)
    assert report.findings == []


def test_tuning_lowers_divergence_and_keeps_routers(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(tiny("qwen2-moe"), tmp_path / "plain", tuned(tune=0))
    ends: list[TuningResult] = []
    tune = TuningStream.tune
    monkeypatch.setattr(TuningStream, "tune", lambda *a: ends.append(tune(*a)) or ends[-1])
    quantize(tiny("qwen2-moe"), tmp_path / "tuned", tuned())
    assert ends[0].after < 0.99 * ends[0].before
    plain, other = (open_checkpoint(tmp_path / name) for name in ("plain", "tuned"))
    changed = {n for n in plain.entries if not torch.equal(plain.read(n), other.read(n))}
    for kind in (".experts.", ".shared_expert.", ".self_attn."):
        assert any(kind in name and name.endswith("weight_scale") for name in changed), kind
    assert "model.layers.1.post_attention_layernorm.weight" in changed  # of an MLP
    assert not [n for n in changed if re.search(r"[02]\.post_att|mlp\.gate\.", n)]
    report = verify(tmp_path / "tuned", tiny("qwen2-moe"), forward=False)
    assert report.findings == []


@pytest.mark.thorough
def test_threads_and_resume_give_the_same_bytes(tmp_path: Path) -> None:
    recipe, model = tuned(tune=1), short(tmp_path, "gpt-oss")
    quantize(model, tmp_path / "whole", recipe, threads=1)
    out, settings = tmp_path / "out", {"threads": 3, "activations": "disk"}
    with pytest.raises(StopError):
        quantize(model, out, recipe, progress=crash_after("block 0"), **settings)
    assert quantize(model, out, recipe, **settings).resumed
    assert file_digests(out) == file_digests(tmp_path / "whole")


@pytest.mark.thorough
def test_an_expert_without_tokens_keeps_its_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = RoutedTokens.record

    def never_three(self: Any, row: int, states: Any, index: Any, weights: Any) -> None:
        keep(self, row, states, torch.where(index == 3, 0, index), weights)

    monkeypatch.setattr(RoutedTokens, "record", never_three)
    model = short(tmp_path, "mixtral")
    quantize(model, tmp_path / "plain", tuned(tune=0))
    done = quantize(model, tmp_path / "tuned", tuned())
    plain, other = (open_checkpoint(tmp_path / name) for name in ("plain", "tuned"))
    changed = {n for n in plain.entries if not torch.equal(plain.read(n), other.read(n))}
    assert [n for n in changed if ".experts.2." in n]
    assert not [n for n in changed if ".experts.3." in n]
    blind = [event for event in done.events if event.kind == "expert-not-tuned"]
    assert [event.where for event in blind] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert "1 of 4 experts got no token: 3" in blind[0].detail
    allowed = {event.kind: len(done.events) for event in done.events if event not in blind}
    with pytest.raises(RefusedError, match="expert-not-tuned"):
        quantize(model, tmp_path / "strict", tuned(), policy=Policy(strict=True, allow=allowed))
