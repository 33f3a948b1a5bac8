"""Evaluation as tables of text: quality, speed with memory, caches; with notes on what the figures mean.

Models on the Pareto front have a mark before their name. The best values of the descendants are marked in the
columns; a perplexity has no best, since one below the reference is not a gain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quantforge.artifacts.number_text import significant, size, value_and_error
from quantforge.evaluation.columns import ABSENT, EXPERT, Column, fitting, left_out
from quantforge.evaluation.tasks import TASK_ERROR
from quantforge.evaluation.verdict import MARK, Verdict, displaced, pace, unsteady

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation

Row = Mapping[str, Any]
Table = tuple[str, list[Column]]  # with its title
ON_FRONT = "*"
PERPLEXITY, IN_ENGINE = "perplexity", "perplexity in llama.cpp"
_OF_ENGINE = "llama_cpp_perplexity"
_ASKED = 1  # the rank of columns that an option asks for: as that of the divergence, which stands before them
FOREIGN = 100  # perplexity of a reference from which on the text is not of the kind that it was trained on
ANSWERS = {  # columns on answers
    "KL of answers": "as KL, along these answers, ± over prompts",
    "parts after": "mean tokens for which a model's own answer is the reference's",
    "length": "of a model's own answers, 1 is as long as the reference's",
}
FIRST_RANK = 2  # of columns of caches by position or distance: the farthest stays longest


def tables(evaluation: Evaluation, width: int | None, *, wide: bool = False) -> list[Table]:
    """Return the tables with their titles: quality, and speed and caches where they were measured; see `fitting`."""
    return [
        (title, fitting(columns, width, wide=wide)) for title, columns in _all_tables(evaluation)
    ]


def _all_tables(evaluation: Evaluation) -> list[Table]:
    rows, verdict = evaluation.rows, evaluation.verdict
    against = f", against {verdict.names[0]} (the reference)" if len(rows) > 1 else ""
    drawn = [(f"Quality{against}", quality_columns(rows, verdict))]
    if evaluation.protocol.speed_dtype:
        drawn.append(("Speed and memory", speed_columns(rows, verdict)))
    return drawn + cache_tables(rows, verdict.names)


def absent_columns(evaluation: Evaluation, drawn: Sequence[Table]) -> str:
    """Return a line on the columns that the tables of `tables` lack, see `left_out`."""
    everything = [column for _, columns in _all_tables(evaluation) for column in columns]
    return left_out(everything, [column for _, columns in drawn for column in columns])


def titles(drawn: Sequence[Table]) -> frozenset[str]:
    """Return the titles of all columns of some tables."""
    return frozenset(column.header for _, columns in drawn for column in columns)


def notes(evaluation: Evaluation, shown: Collection[str]) -> tuple[str, ...]:
    """Return the notes under the tables: the protocol, and what the figures mean.

    Args:
        evaluation: whose they are.
        shown: titles of the columns that are drawn; notes on others are left out.
    """
    protocol = evaluation.protocol
    error, meanings = "± is one standard error over windows", []
    if "KL" in shown:
        meanings.append("KL: exact, reference against model, whole vocabulary, nats per token")
        error += ", of differences paired by window"
    if {"KL", "perplexity"} & {*shown}:
        meanings.append(error)
    if "bits" in shown:
        meanings.append("bits: of a quantized weight, head and embedding included where they are")
    lines = [f"protocol: {protocol}; token ids sha256 {protocol.tokens_sha256[:16]}"]
    lines += ["; ".join(meanings)] if meanings else []
    if IN_ENGINE in shown:
        lines.append(
            f"{IN_ENGINE}: of the same tokens, by the engine's own arithmetic, which also quantizes activations; all"
            " other figures are by QuantForge's own runtime"
        )
    lines += _of_answers(evaluation, shown)
    reference = evaluation.rows[0]["perplexity"]
    if "perplexity" in shown and reference is not None and reference > FOREIGN:
        lines.append(
            f"perplexity {significant(reference)} of the reference: it was not trained on text of this kind (or is"
            " damaged), and perplexity says little then; KL compares with it on any text; --text FILE scores another"
        )
    lines += _of_caches(evaluation.caches)
    if protocol.speed_dtype:
        lines.append(_of_speed(evaluation, shown))
    return tuple(lines)


def _of_answers(evaluation: Evaluation, shown: Collection[str]) -> list[str]:
    """Return the line on prompts and answers, none where there are none or no figure of them is shown."""
    asked = evaluation.options.prompts
    explained = [f"{one}: {ANSWERS[one]}" for one in ANSWERS if one in shown]
    if asked is None or not explained:
        return []
    answers = evaluation.rows[0]["generated"]["answers"]
    count, tokens = len(answers), sum(one["tokens"] for one in answers)
    prompts = f"{count} prompt{'s' * (count > 1)} ({asked.name})"
    text = f"answers: the reference's, always its most likely token, to {prompts}"
    text += f", {tokens} tokens in all, at most {asked.new_tokens} each"
    return ["; ".join([text, *explained])]


def _of_speed(evaluation: Evaluation, shown: Collection[str]) -> str:
    protocol = evaluation.protocol
    text = f"speed and memory: one sequence where no batch is named, {protocol.speed_dtype}"
    if protocol.device == "cpu":
        text += ", 1 thread" if protocol.threads == 1 else f", {protocol.threads} threads"
    used = {row["decoder"] for row in evaluation.rows if row["decoder"]}
    if len(used) > 1:
        named = "" if "decoder" in shown else " (--wide names them)"
        text += f"; decoders differ{named}, and their figures do not compare"
    names = zip(evaluation.verdict.names, evaluation.rows, strict=True)
    if marked := [name for name, row in names if unsteady(row)]:
        text += f"; {MARK}: unsteady, as on a machine with other work: {', '.join(marked)}"
    shares = [
        row["processor_share"] for row in evaluation.rows if row["processor_share"] is not None
    ]
    if shares:
        text += (
            f"; the threads got {min(shares):.0%} or more of the processor time that they asked for"
        )
    if "bandwidth %" in shown:
        text += "; bandwidth: share of the measured read bandwidth"
    return text


def _of_caches(trial: Mapping[str, Any] | None) -> list[str]:
    """Return the line on how caches were tried."""
    if trial is None:
        return []
    windows = (
        f"{trial['windows']} window{'s' * (trial['windows'] != 1)} of {trial['length']:,} tokens"
    )
    text = f"caches: {windows}, float32 from keys and values in 16 bits; requests: of {trial['length']:,} tokens"
    text += f" in the memory that {trial['requests']} take with a cache of 16 bits, by pages"
    if trial["keys"]:
        text += (
            f"; keys: {trial['key_tokens']} random tokens of the text behind a cue of {trial['cue_tokens']}, planted"
            f" once, then the cue again ({trial['keys']} prompts); gain: of a token's log-probability against another"
            " key's having been planted; where it is near 0 with 16 bits, the model does not look so far back"
        )
    return [text]


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
    values = {
        index: row[figure.key]
        for index, row in enumerate(rows)
        if figure.key
        and index
        and row[figure.key] is not None
        and not (figure.timed and displaced(row))
    }
    if len({*values.values()}) < 2:
        return frozenset()
    best = (max if figure.largest else min)(values.values())
    return frozenset(index for index, value in values.items() if value == best)


def _number(
    key: str, scale: float = 1.0, *, error: str = "", sign: bool = False
) -> Callable[[Row], str]:
    """Write a figure with three significant digits, and its standard error where there is one."""

    def write(row: Row) -> str:
        if row[key] is None:
            return ABSENT
        if error:
            known = row[error]
            return value_and_error(row[key] * scale, None if known is None else known * scale)
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
    figures = row["decode_by_batch"]
    return ABSENT if figures is None else significant(figures[str(batch)])


def _by_prompt(row: Row) -> str:
    figures = row["ttft_by_prompt"]
    if figures is None:
        return ABSENT
    return ", ".join(f"{tokens}: {significant(1000 * figures[tokens])} ms" for tokens in figures)


def _kernels(row: Row) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in row["kernels"].items())


def _tasks(rows: Sequence[Row]) -> list[_Figure]:
    """Return one column per task and metric; standard errors stand beside their figure."""
    return [
        _Figure(f"{task} {metric}", _ASKED, partial(_task, task, metric))
        for task, metric in metrics_of(rows)
    ]


def metrics_of(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the tasks with their metrics, in the order of the rows; standard errors are not among them."""
    metrics = dict.fromkeys(
        (task, metric)
        for row in rows
        for task, figures in (row["tasks"] or {}).items()
        for metric in figures
        if not metric.endswith(TASK_ERROR)
    )
    return [*metrics]


