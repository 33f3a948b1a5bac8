"""Measured figures for the card of a result: a section of its text, and ``model-index`` for the hub.

The section has the reference and every model of the evaluation that lies in the folder of the card. The
protocol stands under it: no figure without one. `quantforge.artifacts.card_figures` puts both into the card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantforge.artifacts.card import code
from quantforge.artifacts.card_figures import is_in_folder
from quantforge.artifacts.number_text import significant, size, value_and_error
from quantforge.errors import UsageError
from quantforge.evaluation.compare_models import Evaluation
from quantforge.evaluation.verdict import displaced, short_names
from quantforge.files.hub import source_name

Row = Mapping[str, Any]
_ABSENT = "-"
# Header, key, error, factor.
_COLUMNS = (
    ("bits of all weights", "bits_per_weight_total", "", 1.0),
    ("perplexity", "perplexity", "perplexity_se", 1.0),
    ("KL, nats per token", "kl_mean", "kl_se", 1.0),
    ("same first token, %", "top1_agreement", "", 100.0),
    ("tokens per second", "decode_tokens_per_second", "", 1.0),
    ("first token, s", "ttft_seconds", "", 1.0),
)
_TIMED = (
    "decode_tokens_per_second",
    "ttft_seconds",
)  # left out where other programs slowed them down
_SIZES = (("weights", "weight_bytes"), ("peak memory", "peak_bytes"))
# Key, type of the metric on the hub, its name.
_METRICS = (
    ("perplexity", "perplexity", "Perplexity"),
    ("kl_mean", "kl_divergence", "KL divergence from the source, nats per token"),
    ("top1_agreement", "agreement", "Share of tokens whose most likely successor is the source's"),
)


def section(evaluation: Evaluation, folder: Path) -> str:
    """Return the figures of the models in a folder as Markdown; errors as `chosen`."""
    rows = [evaluation.rows[0], *chosen(evaluation, folder)]
    names = [source_name(Path(rows[0]["path"]))[0], *short_names([row["path"] for row in rows[1:]])]
    columns: list[tuple[str, Callable[[Row], str]]] = []
    columns += [(header, _bytes(key)) for header, key in _SIZES[:1]]
    columns += [(header, _figure(key, error, by)) for header, key, error, by in _COLUMNS]
    columns += [(header, _bytes(key)) for header, key in _SIZES[1:]]
    cells = [[header, *(write(row) for row in rows)] for header, write in columns]
    cells.insert(0, ["model", *map(code, names)])
    kept = [column for column in cells if any(cell != _ABSENT for cell in column[1:])]
    lines = ["| " + " | ".join(line) + " |" for line in zip(*kept, strict=True)]
    lines.insert(1, "|---" + "|---:" * (len(kept) - 1) + "|")
    return "\n".join(["## Measured", "", *lines, "", *_protocol(evaluation)])


def index(evaluation: Evaluation, folder: Path) -> str:
    """Return the figures of the models in a folder as ``model-index`` of a front matter; errors as `chosen`."""
    from huggingface_hub import EvalResult, ModelCardData

    protocol = evaluation.protocol
    written: list[str] = []
    for row in chosen(evaluation, folder):
        arguments = {
            "tokens_sha256": protocol.tokens_sha256,
            "windows": protocol.windows,
            "length": protocol.length,
        }
        results = [
            EvalResult(
                task_type="text-generation",
                dataset_type="text",
                dataset_name=protocol.text,
                dataset_args=arguments,
                metric_type=kind,
                metric_name=name,
                metric_value=row[key],
            )
            for key, kind, name in _METRICS
            if row[key] is not None
        ]
        data = ModelCardData(model_name=Path(row["path"]).name, eval_results=results)
        written += str(data.to_yaml()).splitlines()[len(written) > 0 :]
    return "\n".join(written)


def chosen(evaluation: Evaluation, folder: Path) -> list[Row]:
    """Return the rows of the models that the card of a folder speaks of.

    Raises:
        UsageError: there is none.
    """
    rows = [row for row in evaluation.rows[1:] if is_in_folder(Path(row["path"]), folder)]
    if not rows:
        raise UsageError(f"--card {folder}: no model of it was measured")
    return rows


def _protocol(evaluation: Evaluation) -> list[str]:
    protocol = evaluation.protocol
    lines = [
        f"- {protocol}; token ids SHA-256 {code(protocol.tokens_sha256)}",
        "- KL is exact, of the source's distribution from the model's over the whole vocabulary;"
        " ± is one standard error over windows",
    ]
    if protocol.speed_dtype:
        lines.append(
            f"- speed and memory: one sequence, {protocol.speed_dtype} on {protocol.device},"
            f" {protocol.threads} thread(s), by QuantForge's own runtime"
        )
    return lines


def _figure(key: str, error: str, factor: float) -> Callable[[Row], str]:
    def write(row: Row) -> str:
        if row[key] is None or (key in _TIMED and displaced(row)):
            return _ABSENT
        return value_and_error(row[key], row[error]) if error else significant(row[key] * factor)

    return write


def _bytes(key: str) -> Callable[[Row], str]:
    return lambda row: _ABSENT if row[key] is None else size(row[key])
