"""The backward pass through mixtures: gradients of single experts and of earlier blocks."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantforge.numerics.threads import reproducible
from quantforge.quantizers.guidance.backward import backward
from quantforge.quantizers.guidance.gradients import OutputGradients, strip_weights
from quantforge.quantizers.guidance.token_weights import TokenWeights
from tests.conftest import MIXTURES, VOCABULARY, Tiny
from tests.equivalence.test_mixtures import opened
from tests.thorough import mark_others_thorough

ROWS = torch.randint(0, VOCABULARY, (5, 40), generator=torch.Generator().manual_seed(1))
MOST = 1e-4  # of the norm


class WeightGradients:
    """Gradients of all matrices, as sums over tokens of what a backward pass hands over, and which tokens they had."""

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}
        self.tokens: dict[str, list[int]] = {}

    def __call__(self, seen: OutputGradients) -> None:
        x, y = (part.double().flatten(0, -2) for part in (seen.inputs, seen.gradients))
        self.of[seen.name] = self.of.get(seen.name, torch.zeros((), dtype=torch.float64)) + y.T @ x
        if seen.tokens is not None:
            self.tokens.setdefault(seen.name, []).extend(seen.tokens.tolist())


def streamed(path: Path, rows: Tensor = ROWS, **options: Any) -> tuple[WeightGradients, Tensor]:
    result = WeightGradients()
    labels = backward(*opened(path), rows, result, **{"micro_batch": 2, **options})
    return result, labels


def in_memory(path: Path, rows: Tensor, labels: Tensor) -> Any:
    """The whole model with the gradients of its parameters."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    for row, own in zip(rows.split(1), labels.split(1), strict=True):
        logits = model(row).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), own.flatten(), reduction="sum"
        )
        loss.backward()  # type: ignore[no-untyped-call]
    return model


@pytest.mark.parametrize(
    "family",
    mark_others_thorough(MIXTURES, "qwen3-moe", "deepseek-v3", "granitemoe", "gpt-oss", "llama4"),
)
def test_gradients_are_those_of_the_whole_model(tiny: Tiny, family: str) -> None:
    rows = ROWS[:3]
    result, labels = streamed(tiny(family), rows)
    model = in_memory(tiny(family), rows, labels)
    _, model_layout = opened(tiny(family))
    compared = 0
    for index, kind in enumerate(model_layout.layers):
        block = f"{model_layout.block_name(index)}."
        places = kind.expert_slices()
        for name in kind.linears:
            if name in places:
                whole = model.get_parameter(f"{block}{places[name].stack.parameter}")
                expected = places[name].view(whole.grad)
            elif f"{block}{name}" in result.of:
                expected = model.get_parameter(f"{block}{name}.weight").grad
            else:
                continue
            own = result.of[f"{block}{name}"]
            assert own.shape == expected.shape
            assert float((own - expected).norm()) <= MOST * float(expected.norm()) + 1e-6, name
            compared += float(expected.norm()) > 1e-3
    assert compared > 20


@pytest.mark.parametrize("family", ["qwen2-moe", "gpt-oss"])
def test_neither_threads_nor_micro_batch_nor_storage_matter(
    tiny: Tiny, tmp_path: Path, family: str
) -> None:
    expected, labels = streamed(tiny(family))
    before = torch.get_num_threads()
    for threads, options in (
        (1, {"micro_batch": 5}),
        (3, {"micro_batch": 1, "activations": tmp_path}),
    ):
        torch.set_num_threads(threads)
        try:
            with reproducible(), torch.inference_mode():  # a run is always inside of both
                result, drawn = streamed(tiny(family), **options)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(drawn, labels)
        assert result.tokens == expected.tokens
        for name, tokens in result.tokens.items():
            assert tokens == sorted(set(tokens))
            assert torch.equal(result.of[name], expected.of[name]), name
    assert not list(tmp_path.iterdir())


def test_token_weights_cover_only_tokens_routed_to_the_expert(tiny: Tiny, tmp_path: Path) -> None:
    checkpoint, model_layout = opened(tiny("qwen3-moe"))
    result, sums = WeightGradients(), defaultdict[str, float | Tensor](float)

    def add(seen: OutputGradients) -> None:
        gradients = seen.gradients if seen.tokens is None else seen.gradients[None]
        sums[seen.name] += strip_weights(gradients, 2).sum((0, 1), dtype=torch.float64)

    backward(checkpoint, model_layout, ROWS, result)
    backward(checkpoint, model_layout, ROWS, add)
    dense = "model.layers.1.mlp.up_proj"
    names, shape = [*result.tokens, dense], (*ROWS.shape, 2)
    with TokenWeights(tmp_path / "weights", [dense], shape, result.tokens) as weights:
        backward(checkpoint, model_layout, ROWS, weights, micro_batch=2)
        assert weights.count == len(names) * len(ROWS)
        for name in names:
            own = weights.of(name).flatten(0, 1)
            if name in result.tokens:
                assert own.any(1).nonzero().flatten().tolist() == result.tokens[name]
            total = own.sum(0, dtype=torch.float64)
            assert torch.allclose(total, sums[name], rtol=1e-5)
