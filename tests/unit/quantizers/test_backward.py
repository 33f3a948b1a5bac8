"""The backward pass of a streamed model: gradients, labels, sums and memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantforge.architectures.match import ModelLayout, match_tensors
from quantforge.errors import InputError
from quantforge.files.reader import Checkpoint, open_checkpoint
from quantforge.numerics.threads import reproducible
from quantforge.quantizers.guidance.backward import backward, draw_labels
from quantforge.quantizers.guidance.gradients import OutputGradients, strip_weights
from tests.conftest import SIZES, VOCABULARY, Tiny, randomize

ROWS = torch.randint(0, VOCABULARY, (5, 40), generator=torch.Generator().manual_seed(1))


def opened(path: Path) -> tuple[Checkpoint, ModelLayout]:
    checkpoint = open_checkpoint(path)
    return checkpoint, match_tensors(
        checkpoint.config, [e.to_stored_tensor() for e in checkpoint.entries.values()]
    )


class Collector:
    """Everything that a backward pass hands over, joined over micro-batches, in the order of the first ones."""

    def __init__(self) -> None:
        self._row_parts: dict[str, list[OutputGradients]] = {}

    def __call__(self, seen: OutputGradients) -> None:
        self._row_parts.setdefault(seen.name, []).append(seen)

    def joined(self) -> dict[str, tuple[Tensor, Tensor]]:
        for parts in self._row_parts.values():
            lengths = [len(part.inputs) for part in parts]
            assert [part.start for part in parts] == [sum(lengths[:i]) for i in range(len(parts))]
        return {
            name: (torch.cat([p.inputs for p in parts]), torch.cat([p.gradients for p in parts]))
            for name, parts in self._row_parts.items()
        }


def streamed(path: Path, **options: Any) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    collector = Collector()
    labels = backward(*opened(path), ROWS, collector, **{"micro_batch": 2, **options})
    return collector.joined(), labels


def in_memory(path: Path, labels: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Inputs and output gradients by `Tensor.backward` of the whole model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    results: dict[str, tuple[Tensor, Tensor]] = {}

    def see(name: str) -> Callable[[Any, Any, Tensor], None]:
        def hook(_: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            output.retain_grad()
            results[name] = (args[0], output)

        return hook

    for name, module in model.named_modules():
        if type(module).__name__ in {"Linear", "Conv1D"}:
            module.register_forward_hook(see(name))
    logits = model(ROWS).logits
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    ).backward()  # type: ignore[no-untyped-call]
    return {name: (x.detach(), y.grad) for name, (x, y) in results.items() if y.grad is not None}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "phi3", "qwen3", "lfm2"])
def test_gradients_are_those_of_the_whole_model(tiny: Tiny, family: str) -> None:
    result, labels = streamed(tiny(family))
    expected = in_memory(tiny(family), labels)
    assert result.keys() == expected.keys()
    for name, pair in expected.items():
        for own, other in zip(result[name], pair, strict=True):
            assert own.shape == other.shape
            assert other.norm() > 1e-3
            assert float((own - other).norm() / other.norm()) <= 1e-5, name
    _, model_layout = opened(tiny(family))
    blocks = [model_layout.by_name.get(f"{name}.weight") for name in result]
    order = [tensor.block for tensor in blocks[1:] if tensor is not None]
    assert order == sorted(order, reverse=True)  # the head first, then from the last block


def test_labels_and_gradients_depend_on_neither_threads_nor_micro_batch_nor_storage(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = tiny("gemma2")
    expected, labels = streamed(model, micro_batch=2)
    before = torch.get_num_threads()
    for threads, options in (
        (1, {"micro_batch": 5}),
        (2, {"micro_batch": 3}),
        (3, {"micro_batch": 1, "activations": tmp_path}),
    ):
        torch.set_num_threads(threads)
        try:
            with reproducible(), torch.inference_mode():  # a run is always inside of both
                result, drawn = streamed(model, **options)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(drawn, labels)
        for name, pair in expected.items():
            for own, other in zip(result[name], pair, strict=True):
                assert torch.equal(own, other), name
    assert not list(tmp_path.iterdir())
    assert not torch.equal(streamed(model, seed=1)[1], labels)


def test_labels_follow_the_distribution_of_the_model() -> None:
    logits = torch.tensor([0.0, -torch.inf, 1.0, 2.0]).expand(4, 5000, 4)
    labels = draw_labels(logits, 7, 3)
    shares = torch.bincount(labels.flatten(), minlength=4) / labels.numel()
    expected = logits[0, 0].softmax(-1)
    assert shares[1] == 0
    assert (shares - expected).abs().max() < 0.02
    assert torch.equal(draw_labels(logits[1:, :9], 7, 4), labels[1:, :9])  # by row and position
    assert len({tuple(row.tolist()) for row in labels}) == 4
    assert not torch.equal(draw_labels(logits[:, :9], -7, 3), labels[:, :9])


def test_more_strips_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="5 strips of 4 rows"):
        strip_weights(torch.ones(2, 4), 5)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 16 blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 16}))
    randomize(model)
    directory: Path = tmp_path_factory.mktemp("deep")
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def test_backward_keeps_one_block_and_few_checkpoints(deep: Path) -> None:
    """What is alive is counted at every call, byte by byte, over all tensors that were made since."""
    peak = 0

    def visit(_: OutputGradients) -> None:
        nonlocal peak
        storages = {}
        for item in gc.get_objects():
            if issubclass(type(item), Tensor) and item.device.type == "cpu":
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        peak = max(peak, sum(storages.values()))

    checkpoint, model_layout = opened(deep)
    gc.collect()
    gc.freeze()  # leaves what is there already out of the objects
    try:
        backward(checkpoint, model_layout, ROWS, visit, micro_batch=1)
    finally:
        gc.unfreeze()
    sizes = [
        sum(4 * t.header.shape[0] * (t.header.shape[1] if len(t.header.shape) > 1 else 1) for t in model_layout.tensors
            if t.block == block)
        for block in range(model_layout.blocks)
    ]  # fmt: skip
    states = 4 * ROWS.numel() * SIZES["hidden_size"]
    row = 4 * ROWS.shape[1] * (4 * SIZES["hidden_size"] + 3 * SIZES["intermediate_size"])
    assert sizes[0] < peak  # the block itself is seen, so that the count is one
    assert peak < sizes[0] + (2 * 4 + 1) * states + 2 * row < sum(sizes)


def test_overflow_names_the_layer(tiny: Tiny) -> None:
    checkpoint, model_layout = opened(tiny("llama"))

    class Overflowing:
        config = checkpoint.config

        def read(self, name: str) -> Tensor:
            large = name == "lm_head.weight"
            return checkpoint.read(name).float() * (1e38 if large else 1)

        def read_rows(self, name: str, first: int, last: int) -> Tensor:
            return checkpoint.read_rows(name, first, last)

    with pytest.raises(InputError, match="logits are not finite in calibration row 0"):
        backward(Overflowing(), model_layout, ROWS, lambda _: None)
