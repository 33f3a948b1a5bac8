"""Findings of a bench as columns and lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantforge.evaluation.columns import ABSENT, Column
from quantforge.evaluation.serving_load.load_options import LoadFound, LoadRow
from quantforge.results.significant import significant


def columns_of(found: LoadFound) -> list[Column]:
    """Return all columns."""
    rows = found.rows
    return [
        Column("model", tuple(row.name for row in rows)),
        Column("tokens/s", tuple(significant(row.figures.tokens_per_second) for row in rows)),
        *_latencies(rows),
        Column("goodput/s", tuple(_or_absent(row.figures.goodput) for row in rows), 1),
        Column("cost/M", tuple(_or_absent(row.figures.cost) for row in rows), 1),
        Column("failed", tuple(str(row.figures.failed or ABSENT) for row in rows)),
    ]


def lines_of(found: LoadFound) -> Iterator[str]:
    """Yield what is to be known of the figures, line by line."""
    rows, asked = found.rows, found.options
    stream = rows[-1].figures
    yield (
        f"{stream.requests} requests, {stream.prompt_tokens} tokens of prompts and {stream.new_tokens} new ones; "
        "TTFT counts from the arrival, waiting included; TPOT is the mean time of an answer's further tokens; "
        "p50 and p99 are percentiles"
    )
    for row in rows:
        if row.engine is not None:
            said = _of_engine(row.engine, row.wasted, guessing=bool(asked.drafts.draft))
            yield f"{row.name}: {said}"


def _latencies(rows: Sequence[LoadRow]) -> list[Column]:
    found = []
    for title, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("e2e", "end_to_end")):
        for percentile in (50, 99):
            cells = tuple(_milliseconds(getattr(row.figures, key).get(percentile)) for row in rows)
            found.append(Column(f"{title} p{percentile}", cells, rank=2 if key != "e2e" else 3))
    return found


def _of_engine(counts: Mapping[str, Any], wasted: float | None, *, guessing: bool) -> str:
    scheduling = counts["scheduling_seconds"] / (counts["step_seconds"] or 1)
    text = f"{counts['steps']} steps, {scheduling:.1%} of their time spent scheduling"
    if wasted is not None:
        text += f"; {wasted:.1%} of the reserved cache unused"
    if counts["preemptions"]:
        text += f"; {counts['preemptions']} preemptions"
    guesses = counts["speculation"]
    if guesses["guessed"]:
        share = f"{guesses['accepted']} of {guesses['guessed']} guesses right"
        text += f"; {share}, {guesses['came'] / guesses['checked']:.3g} tokens a checked pass"
    elif guessing:
        text += "; no guess was made"
    return text


def _or_absent(value: float | None) -> str:
    return ABSENT if value is None else significant(value)


def _milliseconds(value: float | None) -> str:
    return ABSENT if value is None else significant(1e3 * value)
