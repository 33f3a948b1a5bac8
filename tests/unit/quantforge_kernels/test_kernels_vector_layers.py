"""Compiled CPU layers equal their definitions on any instruction set and thread count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, silu

from quantforge_kernels import layers
from quantforge_kernels.cpu import instruction_sets, layer_launchers
from tests.thorough import parametrize_each_value

pytestmark = pytest.mark.skipif(
    instruction_sets.best_instruction_set() is None or torch.cuda.is_available(),
    reason="for processors with AVX2",
)
TYPES = (torch.float32, torch.bfloat16, torch.float16)
STEPS = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(params=["avx2", "avx512bw"], autouse=True)
def feature(request, monkeypatch):
    """Vectors of 8 and of 16 lanes."""
    if instruction_sets.INSTRUCTION_SETS.index(
        request.param
    ) < instruction_sets.INSTRUCTION_SETS.index(instruction_sets.best_instruction_set()):
        pytest.skip("not on this processor")
    monkeypatch.setattr(layer_launchers, "best_instruction_set", lambda: request.param)


def random(*shape: int, dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def near(output: torch.Tensor, expected: torch.Tensor, steps: float = 1.0, least: float = 1e-6):
    """Within some roundings to the type of the result."""
    assert output.dtype == expected.dtype
    assert output.shape == expected.shape
    step = steps * STEPS[output.dtype]
    torch.testing.assert_close(output.float(), expected.float(), rtol=step, atol=least * step)


@parametrize_each_value(
    ("dtype", TYPES),
    ("offset", [0.0, 1.0]),
    ("rows", [1, 3]),
)
def test_norms(dtype, offset, rows):
    x, residual = (random(rows, 80 * 2, dtype=dtype, seed=seed, size=3) for seed in (0, 1))
    weight = random(160, dtype=dtype, seed=2)
    assert layer_launchers.accepts(160, x, residual, weight)
    output, total = layers.add_rms_norm(x, residual, weight, 1e-5, offset)
    assert torch.equal(total, x + residual)
    near(output, layers.rms_norm(x + residual, weight, 1e-5, offset))
    output, total = layers.add_rms_norm(x, None, weight, 1e-5, offset)
    assert torch.equal(total, x)
    near(output, layers.rms_norm(x, weight, 1e-5, offset))


def test_norms_of_heads_that_are_a_part_of_longer_rows():
    x = random(5, 300, dtype=torch.bfloat16)[:, 20 : 20 + 4 * 64].view(5, 4, 64)
    weight = random(64, dtype=torch.bfloat16, seed=1)
    near(layers.add_rms_norm(x, None, weight, 1e-6)[0], layers.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", TYPES)
def test_gates(dtype):
    """Of halves of one row, from where the exponential vanishes to where it is too large."""
    both = random(3, 4096, dtype=dtype, size=30)
    gate, up = both.split(2048, -1)
    near(layers.silu_gate(gate, up), silu(gate) * up, least=1.0)
    # torch subtracts almost equal numbers where gelu is small.
    near(layers.gelu_gate(gate, up), gelu(gate, approximate="tanh") * up, least=40.0)


def test_exponential_is_accurate_to_a_few_ulps():
    x = torch.linspace(-86, 87, 1 << 16)[None]
    output = layers.silu_gate(x, torch.ones_like(x)).double()
    expected = silu(x.double())
    assert ((output - expected).abs() <= 3e-7 * expected.abs()).all()


@parametrize_each_value(
    ("dtype", TYPES),
    ("tokens", [1, 4]),
)
def test_rotary_rounds_like_the_definition(dtype, tokens):
    x = random(tokens, 6 * 64, dtype=dtype)[:, 64 : 4 * 64].view(tokens, 3, 64)
    cosine, sine = (random(tokens, 32, dtype=dtype, seed=seed) for seed in (1, 2))
    assert layer_launchers.accepts(32, x, cosine, sine)
    first, second = x[..., :32], x[..., 32:]
    c, s = cosine[:, None], sine[:, None]
    expected = torch.cat((first * c - second * s, second * c + first * s), -1)
    assert torch.equal(layers.apply_rotary(x, cosine, sine), expected)


def test_results_do_not_depend_on_strides():
    """Heads before tokens, angles that are columns of a wider tensor."""
    x = random(3, 5, 64, dtype=torch.float32).transpose(0, 1)
    cosine, sine = random(5, 96, dtype=torch.float32, seed=1)[:, 8:72].split(32, -1)
    expected = layers.apply_rotary(x.contiguous(), cosine.contiguous(), sine.contiguous())
    assert torch.equal(layers.apply_rotary(x, cosine, sine), expected)
    weight = random(64, dtype=torch.float32, seed=2)
    near(layers.add_rms_norm(x, None, weight, 1e-5)[0], layers.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", TYPES)
def test_biases(dtype):
    y, bias = random(3, 200, dtype=dtype)[:, :160], random(160, dtype=dtype, seed=1)
    expected = y + bias
    assert torch.equal(layers.add_bias(y, bias), expected)


@settings(max_examples=60, deadline=None)
@example(dtype=torch.float16, rows=3, columns=8, width=5, biased=True)  # 3e-7 beside a tie
@given(
    dtype=st.sampled_from(TYPES),
    rows=st.integers(1, 32),
    columns=st.integers(1, 20),
    width=st.integers(1, 6),
    biased=st.booleans(),
)
def test_plain_products(dtype, rows, columns, width, biased):
    x = random(rows, 16 * columns, dtype=dtype)
    weight = random(16 * width, 16 * columns, dtype=dtype, seed=1)
    bias = random(16 * width, dtype=dtype, seed=2) if biased else None
    assert layer_launchers.accepts_linear(x[:8], weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    near(
        layers.linear(x, weight, bias),
        exact.to(dtype),
        steps=2.0,  # between two values a sum may go to either
        least=32.0 if dtype == torch.float32 else 1.0,
    )


@pytest.mark.parametrize("place", [0, 31])
def test_nan_and_infinity_stay_non_finite(place):
    x, weight = random(1, 64, dtype=torch.float32), torch.ones(64)
    x[0, place] = float("nan")
    assert layers.add_rms_norm(x, x, weight, 1e-5)[0].isnan().all()
    assert layers.linear(x, torch.ones(16, 64)).isnan().all()
    assert layers.silu_gate(x, weight[None])[0, place].isnan()
    assert layers.gelu_gate(x, weight[None])[0, place].isnan()


def test_threads_do_not_change_a_bit():
    def all_of_them():
        x, weight = random(64, 1024, dtype=torch.bfloat16), random(1024, dtype=torch.bfloat16)
        yield layers.add_rms_norm(x, x, weight, 1e-5)[0]
        yield layers.silu_gate(x, x)
        yield layers.linear(x[:3], x)
        yield layers.linear(x[:15].float(), x.float())

    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(list(all_of_them()))
    finally:
        torch.set_num_threads(before)
    for several in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], several, strict=True))


def test_widths_not_divisible_by_vectors_use_torch():
    x, weight = random(2, 36, dtype=torch.bfloat16), random(36, dtype=torch.bfloat16, seed=1)
    assert not layer_launchers.accepts(36, x, weight)
    near(layers.add_rms_norm(x, None, weight, 1e-5)[0], layers.rms_norm(x, weight, 1e-5))
    assert not layer_launchers.accepts(32, x[:, :32], weight[:32].float())
    assert not layer_launchers.accepts(32, x[:0, :32])
    assert not layer_launchers.accepts_linear(
        x[:, :32], random(8, 32, dtype=torch.bfloat16)[:5], None
    )
    near(layers.linear(x, x), torch.nn.functional.linear(x, x), least=1.0)


def test_recorded_programs_read_current_memory():
    from quantforge_kernels.cpu.recording import record

    x, weight = random(2, 64, dtype=torch.float32), random(64, dtype=torch.float32, seed=1)

    def work():
        h, total = layers.add_rms_norm(x, None, weight, 1e-5)
        gate, up = h.view(1, -1).split(64, -1)
        return layers.silu_gate(gate, up), total

    first, recorded = record(lambda: work()[0])
    assert recorded is not None
    before = first.clone()
    x.copy_(random(2, 64, dtype=torch.float32, seed=2))
    after = recorded.replay()
    assert after is first
    assert not torch.equal(after, before)
    assert torch.equal(after, work()[0])


@pytest.mark.parametrize(
    "touch",
    [
        lambda h: h + 1,
        lambda h: h.add_(1),
        lambda h: h.T.contiguous(),
        lambda h: h.T.reshape(-1),
        lambda h: h * float(h[0, 0]),
        torch.zeros_like,
        lambda h: torch.cat((h, h)),
    ],
)
def test_torch_operations_are_not_recorded(touch):
    from quantforge_kernels.cpu.recording import record

    x, weight = random(2, 64, dtype=torch.float32), torch.ones(64)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            result, recorded = record(lambda: touch(layers.add_rms_norm(x, None, weight, 1e-5)[0]))
            assert recorded is None
            near(result, touch(layers.rms_norm(x, weight, 1e-5)), least=1.0)