def _task(task: str, metric: str, row: Row) -> str:
    figures = (row["tasks"] or {}).get(task, {})
    if metric not in figures:
        return ABSENT
    return value_and_error(figures[metric], figures.get(metric + TASK_ERROR))


def _generated(key: str, row: Row) -> str:
    """Write a figure of the answers to prompts, which the reference has not."""
    answers = (row["generated"] or {}).get(key)
    return ABSENT if answers is None else significant(answers)


def _answers(row: Row) -> str:
    answers = row["generated"]
    if answers is None or answers.get("kl_mean") is None:
        return ABSENT
    return value_and_error(answers["kl_mean"], answers.get("kl_se"))


_QUALITY = (
    _Figure("weights", 2, _bytes("weight_bytes"), "weight_bytes"),
    _Figure("bits", 2, _number("bits_per_weight")),
    _Figure("KL", 1, _number("kl_mean", error="kl_se"), "kl_mean"),
    _Figure("KL of answers", _ASKED, _answers),
    _Figure("KL p99", 4, _number("kl_p99"), "kl_p99"),
    _Figure("top-1 %", 3, _number("top1_agreement", 100), "top1_agreement", largest=True),
    _Figure(PERPLEXITY, 3, _number("perplexity", error="perplexity_se")),
    _Figure(IN_ENGINE, _ASKED, _number(_OF_ENGINE), broken=len("in llama.cpp")),
    _Figure("rise %", 5, _number("perplexity_increase", 100, sign=True)),
    _Figure("parts after", 4, partial(_generated, "same_tokens")),
    _Figure("length", 6, partial(_generated, "length_ratio")),
    _Figure("KL median", 7, _number("kl_median"), "kl_median"),
)
_FILES = (
    _Figure("format", 6, lambda row: str(row["format"])),
    _Figure("scheme", 6, lambda row: str(row["scheme"])),
    _Figure("bits of all", EXPERT, _number("bits_per_weight_total")),
    _Figure(
        "KV cache", EXPERT, lambda row: ABSENT if row["kv_cache"] == "none" else row["kv_cache"]
    ),
)
_SPEED = (
    _Figure("tokens/s", 1, _pace, "decode_tokens_per_second", largest=True, timed=True),
    _Figure("batch 4", 3, partial(_at_batch, 4), timed=True),
    _Figure("batch 16", 4, partial(_at_batch, 16), timed=True),
    _Figure(
        "prompt tokens/s", 2, _number("prefill_tokens_per_second"), "prefill_tokens_per_second",
        largest=True, timed=True,
    ),
    _Figure("first token", 3, _duration("ttft_seconds"), "ttft_seconds", timed=True),
    _Figure("peak memory", 2, _bytes("peak_bytes"), "peak_bytes"),
    _Figure("read/token", 5, _bytes("read_bytes_per_token"), "read_bytes_per_token"),
    _Figure("cache/token", 6, _bytes("kv_bytes_per_token")),
    _Figure("processor %", 5, _number("processor_share", 100)),
    _Figure("decoder", 6, lambda row: row["decoder"] or ABSENT),
    _Figure("kernels", 7, _kernels),
    _Figure("bandwidth %", EXPERT, _number("bandwidth_use", 100)),
    _Figure("first token by prompt", EXPERT, _by_prompt, timed=True),
)  # fmt: skip


