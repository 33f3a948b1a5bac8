"""Mixtures of experts, streamed: the logits of the whole model, and every expert's matrix by its declared name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantforge.architectures.match import ModelLayout, Role, match_tensors
from quantforge.errors import InputError
from quantforge.files.reader import Checkpoint, open_checkpoint
from quantforge.model.block import DecoderBlock
from quantforge.model.scale_folding import fold_scale
from quantforge.model.stream import ModelStream
from quantforge.plans import StoredTensor
from tests.conftest import MIXTURES, VOCABULARY, Tiny
from tests.equivalence.test_stream import NO_ROWS, InFloat64, random_scale
from tests.thorough import representative_families

ROWS = torch.randint(0, VOCABULARY, (5, 40), generator=torch.Generator().manual_seed(1))
MOST = 1e-5  # logits are about 2, and float32 sums may be made in another order
# Layers that have experts; all of them where nothing is said.
ALTERNATE, BEHIND = [0, 2], [1, 2]
EXPECTED = {
    "qwen3-moe": ALTERNATE, "qwen2-moe": ALTERNATE, "deepseek-v2": BEHIND, "deepseek-v3": BEHIND,
    "deepseek-v3-plain": BEHIND, "deepseek-v32": BEHIND, "glm4-moe-lite": BEHIND, "glm4-moe": BEHIND, "dots1": BEHIND,
    "ernie4-5-moe": BEHIND, "afmoe": BEHIND, "lfm2-moe": [1, 2, 3],
    "llama4": [2, 3], "kimi-linear": [1, 2, 3], "qwen3-next": [0, 2, 3], "qwen3.5-moe": [0, 1, 2, 3],
}  # fmt: skip
STACKED = {
    "gpt-oss": 4,
    "granitemoe": 2,
    "granitemoeshared": 2,
    "granitemoehybrid": 2,
    "gemma4-moe": 2,
    "llama4": 2,
}  # tensors of all experts in one layer
TURNED = {"gpt-oss": True, "llama4": False}  # matrices are [in, out]; whether gate and up alternate
ROUTERS = (".gate.weight", ".router.proj.weight", ".router.weight", ".wg.weight")
BESIDE = (
    ".shared_expert_gate.weight",
    ".indexer.weights_proj.weight",
    ".e_score_correction_bias",
    ".conv.weight",
    "conv1d.weight",
    ".A_log",
)


def opened(path: Path) -> tuple[Checkpoint, ModelLayout]:
    checkpoint = open_checkpoint(path)
    return checkpoint, match_tensors(
        checkpoint.config, [e.to_stored_tensor() for e in checkpoint.entries.values()]
    )


def whole_model(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    return model.eval().requires_grad_(False)


def whole_logits(model: Any, micro_batch: int = 1) -> Tensor:
    return torch.cat([model(rows).logits for rows in ROWS.split(micro_batch)])


@pytest.mark.parametrize("family", representative_families(MIXTURES))
def test_every_tensor_has_its_place(tiny: Tiny, family: str) -> None:
    checkpoint, model_layout = opened(tiny(family))
    assert {tensor.header.name for tensor in model_layout.tensors} == set(checkpoint.entries)
    experts = [tensor for tensor in model_layout.tensors if tensor.expert >= 0]
    assert all(tensor.role is Role.LINEAR for tensor in experts)
    stacked = STACKED.get(family, 0)
    mixtures = [i for i, kind in enumerate(model_layout.layers) if kind.stacks]
    assert mixtures == EXPECTED.get(family, [0, 1, 2])
    assert {(t.block, t.expert) for t in experts} == (
        set() if stacked else {(block, number) for block in mixtures for number in range(4)}
    )
    kept = {
        t.name for t in model_layout.tensors if t.role is Role.OTHER and len(t.header.shape) > 1
    }
    routers = {name for name in kept if name.endswith(ROUTERS)}
    kept -= {name for name in kept if name.endswith(BESIDE)}
    assert len(routers) == len(mixtures)
    assert len(kept - routers) == stacked * len(mixtures)


@pytest.mark.parametrize("family", MIXTURES)
def test_logits_equal_those_of_the_whole_model(tiny: Tiny, family: str) -> None:
    checkpoint, model_layout = opened(tiny(family))
    with ModelStream(checkpoint, model_layout, ROWS, micro_batch=2) as stream:
        for part in stream:
            part.advance()
        streamed = torch.cat(list(stream.logits()))
    expected = whole_logits(whole_model(tiny(family)))
    assert expected.std() > 0.1
    assert (streamed - expected).abs().max() <= MOST


@pytest.mark.parametrize("family", representative_families(MIXTURES))
def test_a_changed_expert_changes_what_follows(tiny: Tiny, family: str) -> None:
    """Every expert is read and set by its declared name, in one orientation, wherever the module holds it."""
    checkpoint, model_layout = opened(tiny(family))
    model = whole_model(tiny(family))
    with ModelStream(checkpoint, model_layout, ROWS, micro_batch=2) as stream:
        for part in stream:
            block = model.get_submodule(part.name)
            names = ("mlp", "feed_forward", "block_sparse_moe")
            module = next(name for name in names if hasattr(block, name))
            theirs = block.get_submodule(module)
            for number in range(4 if hasattr(theirs, "experts") else 0):
                names = [
                    f"{module}.experts.{number}.{leaf}"
                    for leaf in ("gate_proj", "up_proj", "down_proj")
                ]
                gate, up, down = (part.weight(name) for name in names)
                gate_up = theirs.experts.gate_up_proj[number]
                if family in TURNED:
                    rows = gate_up.T
                    halves = (rows[::2], rows[1::2]) if TURNED[family] else rows.chunk(2)
                    expected = (*halves, theirs.experts.down_proj[number].T)
                else:
                    expected = (*gate_up.chunk(2), theirs.experts.down_proj[number])
                assert torch.equal(gate, expected[0])
                assert torch.equal(up, expected[1])
                assert torch.equal(down, expected[2])
                for name, other in zip(names, expected, strict=True):
                    columns = torch.arange(other.shape[1]) / 1e3
                    part.set_weight(name, (other * 4).round() / 4 + columns)
                    other.copy_((other * 4).round() / 4 + columns)
            part.advance()
        streamed = torch.cat(list(stream.logits()))
    assert (streamed - whole_logits(model)).abs().max() <= MOST


@pytest.mark.parametrize("family", representative_families(MIXTURES))
def test_folding_every_declared_pair_preserves_the_function(tiny: Tiny, family: str) -> None:
    """Routers, inner norms of latent attention, the values of every head, what else reads a norm."""
    _, model_layout = opened(tiny(family))
    model = whole_model(tiny(family)).double()
    with InFloat64():
        expected = whole_logits(model, len(ROWS))
        for index, kind in enumerate(model_layout.layers):
            name = model_layout.block_name(index)
            known = {
                item.name: model_layout.by_name.get(f"{name}.{item.name}")
                for item in kind.parameters
            }
            stored = {key: tensor.header for key, tensor in known.items() if tensor}
            block = DecoderBlock(index, model.get_submodule(name), model_layout, stored, NO_ROWS)
            for number, shared in enumerate(block.inputs):
                if shared.scale_fold is None:
                    continue
                changed = fold_scale(block, shared, random_scale(block, shared, number))
                assert set(changed) >= {f"{name}.weight" for name in shared.readers}
            actual = whole_logits(model, len(ROWS))
            assert (actual - expected).abs().max() <= 1e-11 * expected.abs().max(), block.name


def test_parameters_are_the_stored_ones(tiny: Tiny) -> None:
    """What is written of a block that stays is read by the names under which its files hold it."""
    checkpoint, model_layout = opened(tiny("mixtral"))
    with ModelStream(checkpoint, model_layout, ROWS, micro_batch=2) as stream:
        part = next(iter(stream))
        names = {part.stored_name(name): name for name in part.parameters()}
        assert set(names) == {name for name in checkpoint.entries if ".layers.0." in name}
        for stored, name in names.items():
            assert torch.equal(part.parameter(name), checkpoint.read(stored).float())


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("model.layers.1.block_sparse_moe.experts.3.w2.weight", "w2.weight: missing"),
        ("model.layers.1.block_sparse_moe.gate.weight", "gate.weight: missing"),
    ],
)
def test_a_missing_expert_is_named_as_it_is_stored(tiny: Tiny, gone: str, words: str) -> None:
    checkpoint, _ = opened(tiny("mixtral"))
    stored = [
        entry.to_stored_tensor() for name, entry in checkpoint.entries.items() if name != gone
    ]
    with pytest.raises(InputError) as caught:
        match_tensors(checkpoint.config, stored)
    assert words in caught.value.message
    with pytest.raises(InputError, match=r"experts.4.w1.weight: missing"):
        match_tensors({**checkpoint.config, "num_local_experts": 5}, stored)
    extra = StoredTensor("model.layers.0.block_sparse_moe.experts.4.w1.weight", "BF16", (128, 64))
    with pytest.raises(InputError, match=r"experts.4.w1.weight: not a tensor of mixtral"):
        match_tensors(checkpoint.config, [*stored, extra])
