"""Speed and memory of a model as an engine would run it: time to the first token, and per further token.

At batch size 1 a token costs at least the time to read every weight, and the cache, once, so that

    tokens/s <= bandwidth / bytes read per token

(the decode roofline). ``bandwidth_use`` is the part of it that was reached, against a read
bandwidth measured here, just before, with the same threads. A small model stays in the cache and
spends its time outside of the weights, so that the share says little about it. Prefill has many
rows per weight and is bound by arithmetic instead; larger batches lie between the two.

Families that the own decoder computes run through it, on a paged cache and on a GPU as one CUDA
graph per step; others run through transformers' forward, and their figures compare with nothing but
each other. ``decoder`` says which it was.
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

from quantforge.architectures.configuration import positions_in
from quantforge.errors import InputError
from quantforge.evaluation.text_windows import Windows
from quantforge.execution.progress import report_step
from quantforge.files.reader import Checkpoint
from quantforge.numerics.shared_processors import ProcessorShare
from quantforge.runtime.decoding import DecodingEngine, engine_of
from quantforge.runtime.load import Loaded, load
from quantforge.runtime.memory import PeakMemory
from quantforge_kernels.select import warm_up

PROMPT_TOKENS = 256
NEW_TOKENS = 32
LEAST_STEPS = 4
PREFILL_RUNS = 3
SECONDS = 5.0  # of each measurement
BATCHES = (4, 16)  # beside 1
PROMPTS = (32, 128)  # tokens, beside the whole prompt
BANDWIDTH_BYTES = 256 << 20  # more than any cache


@dataclass(frozen=True, slots=True)
class Pace:
    """Time per token and sequence of one batch size.

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
    """Load a model as an engine would, generate, and measure time and memory.

    Args:
        model: in its files.
        windows: the prompt is the beginning of the first.
        bandwidth: bytes per second, of `read_bandwidth` on the same device.
        device: where it runs.
        dtype: in which.
        input_bits: to which products of packed weights round their inputs.
        cache: as of `measure_speed`.

    Returns:
        Figures of a row of the report.
    """
    prompt = windows.ids[:1, : max(0, min(PROMPT_TOKENS, positions_in(model.config) - NEW_TOKENS))]
    if torch.device(device).type == "cpu":
        report_step("compiling programs for this processor")
        warm_up(dtype)
    report_step("loading as an engine would")
    with PeakMemory(device) as peak:
        loaded = load(model, device, dtype, input_bits=input_bits)
        figures = measure_speed(loaded, prompt, bandwidth, cache)
    return {
        "read_bytes_per_token": loaded.read_bytes,
        "held_bytes": loaded.held_bytes,
        "kernels": dict(loaded.kernels),
        "peak_bytes": peak.bytes,
        **figures,
    }


def read_bandwidth(device: str = "cpu") -> float:
    """Measure how many bytes per second can be read: the largest of 32 M integers, best of 5."""
    data = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64, device=device)
    best = min(_timed(data.max, data.device) for _ in range(5))
    return data.nbytes / best


@torch.inference_mode()
def measure_speed(
    loaded: Loaded, prompt: Tensor, bandwidth: float, cache: str = ""
) -> dict[str, Any]:
    """Measure a model on a prompt ``[1, tokens]``; takes some seconds.

    Args:
        loaded: the model, in the type that is to be measured.
        prompt: token ids; together with `NEW_TOKENS` they fit the model's positions.
        bandwidth: bytes per second, of `read_bandwidth` on the same device.
        cache: kind of the own decoder's cache, see `quantforge.cache_kinds`; the model's when left out.

    Returns:
        Figures of a row of the report, medians of several runs. ``decoder`` is ``own`` or ``transformers``; the time to
        the first token (``ttft``) has the prefill in it; ``bandwidth_use`` is what is read in a second of decoding one
        sequence, over the measured bandwidth; ``processor_share`` is the share of the processor time that the threads
        asked for and got, None on a GPU and where the system does not count it.

    Raises:
        InputError: the prompt is empty.
    """
    if not prompt.numel():
        raise InputError("no prompt to measure speed with", "give a longer text (--text)")
    model, device = loaded.model, loaded.model.device
    prompt = prompt.to(device)
    engine, token_bytes = engine_of(model, cache, loaded.kv_scales)
    lengths = [length for length in PROMPTS if length < prompt.shape[1]] + [prompt.shape[1]]
    first: dict[int, float] = {}
    processor_share = ProcessorShare()
    for length in lengths:
        start = partial(engine.start, prompt[:, :length], NEW_TOKENS)
        report_step(f"first token of a prompt of {length}", share=0.1 * len(first))
        start()  # warm-up
        times = _repeat(start, device, PREFILL_RUNS, 1)
        first[length] = median(times)
    paces = {batch: _pace(engine, prompt, batch, device) for batch in (1, *BATCHES)}
    tokens, one = prompt.shape[1], paces[1]
    read = loaded.read_bytes + (token_bytes or 0) * (tokens + NEW_TOKENS // 2)
    return {
        "decoder": "own" if token_bytes is not None else "transformers",
        "prefill_tokens_per_second": tokens / first[tokens],
        "decode_tokens_per_second": one.tokens_per_second,
        "ttft_seconds": first[tokens],
        "ttft_by_prompt": {str(length): seconds for length, seconds in first.items()},
        "tpot_seconds": one.tpot_seconds,
        "tpot_spread": one.tpot_spread,
        "decode_by_batch": {str(batch): pace.tokens_per_second for batch, pace in paces.items()},
        "bandwidth_use": read / one.tpot_seconds / bandwidth,
        "kv_bytes_per_token": token_bytes,
        "processor_share": processor_share.so_far() if device.type == "cpu" else None,
    }


def _pace(engine: DecodingEngine, prompt: Tensor, batch: int, device: torch.device) -> Pace:
    """Time steps of some sequences with the same prompt."""
    report_step(
        f"tokens per second of {batch} at a time", share=0.3 + 0.2 * (1, *BATCHES).index(batch)
    )
    chosen = engine.start(prompt.expand(batch, -1), NEW_TOKENS).argmax(-1)

    def step() -> None:
        nonlocal chosen
        chosen = engine.step(chosen).argmax(-1)

    step()  # warm-up, and on a GPU the capture of the graph
    steps = _repeat(step, device, NEW_TOKENS - 1, LEAST_STEPS)
    low, tpot, high = quantiles(steps, n=4)
    return Pace(tpot, (high - low) / tpot, batch / tpot)


def _repeat(work: Callable[[], object], device: torch.device, most: int, least: int) -> list[float]:
    """Time some work up to ``most`` times, fewer when that would take long."""
    times: list[float] = []
    while len(times) < most and (len(times) < least or sum(times) < SECONDS):
        times.append(_timed(work, device))
    return times


def _timed(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
