"""`eval`: a reference and its descendants, measured under one protocol, one model in memory at a time.

Quality is computed in float32: rounding of activations would only blur what quantized weights do.
Speed and memory are measured in bfloat16, as an engine would run, in a pass of its own, so that
nothing of the evaluation counts as memory of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantforge.architectures import text_config
from quantforge.checkpoint.files import FILES
from quantforge.errors import GateError, InputError
from quantforge.evaluation.divergence import Reference, score, score_reference
from quantforge.evaluation.figures import identity, plain, quality
from quantforge.evaluation.harness import Tasks
from quantforge.evaluation.harness import run as run_tasks
from quantforge.evaluation.llama_cpp import perplexity_in_engine
from quantforge.evaluation.requests import Answers
from quantforge.evaluation.speed import NEW_TOKENS, PROMPT_TOKENS, measure, read_bandwidth
from quantforge.evaluation.windows import Protocol, Windows, cut, tokenizer_of
from quantforge.formats.opening import open_model
from quantforge.runtime.load import load
from quantforge.runtime.memory import PeakMemory
from quantforge_files.roles import SETTINGS, TOKENIZER
from quantforge_kernels.probe import warm_up

SCHEMA = "quantforge.eval/1"
POSITIONS = ("max_position_embeddings", "n_positions")


def _silent(_what: str, _done: int, _total: int) -> None:
    """Report no progress."""


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Settings of an evaluation: what is scored, and how.

    Attributes:
        text: what is scored.
        text_name: how the report names it.
        windows: at most so many.
        length: tokens of a window.
        device: ``cpu`` or ``cuda``.
        dtype: in which quality is computed.
        speed: measure speed and memory as well.
        speed_dtype: in which.
        cache: kind of the KV cache when speed is measured, see `quantforge_kernels.kv.KINDS`.
        activations: directory for the reference's hidden states; in memory when None.
        engine: "llama.cpp" scores GGUF files in that engine too.
        tasks: of lm-eval, answered by every model.
        progress: called with what is being done, windows done, and windows.
    """

    text: str = field(repr=False)
    text_name: str
    windows: int = 80
    length: int = 512
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    speed: bool = True
    speed_dtype: torch.dtype = torch.bfloat16
    cache: str = ""
    activations: Path | None = None
    engine: str = ""
    tasks: Tasks | None = None
    progress: Callable[[str, int, int], None] = _silent


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result: the protocol, and one row of plain data per model, the reference first."""

    protocol: Protocol
    rows: tuple[Mapping[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document ``quantforge.eval/1``."""
        rows = [dict(row) for row in self.rows]
        return {"schema": SCHEMA, "protocol": self.protocol.to_json(), "models": rows}


def evaluate(reference: Path, models: Sequence[Path], options: EvaluationOptions) -> Evaluation:
    """Measure a reference and models that descend from it.

    Raises:
        InputError: a model or the text cannot be used, tokenizers differ, or a result is no number.
    """
    windows = _windows(reference, options)
    for path in (reference, *models):
        _check(path, reference, windows, options)
    bandwidth = read_bandwidth(options.device) if options.speed else math.nan
    rows = tuple(_measured((reference, *models), windows, options, bandwidth))
    return Evaluation(_protocol(windows, options), rows)


def check_gates(
    evaluation: Evaluation, max_ppl_increase: float | None = None, max_kl: float | None = None
) -> None:
    """Hold every model to the limits that are given; call it once the report is written.

    Args:
        evaluation: the result.
        max_ppl_increase: relative to the reference, e.g. 0.02.
        max_kl: mean KL divergence in nats per token.

    Raises:
        GateError: listing every model that is beyond a limit, with its figure.
    """
    limits = (
        ("perplexity_increase", max_ppl_increase, "perplexity increased by {:.2%}, at most {:.2%}"),
        ("kl_mean", max_kl, "KL divergence {:.4g}, at most {:.4g}"),
    )
    failed = [
        f"{row['path']}: {text.format(row[key], limit)}"
        for row in evaluation.rows[1:]
        for key, limit, text in limits
        if limit is not None and row[key] > limit
    ]
    if failed:
        raise GateError(
            f"{len(failed)} quality gate(s) failed: {'; '.join(failed)}",
            "use more bits, smaller groups or another method, or raise the limit",
        )


