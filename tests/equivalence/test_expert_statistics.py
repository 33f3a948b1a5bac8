"""What is observed of single experts, against sums over the arguments of transformers' own experts in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quantforge import api
from quantforge.errors import InputError, RefusedError
from quantforge.model import expert_statistics
from quantforge.model.expert_statistics import ExpertStatistics
from quantforge.model.experts import Experts
from quantforge.model.statistics import Statistic, Statistics
from quantforge.model.stream import ModelStream
from quantforge.numerics.threads import reproducible
from tests.conftest import MIXTURES, Tiny, make_tiny
from tests.equivalence.test_mixtures import ROWS, opened, whole_model
from tests.thorough import representative_families

ALL = frozenset({Statistic.HESSIAN, Statistic.SQUARES, Statistic.PEAKS, Statistic.HISTOGRAM})
HESSIAN = frozenset({Statistic.HESSIAN})
BLOCK = 2  # a mixture in every family
FIRST, LAST = "gate_up_proj", "down_proj"
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def arguments(path: Path) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return what reaches the experts of a block, as transformers calls them, and the module."""
    model = whole_model(path)
    layer = model.model.layers[BLOCK]
    experts = next(module for module in layer.modules() if hasattr(module, "gate_up_proj"))
    seen: list[tuple[Tensor, ...]] = []
    experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    for row in ROWS.split(1):
        model(row)
    if len(seen[0]) == 1:  # every token once for each expert, 0 for those that it is not sent to
        spread = torch.cat([one.unflatten(0, (4, -1)) for (one,) in seen], 1).double()
        index = spread.norm(dim=-1).argmax(0)[:, None]
        return spread.sum(0), index, torch.ones(index.shape, dtype=torch.float64), experts
    states, index, weights = (torch.cat(parts) for parts in zip(*seen, strict=True))
    return states.double(), index, weights.double(), experts


def intermediate(experts: Any, x: Tensor, number: int, family: str) -> Tensor:
    """What ``down`` of an expert reads, by the formula of the family."""
    matrix = experts.gate_up_proj[number].double()
    if family != "gpt-oss":
        gate, up = (x @ (matrix if family == "llama4" else matrix.T)).chunk(2, -1)
        return getattr(experts, "act_fn", functional.silu)(gate) * up
    both = x @ matrix + experts.gate_up_proj_bias[number].double()
    gate, up = both[:, ::2].clamp(max=experts.limit), both[:, 1::2]
    up = up.clamp(-experts.limit, experts.limit)
    return (up + 1) * gate * torch.sigmoid(gate * experts.alpha)


def off_diagonal(hessian: Tensor, tokens: float) -> Tensor:
    """Shrink what lies off the diagonal; ``tokens`` for each input feature."""
    found = hessian * (tokens / (tokens + 2))
    found.diagonal().copy_(hessian.diagonal())
    return found


def observed(
    path: Path,
    wanted: frozenset[Statistic] = ALL,
    *,
    everyone: bool = False,
    micro_batch: int = 2,
    activations: Path | None = None,
) -> list[dict[str, Statistics]]:
    checkpoint, model_layout = opened(path)
    with ModelStream(
        checkpoint, model_layout, ROWS, micro_batch=micro_batch, activations=activations
    ) as stream:
        for part in stream:
            if part.index == BLOCK:
                part.observe({})
                experts = part.experts
                assert experts is not None
                statistics = ExpertStatistics(experts, wanted, all_tokens=everyone, seed=0)
                found = [statistics.compute(number, add=False) for number in experts.numbers]
                return [{name.rpartition(".")[2]: one[name] for name in one} for one in found]
            part.advance()
    raise AssertionError


def mean(x: Tensor, weights: Tensor) -> Tensor:
    scaled = x * weights[:, None]
    return scaled.T @ scaled / weights.square().sum()


