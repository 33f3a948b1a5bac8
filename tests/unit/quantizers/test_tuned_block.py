"""A tuned block keeps its learned tensors on its own device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantforge.grids import ScaleType
from quantforge.model.block import MicroBatch
from quantforge.notation import parse
from quantforge.packers import get_packer
from quantforge.packers.tensor import QuantizedTensor
from quantforge.quantizers.tuning.tuned_block import TunedBlock, WrittenBlock

ELSEWHERE = torch.device("meta")  # a device whose tensors do not mix with those of the CPU


class Small(nn.Module):
    """A norm, and two linears behind it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, device=device)
        self.up = nn.Linear(64, 96, bias=False, device=device)
        self.down = nn.Linear(96, 64, bias=False, device=device)
        self.requires_grad_(requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        return states + self.down(self.up(self.norm(states)).relu())


def block_of(module: Small, scheme: str, device: torch.device) -> TunedBlock:
    """A tuned block whose parts were written, and read, on the CPU."""
    made, torch_scheme = {}, parse(scheme).with_scale(ScaleType.BF16)
    generator = torch.Generator().manual_seed(0)
    for name, shape in (("up", (96, 64)), ("down", (64, 96))):
        weight = torch.randn(shape, generator=generator)
        packer = get_packer(torch_scheme)
        parameters = packer.fit(weight, torch_scheme)
        codes = packer.encode(weight, parameters, torch_scheme)
        made[name] = QuantizedTensor(codes, parameters, torch_scheme)
    kind = SimpleNamespace(value="norm")
    scale_fold = SimpleNamespace(kind=kind, module="norm")
    part: Any = SimpleNamespace(
        module=module,
        parameter=module.get_parameter,
        has_parameter=lambda _: True,
        is_outside_module=lambda _: False,
        inputs=[SimpleNamespace(scale_fold=scale_fold)],
        separate_linears=("up", "down"),
        experts=None,
        architecture=SimpleNamespace(transposed=False),
    )
    return TunedBlock.of(part, WrittenBlock(made, lambda _: torch.ones(64)), 0.1, device)


def row(states: Tensor) -> MicroBatch:
    layout = SimpleNamespace(pack=lambda states: states)
    call = SimpleNamespace(args=(), kwargs={})
    reached = lambda _, states: SimpleNamespace(states=states, arguments=call)  # noqa: E731
    passage: Any = SimpleNamespace(call_for=reached, layout=layout, one_row_at_a_time=False)
    return MicroBatch(0, states, passage)


@pytest.mark.parametrize("scheme", ["int3:g32:sym", "int2:g32:asym", "int4:row:sym"])
def test_tuning_step_runs_on_the_device_of_the_block(scheme: str) -> None:
    block = block_of(Small(ELSEWHERE), scheme, ELSEWHERE)
    states = torch.empty(1, 8, 64, device=ELSEWHERE)
    (outputs,) = block.forward([row(states)])
    assert outputs.device == ELSEWHERE
    (before,), factors = block.backward([row(states)], lambda _, outputs: outputs, 1.0)
    assert before.device == ELSEWHERE
    for learned, gradient in zip(block.learned, factors, strict=True):
        assert gradient is not None
        assert learned.factor.device == gradient.device == ELSEWHERE
        learned.step(gradient, 1.0)
        assert learned.stored().device == ELSEWHERE
    for matrix in block.matrices.values():
        assert matrix.result().codes.device == ELSEWHERE
        assert {codes.offsets.device for codes in matrix.codes.values()} == {ELSEWHERE}
    assert block.decoder_block.module.get_parameter("up.weight").device == ELSEWHERE  # let go of


def test_step_gradients_equal_autograd_of_the_loss() -> None:
    module = Small(torch.device("cpu"))
    block = block_of(module, "int3:g32:sym", torch.device("cpu"))
    states, output_gradient = torch.randn(1, 8, 64), torch.randn(1, 8, 64)
    scales = {name: block.matrices[name].scales["scales"].start for name in block.linears.matrices}
    decoded = {name: block.matrices[name].weight() for name in block.linears.matrices}
    (first,), factors = block.backward([row(states)], lambda *_: output_gradient, 0.0)
    leaf_scales = [torch.zeros_like(scale, requires_grad=True) for scale in scales.values()]
    gain, leaf_states = torch.ones(64, requires_grad=True), states.clone().requires_grad_()
    up, down = (
        (weight.view(*item.shape, -1) * (1 + factor)[..., None]).view_as(weight)
        for weight, item, factor in zip(decoded.values(), scales.values(), leaf_scales, strict=True)
    )
    normed = nn.functional.rms_norm(leaf_states, (64,)) * gain
    outputs = leaf_states + (normed @ up.T).relu() @ down.T
    expected = torch.autograd.grad(outputs, [leaf_states, *leaf_scales, gain], output_gradient)
    for result, gradient in zip([first, *factors], expected, strict=True):
        assert result is not None
        torch.testing.assert_close(result, gradient, rtol=1e-3, atol=1e-4)
