"""Speed and memory measurements report what was measured."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from quantforge.errors import InputError
from quantforge.evaluation import speed
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import DecoderEngine, TransformersEngine
from quantforge.runtime.load import load
from quantforge.runtime.memory import PeakMemory


def test_peak_memory_includes_freed_allocations():
    with PeakMemory() as peak:
        block = torch.ones(16 << 20)
        del block
    with PeakMemory() as idle:
        pass
    if peak.bytes is not None and idle.bytes is not None:
        assert 62 << 20 <= peak.bytes < 80 << 20  # the kernel counts pages in batches
        assert idle.bytes < 8 << 20


def test_decoding_stops_early_when_it_is_slow(tiny, monkeypatch):
    loaded = load(tiny("llama-tied"))
    prompt = torch.arange(12)[None]
    monkeypatch.setattr(speed, "MAX_SECONDS", 0.0)
    times = []
    timed = speed._time
    monkeypatch.setattr(speed, "_time", lambda *a: times.append(timed(*a)) or times[-1])
    measured = speed.measure_speed(loaded, prompt, 1e9)
    assert len(times) == 1 + 3 * speed.MIN_STEPS  # one prompt, three sizes of a batch
    read = loaded.read_bytes + measured["kv_bytes_per_token"] * (12 + speed.NEW_TOKENS // 2)
    assert measured["bandwidth_utilization"] == pytest.approx(read / measured["tpot_seconds"] / 1e9)
    assert measured["decode_tokens_per_second"] == pytest.approx(1 / measured["tpot_seconds"])
    pace = median(times[-speed.MIN_STEPS :])  # of the largest batch, which comes last
    assert measured["decode_by_batch"]["16"] == pytest.approx(16 / pace)
    with pytest.raises(InputError, match="prompt"):
        speed.measure_speed(loaded, prompt[:, :0], 1e9)


def test_speed_without_our_decoder_uses_transformers(tiny):
    measured = speed.measure_speed(load(tiny("gpt2")), torch.arange(40)[None], 1e9)
    assert measured["decoder"] == "transformers"
    assert measured["kv_bytes_per_token"] is None
    assert list(measured["ttft_by_prompt"]) == ["32", "40"]
    assert measured["ttft_seconds"] == measured["ttft_by_prompt"]["40"]
    assert measured["prefill_tokens_per_second"] == pytest.approx(40 / measured["ttft_seconds"])


def test_both_decoders_decode_the_same(tiny):
    loaded = load(tiny("llama"))
    own, peer = DecoderEngine(Decoder(loaded.model)), TransformersEngine(loaded.model)
    ids = torch.arange(3, 27).view(2, 12)
    with torch.inference_mode():
        for _ in range(2):
            first = [engine.start(ids, 4) for engine in (own, peer)]
            torch.testing.assert_close(*first, rtol=1e-4, atol=1e-4)
            steps = [engine.step(torch.tensor([5, 6])) for engine in (own, peer)]
            torch.testing.assert_close(*steps, rtol=1e-4, atol=1e-4)


def test_a_quantized_cache_is_measured(tiny):
    measured = speed.measure_speed(load(tiny("llama")), torch.arange(12)[None], 1e9, "int8")
    assert measured["kv_bytes_per_token"] == 3 * 2 * 2 * (16 + 2)


def test_read_bandwidth_is_plausible(monkeypatch):
    monkeypatch.setattr(speed, "BANDWIDTH_BYTES", 8 << 20)
    assert 1e8 < speed.read_bandwidth() < 1e13


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_time_and_memory_use_the_named_gpu(name, monkeypatch):
    devices = []
    for function in (
        "synchronize",
        "reset_peak_memory_stats",
        "memory_allocated",
        "max_memory_allocated",
    ):
        monkeypatch.setattr(torch.cuda, function, lambda device: devices.append(device) or 0)
    with PeakMemory(name):
        speed._time(int, torch.device(name))
    assert devices == 4 * [torch.device(name)]
