"""Findings of a bench as columns and lines, for a terminal and a page, and the command that makes them again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantforge.evaluation.columns import ABSENT, Column
from quantforge.evaluation.serving_load.load_options import LoadFound, LoadOptions, LoadRow
from quantforge.evaluation.serving_load.stream_of_requests import LengthRange
from quantforge.results.significant import significant


def columns_of(found: LoadFound, *, named: bool = False) -> list[Column]:
    """Return all columns; with ``named``, models have the last part of their paths for a name."""
    rows, ladder = found.rows, found.options.ladder
    short = named and not ladder and not found.options.url
    return [
        Column(
            "technique" if ladder else "model",
            tuple(Path(row.name).name if short else row.name for row in rows),
        ),
        Column("tokens/s", tuple(significant(row.figures.tokens_per_second) for row in rows)),
        *_latencies(rows),
        Column("goodput/s", tuple(_or_absent(row.figures.goodput) for row in rows), 1),
        Column("cost/M", tuple(_or_absent(row.figures.cost) for row in rows), 1),
        Column("failed", tuple(str(row.figures.failed or ABSENT) for row in rows)),
    ]


def lines_of(found: LoadFound, *, named: bool = False) -> Iterator[str]:
    """Yield what is to be known of the figures, line by line; ``named`` as for `columns_of`."""
    rows, asked, forecast = found.rows, found.options, found.forecast
    short = named and not asked.ladder
    stream = rows[-1].figures
    yield (
        f"{stream.requests} requests, {stream.prompt_tokens} tokens of prompts and {stream.new_tokens} new ones; "
        "TTFT counts from the arrival, waiting included; TPOT is the mean time of an answer's further tokens; "
        "p50 and p99 are percentiles"
    )
    if asked.ladder:
        yield f"'{rows[0].name}' computed {rows[0].figures.new_tokens} tokens of the first request alone"
    for row in rows:
        if row.engine is not None:
            said = _of_engine(row.engine, row.wasted, guessing=bool(asked.drafts.draft))
            yield f"{Path(row.name).name if short else row.name}: {said}"
    yield (
        f"by arithmetic: static batches of {asked.rows} are {forecast['static']:.0%} busy with tokens, continuous ones "
        f"{forecast['continuous']:.0%}; a contiguous cache wastes {forecast['contiguous_waste']:.0%}, "
        f"a paged one {forecast['paged_waste']:.1%}"
    )


def bench_command(found: LoadFound) -> str:
    """Return the command that measures the same again: files and directories are named, and have to be there."""
    names = [Path(name).name for name in found.models]
    return shlex.join(["quantforge", "bench", *names, *_words(found.options, found.input_bits)])


def _words(asked: LoadOptions, bits: int) -> Iterator[str]:
    """Yield the options that differ from the usual ones."""
    usual, stream = LoadOptions(), asked.stream
    price = None if asked.price is None else f"{asked.price:g}/h"
    slo = asked.slo and ",".join(
        f"{name}={seconds:g}s"
        for name in ("ttft", "tpot", "e2e")
        if (seconds := getattr(asked.slo, name)) is not None
    )
    valued = {
        "--requests": (stream.requests, usual.stream.requests),
        "--rate": (stream.rate, usual.stream.rate),
        "--trace": (asked.trace and asked.trace.name, None),
        "--prompt-tokens": (_range(stream.prompt), _range(usual.stream.prompt)),
        "--new-tokens": (_range(stream.new), _range(usual.stream.new)),
        "--shared-tokens": (stream.shared, usual.stream.shared),
        "--share": (f"{100 * stream.share:g}%", "100%"),
        "--text": (asked.text if asked.text == usual.text else Path(asked.text).name, usual.text),
        "--seed": (stream.seed, usual.stream.seed),
        "--slo": (slo, None),
        "--price": (price, None),
        "--rows": (asked.rows, usual.rows),
        "--token-budget": (asked.token_budget, usual.token_budget),
        "--cache": (asked.cache, usual.cache),
        "--draft": (Path(asked.drafts.draft).name, usual.drafts.draft),
        "--draft-tokens": (asked.drafts.tokens, usual.drafts.tokens),
        "--draft-tree": (asked.drafts.tree, usual.drafts.tree),
        "--input-bits": (bits, 16),
        "--url": (asked.url, usual.url),
        "--served-name": (asked.served_name, usual.served_name),
    }
    for flag, (value, other) in valued.items():
        if value != other:
            yield from (flag, str(value))
    yield from ["--ladder"] if asked.ladder else []
    yield from ["--static"] if asked.batching != usual.batching else []
    yield from [] if asked.chunked_prefill else ["--whole-prompts"]
    yield from [] if asked.prefix_cache else ["--no-prefix-cache"]


def _range(lengths: LengthRange) -> str:
    same = lengths.least == lengths.most
    return str(lengths.least) if same else f"{lengths.least}..{lengths.most}"


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
