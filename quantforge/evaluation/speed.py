"""Speed of one sequence: time to the first token, time per further token, and the share of the roof.

At batch size 1 a token costs at least the time to read every weight once, so that

    tokens/s <= bandwidth / bytes read per token

(the decode roofline). ``bandwidth_use`` is the part of it that was reached, against a read
bandwidth measured here, just before, with the same threads. A small model stays in the cache and
spends its time outside of the weights, so that the share says little about it. Prefill has many
rows per weight and is bound by arithmetic instead.

The forward pass is that of transformers, with its KV cache: figures compare the models of one
report, and are no figures of a serving engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles

import torch
from torch import Tensor

from quantforge.errors import InputError
from quantforge.runtime.load import Loaded

PROMPT_TOKENS = 256
NEW_TOKENS = 32
LEAST_STEPS = 4
PREFILL_RUNS = 3
SECONDS = 5.0  # of each of the two measurements
BANDWIDTH_BYTES = 256 << 20  # more than any cache


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians of one sequence.

    Attributes:
        prompt_tokens: of the prompt.
        ttft_seconds: time to the first token, prefill included.
        tpot_seconds: time per further token.
        tpot_spread: interquartile range of the steps over their median.
        bandwidth_use: bytes of weights read per second of decoding, over the measured bandwidth.
    """

    prompt_tokens: int
    ttft_seconds: float
    tpot_seconds: float
    tpot_spread: float
    bandwidth_use: float

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of the prompt over the time to the first token."""
        return self.prompt_tokens / self.ttft_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Further tokens per second."""
        return 1 / self.tpot_seconds


def read_bandwidth(device: str = "cpu") -> float:
    """Measure how many bytes per second can be read: the largest of 32 M integers, best of 5."""
    data = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64, device=device)
    best = min(_timed(data.max, device) for _ in range(5))
    return data.nbytes / best


@torch.inference_mode()
def measure(loaded: Loaded, prompt: Tensor, bandwidth: float) -> Speed:
    """Measure a model on a prompt ``[1, tokens]``; takes some seconds.

    Args:
        loaded: the model, in the type that is to be measured.
        prompt: token ids; together with `NEW_TOKENS` they fit the model's positions.
        bandwidth: bytes per second, of `read_bandwidth` on the same device.

    Raises:
        InputError: the prompt is empty.
    """
    if not prompt.numel():
        raise InputError("no prompt to measure speed with", "give a longer text (--text)")
    model, device = loaded.model, loaded.model.device.type
    prompt = prompt.to(model.device)

    def prefill() -> tuple[Tensor, object]:
        output = model(prompt, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(-1), output.past_key_values

    prefill()  # warm-up
    first = _repeat(prefill, device, PREFILL_RUNS, 1)
    state = prefill()

    def step() -> None:
        nonlocal state
        token, cache = state
        output = model(token, past_key_values=cache, use_cache=True)
        state = output.logits[:, -1:].argmax(-1), output.past_key_values

    step()  # warm-up
    steps = _repeat(step, device, NEW_TOKENS - 1, LEAST_STEPS)
    low, tpot, high = quantiles(steps, n=4)
    used = loaded.read_bytes / tpot / bandwidth
    return Speed(prompt.shape[1], median(first), tpot, (high - low) / tpot, used)


def _repeat(work: Callable[[], object], device: str, most: int, least: int) -> list[float]:
    """Time some work up to ``most`` times, fewer when that would take long."""
    times: list[float] = []
    while len(times) < most and (len(times) < least or sum(times) < SECONDS):
        times.append(_timed(work, device))
    return times


def _timed(work: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
