"""The paged cache on a CPU equals its definition for every kind, instruction set and thread count."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.cache_kinds import WORDS, parse_cache_kind
from quantforge_kernels import kv
from quantforge_kernels.attention import attend_reference
from quantforge_kernels.cpu import instruction_sets, layer_launchers
from quantforge_kernels.kv import PAGE_SIZE, EncodedKV
from quantforge_kernels.score_options import ScoreOptions
from tests.caches import random_paged_cache
from tests.thorough import mark_others_thorough, parametrize_each_value

pytestmark = pytest.mark.skipif(
    instruction_sets.best_instruction_set() is None or torch.cuda.is_available(),
    reason="for processors with AVX2",
)
KINDS = (*WORDS, "k=int8,v=int4", "k=16bit,v=fp8", "k=int4,v=16bit")
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


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(TYPES),
    kind=st.sampled_from(KINDS),
    groups=st.sampled_from([(1, 1), (4, 2), (3, 1), (10, 2), (7, 1)]),
    head=st.sampled_from([32, 64, 80, 96, 128, 256]),
    lengths=st.lists(st.integers(1, 4 * PAGE_SIZE), min_size=1, max_size=3),
    cap=st.sampled_from([0.0, 3.0]),
    window=st.sampled_from([0, 1, 20, 200]),
)
def test_attention(dtype, kind, groups, head, lengths, cap, window):
    q, *cache = random_paged_cache(dtype, groups, head, lengths, kind)
    if not layer_launchers.accepts_cache(head, parse_cache_kind(kind), q):
        assert "int4" in kind
        assert head // 2 % 16
        return
    scores = ScoreOptions(head**-0.5, cap, window)
    output = layer_launchers.attend(q, *cache, scores)
    # Decoded numbers are not rounded to the type of the queries on the way.
    expected = attend_reference(q.float(), *cache, scores)
    assert output.dtype == dtype
    step = STEPS[dtype] * (20 if dtype == torch.float32 else 2)
    torch.testing.assert_close(output.float(), expected, rtol=step, atol=step)


@pytest.mark.parametrize(  # every kind with every type and with every width of a head
    ("kind", "dtype", "head"),
    [
        (kind, TYPES[(at + place) % len(TYPES)], head)
        for at, kind in enumerate(KINDS)
        for place, head in enumerate((32, 64, 96, 160))
    ],
)
def test_stored_tokens_equal_the_reference_cache(kind, dtype, head):
    both = random(4, 2, 3, head, dtype=dtype) * 3
    both[0, :, 1] = 0
    both[1, :, 0] *= 1e-4  # subnormal float8
    both[2, :, 0] *= 1e-9
    keys, values = both.unbind(1)
    shape, kinds = (2, PAGE_SIZE, 3), parse_cache_kind(kind)
    pools = tuple(kv.allocate(shape, head, kind, dtype, torch.device("cpu")) for kind in kinds)
    slots = torch.tensor([40, 3, 0, 63])
    assert layer_launchers.accepts_cache(head, kinds, keys, values)
    layer_launchers.store_kv((keys, values), pools, slots)
    for pool, given_ in zip(pools, (keys, values), strict=True):
        for part, expected in zip(
            pool.tensors(), kv.encode(given_, pool.kind).tensors(), strict=True
        ):
            flat = part.flatten(0, 1)
            assert torch.equal(flat[slots].float(), expected.float())
            rest = torch.ones(2 * PAGE_SIZE, dtype=torch.bool)
            rest[slots] = False
            assert not flat[rest].float().any()


def test_measured_cache_scales_are_used():
    keys, values = random(2, 5, 2, 64, dtype=torch.bfloat16)
    scales = tuple(
        kv.expand_scale(torch.tensor(given_), 2, 64, "fp8") for given_ in ([0.004, 0.01], [0.002])
    )
    pools = tuple(
        kv.allocate((1, PAGE_SIZE, 2), 64, "fp8", torch.bfloat16, torch.device("cpu"))
        for _ in range(2)
    )
    layer_launchers.store_kv((keys, values), pools, torch.arange(5), scales)
    for pool, given_, scale in zip(pools, (keys, values), scales, strict=True):
        expected = kv.encode(given_, "fp8", scale)
        assert torch.equal(pool.codes[0, :5].float(), expected.codes.float())
        assert torch.equal(pool.scales[0, :5], expected.scales)
        assert (given_.float().abs() > 448 * scale[0, 0]).any()  # some are clamped


@pytest.mark.parametrize("number", [math.nan, -math.nan, math.inf, -math.inf, 1e30])
def test_nan_stays_nan_under_a_measured_scale(number):
    x = random(3, 2, 64, dtype=torch.float32)
    x[1, 1, 5] = number
    scale = kv.expand_scale(torch.tensor([0.01]), 2, 64, "fp8")
    pools = tuple(
        kv.allocate((1, PAGE_SIZE, 2), 64, "fp8", torch.float32, torch.device("cpu"))
        for _ in range(2)
    )
    layer_launchers.store_kv((x, x.clone()), pools, torch.arange(3), (scale, scale))
    expected = kv.encode(x, "fp8", scale).codes.view(torch.uint8)
    for pool in pools:
        assert torch.equal(pool.codes[0, :3].view(torch.uint8), expected)


def test_every_float8_cache_code_round_trips():
    numbers = torch.arange(256).byte().view(torch.float8_e4m3fn).float()
    numbers = torch.where(numbers.isnan(), 0, numbers)
    between = (numbers[:-1] + numbers[1:]) / 2  # halves go to even
    given_ = torch.cat((numbers, between.nan_to_num(0), numbers[:1])).view(1, 8, 64)
    ones = kv.expand_scale(torch.ones(1), 8, 64, "fp8")
    pools = tuple(
        kv.allocate((1, PAGE_SIZE, 8), 64, "fp8", torch.float32, torch.device("cpu"))
        for _ in range(2)
    )
    layer_launchers.store_kv((given_, given_), pools, torch.tensor([7]), (ones, ones))
    assert torch.equal(pools[0].codes[0, 7].float(), given_[0].to(torch.float8_e4m3fn).float())


def test_results_do_not_depend_on_strides():
    """Heads before tokens."""
    x = random(3, 5, 64, dtype=torch.float32).transpose(0, 1)
    pools = (
        EncodedKV(torch.zeros(1, PAGE_SIZE, 3, 64)),
        EncodedKV(torch.zeros(1, PAGE_SIZE, 3, 64)),
    )
    layer_launchers.store_kv((x, x.contiguous()), pools, torch.arange(5))
    assert torch.equal(pools[0].codes, pools[1].codes)
    assert torch.equal(pools[0].codes[0, :5], x)


@parametrize_each_value(
    ("kind", KINDS),
    ("place", [0, 31]),
)
def test_nan_and_infinity_stay_non_finite(kind, place):
    q, *cache = random_paged_cache(torch.float32, (2, 1), 64, [9], kind)
    q[0, 1, place] = float("nan")
    output = layer_launchers.attend(q, *cache, ScoreOptions(0.1))
    assert output[0, 1].isnan().all()
    assert output[0, 0].isfinite().all()
    new = random(1, 1, 64, dtype=torch.float32)
    new[0, 0, place] = float("nan")
    layer_launchers.store_kv((new, new), tuple(cache[:2]), cache[2][0, :1].long() * PAGE_SIZE)
    output = layer_launchers.attend(q, *cache, ScoreOptions(0.1))
    assert output.isnan().any(-1).all()


@pytest.mark.parametrize("kind", mark_others_thorough(KINDS, *WORDS))
def test_threads_do_not_change_a_bit(kind):
    cache = random_paged_cache(torch.bfloat16, (32, 8), 128, [100, 60], kind)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(layer_launchers.attend(*cache, ScoreOptions(0.1)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])