def cache_tables(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[str, list[Column]]]:
    """Return the tables with their titles; none without caches.

    Args:
        rows: of the models.
        names: theirs.
    """
    labelled = [*_labelled_caches(rows, names)]
    if not labelled:
        return []
    label = Column("cache", tuple(name for name, _ in labelled))
    caches = [cache for _, cache in labelled]
    tables = [
        ("Caches, each against one of 16 bits", [label, *_summary_of_caches(caches)]),
        (
            "KL by position: tokens attended to, up to",
            [label, *_columns_by_place(caches, "by_position", "last", _divergence)],
        ),
        (
            "Nats that a planted key gains, by how far back it is",
            [label, *_columns_by_place(caches, "by_distance", "distance", _gain)],
        ),
    ]
    return [(title, columns) for title, columns in tables if len(columns) > 1]


def _labelled_caches(rows: Sequence[Row], names: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield every cache of every model with its label: its name alone where there is one model."""
    for name, row in zip(names, rows, strict=True):
        for cache in row["caches"] or ():
            yield (cache["kind"] if len(rows) == 1 else f"{name} {cache['kind']}"), cache


def _summary_of_caches(caches: Sequence[Row]) -> Iterator[Column]:
    def column(header: str, rank: int, write: Callable[[Row], str]) -> Column:
        return Column(header, tuple(write(cache) for cache in caches), rank)

    yield column("bytes/token", 2, lambda cache: f"{cache['token_bytes']:,}")
    yield column("requests", 2, lambda cache: f"{cache['requests']:,}")
    yield column("KL", 1, lambda cache: _with_error(cache, "kl_mean", "kl_se"))
    yield column("key gain", 2, _gain)
    yield column("change of it", 3, lambda cache: _with_error(cache, "key_change", "key_change_se"))
    yield column("keys %", 4, _share_of_keys)


def _columns_by_place(
    caches: Sequence[Row], key: str, name: str, write: Callable[[Row], str]
) -> Iterator[Column]:
    """Yield one column for every position, or distance."""
    places = list(dict.fromkeys(one[name] for cache in caches for one in cache[key]))
    for number, place in enumerate(places):
        cells = tuple(
            next((write(one) for one in cache[key] if one[name] == place), ABSENT)
            for cache in caches
        )
        yield Column(f"{place:,}", cells, FIRST_RANK + len(places) - number)


def _divergence(figures: Row) -> str:
    return significant(figures["kl_mean"])


def _gain(figures: Row) -> str:
    return ABSENT if figures["key_gain"] is None else significant(figures["key_gain"])


def _share_of_keys(figures: Row) -> str:
    share = figures["keys_found"]
    return ABSENT if share is None else significant(100 * share)


def _with_error(figures: Row, mean: str, error: str) -> str:
    return ABSENT if figures[mean] is None else value_and_error(figures[mean], figures[error])