@pytest.mark.parametrize("family", representative_families(MIXTURES))
def test_tokens_count_by_the_square_of_their_router_weight(
    tiny: Tiny, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_statistics, "PRIOR_WEIGHT", 1e-9)  # of the prior: nothing
    monkeypatch.setattr(expert_statistics, "OFF_DIAGONAL_SHRINKAGE", 0)
    states, index, weights, experts = arguments(tiny(family))
    for number, found in enumerate(observed(tiny(family))):
        tokens, place = (index == number).nonzero(as_tuple=True)
        assert len(tokens)
        x, mine = states[tokens], weights[tokens, place]
        for name, read in ((FIRST, x), (LAST, intermediate(experts, x, number, family))):
            expected = mean(read, mine)
            one = found[name]
            assert one.tokens == len(tokens)
            assert one.hessian is not None
            assert one.squares is not None
            assert one.peaks is not None
            assert one.histogram is not None
            assert torch.allclose(one.hessian.double(), expected, **CLOSE)
            assert torch.allclose(one.squares.double(), expected.diagonal(), **CLOSE)
            assert torch.allclose(one.peaks.double(), read.abs().amax(0), **CLOSE)
            assert one.histogram.sum() == read.numel()


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_few_tokens_are_shrunk_toward_the_layer(
    tiny: Tiny, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_statistics, "SAMPLE_TOKENS", 1000)  # all tokens
    states, index, weights, experts = arguments(tiny(family))
    everything = states.T @ states / len(states)
    for number, found in enumerate(observed(tiny(family), HESSIAN)):
        tokens, place = (index == number).nonzero(as_tuple=True)
        x, mine = states[tokens], weights[tokens, place]
        inner = intermediate(experts, states, number, family)
        priors = {FIRST: everything, LAST: inner.T @ inner / len(inner)}
        reads = {FIRST: x, LAST: intermediate(experts, x, number, family)}
        for name, prior in priors.items():
            n, width = len(tokens), reads[name].shape[1]
            m, sample = 2 * width, len(states)
            expected = (n * mean(reads[name], mine) + m * prior) / (n + m)
            if name == LAST:
                variance = (n / (n + m)) ** 2 / n + (m / (n + m)) ** 2 / sample
                expected = off_diagonal(expected, 1 / variance / width)
            hessian = found[name].hessian
            assert hessian is not None
            assert torch.allclose(hessian.double(), expected, **CLOSE)


def test_every_token_may_pass_every_expert(tiny: Tiny) -> None:
    states, _, _, experts = arguments(tiny("mixtral"))
    for number, found in enumerate(observed(tiny("mixtral"), HESSIAN, everyone=True)):
        inner = intermediate(experts, states, number, "mixtral")
        for name, read in ((FIRST, states), (LAST, inner)):
            hessian = found[name].hessian
            assert hessian is not None
            assert found[name].tokens == len(states)
            expected = read.T @ read / len(read)
            if name == LAST:
                expected = off_diagonal(expected, len(read) / read.shape[1])
            assert torch.allclose(hessian.double(), expected, **CLOSE)