def _windows(reference: Path, options: EvaluationOptions) -> Windows:
    return cut(tokenizer_of(reference), options.text, options.windows, options.length)


def _check(path: Path, reference: Path, windows: Windows, options: EvaluationOptions) -> None:
    """Refuse, before any work, what could not be compared."""
    positions = _positions(path)
    if positions < options.length:
        raise InputError(
            f"{path}: windows of {options.length} tokens, the model has {positions} positions",
            f"--length {positions}",
        )
    if path == reference or _tokenizer_files(path) == _tokenizer_files(reference):
        return
    if _windows(path, options).sha256 != windows.sha256:
        raise InputError(
            f"{path}: its tokenizer makes other tokens of the text than that of {reference}",
            "compare a model with the one that it was made from",
        )


def _tokenizer_files(path: Path) -> list[bytes]:
    if path.is_file():
        return []
    files = ((path / "tokenizer.json", TOKENIZER), (path / "tokenizer_config.json", SETTINGS))
    return [FILES.read(file, role, path) if file.is_file() else b"" for file, role in files]


def _positions(path: Path) -> int:
    config = text_config(open_model(path).config)
    return min((config[key] for key in POSITIONS if config.get(key)), default=1 << 30)


def _measured(
    paths: Sequence[Path], windows: Windows, options: EvaluationOptions, bandwidth: float
) -> Iterator[Mapping[str, Any]]:
    """Yield one row per model; the first is the reference. One model is in memory at a time."""
    reference: Reference | None = None
    try:
        for path in paths:
            loaded = load(path, options.device, options.dtype)
            progress = partial(options.progress, str(path))
            if reference is None:
                where = options.activations
                reference = score_reference(loaded.model, windows, where, progress)
                row = identity(loaded) | quality(reference.scores, None)
            else:
                scores = score(loaded.model, windows, reference, progress)
                row = identity(loaded) | quality(scores, reference.scores)
            if options.tasks is not None:
                scales = loaded.kv_scales
                answers = Answers(loaded.model, tokenizer_of(path), _positions(path), scales)
                row |= {"tasks": run_tasks(answers, options.tasks)}
                del answers
            del loaded  # before the next one comes in
            # Only now, when everything that is loaded once and for all has been loaded.
            if options.speed:
                row |= _deployment(path, windows, options, bandwidth)
            if options.engine and path.is_file():
                row["llama_cpp_perplexity"] = perplexity_in_engine(path, windows, progress)
            yield {key: plain(value) for key, value in row.items()}
    finally:
        if reference is not None:
            reference.close()


def _deployment(
    path: Path, windows: Windows, options: EvaluationOptions, bandwidth: float
) -> dict[str, Any]:
    """Load as an engine would, generate, and take the time and the memory."""
    tokens = min(PROMPT_TOKENS, options.length, _positions(path) - NEW_TOKENS)
    prompt = windows.ids[:1, : max(0, tokens)]
    if torch.device(options.device).type == "cpu":
        warm_up(options.speed_dtype)
    with PeakMemory(options.device) as peak:
        loaded = load(path, options.device, options.speed_dtype)
        speed = measure(loaded, prompt, bandwidth, options.cache)
    return {
        "kernels": dict(loaded.kernels),
        "peak_bytes": peak.bytes,
        **speed.to_json(),
    }


def _protocol(windows: Windows, options: EvaluationOptions) -> Protocol:
    return Protocol(
        text=options.text_name,
        tokens_sha256=windows.sha256,
        windows=len(windows.ids),
        length=options.length,
        bos=windows.bos,
        tokens_scored=windows.targets.numel(),
        dtype=_name(options.dtype),
        speed_dtype=_name(options.speed_dtype) if options.speed else "",
        device=options.device,
        threads=torch.get_num_threads(),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
