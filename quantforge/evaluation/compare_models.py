"""The `eval` command: measure a reference model and models derived from it, one model in memory at a time.

The reference is scored first and then unloaded; its final hidden states and output head are saved, so that every other
model is compared with it token by token (`divergence`). Quality is computed in float32, because rounded activations
would hide the effect of quantized weights. Speed and memory are measured in bfloat16, as in deployment, in a separate
pass (`speed`), so that data of the evaluation does not count as memory of the model. Each model yields one result row.

Perplexity, divergence and block errors are always measured. Optional measurements have modules of their own: generated
answers (`reference_text`), KV caches (`cache_quality`), tasks (`tasks`), speed (`speed`), llama.cpp (`llama_cpp`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from quantforge.architectures.configuration import max_positions
from quantforge.artifacts import manifest
from quantforge.evaluation.block_errors import block_errors, block_states
from quantforge.evaluation.cache_quality import (
    CacheComparison,
    compare_caches,
    plan_cache_comparison,
)
from quantforge.evaluation.divergence import ModelScores, Reference, score, score_reference
from quantforge.evaluation.llama_cpp import perplexity_in_engine
from quantforge.evaluation.measurement_options import EvaluationOptions
from quantforge.evaluation.reference_text import (
    ReferenceAnswers,
    TokenizedPrompts,
    tokenize_prompts,
)
from quantforge.evaluation.saved_rows import SCHEMA, SavedRows
from quantforge.evaluation.speed import measure_as_deployed, read_bandwidth
from quantforge.evaluation.tasks import Tasks
from quantforge.evaluation.tasks import run as run_tasks
from quantforge.evaluation.text_windows import (
    EvaluationProtocol,
    Windows,
    check_comparable,
    cut_windows,
)
from quantforge.evaluation.verdict import Verdict, judge
from quantforge.files.reader import Checkpoint
from quantforge.formats.sources.adapter import open_adapter
from quantforge.formats.sources.low_precision import decode_if_low_precision
from quantforge.formats.sources.merged import merge_adapter
from quantforge.progress import phase, report_step
from quantforge.runtime.adapter_layers import add_adapter, open_correction
from quantforge.runtime.linear import UNROUNDED_BITS
from quantforge.runtime.load import Loaded, load
from quantforge.runtime.text_processing import as_input_errors, load_model_tokenizer
from quantforge.settings import Settings

QUALITY_DTYPE, SPEED_DTYPE = torch.float32, torch.bfloat16
EPOCH = "SOURCE_DATE_EPOCH"  # https://reproducible-builds.org/specs/source-date-epoch/
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
FIGURES = (  # None if not measured, or not defined for the reference
    "perplexity", "perplexity_se", "perplexity_increase", "perplexity_increase_se", "nll",
    "kl_mean", "kl_se", "kl_median", "kl_p99", "kl_quantiles", "top1_agreement", "block_errors", "generated",
    "peak_bytes", "prefill_tokens_per_second", "decode_tokens_per_second", "ttft_seconds",
    "tpot_seconds", "tpot_spread", "bandwidth_utilization", "llama_cpp_perplexity",
    "decoder", "ttft_by_prompt", "decode_by_batch", "kv_bytes_per_token", "processor_share", "tasks", "caches",
)  # fmt: skip


def _today() -> str:
    """Return today's date (ISO 8601, UTC), or that of ``SOURCE_DATE_EPOCH`` if it is set."""
    epoch = os.environ.get(EPOCH, "")
    moment = datetime.fromtimestamp(int(epoch), UTC) if epoch.isdecimal() else datetime.now(UTC)
    return moment.date().isoformat()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of an evaluation: the protocol and one row of plain data per model, the reference first.

    ``caches`` is the protocol of the cache comparison, if there was one; ``versions`` are library versions.
    """

    protocol: EvaluationProtocol
    rows: tuple[Mapping[str, Any], ...]
    options: EvaluationOptions
    caches: Mapping[str, Any] | None = None
    date: str = field(default_factory=_today)
    versions: Mapping[str, str] = field(default_factory=manifest.versions)

    @property
    def verdict(self) -> Verdict:
        """Return the Pareto front, the best models by size, quality and speed, and the conclusions in sentences."""
        return judge(self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return the document ``quantforge.eval/2``."""
        return {
            "schema": SCHEMA,
            "date": self.date,
            "versions": dict(self.versions),
            "protocol": self.protocol.to_json(),
            "generated": None if (prompts := self.options.prompts) is None else prompts.to_json(),
            "caches": self.caches,
            "models": [dict(row) for row in self.rows],
            "verdict": self.verdict.to_json(),
        }


