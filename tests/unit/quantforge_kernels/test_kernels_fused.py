"""Triton kernels for norms, rotary, gates and attention equal their definitions."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("triton")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, silu

from quantforge.api import quantize
from quantforge.cache_kinds import WORDS
from quantforge.recipe import Recipe
from quantforge.runtime import decoder as runtime
from quantforge.runtime import linear
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import DecodingStep, prefill
from quantforge.runtime.load import load
from quantforge.settings import Settings
from quantforge_kernels import attention, layers
from quantforge_kernels.attention import attend_reference, attend_triton
from quantforge_kernels.gpu import plane_products
from quantforge_kernels.kv import PAGE_SIZE
from quantforge_kernels.matmul_spec import Kernel
from quantforge_kernels.score_options import ScoreOptions
from tests.caches import random_paged_cache
from tests.conftest import make_tiny
from tests.thorough import parametrize_each_value, thorough_case
from tests.triton_kernels import DEVICE

TYPES = (torch.float32, torch.bfloat16, torch.float16)
# One rounding; the interpreter cuts bfloat16 off instead.
STEPS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6.9, torch.float16: 2.0**-10}


def random(*shape: int, dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size
    return values.to(DEVICE, dtype)


def near(output: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert output.shape == expected.shape
    assert output.dtype == dtype
    step = STEPS[dtype]
    torch.testing.assert_close(output.float(), expected.float(), rtol=step, atol=step)


@parametrize_each_value(
    ("dtype, offset", product(TYPES, (0.0, 1.0))),
    ("shape", [(1, 64), (3, 100), (0, 8), (2, 3, 40)]),
)
def test_norms(dtype, offset, shape):
    x, residual = (random(*shape, dtype=dtype, seed=seed, size=3) for seed in (0, 1))
    weight = random(shape[-1], dtype=dtype, seed=2)
    out, total = layers.add_rms_norm_triton(x, residual, weight, 1e-5, offset)
    near(total, x + residual, dtype)
    near(out, layers.rms_norm(total, weight, 1e-5, offset), dtype)
    out, total = layers.add_rms_norm_triton(x, None, weight, 1e-5, offset)
    assert torch.equal(total, x)
    near(out, layers.rms_norm(x, weight, 1e-5, offset), dtype)


def test_rotary_and_norm_on_strided_heads():
    """As q, k and v of one product are: nothing is copied, nothing beside them is read."""
    whole = random(5, 3 * 4 * 24, dtype=torch.float32)
    cosine, sine = (random(5, 12, dtype=torch.float32, seed=seed) for seed in (1, 2))
    weight = random(24, dtype=torch.float32, seed=3)
    for part in whole.split(4 * 24, -1):
        heads = part.view(5, 4, 24)
        first, second = heads[..., :12], heads[..., 12:]
        c, s = cosine[:, None], sine[:, None]
        expected = torch.cat((first * c - second * s, second * c + first * s), -1)
        near(layers.apply_rotary_triton(heads, cosine, sine), expected, torch.float32)
        near(
            layers.add_rms_norm_triton(heads, None, weight, 1e-5)[0],
            layers.rms_norm(heads, weight, 1e-5), torch.float32,
        )  # fmt: skip
    transposed = whole.view(5, 12, 24).transpose(0, 1)
    cosine, sine = (random(12, 12, dtype=torch.float32, seed=seed) for seed in (1, 2))
    expected = layers.apply_rotary_triton(transposed.contiguous(), cosine, sine)
    assert torch.equal(layers.apply_rotary_triton(transposed, cosine, sine), expected)


@parametrize_each_value(
    ("dtype, tanh", product(TYPES, (False, True))),
    ("rows", [1, 3, 0]),
)
def test_gates(dtype, tanh, rows):
    """The halves of one product, wider than a program."""
    whole = random(rows, 2 * 1500, dtype=dtype, size=3)
    gate, up = whole.split(1500, -1)

    def gated(gate, up):
        gate, up = gate.double(), up.double()
        return (gelu(gate, approximate="tanh") if tanh else silu(gate)) * up

    near(layers.gate_triton(gate, up, tanh), gated(gate, up).to(dtype), dtype)
    transposed = up.T.contiguous().T
    near(layers.gate_triton(transposed, gate, tanh), gated(up, gate).to(dtype), dtype)


@parametrize_each_value(
    ("splits", [1, 2, 5]),
    ("dtype", [torch.float32, torch.bfloat16]),
)
def test_split_results_are_summed_in_order(splits, dtype):
    parts = random(splits, 3, 700, dtype=torch.float32 if splits > 1 else dtype)
    total = torch.zeros(3, 700, device=DEVICE)
    for part in parts:
        total += part
    near(plane_products.add_splits(parts, dtype), total.to(dtype), dtype)
    if dtype == torch.float32:
        assert torch.equal(plane_products.add_splits(parts, dtype), total)


@pytest.mark.parametrize("bytes_", [False, True])
@settings(max_examples=8, deadline=None)
@given(
    dtype=st.sampled_from(TYPES),
    kind=st.sampled_from([*WORDS, "k=int8,v=int4", "k=16bit,v=fp8", "k=int4,v=16bit"]),
    groups=st.sampled_from([(1, 1), (4, 2), (10, 2), (7, 1)]),
    head=st.sampled_from([32, 64, 80, 128]),
    lengths=st.lists(st.integers(1, 3 * PAGE_SIZE), min_size=1, max_size=2),
    cap=st.sampled_from([0.0, 3.0]),
    window=st.sampled_from([0, 1, 20, 200]),
)
def test_attention(bytes_, dtype, kind, groups, head, lengths, cap, window):
    """``bytes_``: as on a device that does not know float8."""
    given_ = (
        *random_paged_cache(dtype, groups, head, lengths, kind),
        ScoreOptions(head**-0.5, cap, window),
    )
    with pytest.MonkeyPatch.context() as patch:
        if bytes_:
            patch.setattr(attention, "supports_float8", lambda _device: False)
        output = attend_triton(*given_)
    near(output, attend_reference(given_[0].float(), *given_[1:]), dtype)


def test_nan_query_affects_only_its_own_head():
    q, *cache = random_paged_cache(torch.float32, (4, 2), 64, [40], "")
    q[0, 1, 5] = float("nan")
    output = attend_triton(q, *cache, ScoreOptions(0.125))
    assert output[0, 1].isnan().all()
    assert output[0, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize(
    ("family", "kind", "blocks"),
    [("llama", "", 1), thorough_case("gemma2", "", 2), thorough_case("qwen3", "k=int8,v=int4", 1)],
)
def test_decoder_with_triton_kernels_gives_the_same_logits(
    tmp_path, monkeypatch, family, kind, blocks
):
    """As on a GPU: products, norms, rotary, gates and attention of every block are Triton's."""
    recipe = Recipe(scheme="int4:g32:sym", scales="absmax")
    model = make_tiny(family, tmp_path / "m", num_hidden_layers=blocks, intermediate_size=64)
    quantize(str(model), recipe, tmp_path / "q", Settings())
    ids = torch.randint(3, 300, (2, 3), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def steps() -> torch.Tensor:
        decoder = Decoder(load(tmp_path / "q", dtype=torch.float32, device=DEVICE).model)
        cache = decoder.cache(2, 20, kind)
        with torch.inference_mode():
            prefill(decoder, ids[:, :2], cache, 2)
            step = DecodingStep(decoder, cache, graph=False)
            return step(ids[:, 2]).clone()

    expected = steps()
    kernel = Kernel("triton", lambda _: True, plane_products.prepare, plane_products.matmul)
    monkeypatch.setattr(linear, "select_kernel", lambda _problem: kernel)
    monkeypatch.setattr(runtime, "attend", attend_triton)
    monkeypatch.setattr(runtime, "add_rms_norm", layers.add_rms_norm_triton)
    monkeypatch.setattr(runtime, "apply_rotary", layers.apply_rotary_triton)
    for name, tanh in (("silu_gate", False), ("gelu_gate", True)):
        monkeypatch.setattr(
            runtime, name, lambda gate, up, tanh=tanh: layers.gate_triton(gate, up, tanh)
        )
    torch.testing.assert_close(steps(), expected, rtol=1e-4, atol=2e-4)
