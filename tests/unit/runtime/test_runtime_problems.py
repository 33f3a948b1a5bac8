"""Kernels compute exactly with the packed tensors of every grid."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantforge.grids import GGML_BLOCKS, ScaleType
from quantforge.notation import parse
from quantforge.packers import get_packer
from quantforge.packers.input_rounding import fake_quantize_input
from quantforge.packers.lattices import LATTICES
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime import linear
from quantforge.runtime.linear import PackedLinear
from quantforge.scheme import Activation
from quantforge_kernels.gpu import plane_products
from quantforge_kernels.matmul_spec import Kernel, MatmulSpec
from quantforge_kernels.select import select_kernel
from tests.thorough import mark_others_thorough

CPU = torch.device("cpu")
SCHEMES = (
    *(grid for grid in GGML_BLOCKS if grid not in LATTICES), "nvfp4", "mxfp8",
    "nf4:g64:sym:f32", "nf4:g64:sym:double", "fp4:g32:sym:f32", "fp8:row", "fp8:128x128",
    "fp8_e5m2:row", "fp8_e5m2:g32:sym:bf16",
    "fp8:tensor", "fp8:g128", "int4:g128:asym:f16", "int3:row:sym:bf16", "int8:tensor:sym:f32",
)  # fmt: skip


def rounded(
    text: str, shape=(40, 512), taken: Activation | None = None, **extra
) -> QuantizedTensor:
    scheme = parse(text).with_scale(ScaleType.F16)
    packer = get_packer(scheme)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parameters = packer.fit(weight, scheme)
    codes = packer.encode(weight, parameters, scheme)
    return QuantizedTensor(codes, parameters | extra, scheme, taken)


def stored_bits(tensor: QuantizedTensor) -> float:
    """Bits per weight of the file; of codes that it packs closer (TQ1_0), those of whole codes."""
    return max(float(tensor.scheme.bits_per_weight(tensor.shape)), tensor.scheme.weight_bits)


@pytest.mark.parametrize("text", SCHEMES)
def test_products_are_those_of_the_decoded_weight(text):
    tensor = rounded(text)
    layer = PackedLinear(tensor, None, torch.float32, CPU)
    x = torch.randn(3, 512)
    torch.testing.assert_close(layer(x), x @ tensor.decode().T, rtol=1e-6, atol=1e-6)
    stored = stored_bits(tensor)
    held_bits = 8 * layer.weight_bytes / layer.weights
    slack = 64 * 8 / layer.weights  # the table of a codebook
    rows = 32 / 512 if "tensor" in text else 0  # one scale for every row
    assert stored <= held_bits + 0.05 <= 1.1 * stored + slack + rows + 0.05


@pytest.mark.parametrize("text", SCHEMES)
def test_packed_weights_stay_near_file_size(text):
    tensor = rounded(text, (64, 2048))
    layer = PackedLinear(tensor, None, torch.bfloat16, CPU)
    stored = stored_bits(tensor)
    held_bits = 8 * (layer.weight_bytes - 64) / layer.weights  # without the table of a codebook
    assert stored <= held_bits + 0.05 <= 1.1 * stored + 0.05


@pytest.mark.parametrize("text", mark_others_thorough(SCHEMES, *SCHEMES[::2]))
def test_gpu_kernels_compute_the_same_product(text, monkeypatch):
    """Interpreted: the launcher, given what the runtime states."""
    tensor = rounded(text, (5, 256))
    kernel = Kernel("triton", lambda _: True, plane_products.prepare, plane_products.matmul)
    monkeypatch.setattr(linear, "select_kernel", lambda _: kernel)
    layer = PackedLinear(tensor, None, torch.float32, CPU)
    assert layer.kernel == "triton"
    x = torch.randn(1, 256)
    torch.testing.assert_close(layer(x), x @ tensor.decode().T, rtol=1e-5, atol=3e-5)


def test_failing_kernel_falls_back_to_the_reference(monkeypatch):
    def broken(*_):
        raise RuntimeError("ptxas: no such register\nand more")

    kernel = Kernel("triton-int", lambda _: True, plane_products.prepare, broken)
    tensor = rounded("int4:g128:sym:f16")
    monkeypatch.setattr(linear, "select_kernel", lambda _: kernel)
    layer = PackedLinear(tensor, None, torch.float32, CPU)
    assert layer.kernel == "reference"
    assert layer.failure == "triton-int: RuntimeError: ptxas: no such register"
    x = torch.randn(2, 512)
    torch.testing.assert_close(layer(x), x @ tensor.decode().T)


def test_device_without_fp8_uses_the_reference(monkeypatch):
    spec = MatmulSpec(64, 256, 8, 256, True, torch.bfloat16, "cuda", "fp8", 1, "fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert select_kernel(spec).name == "reference"
    # Weights alone are decoded with integer operations, on any GPU.
    assert select_kernel(replace(spec, activation_kind="")).name == "triton-fp8"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert select_kernel(spec).name == "triton-w8a8"


def test_fp8_support_is_checked_on_the_weights_device(monkeypatch):
    abilities = {"cuda:0": (9, 0), "cuda:1": (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: abilities[str(where)])
    spec = MatmulSpec(64, 256, 8, 256, True, torch.bfloat16, "cuda:0", "fp8", 1, "fp8")
    assert select_kernel(spec).name == "triton-w8a8"
    assert select_kernel(replace(spec, device="cuda:1")).name == "reference"


# Quantized inputs


def test_dynamic_input_rounding_is_per_row():
    x = torch.tensor([[1.0, -0.5, 0.26], [100.0, 1.0, 0.0]])
    result = fake_quantize_input(x, Activation("int8", "token"))
    assert result[0, 2] == pytest.approx(round(0.26 * 127) / 127)
    assert result[1].tolist() == pytest.approx([100.0, 100 / 127, 0.0])


def test_static_ranges_clamp_and_outliers_pass():
    x = torch.tensor([[1.0, 8.0, 0.3]])
    scale = torch.tensor([[2 / 127]])
    static = Activation("int8", "tensor", dynamic=False)
    assert fake_quantize_input(x, static, scale)[0, 1] == 2
    kept = Activation("int8", "token", threshold=6.0)
    result = fake_quantize_input(x, kept)
    assert result[0, 1] == 8
    assert result[0, 2] == pytest.approx(round(0.3 * 127) / 127)


def test_groups_of_channels_and_float8():
    x = torch.cat((torch.full((1, 4), 1000.0), torch.linspace(0.1, 1, 4)[None]), 1)
    result = fake_quantize_input(x, Activation("fp8_e4m3", "g4"))
    assert (result[0, 4:] - x[0, 4:]).abs().max() <= 2**-4
    assert (result[0, 4:] != x[0, 4:]).any()


@pytest.mark.parametrize(
    ("weights", "taken"),
    [("int8:row:sym:f16", Activation("int8", "token")),
     ("int8:row:sym:f16", Activation("int8", "tensor", dynamic=False)),
     ("fp8:128x128", Activation("fp8_e4m3", "g128")),
     ("fp8:row", Activation("fp8_e4m3", "token"))],
)  # fmt: skip
def test_layers_with_quantized_inputs(weights, taken):
    extra = {} if taken.dynamic else {"input_scale": torch.full((1, 1), 3.0 / 127)}
    tensor = rounded(weights, (16, 256), taken, **extra)
    x = torch.randn(4, 256)
    y = PackedLinear(tensor, None, torch.float32, CPU)(x)
    inputs = fake_quantize_input(x, taken, extra.get("input_scale"))
    torch.testing.assert_close(y, inputs @ tensor.decode().T, rtol=1e-5, atol=1e-5)
    assert (y - x @ tensor.decode().T).abs().max() > 1e-3


def test_unquantized_columns_are_multiplied_exactly():
    taken = Activation("int8", "token", threshold=6.0, max_outlier_columns=4)
    weight = torch.randn(16, 4)
    extra = {"outlier_columns": torch.tensor([3, 100, 511, -1]), "outlier_weight": weight.half()}
    tensor = rounded("int8:row:sym:f32", (16, 512), taken, **extra)
    decoded = tensor.decode()
    assert torch.equal(decoded[:, [3, 100, 511]], weight.half().float()[:, :3])
    layer = PackedLinear(tensor, None, torch.float32, CPU)
    assert layer.weight_bytes >= 16 * 512 + 2 * 16 * 3
    x = torch.randn(4, 512)
    x[:, [3, 100, 511]] *= 50
    torch.testing.assert_close(
        layer(x),
        fake_quantize_input(x, taken, unquantized_columns=tensor.outlier_columns) @ decoded.T,
        rtol=1e-5,
        atol=1e-4,
    )
    x[:, 3] = 0.01  # kept whatever the token holds
    assert (
        fake_quantize_input(x, taken, unquantized_columns=tensor.outlier_columns)[0, 3] == x[0, 3]
    )
