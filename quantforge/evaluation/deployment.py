"""A model as an engine would run it: loaded in 16 bits, its speed and its memory taken."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantforge.evaluation.comparable import positions_of
from quantforge.evaluation.speed import NEW_TOKENS, PROMPT_TOKENS, measure
from quantforge.evaluation.windows import Windows
from quantforge.execution.progress import tell
from quantforge.runtime.load import load
from quantforge.runtime.memory import PeakMemory
from quantforge_kernels.select import warm_up

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import EvaluationOptions


def as_deployed(
    path: Path, windows: Windows, options: EvaluationOptions, bandwidth: float, bits: int
) -> dict[str, Any]:
    """Load as an engine would, generate, and take the time and the memory.

    Args:
        path: the model.
        windows: the text is of these.
        options: of the evaluation.
        bandwidth: bytes that this machine reads in a second.
        bits: of the inputs of packed weights.

    Returns:
        Figures of a row.
    """
    tokens = min(PROMPT_TOKENS, options.length, positions_of(path) - NEW_TOKENS)
    prompt = windows.ids[:1, : max(0, tokens)]
    if torch.device(options.device).type == "cpu":
        tell("compiling programs for this processor")
        warm_up(options.speed_dtype)
    tell("loading as an engine would")
    with PeakMemory(options.device) as peak:
        loaded = load(path, options.device, options.speed_dtype, input_bits=bits)
        speed = measure(loaded, prompt, bandwidth, options.cache)
    return {
        "read_bytes_per_token": loaded.read_bytes,
        "held_bytes": loaded.held_bytes,
        "kernels": dict(loaded.kernels),
        "peak_bytes": peak.bytes,
        **speed.to_json(),
    }
