"""Evaluation as two tables of text: quality, and speed with memory.

Models on the Pareto front have a mark before their name. The best values of the descendants are marked for whoever
draws the table; a perplexity has no best, since one below the reference is no gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quantforge.evaluation.columns import ABSENT, EXPERT, Column
from quantforge.evaluation.tasks import TASK_ERROR
from quantforge.evaluation.verdict import MARK, Verdict, displaced, pace
from quantforge.results.significant import significant, size, with_error

Row = Mapping[str, Any]
ON_FRONT = "*"
PERPLEXITY, IN_ENGINE = "perplexity", "perplexity in llama.cpp"
_OF_ENGINE = "llama_cpp_perplexity"
_ASKED = 1  # the rank of columns for which somebody gave an option: as that of the divergence, which stands before them


@dataclass(frozen=True, slots=True)
class _Figure:
    """A column to be: how a row is written, and by which figure (``key``) what is best is found."""

    header: str
    rank: int
    write: Callable[[Row], str]
    key: str = ""
    largest: bool = False
    broken: int = 0
    timed: bool = False  # a speed, which is not compared where other programs slowed it down


def quality_columns(rows: Sequence[Row], verdict: Verdict) -> list[Column]:
    """Return what a model is, how much it holds, and how far it is from the reference."""
    front = tuple(ON_FRONT if index in verdict.front else "" for index in range(len(rows)))
    return [
        Column("", front),
        Column("model", verdict.names),
        *_columns((*_quality(rows), *_tasks(rows), *_FILES), rows),
    ]


def speed_columns(rows: Sequence[Row], verdict: Verdict) -> list[Column]:
    """Return how fast a model is, and the memory that it takes; no column has a figure without a measurement."""
    return [Column("model", verdict.names), *_columns(_SPEED, rows)]


def _quality(rows: Sequence[Row]) -> Iterator[_Figure]:
    """Yield the columns; beside the perplexity of an engine that was asked for, ours was asked for too."""
    asked = any(row[_OF_ENGINE] is not None for row in rows)
    for figure in _QUALITY:
        yield replace(figure, rank=_ASKED) if asked and figure.header == PERPLEXITY else figure


def _columns(figures: Sequence[_Figure], rows: Sequence[Row]) -> Iterator[Column]:
    for figure in figures:
        cells = tuple(_cell(figure, row) for row in rows)
        yield Column(figure.header, cells, figure.rank, _best(figure, rows), figure.broken)


def _cell(figure: _Figure, row: Row) -> str:
    text = figure.write(row)
    marked = text == ABSENT or text.startswith(MARK) or not (figure.timed and displaced(row))
    return text if marked else f"{MARK}{text}"


def _best(figure: _Figure, rows: Sequence[Row]) -> frozenset[int]:
    """Return the descendants with the best value, where there are several values."""
    found = {
        index: row[figure.key]
        for index, row in enumerate(rows)
        if figure.key
        and index
        and row[figure.key] is not None
        and not (figure.timed and displaced(row))
    }
    if len({*found.values()}) < 2:
        return frozenset()
    best = (max if figure.largest else min)(found.values())
    return frozenset(index for index, value in found.items() if value == best)


def _plain(
    key: str, scale: float = 1.0, *, error: str = "", sign: bool = False
) -> Callable[[Row], str]:
    """Write a figure with three significant digits, and its standard error where there is one."""

    def write(row: Row) -> str:
        if row[key] is None:
            return ABSENT
        if error:
            known = row[error]
            return with_error(row[key] * scale, None if known is None else known * scale)
        return significant(row[key] * scale, sign=sign)

    return write


def _bytes(key: str) -> Callable[[Row], str]:
    return lambda row: ABSENT if row[key] is None else size(row[key])


def _duration(key: str) -> Callable[[Row], str]:
    def write(row: Row) -> str:
        seconds = row[key]
        if seconds is None:
            return ABSENT
        return f"{significant(1000 * seconds)} ms" if seconds < 1 else f"{significant(seconds)} s"

    return write


def _pace(row: Row) -> str:
    return ABSENT if row["decode_tokens_per_second"] is None else pace(row)


def _at_batch(batch: int, row: Row) -> str:
    found = row["decode_by_batch"]
    return ABSENT if found is None else significant(found[str(batch)])


def _by_prompt(row: Row) -> str:
    found = row["ttft_by_prompt"]
    if found is None:
        return ABSENT
    return ", ".join(f"{tokens}: {significant(1000 * found[tokens])} ms" for tokens in found)


def _kernels(row: Row) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in row["kernels"].items())


def _tasks(rows: Sequence[Row]) -> list[_Figure]:
    """Return one column per task and metric; standard errors stand beside their figure."""
    asked = dict.fromkeys(
        (task, metric)
        for row in rows
        for task, figures in (row["tasks"] or {}).items()
        for metric in figures
        if not metric.endswith(TASK_ERROR)
    )
    return [
        _Figure(f"{task} {metric}", _ASKED, partial(_task, task, metric)) for task, metric in asked
    ]


def _task(task: str, metric: str, row: Row) -> str:
    figures = (row["tasks"] or {}).get(task, {})
    if metric not in figures:
        return ABSENT
    return with_error(figures[metric], figures.get(metric + TASK_ERROR))


def _generated(key: str, row: Row) -> str:
    """Write a figure of the answers to prompts, which the reference has not."""
    found = (row["generated"] or {}).get(key)
    return ABSENT if found is None else significant(found)


def _answers(row: Row) -> str:
    found = row["generated"]
    if found is None or found.get("kl_mean") is None:
        return ABSENT
    return with_error(found["kl_mean"], found.get("kl_se"))


_QUALITY = (
    _Figure("weights", 2, _bytes("weight_bytes"), "weight_bytes"),
    _Figure("bits", 2, _plain("bits_per_weight")),
    _Figure("KL", 1, _plain("kl_mean", error="kl_se"), "kl_mean"),
    _Figure("KL of answers", _ASKED, _answers),
    _Figure("KL p99", 4, _plain("kl_p99"), "kl_p99"),
    _Figure("top-1 %", 3, _plain("top1_agreement", 100), "top1_agreement", largest=True),
    _Figure(PERPLEXITY, 3, _plain("perplexity", error="perplexity_se")),
    _Figure(IN_ENGINE, _ASKED, _plain(_OF_ENGINE), broken=len("in llama.cpp")),
    _Figure("rise %", 5, _plain("perplexity_increase", 100, sign=True)),
    _Figure("parts after", 4, partial(_generated, "same_tokens")),
    _Figure("length", 6, partial(_generated, "length_ratio")),
    _Figure("KL median", 7, _plain("kl_median"), "kl_median"),
)
_FILES = (
    _Figure("format", 6, lambda row: str(row["format"])),
    _Figure("scheme", 6, lambda row: str(row["scheme"])),
    _Figure("bits of all", EXPERT, _plain("bits_per_weight_total")),
    _Figure(
        "KV cache", EXPERT, lambda row: ABSENT if row["kv_cache"] == "none" else row["kv_cache"]
    ),
)
_SPEED = (
    _Figure("tokens/s", 1, _pace, "decode_tokens_per_second", largest=True, timed=True),
    _Figure("batch 4", 3, partial(_at_batch, 4), timed=True),
    _Figure("batch 16", 4, partial(_at_batch, 16), timed=True),
    _Figure(
        "prompt tokens/s", 2, _plain("prefill_tokens_per_second"), "prefill_tokens_per_second", largest=True, timed=True
    ),
    _Figure("first token", 3, _duration("ttft_seconds"), "ttft_seconds", timed=True),
    _Figure("peak memory", 2, _bytes("peak_bytes"), "peak_bytes"),
    _Figure("read/token", 5, _bytes("read_bytes_per_token"), "read_bytes_per_token"),
    _Figure("cache/token", 6, _bytes("kv_bytes_per_token")),
    _Figure("processor %", 5, _plain("processor_share", 100)),
    _Figure("decoder", 6, lambda row: row["decoder"] or ABSENT),
    _Figure("kernels", 7, _kernels),
    _Figure("bandwidth %", EXPERT, _plain("bandwidth_use", 100)),
    _Figure("first token by prompt", EXPERT, _by_prompt, timed=True),
)  # fmt: skip
