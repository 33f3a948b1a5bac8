"""Speed and memory of a model as deployed: time to first token, time per output token, peak memory.

At batch size 1 a token costs at least the time to read every weight, and the cache, once, so that

    tokens/s <= bandwidth / bytes read per token

(the decode roofline). ``bandwidth_utilization`` is the fraction of this limit that was reached, relative to the
read bandwidth measured just before with the same threads. A small model fits into the CPU cache and spends its time
elsewhere, so the fraction says little about it. Prefill is compute-bound; larger batches lie between the two.

Families supported by QuantForge's decoder run in it, with a paged KV cache and on a GPU as one CUDA graph per step;
others run in transformers, and their speeds are only comparable with each other. ``decoder`` records which one was
used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from quantforge.architectures.configuration import max_positions
from quantforge.errors import InputError
from quantforge.evaluation.text_windows import Windows
from quantforge.files.reader import Checkpoint
from quantforge.numerics.shared_processors import ProcessorShare
from quantforge.progress import report_step
from quantforge.runtime.decoding import DecodingEngine, create_engine
from quantforge.runtime.load import Loaded, load
from quantforge.runtime.memory import PeakMemory
from quantforge_kernels.select import warm_up

PROMPT_TOKENS = 256
NEW_TOKENS = 32
MIN_STEPS = 4
PREFILL_RUNS = 3
MAX_SECONDS = 5.0  # of each measurement
BATCHES = (4, 16)  # batch sizes in addition to 1
PROMPT_LENGTHS = (32, 128)  # tokens, in addition to the whole prompt
BANDWIDTH_BYTES = 256 << 20  # more than any cache


@dataclass(frozen=True, slots=True)
class DecodingSpeed:
    """Decoding speed at one batch size.

    Attributes:
        tpot_seconds: median time of a step.
        tpot_spread: interquartile range of the steps over their median.
        tokens_per_second: of all sequences together.
    """

    tpot_seconds: float
    tpot_spread: float
    tokens_per_second: float


def measure_as_deployed(
    model: Checkpoint,
    windows: Windows,
    bandwidth: float,
    *,
    device: str,
    dtype: torch.dtype,
    input_bits: int,
    cache: str,
) -> dict[str, Any]:
    """Load a model as an engine would, generate text, and measure time and memory.

    Args:
        model: the checkpoint.
        windows: windows of the text; the prompt is the beginning of the first one.
        bandwidth: read bandwidth of the device in bytes per second.
        device: device of the model.
        dtype: type of the activations.
        input_bits: bits to which packed layers round their activations.
        cache: cache kind, as for `measure_speed`.

    Returns:
        Speed and memory columns of a report row.
    """
    prompt = windows.ids[:1, : max(0, min(PROMPT_TOKENS, max_positions(model.config) - NEW_TOKENS))]
    if torch.device(device).type == "cpu":
        report_step("compiling programs for this processor")
        warm_up(dtype)
    report_step("loading as an engine would")
    with PeakMemory(device) as peak:
        loaded = load(model, device, dtype, input_bits=input_bits)
        speeds = measure_speed(loaded, prompt, bandwidth, cache)
    return {
        "read_bytes_per_token": loaded.read_bytes,
        "resident_bytes": loaded.held_bytes,
        "kernels": dict(loaded.kernels),
        "peak_bytes": peak.bytes,
        **speeds,
    }


def read_bandwidth(device: str = "cpu") -> float:
    """Measure the memory read bandwidth in bytes per second: maximum over 32 M integers, best of 5 runs."""
    data = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64, device=device)
    best = min(_time(data.max, data.device) for _ in range(5))
    return data.nbytes / best


@torch.inference_mode()
def measure_speed(
    loaded: Loaded, prompt: Tensor, bandwidth: float, cache: str = ""
) -> dict[str, Any]:
    """Measure the speed of a model on a prompt ``[1, tokens]``; takes some seconds.

    Args:
        loaded: the model, in the type to measure.
        prompt: token ids; with `NEW_TOKENS` more they must fit into the context length.
        bandwidth: read bandwidth of the device in bytes per second.
        cache: kind of the KV cache, see `quantforge.cache_kinds`; the model's default if empty.

    Returns:
        Speed columns of a report row, medians of several runs. ``decoder`` is ``own`` or ``transformers``; the time to
        the first token (``ttft``) includes the prefill; ``bandwidth_utilization`` is the bytes read per second of
        decoding one sequence, relative to the measured bandwidth; ``processor_share`` is the fraction of the requested
        processor time that the threads received, None on a GPU and if the system does not report it.

    Raises:
        InputError: the prompt is empty.
    """
    if not prompt.numel():
        raise InputError("no prompt to measure speed with", "give a longer text (--text)")
    model, device = loaded.model, loaded.model.device
    prompt = prompt.to(device)
    engine, token_bytes = create_engine(model, cache, loaded.kv_scales)
    lengths = [length for length in PROMPT_LENGTHS if length < prompt.shape[1]] + [prompt.shape[1]]
    ttft_by_length: dict[int, float] = {}
    processor_share = ProcessorShare()
    for length in lengths:
        start = partial(engine.start, prompt[:, :length], NEW_TOKENS)
        report_step(f"first token of a prompt of {length}", share=0.1 * len(ttft_by_length))
        start()  # warm-up
        times = _time_repeatedly(start, device, PREFILL_RUNS, 1)
        ttft_by_length[length] = median(times)
    speeds = {batch: _measure_decoding(engine, prompt, batch, device) for batch in (1, *BATCHES)}
    tokens, single_speed = prompt.shape[1], speeds[1]
    bytes_read = loaded.read_bytes + (token_bytes or 0) * (tokens + NEW_TOKENS // 2)
    return {
        "decoder": "own" if token_bytes is not None else "transformers",
        "prefill_tokens_per_second": tokens / ttft_by_length[tokens],
        "decode_tokens_per_second": single_speed.tokens_per_second,
        "ttft_seconds": ttft_by_length[tokens],
        "ttft_by_prompt": {str(length): seconds for length, seconds in ttft_by_length.items()},
        "tpot_seconds": single_speed.tpot_seconds,
        "tpot_spread": single_speed.tpot_spread,
        "decode_by_batch": {str(batch): speed.tokens_per_second for batch, speed in speeds.items()},
        "bandwidth_utilization": bytes_read / single_speed.tpot_seconds / bandwidth,
        "kv_bytes_per_token": token_bytes,
        "processor_share": processor_share.current_share() if device.type == "cpu" else None,
    }


def _measure_decoding(
    engine: DecodingEngine, prompt: Tensor, batch: int, device: torch.device
) -> DecodingSpeed:
    """Measure decoding of a batch of sequences with the same prompt."""
    report_step(
        f"tokens per second of {batch} at a time", share=0.3 + 0.2 * (1, *BATCHES).index(batch)
    )
    next_tokens = engine.start(prompt.expand(batch, -1), NEW_TOKENS).argmax(-1)

    def step() -> None:
        nonlocal next_tokens
        next_tokens = engine.step(next_tokens).argmax(-1)

    step()  # warm-up, and on a GPU the capture of the graph
    steps = _time_repeatedly(step, device, NEW_TOKENS - 1, MIN_STEPS)
    low, tpot, high = quantiles(steps, n=4)
    return DecodingSpeed(tpot, (high - low) / tpot, batch / tpot)


def _time_repeatedly(
    function: Callable[[], object], device: torch.device, max_runs: int, min_runs: int
) -> list[float]:
    """Time a function up to ``max_runs`` times, but at least ``min_runs`` times if it is slow; return the seconds."""
    times: list[float] = []
    while len(times) < max_runs and (len(times) < min_runs or sum(times) < MAX_SECONDS):
        times.append(_time(function, device))
    return times


def _time(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a function takes, including its work on a GPU."""
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
