"""Products of many rows avoid torch's slow products in types that the processor lacks."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import TransformersEngine
from quantforge.runtime.load import load
from quantforge_kernels import layers
from quantforge_kernels.cpu import instruction_sets, layer_launchers, many_rows
from quantforge_kernels.matmul_spec import MatmulSpec
from quantforge_kernels.select import select_kernel
from tests.thorough import parametrize_each_value

TYPES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SLOW = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::addmm_"}


@pytest.fixture
def without(monkeypatch):
    """A processor without instructions for 16 bits."""
    monkeypatch.setattr(many_rows, "_has_native_arithmetic", lambda _dtype: False)


class NoSlowProduct(TorchDispatchMode):
    """Fails where torch is asked for a product in 16 bits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in SLOW:
            kinds = {value.dtype for value in args if isinstance(value, torch.Tensor)}
            assert not kinds & TYPES.keys(), f"{func} in {kinds}"
        return func(*args, **(kwargs or {}))


@parametrize_each_value(
    ("dtype", TYPES),
    (
        "rows, bias",
        [
            (1, False),
            (8, True),
            (9, False),
            (17, True),
            (32, False),
            (33, True),
            (65, False),
            (200, True),
        ],
    ),
)
def test_dense_products_of_any_number_of_rows(dtype, rows, bias, without, monkeypatch):
    monkeypatch.setattr(many_rows, "SLAB_WEIGHTS", 64 * 50)
    x, weight = torch.randn(rows, 64).to(dtype), torch.randn(160, 64).to(dtype)
    more = torch.randn(160).to(dtype) if bias else None
    with NoSlowProduct():
        y = layers.linear(x, weight, more)
    expected = x.double() @ weight.double().T + (0 if more is None else more.double())
    assert y.dtype == dtype
    assert float((y - expected).abs().max() / expected.abs().max()) < TYPES[dtype]


@parametrize_each_value(
    ("dtype", [*TYPES, torch.float32]),
    ("rows", [9, 13, 16]),
)
def test_strips_of_a_dense_product_are_equal(dtype, rows, without):
    from quantforge_kernels.cpu import dense

    x, weight = torch.randn(rows, 64).to(dtype), torch.randn(32, 64).to(dtype)
    if not layer_launchers.accepts_linear(x, weight, None):
        pytest.skip("no vectors")
    y, each = (
        layers.linear(x, weight),
        dense.choose_strip_rows(
            rows, dtype, instruction_sets.LANES[instruction_sets.best_instruction_set()]
        ),
    )
    for start in [
        *range(0, rows - each, each),
        rows - each,
    ]:  # the last may begin in the one before
        part = slice(start, start + each)
        assert torch.equal(y[part], layers.linear(x[part], weight))


@parametrize_each_value(
    ("grid", ["int", "table", "fp8"]),
    ("dtype", TYPES),
)
def test_packed_products_of_many_rows(grid, dtype, without):
    bits = {"int": 4, "table": 4, "fp8": 8}[grid]
    problem = MatmulSpec(48, 256, bits, 256, True, dtype, "cpu", grid)
    kernel = select_kernel(problem)
    codes = torch.randint(0, 3, (48, 256), dtype=torch.uint8)
    parameters = {"scales": torch.rand(48, 1)}
    if grid == "table":
        parameters["table"] = torch.linspace(-1, 1, 16)
    packed = kernel.prepare(codes, parameters, problem)
    x = torch.randn(150, 256).to(dtype)
    with NoSlowProduct():
        y = kernel.matmul(x, packed, problem)
        parts = torch.cat([kernel.matmul(part, packed, problem) for part in x.split(16)])
    torch.testing.assert_close(y, parts, rtol=2 * TYPES[dtype], atol=TYPES[dtype] / 10)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@torch.inference_mode()
def test_prompts_and_steps_avoid_slow_torch_products(family, tiny, without):
    model = load(tiny(family), dtype=torch.bfloat16).model
    ids = torch.arange(140).view(2, 70)
    with NoSlowProduct():
        if family == "gpt2":
            engine = TransformersEngine(model)
            engine.start(ids, 2)
            engine.step(ids[:, 0])
            return
        decoder = Decoder(model)
        decoder.hidden(ids, cache := decoder.cache(2, 80))
        decoder.logits(decoder.hidden(ids[:, :1], cache))


def test_third_party_products_are_computed_in_float32(without):
    a, b = torch.randn(3, 70, 64).bfloat16(), torch.randn(3, 64, 32).bfloat16()
    weight, bias = torch.randn(32, 64).bfloat16(), torch.randn(32).bfloat16()
    expected = a.double() @ b.double()
    with NoSlowProduct(), many_rows.widen_products(torch.bfloat16):
        results = [a @ b, torch.bmm(a, b), torch.matmul(a, b), a.matmul(b)]
        line = torch.nn.functional.linear(a, weight, bias=bias)
        joined = torch.addmm(bias, a[0], weight.T)
    for y in results:
        assert y.dtype == torch.bfloat16
        assert float((y - expected).abs().max() / expected.abs().max()) < 2.0**-8
    assert line.shape == (3, 70, 32)
    assert torch.equal(line[0], joined)


def test_native_dtype_products_use_torch(monkeypatch):
    monkeypatch.setattr(many_rows, "_has_native_arithmetic", lambda _dtype: True)
    x, weight = torch.randn(70, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    assert torch.equal(layers.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert many_rows.compute_dtype(x) == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "limit", "native"),
    [
        ("avx512_bf16", "", True), ("amx_bf16", "ALL", True), ("avx512_bf16", "AVX512_CORE_AMX", True),
        ("avx512_bf16", "AVX2", False), ("avx512_bf16", "avx512_core_vnni", False),
        ("avx512_fp16", "", False), ("avx2", "", False),
    ],
)  # fmt: skip
def test_native_arithmetic_follows_cpu_capabilities(name, limit, native, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {name: True}, raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    many_rows._has_native_arithmetic.cache_clear()
    assert many_rows._has_native_arithmetic(torch.bfloat16) is native
    many_rows._has_native_arithmetic.cache_clear()


@pytest.mark.parametrize(
    ("tile", "block", "most"), [("", 64, 128), ("", 16, 64), ("amx_bf16", 64, 64)]
)
def test_row_limit_for_packed_products(tile, block, most, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {tile: True}, raising=False)
    assert many_rows.max_packed_rows(torch.bfloat16, block) == most


def test_instruction_set_limit_variable_is_respected(monkeypatch):
    from quantforge_kernels.cpu import compiler

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    monkeypatch.setenv(instruction_sets.LIMIT_VARIABLE, "avx2")
    many_rows._has_native_arithmetic.cache_clear()
    assert not many_rows._has_native_arithmetic(torch.bfloat16)
    many_rows._has_native_arithmetic.cache_clear()
    assert "+avx512" not in compiler._cpu_name_and_features()[1]
    monkeypatch.setenv(instruction_sets.LIMIT_VARIABLE, "anything else")
    assert instruction_sets.allowed_instruction_set() == "avx2"