@as_input_errors()
def compare_models(
    models: Sequence[Checkpoint],
    options: EvaluationOptions,
    settings: Settings | None = None,
    saved: SavedRows | None = None,
) -> Evaluation:
    """Measure a reference model and models derived from it.

    Args:
        models: the reference, and the models to compare with it.
        options: what to measure.
        settings: device, adapter of the reference, storage of hidden states (memory or disk), and activation bits of
            the other models.
        saved: rows of an interrupted run of this evaluation; new rows are added to it.

    Raises:
        InputError: a model, the text or a task cannot be used, tokenizers differ, or a result is NaN or infinite.
        RefusedError: the head of a model is not understood.
        UsageError: an engine is named whose package is not installed.
    """
    settings = settings or Settings()
    report_step("tokens of the text")
    windows = cut_windows(
        load_model_tokenizer(models[0]), options.text, options.windows, options.length
    )
    if len(windows.ids) < options.windows:
        settings.note(
            f"the text gives {len(windows.ids)} windows of {options.length} tokens"
            f" (at most {options.windows} were to be scored)"
        )
    for model in models:
        check_comparable(model, models[0], options.text, windows)
    prompts = None if options.prompts is None else tokenize_prompts(models, options.prompts)
    cache_comparison = None
    if options.caches:
        cache_comparison = plan_cache_comparison(
            models, options.text, options.caches, options.windows * options.length
        )
    bandwidth = math.nan
    if options.speed:
        report_step("read bandwidth of this machine")
        bandwidth = read_bandwidth(settings.device)
    saved = saved or SavedRows()
    rows = [*saved.rows]
    if len(rows) < len(models):
        rows += _measure_models(
            models, windows, prompts, cache_comparison, options, settings, bandwidth, saved
        )
    return Evaluation(
        _protocol(windows, options, settings),
        tuple(rows),
        options,
        None if cache_comparison is None else cache_comparison.to_json(),
    )


def _measure_models(
    models: Sequence[Checkpoint],
    windows: Windows,
    prompts: TokenizedPrompts | None,
    cache_comparison: CacheComparison | None,
    options: EvaluationOptions,
    settings: Settings,
    bandwidth: float,
    saved: SavedRows,
) -> Iterator[Mapping[str, Any]]:
    """Yield a result row for each model without a saved row, with one model in memory at a time.

    The reference is scored even if its row is saved, because the other models are compared with it.
    """
    saved_count = len(saved.rows)
    shares = _phase_shares(options, cache_comparison)
    baseline = _Baseline(windows, prompts, settings)
    try:
        for number, model in enumerate(models):
            name = model.path.name
            is_reference, is_saved = number == 0, number < saved_count
            if is_saved and not is_reference:
                continue
            with phase("", 1 / len(models)):
                with phase(f"loading {name}", shares["loading"]):
                    loaded = _load(model, options.correction, settings, is_reference=is_reference)
                with phase(f"scoring {name}", shares["scoring"], "windows of the text"):
                    measure = baseline.score_reference if is_reference else baseline.compare
                    row = _new_row(loaded) | measure(loaded)
                if is_saved:
                    del loaded
                    continue
                if cache_comparison is not None:
                    with phase(f"caches of {name}", shares["caches"]):
                        row["caches"] = compare_caches(loaded, cache_comparison)
                if options.tasks is not None:
                    with phase(f"tasks on {name}", shares["tasks"]):
                        row["tasks"] = _task_scores(model, loaded, options.tasks)
                del loaded  # before the next model is loaded
                # Measured last, so that libraries imported on first use do not count as memory of the model.
                if options.speed and (is_reference or not options.correction):
                    with phase(f"speed of {name}", shares["speed"]):
                        row |= measure_as_deployed(
                            model,
                            windows,
                            bandwidth,
                            device=settings.device,
                            dtype=SPEED_DTYPE,
                            input_bits=UNROUNDED_BITS if is_reference else settings.input_bits,
                            cache=options.caches[0] if options.caches else "",
                        )
                if options.engine and model.path.is_file():
                    row["llama_cpp_perplexity"] = perplexity_in_engine(model.path, windows)
            row = {key: _none_for_nan(value) for key, value in row.items()}
            saved.add(row)
            yield row
    finally:
        baseline.close()


def _phase_shares(
    options: EvaluationOptions, cache_comparison: CacheComparison | None
) -> dict[str, float]:
    """Return the fraction of a model's progress bar for each phase, from typical durations."""
    durations = {"loading": 1, "scoring": 12}
    if cache_comparison is not None:
        durations["caches"] = 15
    if options.tasks is not None:
        durations["tasks"] = 20
    if options.speed:
        durations["speed"] = 5
    return {name: duration / sum(durations.values()) for name, duration in durations.items()}


class _Baseline:
    """Data of the reference that is saved after unloading it: hidden states, head, block outputs and answers."""

    def __init__(
        self, windows: Windows, prompts: TokenizedPrompts | None, settings: Settings
    ) -> None:
        self.windows, self.prompts = windows, prompts
        self.reference: Reference | None = None
        self.directory = Path.cwd() if settings.activations == "disk" else None

    def score_reference(self, loaded: Loaded) -> dict[str, Any]:
        """Measure the reference and keep the data to compare other models with; return its quality columns."""
        self.reference = score_reference(loaded.model, self.windows, self.directory)
        columns = _quality_figures(self.reference.scores)
        report_step("error of each block")
        self.blocks = block_states(loaded.model, self.windows.ids[0])
        if self.prompts is not None:
            report_step("answers to the prompts")
            self.answers = ReferenceAnswers(self.prompts, loaded)
            columns["generated"] = self.answers.to_json()
        return columns

    def compare(self, loaded: Loaded) -> dict[str, Any]:
        """Measure another model against the reference; return its quality columns."""
        assert self.reference is not None, "the reference is scored first"
        scores = score(loaded.model, self.windows, self.reference)
        columns = _quality_figures(scores, self.reference.scores)
        report_step("error of each block")
        columns["block_errors"] = block_errors(loaded.model, self.blocks)
        if self.prompts is not None:
            report_step("answers to the prompts")
            columns["generated"] = self.answers.compare(loaded)
        return columns

    def close(self) -> None:
        """Release the disk storage of the reference's hidden states."""
        if self.reference is not None:
            self.reference.close()


