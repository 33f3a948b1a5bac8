"""Inputs are rounded as an engine would: block scales, short groups and a loaded layer."""

import pytest
import torch

from quantforge.formats.decoded import decode_checkpoint
from quantforge.formats.open_model import open_model
from quantforge.notation import parse
from quantforge.packers import get_packer
from quantforge.packers.input_rounding import fake_quantize_input
from quantforge.runtime.load import load
from quantforge.scheme import Activation
from tests import peers


def values(columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, columns, generator=generator) * torch.logspace(-3, 3, 5).unsqueeze(1)


@pytest.mark.parametrize(("grid", "size"), [("mxfp8", 32), ("nvfp4", 16)])
def test_block_scales_round_inputs_as_they_round_weights(grid, size):
    x, scheme = values(96), parse(grid)
    packer = get_packer(scheme)
    parameters = packer.fit(x, scheme)
    expected = packer.decode(packer.encode(x, parameters, scheme), parameters, scheme)
    scale = 1 / parameters["divisor"] if grid == "nvfp4" else None
    result = fake_quantize_input(x, Activation(grid, f"g{size}", scale is None), scale)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)
    assert not torch.equal(result, x)


def test_mxfp4_takes_the_nearest_level_under_the_power_of_two_of_the_standard():
    x = values(64).double()
    result = fake_quantize_input(x.float(), Activation("mxfp4", "g32")).double()
    groups = x.view(5, 2, 32)
    steps = 2.0 ** (groups.abs().amax(-1, keepdim=True).log2().floor() - 2)
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).double()
    scaled = groups / steps
    nearest = (scaled.abs().unsqueeze(-1) - levels).abs().argmin(-1)
    assert torch.equal(result, (levels[nearest] * scaled.sign() * steps).view(5, 64))


def test_last_group_of_channels_may_be_shorter():
    x, activation = values(72), Activation("fp8_e4m3", "g64")
    parts = [fake_quantize_input(part.contiguous(), activation) for part in (x[:, :64], x[:, 64:])]
    assert torch.equal(fake_quantize_input(x, activation), torch.cat(parts, 1))


def test_a_loaded_layer_rounds_its_inputs():
    path, name = peers.FIXTURES / "llmc-nvfp4", "model.layers.0.mlp.up_proj"
    layer = load(path).model.get_submodule(name)
    x, weight = values(64), decode_checkpoint(open_model(path)).read(f"{name}.weight").float()
    rounded = fake_quantize_input(x, Activation("nvfp4", "g16", False), layer._input_scale)
    torch.testing.assert_close(layer(x), rounded @ weight.T, rtol=0.01, atol=0.01)
    assert (layer(x) - x @ weight.T).abs().max() > 0.1
