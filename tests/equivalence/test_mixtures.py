"""Mixtures of experts, streamed: the logits of the whole model, and every expert's matrix by its declared name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantforge.architectures.match import Matched, Role, match
from quantforge.checkpoint.reader import Checkpoint, open_checkpoint
from quantforge.errors import InputError, RefusedError
from quantforge.model.statistics import Statistic
from quantforge.model.stream import ModelStream
from quantforge.plans import StoredTensor
from tests.conftest import MIXTURES, VOCABULARY, Tiny

ROWS = torch.randint(0, VOCABULARY, (5, 40), generator=torch.Generator().manual_seed(1))
MOST = 1e-5  # logits are about 2, and float32 sums may be made in another order
HESSIAN = frozenset({Statistic.HESSIAN})


def opened(path: Path) -> tuple[Checkpoint, Matched]:
    checkpoint = open_checkpoint(path)
    return checkpoint, match(checkpoint.config, [e.stored() for e in checkpoint.entries.values()])


def whole_model(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    return model.eval().requires_grad_(False)


def whole_logits(model: Any) -> Tensor:
    return torch.cat([model(row).logits for row in ROWS.split(1)])


@pytest.mark.parametrize("family", MIXTURES)
def test_every_tensor_has_its_place(tiny: Tiny, family: str) -> None:
    checkpoint, matched = opened(tiny(family))
    assert {tensor.stored.name for tensor in matched.tensors} == set(checkpoint.entries)
    experts = [tensor for tensor in matched.tensors if tensor.expert >= 0]
    assert all(tensor.role is Role.LINEAR for tensor in experts)
    stacked = family == "gpt-oss"
    mixtures = [0, 2] if family == "qwen3-moe" else [0, 1, 2]
    assert {(t.block, t.expert) for t in experts} == (
        set() if stacked else {(block, number) for block in mixtures for number in range(4)}
    )
    kept = {t.name for t in matched.tensors if t.role is Role.OTHER and len(t.stored.shape) > 1}
    routers = {name for name in kept if name.endswith((".gate.weight", ".router.weight"))}
    assert len(routers) == len(mixtures)
    assert len(kept - routers) == (4 * 3 if stacked else 0)


@pytest.mark.parametrize("family", MIXTURES)
def test_logits_equal_those_of_the_whole_model(tiny: Tiny, family: str) -> None:
    checkpoint, matched = opened(tiny(family))
    with ModelStream(checkpoint, matched, ROWS, micro_batch=2) as stream:
        for part in stream:
            part.advance()
        streamed = torch.cat(list(stream.logits()))
    expected = whole_logits(whole_model(tiny(family)))
    assert expected.std() > 0.1
    assert (streamed - expected).abs().max() <= MOST


@pytest.mark.parametrize("family", MIXTURES)
def test_a_changed_expert_changes_what_follows(tiny: Tiny, family: str) -> None:
    """Every expert is read and set by its declared name, in one orientation, wherever the module holds it."""
    checkpoint, matched = opened(tiny(family))
    model = whole_model(tiny(family))
    with ModelStream(checkpoint, matched, ROWS, micro_batch=2) as stream:
        for part in stream:
            theirs = model.get_submodule(part.name).mlp
            for number in range(4 if hasattr(theirs, "experts") else 0):
                names = [
                    f"mlp.experts.{number}.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")
                ]
                gate, up, down = (part.weight(name) for name in names)
                gate_up = theirs.experts.gate_up_proj[number]
                if family == "gpt-oss":
                    expected = (gate_up.T[::2], gate_up.T[1::2], theirs.experts.down_proj[number].T)
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


def test_parameters_are_the_stored_ones(tiny: Tiny) -> None:
    """What is written of a block that stays is read by the names under which its files hold it."""
    checkpoint, matched = opened(tiny("mixtral"))
    with ModelStream(checkpoint, matched, ROWS, micro_batch=2) as stream:
        part = next(iter(stream))
        names = {part.stored_name(name): name for name in part.parameters()}
        assert set(names) == {name for name in checkpoint.entries if ".layers.0." in name}
        for stored, name in names.items():
            assert torch.equal(part.parameter(name), checkpoint.read(stored).float())


def test_inputs_of_single_experts_are_not_observed(tiny: Tiny) -> None:
    checkpoint, matched = opened(tiny("mixtral"))
    with ModelStream(checkpoint, matched, ROWS) as stream:
        part = next(iter(stream))
        assert set(part.observe({"self_attn.q_proj": HESSIAN})) == {"self_attn.q_proj"}
        with pytest.raises(RefusedError, match=r"experts\.3\.down_proj: inputs of single experts"):
            part.observe({"mlp.experts.3.down_proj": HESSIAN})


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("model.layers.1.block_sparse_moe.experts.3.w2.weight", "w2.weight: missing"),
        ("model.layers.1.block_sparse_moe.gate.weight", "gate.weight: missing"),
    ],
)
def test_a_missing_expert_is_named_as_it_is_stored(tiny: Tiny, gone: str, words: str) -> None:
    checkpoint, _ = opened(tiny("mixtral"))
    stored = [entry.stored() for name, entry in checkpoint.entries.items() if name != gone]
    with pytest.raises(InputError) as caught:
        match(checkpoint.config, stored)
    assert words in caught.value.message
    with pytest.raises(InputError, match=r"experts.4.w1.weight: missing"):
        match({**checkpoint.config, "num_local_experts": 5}, stored)
    extra = StoredTensor("model.layers.0.block_sparse_moe.experts.4.w1.weight", "BF16", (128, 64))
    with pytest.raises(InputError, match=r"experts.4.w1.weight: not a tensor of mixtral"):
        match(checkpoint.config, [*stored, extra])