def _load(
    model: Checkpoint, correction: Path | None, settings: Settings, *, is_reference: bool
) -> Loaded:
    """Load a model for scoring: the reference decoded and with its adapter merged, others with their correction."""
    if is_reference:
        source = decode_if_low_precision(model)
        if settings.adapter is not None:
            source = merge_adapter(source, open_adapter(settings.adapter))
        return load(source, settings.device, QUALITY_DTYPE)
    loaded = load(model, settings.device, QUALITY_DTYPE, input_bits=settings.input_bits)
    if correction is not None:
        loaded = add_adapter(loaded, open_correction(correction))
    if settings.input_bits < UNROUNDED_BITS:
        for event in loaded.events:
            settings.note(f"{model.path.name}: {event.detail}")
    return loaded


def _task_scores(model: Checkpoint, loaded: Loaded, tasks: Tasks) -> dict[str, dict[str, float]]:
    """Run the lm-eval tasks on a loaded model and return ``{task: {metric: value}}``."""
    from quantforge.evaluation.task_model import TaskModel  # imports lm-eval

    positions = max_positions(model.config)
    task_model = TaskModel(loaded.model, load_model_tokenizer(model), positions, loaded.kv_scales)
    return run_tasks(task_model, tasks)


def _new_row(loaded: Loaded) -> dict[str, Any]:
    """Create the result row of a loaded model with format, sizes, kernels and history; measurements are still None."""
    history = manifest.read_manifest(loaded.path) or {}
    return {
        "path": str(loaded.path),
        "format": loaded.format,
        "scheme": loaded.scheme,
        "bits_per_weight": loaded.bits_per_weight,
        "bits_per_weight_total": loaded.bits_per_weight_total,
        "weight_bytes": loaded.weight_bytes,
        "resident_bytes": loaded.held_bytes,
        "read_bytes_per_token": loaded.read_bytes,
        "kv_cache": loaded.kv_cache,
        "kernels": dict(loaded.kernels),
        "made_by": _made_by(history),
        "events": [*history.get("events", ()), *(event.to_json() for event in loaded.events)],
        **dict.fromkeys(FIGURES),
    }


def _made_by(history: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return method, source and recipe from a manifest; for an exported model, those of the original."""
    if not history:
        return None
    origin = {**history, **history.get("lineage", {})}
    return {
        "method": origin.get("method"),
        "source": origin.get("source", {}).get("model"),
        "exported": "lineage" in history,
        "recipe": origin.get("recipe") or None,
    }


def _quality_figures(scores: ModelScores, reference: ModelScores | None = None) -> dict[str, Any]:
    """Return the perplexity columns and, given a ``reference``, the comparison columns."""
    metrics = {
        "perplexity": scores.perplexity.mean,
        "perplexity_se": scores.perplexity.error,
        "nll": scores.mean_nll.mean,
    }
    if reference is None or scores.divergence is None:
        return metrics
    increase, divergence = scores.increase(reference), scores.divergence
    return metrics | {
        "perplexity_increase": increase.mean,
        "perplexity_increase_se": increase.error,
        "kl_mean": divergence.mean.mean,
        "kl_se": divergence.mean.error,
        "kl_median": divergence.quantile(0.5),
        "kl_p99": divergence.quantile(0.99),
        "kl_quantiles": {str(fraction): divergence.quantile(fraction) for fraction in QUANTILES},
        "top1_agreement": divergence.agreement.mean,
    }


def _none_for_nan(value: object) -> object:
    """Replace NaN by None: JSON has no NaN, and a standard error from one window is not a figure."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _protocol(
    windows: Windows, options: EvaluationOptions, settings: Settings
) -> EvaluationProtocol:
    """Describe everything besides the models that the results depend on."""

    def adapter_name(adapter: Path | None) -> str:
        return "" if adapter is None else open_adapter(adapter).cited_name

    def dtype_name(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    return EvaluationProtocol(
        text=options.text_name,
        tokens_sha256=windows.sha256,
        windows=len(windows.ids),
        length=options.length,
        bos=windows.bos,
        tokens_scored=windows.targets.numel(),
        dtype=dtype_name(QUALITY_DTYPE),
        speed_dtype=dtype_name(SPEED_DTYPE) if options.speed else "",
        device=settings.device,
        threads=torch.get_num_threads(),
        windows_requested=options.windows,
        adapter=adapter_name(settings.adapter),
        correction=adapter_name(options.correction),
        input_bits=settings.input_bits,
    )
