"""A block method, added from outside, goes all the way from plan to verify, with gradients on whole blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantforge import verbs
from quantforge.architectures.match import match
from quantforge.checkpoint.reader import Checkpoint, open_checkpoint
from quantforge.errors import UsageError
from quantforge.execution.progress import Progress
from quantforge.formats.decoded import decoded
from quantforge.model.block import BlockPart
from quantforge.model.block_samples import BlockSamples
from quantforge.model.statistics import Statistic
from quantforge.model.stream import ModelStream
from quantforge.quantizers import METHODS, Method, MethodKind, MethodMemory
from quantforge.recipe import Recipe
from quantforge.results import manifest
from quantforge.verification.verify import VerificationOptions, verify
from tests.conftest import VOCABULARY, Tiny
from tests.runs import CALIBRATION, quantize, recipe
from tests.toys import learned_scales

SCHEME = "int3:g32:sym"
RECORD = Method(
    "tests.toys.learned_scales", MethodKind.BLOCK_METHOD, frozenset(), MethodMemory(matrices=4.0)
)
ROWS = torch.randint(0, VOCABULARY, (4, 30), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "learned-scales", RECORD)


def learned(propagate: str = "source", method: str = "learned-scales") -> Recipe:
    calibration = replace(CALIBRATION, samples=16, length=40, propagate=propagate)
    return recipe(
        method, scheme=SCHEME, calibration=calibration, format="compressed-tensors", scales="absmax"
    )


def block_error(samples: BlockSamples, part: BlockPart, result: Checkpoint) -> float:
    """Squared error of the output of a block that has the weights of a result."""
    weights = {name: result.read(f"{part.name}.{name}.weight").float() for name in part.linears}
    return sum(
        float((samples.run(batch, weights) - targets).square().sum()) for batch, targets in samples
    )


@pytest.mark.parametrize("propagate", ["source", "quantized"])
def test_learned_scales_beat_rounding_to_nearest(
    tiny: Tiny, tmp_path: Path, propagate: str
) -> None:
    model = tiny("llama-wide")
    plan = verbs.plan(str(model), learned(propagate))
    assert plan.rounder == "learned-scales"
    assert Statistic.STATES in plan.needs
    quantize(model, tmp_path / "learned", learned(propagate))
    assert verify(tmp_path / "learned", VerificationOptions(model)).findings == []
    document = manifest.read(tmp_path / "learned")
    assert document is not None
    figures = [tensor for tensor in document["tensors"] if tensor["action"] == "quantize"]
    assert len(figures) == 14
    assert all(one["block_error"] < 0.95 * one["block_error_rtn"] for one in figures)
    # On rows that nothing was learned on, against the plain rounding that the scales began as.
    quantize(model, tmp_path / "rtn", recipe("rtn", scheme=SCHEME, scales="absmax"))
    results = [decoded(open_checkpoint(tmp_path / name)) for name in ("learned", "rtn")]
    source = open_checkpoint(model)
    matched = match(source.config, [entry.stored() for entry in source.entries.values()])
    with torch.no_grad(), ModelStream(source, matched, ROWS) as stream:
        for part in stream:
            samples = part.samples()
            own, plain = (block_error(samples, part, result) for result in results)
            assert 0 < own < 0.95 * plain
            part.advance_to(samples)


@pytest.mark.parametrize("propagate", ["source", "quantized"])
def test_bytes_depend_on_neither_threads_nor_interruptions(
    tiny: Tiny, tmp_path: Path, propagate: str
) -> None:
    model, wanted = tiny("llama-wide"), learned(propagate)

    def stop(progress: Progress) -> None:
        if progress.part == "block 0":
            raise KeyboardInterrupt

    quantize(model, tmp_path / "a", wanted, threads=1)
    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "b", wanted, progress=stop, threads=2)
    assert quantize(model, tmp_path / "b", wanted, threads=2).resumed
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_what_lies_outside_of_blocks_is_rounded_plainly(tiny: Tiny, tmp_path: Path) -> None:
    head = {"head": "int8:row:sym"}
    quantize(tiny("llama-wide"), tmp_path / "q", replace(learned(), **head))
    plain = recipe("rtn", scheme=SCHEME, scales="absmax", **head)
    quantize(tiny("llama-wide"), tmp_path / "p", plain)
    results = [decoded(open_checkpoint(tmp_path / key)) for key in "qp"]
    found, rounded = (result.read("lm_head.weight") for result in results)
    assert torch.equal(found, rounded)


@pytest.mark.thorough
def test_gains_of_norms_that_a_method_changes_are_written(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_block = learned_scales.round_block

    def with_gains(part: BlockPart, *others: object) -> object:
        with torch.no_grad():
            name = "input_layernorm.weight"
            part.set_parameter(name, part.parameter(name) * 1.25)
        return round_block(part, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(learned_scales, "round_block", with_gains)
    model = tiny("gemma2")
    quantize(model, tmp_path / "q", learned(method="awq+learned-scales"))
    quantize(model, tmp_path / "p", learned(method="awq+rtn"))
    name = "model.layers.1.input_layernorm.weight"
    found, plain = (open_checkpoint(tmp_path / key).read(name).float() for key in "qp")
    torch.testing.assert_close(found, 1.25 * plain, rtol=2**-7, atol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_pass_to_weights_in_either_orientation(tiny: Tiny, family: str) -> None:
    checkpoint = open_checkpoint(tiny(family))
    matched = match(checkpoint.config, [entry.stored() for entry in checkpoint.entries.values()])
    with torch.no_grad(), ModelStream(checkpoint, matched, ROWS, micro_batch=4) as stream:
        part = next(iter(stream))
        samples = part.samples()
        ((batch, targets),) = samples
        weights = {name: part.weight(name).clone() for name in part.linears}
        torch.testing.assert_close(samples.run(batch, weights), targets, rtol=1e-4, atol=1e-5)
        name = part.linears[-1]

        def loss(weight: Tensor) -> Tensor:
            return samples.run(batch, {**weights, name: weight}).double().square().mean()

        with torch.enable_grad():
            weight = weights[name].requires_grad_()
            (gradient,) = torch.autograd.grad(loss(weight), weight)
        step = 1e-2 * gradient / gradient.norm()
        slope = float(loss(weights[name] + step) - loss(weights[name] - step)) / 2e-2
        assert slope == pytest.approx(float(gradient.norm()), rel=1e-2)


def test_it_comes_last_and_needs_calibration(tiny: Tiny) -> None:
    model = str(tiny("llama-wide"))
    with pytest.raises(UsageError, match="transforms come first"):
        verbs.plan(model, recipe("learned-scales+gptq", scheme=SCHEME))
    nothing = replace(CALIBRATION, source="none")
    with pytest.raises(UsageError, match="observes what the layers read"):
        verbs.plan(model, recipe("learned-scales", scheme=SCHEME, calibration=nothing))