def lonely(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the router send no token to an expert."""
    original = Experts.collecting_tokens

    def collecting(self: Experts, tokens: Any) -> Any:
        record = tokens.record

        def recorded(row: int, states: Tensor, index: Tensor, weights: Tensor) -> None:
            record(row, states, torch.where(index == number, 99, index), weights)

        if f"layers.{BLOCK}." in self.name:
            tokens.record = recorded
        return original(self, tokens)

    monkeypatch.setattr(Experts, "collecting_tokens", collecting)


def test_an_expert_without_tokens_has_what_the_layer_knows(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, _, _, experts = arguments(tiny("mixtral"))
    lonely(tiny, monkeypatch, 3)
    found = observed(tiny("mixtral"))[3]
    inner = intermediate(experts, states, 3, "mixtral")
    for name, read in ((FIRST, states), (LAST, inner)):
        one = found[name]
        assert one.tokens == 0
        assert one.hessian is not None
        assert one.peaks is not None
        expected = read.T @ read / len(read)
        if name == LAST:
            expected = off_diagonal(expected, len(read) / read.shape[1])
        assert torch.allclose(one.hessian.double(), expected, **CLOSE)
        assert torch.allclose(one.peaks.double(), read.abs().amax(0), **CLOSE)


def test_the_input_of_a_mixture_is_observed_where_the_weights_of_its_experts_are(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are kept in the memory of the host, whatever the device."""
    lonely(tiny, monkeypatch, 3)
    checkpoint, model_layout = opened(tiny("mixtral"))
    with ModelStream(checkpoint, model_layout, ROWS) as stream:
        for part in stream:
            if part.index == BLOCK:
                part.observe({})
                experts = part.experts
                assert experts is not None
                wanted = ALL - {Statistic.HISTOGRAM}  # which this device cannot count
                statistics = ExpertStatistics(experts, wanted, all_tokens=False, seed=0)
                # On this device nothing is computed: all matrices read the input, which no token of theirs adds to.
                outer, meta = frozenset(experts.stacks), torch.device("meta")
                monkeypatch.setattr(
                    ExpertStatistics, "_stacks_reading_input", lambda *_, found=outer: found
                )
                monkeypatch.setattr(Experts, "device", lambda *_, found=meta: found)
                found = statistics.compute(3, add=False)
                break
            part.advance()
    for one in found.values():
        for value in (one.hessian, one.squares, one.peaks):
            assert value is not None
            assert value.is_meta


def test_neither_threads_nor_micro_batch_nor_place_change_a_bit(tiny: Tiny, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    ways: list[tuple[int, dict[str, Any]]] = [
        (1, {}), (3, {"micro_batch": 5}), (2, {"micro_batch": 1, "activations": tmp_path}),
    ]  # fmt: skip
    results = []
    for number, options in ways:
        torch.set_num_threads(number)
        try:
            with reproducible():
                results.append(observed(tiny("qwen3-moe"), **options))
        finally:
            torch.set_num_threads(threads)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            for name in one:
                assert torch.equal(one[name].hessian, two[name].hessian)  # type: ignore[arg-type]
                assert torch.equal(one[name].histogram, two[name].histogram)  # type: ignore[arg-type]


def test_an_expert_that_overflows_is_named(tiny: Tiny) -> None:
    checkpoint, model_layout = opened(tiny("mixtral"))
    with ModelStream(checkpoint, model_layout, ROWS) as stream:
        part = next(iter(stream))
        part.observe({})
        assert part.experts is not None
        part.set_weight("mlp.experts.2.up_proj", part.weight("mlp.experts.2.up_proj") * torch.inf)
        statistics = ExpertStatistics(part.experts, HESSIAN, all_tokens=False, seed=0)
        with pytest.raises(InputError, match=r"layers\.0\.mlp\.experts\.2: what .*down_proj"):
            statistics.compute(2, add=False)


def test_a_call_of_another_kind_is_refused(tiny: Tiny) -> None:
    checkpoint, model_layout = opened(tiny("mixtral"))
    with ModelStream(checkpoint, model_layout, ROWS) as stream:
        part = next(iter(stream))
        mlp = part.module.get_submodule("mlp")
        mlp.register_forward_pre_hook(lambda module, args: module.experts(*args, args[0], args[0]))
        with pytest.raises(RefusedError, match=r"mlp\.experts: called with"):
            part.observe({})


def test_tokens_that_are_spread_over_several_experts_each_are_refused(tmp_path: Path) -> None:
    """Their inputs, multiplied by the weights of the router, would differ by expert."""
    checkpoint, model_layout = opened(make_tiny("llama4", tmp_path / "m", num_experts_per_tok=2))
    with ModelStream(checkpoint, model_layout, ROWS) as stream:
        parts = iter(stream)
        for _ in range(BLOCK):
            next(parts).advance()
        with pytest.raises(RefusedError, match="spread over 4 experts, each sent to one"):
            next(parts).observe({})


@pytest.mark.parametrize(
    "asked",
    [
        {"method": "gptq", "bits": 4},
        {"method": "rtn", "bits": 4},
        {"prune_experts": "25%", "format": "plain"},
    ],
)
def test_a_plan_refuses_what_would_observe_such_experts(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    model = make_tiny("llama4", tmp_path / "m", num_experts_per_tok=2)
    with pytest.raises(RefusedError, match=r"sent to 2 experts \(num_experts_per_tok\)"):
        api.quantize(model, out=tmp_path / "x", **asked)
    assert [one.name for one in tmp_path.iterdir()] == ["m"]
    assert api.plan(model, bits=4, method="rtn", calibration="none").needs == ()


def test_spread_tokens_that_are_not_finite_are_told(tiny: Tiny) -> None:
    checkpoint, model_layout = opened(tiny("llama4"))
    with ModelStream(checkpoint, model_layout, ROWS) as stream:
        parts = iter(stream)
        for _ in range(BLOCK):
            next(parts).advance()
        part = next(parts)
        part.module.get_submodule("feed_forward.router").register_forward_hook(
            lambda _, __, output: (output[0] * torch.inf, output[1])
        )
        with pytest.raises(InputError, match=r"what reaches the experts is not finite"):
            part.observe({})


def test_products_that_are_not_known_are_refused(tiny: Tiny) -> None:
    checkpoint, model_layout = opened(tiny("mixtral"))
    with ModelStream(checkpoint, model_layout, ROWS) as stream:
        part = next(iter(stream))
        part.observe({})
        assert part.experts is not None
        module: Any = part.module.get_submodule("mlp.experts")
        module.act_fn = torch.nn.Identity()  # what lies between the products is nobody's business
        ExpertStatistics(part.experts, HESSIAN, all_tokens=False, seed=0).compute(0, add=False)

        def forward(states: Tensor, _index: Tensor, _weights: Tensor) -> Tensor:
            return torch.einsum("th,oh->to", states, module.gate_up_proj[0])[:, : states.shape[1]]

        module.forward = forward
        with pytest.raises(RefusedError, match="is not seen in the products"):
            ExpertStatistics(part.experts, HESSIAN, all_tokens=False, seed=0).compute(0, add=False)
