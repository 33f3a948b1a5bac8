"""Weights and caches that exceed GPU memory are refused before loading."""

from __future__ import annotations

import pytest
import torch

from quantforge.errors import ResourceError
from quantforge.runtime import cache, load, memory
from quantforge.runtime.cache import CacheShape, PagedCache
from quantforge.runtime.linear import PackedLinear
from quantforge.runtime.load import load as load_model
from quantforge.runtime.memory import check_cache_fits, check_weights_fit
from tests.gguf_exports import WIDE, export

GB = 10**9
SHAPE = CacheShape(32, 8, 128, "", torch.bfloat16)  # 128 KiB per token


def test_weights_that_exceed_gpu_memory_are_refused():
    check_weights_fit(14 * GB, 8 * GB, 16 * GB)
    check_weights_fit(99 * GB, 8 * GB, None)
    with pytest.raises(ResourceError, match=r"16\.0 GB on the GPU, 10\.0 GB are free") as raised:
        check_weights_fit(16 * GB, 8 * GB, 10 * GB)
    assert "about 9 bits per weight fit: quantize --bits 8" in raised.value.hint
    with pytest.raises(ResourceError) as raised:
        check_weights_fit(140 * GB, 70 * GB, 8 * GB)
    assert "no precision fits" in raised.value.hint
    assert ResourceError.exit_code == 7


def test_caches_that_exceed_gpu_memory_are_refused():
    def check(sequences, tokens, free):
        needed = SHAPE.token_bytes * sequences * tokens
        check_cache_fits(sequences, tokens, SHAPE.token_bytes, needed, free)

    check(16, 4096, 10 * GB)
    with pytest.raises(ResourceError, match=r"8\.6 GB, 5\.0 GB") as raised:
        check(16, 4096, 5 * GB)
    assert "8 sequences would fit" in raised.value.hint
    with pytest.raises(ResourceError) as raised:
        check(1, 1 << 20, 5 * GB)
    assert "one sequence of 34332 tokens" in raised.value.hint


def test_memory_is_checked_before_loading(tiny, monkeypatch):
    monkeypatch.setattr(load, "free_bytes", lambda _device: 100_000)
    monkeypatch.setattr(load.SkeletonFiller, "fill", lambda *_: pytest.fail("filled"))
    with pytest.raises(ResourceError, match="weights take"):
        load_model(tiny("llama"))
    monkeypatch.setattr(cache, "free_bytes", lambda _device: 1_000)
    with pytest.raises(ResourceError, match="a cache of 2 sequences"):
        PagedCache(SHAPE, 2, 64, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forecast_equals_the_loaded_bytes(tiny, dtype, monkeypatch):
    requested = []
    monkeypatch.setattr(load, "check_weights_fit", lambda needed, *_: requested.append(needed))
    model = load_model(tiny("llama"), dtype=dtype).model
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    held_bytes = sum(value.nbytes for value in model.parameters())
    held_bytes += sum(module.weight_bytes for module in packed)
    assert held_bytes <= requested[0] <= 1.1 * held_bytes


@pytest.mark.parametrize("scheme", ["q2_k", "q4_k", "tq1_0", "iq4_xs"])
def test_forecast_equals_the_loaded_bytes_of_gguf_blocks(models, scheme, tmp_path, monkeypatch):
    requested = []
    monkeypatch.setattr(load, "check_weights_fit", lambda needed, *_: requested.append(needed))
    path = export(models("llama", **WIDE), tmp_path / "x.gguf", None, scheme=scheme)
    model = load_model(path, dtype=torch.bfloat16).model
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) > 10
    held_bytes = sum(value.nbytes for value in model.parameters())
    held_bytes += sum(module.weight_bytes for module in packed)
    assert held_bytes <= requested[0] <= 1.15 * held_bytes


def test_cpu_memory_is_not_checked():
    assert memory.free_bytes(torch.device("cpu")) is None
