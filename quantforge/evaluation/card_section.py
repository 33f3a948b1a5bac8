"""Measured results for a model card: a Markdown section, and ``model-index`` metadata for the hub.

The section lists the reference and every evaluated model in the directory of the card, followed by the protocol,
because results without their protocol cannot be compared. `quantforge.artifacts.card_figures` inserts both into the
card.
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
from quantforge.evaluation.verdict import short_names, was_slowed_down
from quantforge.files.hub import source_name

Row = Mapping[str, Any]
_ABSENT = "-"
# Header, key of the figure, key of its standard error, factor.
_COLUMNS = (
    ("bits of all weights", "bits_per_weight_total", "", 1.0),
    ("perplexity", "perplexity", "perplexity_se", 1.0),
    ("KL, nats per token", "kl_mean", "kl_se", 1.0),
    ("same first token, %", "top1_agreement", "", 100.0),
    ("tokens per second", "decode_tokens_per_second", "", 1.0),
    ("first token, s", "ttft_seconds", "", 1.0),
)
# Omitted if other programs slowed the measurement down
_SPEED_KEYS = ("decode_tokens_per_second", "ttft_seconds")
_SIZE_COLUMNS = (("weights", "weight_bytes"), ("peak memory", "peak_bytes"))
# Key of the figure, metric type on the hub, metric name.
_HUB_METRICS = (
    ("perplexity", "perplexity", "Perplexity"),
    ("kl_mean", "kl_divergence", "KL divergence from the source, nats per token"),
    ("top1_agreement", "agreement", "Share of tokens whose most likely successor is the source's"),
)


def measured_section(evaluation: Evaluation, folder: Path) -> str:
    """Return the results of the models in a directory as a Markdown section; raises as `rows_in_folder` does."""
    rows = [evaluation.rows[0], *rows_in_folder(evaluation, folder)]
    names = [source_name(Path(rows[0]["path"]))[0], *short_names([row["path"] for row in rows[1:]])]
    columns: list[tuple[str, Callable[[Row], str]]] = []
    columns += [(header, _size_writer(key)) for header, key in _SIZE_COLUMNS[:1]]
    columns += [
        (header, _figure_writer(key, error, factor)) for header, key, error, factor in _COLUMNS
    ]
    columns += [(header, _size_writer(key)) for header, key in _SIZE_COLUMNS[1:]]
    text_columns = [[header, *(write_cell(row) for row in rows)] for header, write_cell in columns]
    text_columns.insert(0, ["model", *map(code, names)])
    columns_with_values = [
        column for column in text_columns if any(cell != _ABSENT for cell in column[1:])
    ]
    lines = ["| " + " | ".join(line) + " |" for line in zip(*columns_with_values, strict=True)]
    lines.insert(1, "|---" + "|---:" * (len(columns_with_values) - 1) + "|")
    return "\n".join(["## Measured", "", *lines, "", *_protocol_lines(evaluation)])


def model_index(evaluation: Evaluation, folder: Path) -> str:
    """Return the results of the models in a directory as ``model-index`` YAML; raises as `rows_in_folder` does."""
    from huggingface_hub import EvalResult, ModelCardData

    protocol = evaluation.protocol
    yaml_lines: list[str] = []
    for row in rows_in_folder(evaluation, folder):
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
                metric_type=metric_type,
                metric_name=name,
                metric_value=row[key],
            )
            for key, metric_type, name in _HUB_METRICS
            if row[key] is not None
        ]
        card_data = ModelCardData(model_name=Path(row["path"]).name, eval_results=results)
        yaml_lines += str(card_data.to_yaml()).splitlines()[len(yaml_lines) > 0 :]
    return "\n".join(yaml_lines)


def rows_in_folder(evaluation: Evaluation, folder: Path) -> list[Row]:
    """Return the rows of the models in the directory of a card.

    Raises:
        UsageError: no model in the directory was measured.
    """
    rows = [row for row in evaluation.rows[1:] if is_in_folder(Path(row["path"]), folder)]
    if not rows:
        raise UsageError(f"--card {folder}: no model of it was measured")
    return rows


def _protocol_lines(evaluation: Evaluation) -> list[str]:
    """Return the evaluation protocol as a Markdown list."""
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


def _figure_writer(key: str, error: str, factor: float) -> Callable[[Row], str]:
    """Return a function that formats one figure of a row, with its standard error if ``error`` names one."""

    def write(row: Row) -> str:
        if row[key] is None or (key in _SPEED_KEYS and was_slowed_down(row)):
            return _ABSENT
        return value_and_error(row[key], row[error]) if error else significant(row[key] * factor)

    return write


def _size_writer(key: str) -> Callable[[Row], str]:
    """Return a function that formats one size in bytes of a row."""
    return lambda row: _ABSENT if row[key] is None else size(row[key])
