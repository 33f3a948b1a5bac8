"""Text tables of an evaluation (quality, speed and memory, caches), with notes that explain the columns.

Models on the Pareto front have a mark before their name. The best values of the compared models are marked in their
columns; perplexity has no best value, because a perplexity below that of the reference is not an improvement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quantforge.artifacts.number_text import significant, size, value_and_error
from quantforge.evaluation.columns import (
    ABSENT,
    EXPERT_RANK,
    Column,
    describe_omitted,
    select_columns,
)
from quantforge.evaluation.tasks import STDERR_SUFFIX
from quantforge.evaluation.verdict import (
    UNRELIABLE_MARK,
    Verdict,
    format_speed,
    is_unsteady,
    was_slowed_down,
)

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation

Row = Mapping[str, Any]
Table = tuple[str, list[Column]]  # title and columns
PARETO_MARK = "*"
PERPLEXITY_HEADER, LLAMA_CPP_HEADER = "perplexity", "perplexity in llama.cpp"
_LLAMA_CPP_KEY = "llama_cpp_perplexity"
_REQUESTED_RANK = 1  # rank of columns that an option requests, the same as that of the divergence
UNFAMILIAR_PERPLEXITY = 100  # above it, the reference was not trained on text of this kind
ANSWER_COLUMNS = {  # headers of columns about answers, with explanations
    "KL of answers": "as KL, along these answers, ± over prompts",
    "parts after": "mean tokens for which a model's own answer is the reference's",
    "length": "of a model's own answers, 1 is as long as the reference's",
}
CACHE_COLUMN_RANK = 2  # rank of cache columns by position; the farthest position has the lowest


def build_tables(evaluation: Evaluation, width: int | None, *, wide: bool = False) -> list[Table]:
    """Return the tables with their titles: quality, and speed and caches if measured; see `select_columns`."""
    return [
        (title, select_columns(columns, width, wide=wide))
        for title, columns in _all_tables(evaluation)
    ]


def _all_tables(evaluation: Evaluation) -> list[Table]:
    """Return all tables with all their columns."""
    rows, verdict = evaluation.rows, evaluation.verdict
    reference_text = f", against {verdict.names[0]} (the reference)" if len(rows) > 1 else ""
    tables = [(f"Quality{reference_text}", quality_columns(rows, verdict))]
    if evaluation.protocol.speed_dtype:
        tables.append(("Speed and memory", speed_columns(rows, verdict)))
    return tables + cache_tables(rows, verdict.names)


def describe_omitted_columns(evaluation: Evaluation, shown_tables: Sequence[Table]) -> str:
    """Return a line that lists the columns missing from the shown tables; see `describe_omitted`."""
    all_columns = [column for _, columns in _all_tables(evaluation) for column in columns]
    return describe_omitted(
        all_columns, [column for _, columns in shown_tables for column in columns]
    )


def column_headers(tables: Sequence[Table]) -> frozenset[str]:
    """Return the headers of all columns of some tables."""
    return frozenset(column.header for _, columns in tables for column in columns)


def notes(evaluation: Evaluation, headers: Collection[str]) -> tuple[str, ...]:
    """Return the notes below the tables: the protocol, and explanations of the columns.

    Args:
        evaluation: the evaluation.
        headers: headers of the shown columns; notes on other columns are omitted.
    """
    protocol = evaluation.protocol
    error_text, explanations = "± is one standard error over windows", []
    if "KL" in headers:
        explanations.append("KL: exact, reference against model, whole vocabulary, nats per token")
        error_text += ", of differences paired by window"
    if {"KL", "perplexity"} & {*headers}:
        explanations.append(error_text)
    if "bits" in headers:
        explanations.append(
            "bits: of a quantized weight, head and embedding included where they are"
        )
    lines = [f"protocol: {protocol}; token ids sha256 {protocol.tokens_sha256[:16]}"]
    lines += ["; ".join(explanations)] if explanations else []
    if LLAMA_CPP_HEADER in headers:
        lines.append(
            f"{LLAMA_CPP_HEADER}: of the same tokens, by the engine's own arithmetic, which also quantizes activations;"
            " all other figures are by QuantForge's own runtime"
        )
    lines += _answers_note(evaluation, headers)
    reference = evaluation.rows[0]["perplexity"]
    if "perplexity" in headers and reference is not None and reference > UNFAMILIAR_PERPLEXITY:
        lines.append(
            f"perplexity {significant(reference)} of the reference: it was not trained on text of this kind (or is"
            " damaged), and perplexity says little then; KL compares with it on any text; --text FILE scores another"
        )
    lines += _caches_note(evaluation.caches)
    if protocol.speed_dtype:
        lines.append(_speed_note(evaluation, headers))
    return tuple(lines)


def _answers_note(evaluation: Evaluation, headers: Collection[str]) -> list[str]:
    """Return the line that explains prompts and answers; [] if no column about answers is shown."""
    prompts = evaluation.options.prompts
    explained = [
        f"{header}: {text}" for header, text in ANSWER_COLUMNS.items() if header in headers
    ]
    if prompts is None or not explained:
        return []
    answers = evaluation.rows[0]["generated"]["answers"]
    count, tokens = len(answers), sum(answer["tokens"] for answer in answers)
    prompts_text = f"{count} prompt{'s' * (count > 1)} ({prompts.name})"
    text = f"answers: the reference's, always its most likely token, to {prompts_text}"
    text += f", {tokens} tokens in all, at most {prompts.new_tokens} each"
    return ["; ".join([text, *explained])]


def _speed_note(evaluation: Evaluation, headers: Collection[str]) -> str:
    """Return the line that explains the conditions of the speed measurement."""
    protocol = evaluation.protocol
    text = f"speed and memory: one sequence where no batch is named, {protocol.speed_dtype}"
    if protocol.device == "cpu":
        text += ", 1 thread" if protocol.threads == 1 else f", {protocol.threads} threads"
    decoders = {row["decoder"] for row in evaluation.rows if row["decoder"]}
    if len(decoders) > 1:
        hint = "" if "decoder" in headers else " (--wide names them)"
        text += f"; decoders differ{hint}, and their figures do not compare"
    names = zip(evaluation.verdict.names, evaluation.rows, strict=True)
    if unsteady_models := [name for name, row in names if is_unsteady(row)]:
        text += f"; {UNRELIABLE_MARK}: unsteady, as on a machine with other work: {', '.join(unsteady_models)}"
    shares = [
        row["processor_share"] for row in evaluation.rows if row["processor_share"] is not None
    ]
    if shares:
        text += (
            f"; the threads got {min(shares):.0%} or more of the processor time that they asked for"
        )
    if "bandwidth %" in headers:
        text += "; bandwidth: share of the measured read bandwidth"
    return text


def _caches_note(protocol: Mapping[str, Any] | None) -> list[str]:
    """Return the line that explains the comparison of caches."""
    if protocol is None:
        return []
    windows = f"{protocol['windows']} window{'s' * (protocol['windows'] != 1)} of {protocol['length']:,} tokens"
    text = f"caches: {windows}, float32 from keys and values in 16 bits; requests: of {protocol['length']:,} tokens"
    text += f" in the memory that {protocol['requests']} take with a cache of 16 bits, by pages"
    if protocol["keys"]:
        text += (
            f"; keys: {protocol['key_tokens']} random tokens of the text behind a cue of {protocol['cue_tokens']},"
            f" planted once, then the cue again ({protocol['keys']} prompts); gain: of a token's log-probability"
            " against another key's having been planted; where it is near 0 with 16 bits, the model does not look so"
            " far back"
        )
    return [text]


@dataclass(frozen=True, slots=True)
class _ColumnSpec:
    """Specification of a table column.

    Attributes:
        header: title of the column.
        rank: priority of the column, see `Column`.
        format_cell: formats the cell of a row.
        best_key: key of the figure that determines the best rows; "" marks no best.
        higher_is_better: whether the largest value is the best.
        header_width: width of a wrapped header, see `Column`.
        is_speed: whether the figure is a speed, which is not compared if other programs slowed it down.
    """

    header: str
    rank: int
    format_cell: Callable[[Row], str]
    best_key: str = ""
    higher_is_better: bool = False
    header_width: int = 0
    is_speed: bool = False


def quality_columns(rows: Sequence[Row], verdict: Verdict) -> list[Column]:
    """Return the columns on format, size and quality of the models."""
    front = tuple(
        PARETO_MARK if index in verdict.pareto_front else "" for index in range(len(rows))
    )
    return [
        Column("", front),
        Column("model", verdict.names),
        *_build_columns((*_quality_specs(rows), *_task_specs(rows), *_FILE_COLUMNS), rows),
    ]


def speed_columns(rows: Sequence[Row], verdict: Verdict) -> list[Column]:
    """Return the columns on speed and memory; cells without a measurement show a dash."""
    return [Column("model", verdict.names), *_build_columns(_SPEED_COLUMNS, rows)]


def _quality_specs(rows: Sequence[Row]) -> Iterator[_ColumnSpec]:
    """Yield the quality columns; if llama.cpp's perplexity was requested, ours gets the same priority."""
    is_requested = any(row[_LLAMA_CPP_KEY] is not None for row in rows)
    for spec in _QUALITY_COLUMNS:
        yield (
            replace(spec, rank=_REQUESTED_RANK)
            if is_requested and spec.header == PERPLEXITY_HEADER
            else spec
        )


def _build_columns(specs: Sequence[_ColumnSpec], rows: Sequence[Row]) -> Iterator[Column]:
    """Build the columns of a table from their specifications."""
    for spec in specs:
        cells = tuple(_cell(spec, row) for row in rows)
        yield Column(spec.header, cells, spec.rank, _best_rows(spec, rows), spec.header_width)


def _cell(spec: _ColumnSpec, row: Row) -> str:
    """Format one cell; an unreliable speed gets a mark."""
    text = spec.format_cell(row)
    needs_no_mark = (
        text == ABSENT
        or text.startswith(UNRELIABLE_MARK)
        or not (spec.is_speed and was_slowed_down(row))
    )
    return text if needs_no_mark else f"{UNRELIABLE_MARK}{text}"


def _best_rows(spec: _ColumnSpec, rows: Sequence[Row]) -> frozenset[int]:
    """Return the indices of the compared models with the best value; none if all values are equal."""
    values = {
        index: row[spec.best_key]
        for index, row in enumerate(rows)
        if spec.best_key
        and index
        and row[spec.best_key] is not None
        and not (spec.is_speed and was_slowed_down(row))
    }
    if len({*values.values()}) < 2:
        return frozenset()
    best = (max if spec.higher_is_better else min)(values.values())
    return frozenset(index for index, value in values.items() if value == best)


def _number_formatter(
    key: str, scale: float = 1.0, *, error: str = "", sign: bool = False
) -> Callable[[Row], str]:
    """Return a function that formats a figure with three significant digits.

    Args:
        key: key of the figure in a row.
        scale: factor to multiply the figure with.
        error: key of its standard error, or "".
        sign: whether to write a plus sign.
    """

    def write(row: Row) -> str:
        if row[key] is None:
            return ABSENT
        if error:
            standard_error = row[error]
            return value_and_error(
                row[key] * scale, None if standard_error is None else standard_error * scale
            )
        return significant(row[key] * scale, sign=sign)

    return write


def _size_formatter(key: str) -> Callable[[Row], str]:
    """Return a function that formats a size in bytes."""
    return lambda row: ABSENT if row[key] is None else size(row[key])


def _duration_formatter(key: str) -> Callable[[Row], str]:
    """Return a function that formats a duration in seconds."""

    def write(row: Row) -> str:
        seconds = row[key]
        if seconds is None:
            return ABSENT
        return f"{significant(1000 * seconds)} ms" if seconds < 1 else f"{significant(seconds)} s"

    return write


def _decoding_speed(row: Row) -> str:
    """Format the decoding speed of one sequence."""
    return ABSENT if row["decode_tokens_per_second"] is None else format_speed(row)


def _speed_at_batch(batch: int, row: Row) -> str:
    """Format the decoding speed at a batch size."""
    speeds = row["decode_by_batch"]
    return ABSENT if speeds is None else significant(speeds[str(batch)])


def _ttft_by_prompt(row: Row) -> str:
    """Format the times to first token by prompt length."""
    ttft_by_length = row["ttft_by_prompt"]
    if ttft_by_length is None:
        return ABSENT
    return ", ".join(
        f"{tokens}: {significant(1000 * ttft_by_length[tokens])} ms" for tokens in ttft_by_length
    )


def _kernels(row: Row) -> str:
    """Format the kernels of a model with the share of the weights that each computes."""
    return ", ".join(f"{name} {share:.0%}" for name, share in row["kernels"].items())


def _task_specs(rows: Sequence[Row]) -> list[_ColumnSpec]:
    """Return one column per task and metric, with standard errors next to the scores."""
    return [
        _ColumnSpec(f"{task} {metric}", _REQUESTED_RANK, partial(_task_score, task, metric))
        for task, metric in task_metrics(rows)
    ]


def task_metrics(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the pairs of task and metric that occur in the rows, in order, without standard errors."""
    metrics = dict.fromkeys(
        (task, metric)
        for row in rows
        for task, scores in (row["tasks"] or {}).items()
        for metric in scores
        if not metric.endswith(STDERR_SUFFIX)
    )
    return [*metrics]


def _task_score(task: str, metric: str, row: Row) -> str:
    """Format the score of a model in a task, with its standard error."""
    scores = (row["tasks"] or {}).get(task, {})
    if metric not in scores:
        return ABSENT
    return value_and_error(scores[metric], scores.get(metric + STDERR_SUFFIX))


def _answer_figure(key: str, row: Row) -> str:
    """Format a figure about generated answers; the reference has none."""
    answers = (row["generated"] or {}).get(key)
    return ABSENT if answers is None else significant(answers)


def _answer_divergence(row: Row) -> str:
    """Format the KL divergence along the reference's answers, with its standard error."""
    answers = row["generated"]
    if answers is None or answers.get("kl_mean") is None:
        return ABSENT
    return value_and_error(answers["kl_mean"], answers.get("kl_se"))


_QUALITY_COLUMNS = (
    _ColumnSpec("weights", 2, _size_formatter("weight_bytes"), "weight_bytes"),
    _ColumnSpec("bits", 2, _number_formatter("bits_per_weight")),
    _ColumnSpec("KL", 1, _number_formatter("kl_mean", error="kl_se"), "kl_mean"),
    _ColumnSpec("KL of answers", _REQUESTED_RANK, _answer_divergence),
    _ColumnSpec("KL p99", 4, _number_formatter("kl_p99"), "kl_p99"),
    _ColumnSpec(
        "top-1 %",
        3,
        _number_formatter("top1_agreement", 100),
        "top1_agreement",
        higher_is_better=True,
    ),
    _ColumnSpec(PERPLEXITY_HEADER, 3, _number_formatter("perplexity", error="perplexity_se")),
    _ColumnSpec(
        LLAMA_CPP_HEADER,
        _REQUESTED_RANK,
        _number_formatter(_LLAMA_CPP_KEY),
        header_width=len("in llama.cpp"),
    ),
    _ColumnSpec("rise %", 5, _number_formatter("perplexity_increase", 100, sign=True)),
    _ColumnSpec("parts after", 4, partial(_answer_figure, "tokens_before_divergence")),
    _ColumnSpec("length", 6, partial(_answer_figure, "length_ratio")),
    _ColumnSpec("KL median", 7, _number_formatter("kl_median"), "kl_median"),
)
_FILE_COLUMNS = (
    _ColumnSpec("format", 6, lambda row: str(row["format"])),
    _ColumnSpec("scheme", 6, lambda row: str(row["scheme"])),
    _ColumnSpec("bits of all", EXPERT_RANK, _number_formatter("bits_per_weight_total")),
    _ColumnSpec(
        "KV cache",
        EXPERT_RANK,
        lambda row: ABSENT if row["kv_cache"] == "none" else row["kv_cache"],
    ),
)
_SPEED_COLUMNS = (
    _ColumnSpec("tokens/s", 1, _decoding_speed, "decode_tokens_per_second", higher_is_better=True, is_speed=True),
    _ColumnSpec("batch 4", 3, partial(_speed_at_batch, 4), is_speed=True),
    _ColumnSpec("batch 16", 4, partial(_speed_at_batch, 16), is_speed=True),
    _ColumnSpec(
        "prompt tokens/s", 2, _number_formatter("prefill_tokens_per_second"), "prefill_tokens_per_second",
        higher_is_better=True, is_speed=True,
    ),
    _ColumnSpec("first token", 3, _duration_formatter("ttft_seconds"), "ttft_seconds", is_speed=True),
    _ColumnSpec("peak memory", 2, _size_formatter("peak_bytes"), "peak_bytes"),
    _ColumnSpec("read/token", 5, _size_formatter("read_bytes_per_token"), "read_bytes_per_token"),
    _ColumnSpec("cache/token", 6, _size_formatter("kv_bytes_per_token")),
    _ColumnSpec("processor %", 5, _number_formatter("processor_share", 100)),
    _ColumnSpec("decoder", 6, lambda row: row["decoder"] or ABSENT),
    _ColumnSpec("kernels", 7, _kernels),
    _ColumnSpec("bandwidth %", EXPERT_RANK, _number_formatter("bandwidth_utilization", 100)),
    _ColumnSpec("first token by prompt", EXPERT_RANK, _ttft_by_prompt, is_speed=True),
)  # fmt: skip


def cache_tables(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[str, list[Column]]]:
    """Return the tables about caches with their titles; [] if no caches were compared.

    Args:
        rows: rows of the models.
        names: names of the models.
    """
    labeled = [*_labeled_caches(rows, names)]
    if not labeled:
        return []
    label = Column("cache", tuple(name for name, _ in labeled))
    caches = [cache for _, cache in labeled]
    tables = [
        ("Caches, each against one of 16 bits", [label, *_cache_summary_columns(caches)]),
        (
            "KL by position: tokens attended to, up to",
            [label, *_columns_by_position(caches, "by_position", "last", _kl_cell)],
        ),
        (
            "Nats that a planted key gains, by how far back it is",
            [label, *_columns_by_position(caches, "by_distance", "distance", _key_gain_cell)],
        ),
    ]
    return [(title, columns) for title, columns in tables if len(columns) > 1]


def _labeled_caches(rows: Sequence[Row], names: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield every cache row with its label: the cache kind, preceded by the model name if there are several models."""
    for name, row in zip(names, rows, strict=True):
        for cache in row["caches"] or ():
            yield (cache["kind"] if len(rows) == 1 else f"{name} {cache['kind']}"), cache


def _cache_summary_columns(caches: Sequence[Row]) -> Iterator[Column]:
    """Yield the columns of the summary table of caches."""

    def column(header: str, rank: int, format_cell: Callable[[Row], str]) -> Column:
        return Column(header, tuple(format_cell(cache) for cache in caches), rank)

    yield column("bytes/token", 2, lambda cache: f"{cache['token_bytes']:,}")
    yield column("requests", 2, lambda cache: f"{cache['requests']:,}")
    yield column("KL", 1, lambda cache: _cell_with_error(cache, "kl_mean", "kl_se"))
    yield column("key gain", 2, _key_gain_cell)
    yield column(
        "change of it", 3, lambda cache: _cell_with_error(cache, "key_change", "key_change_se")
    )
    yield column("keys %", 4, _key_hit_cell)


def _columns_by_position(
    caches: Sequence[Row], list_key: str, position_key: str, format_cell: Callable[[Row], str]
) -> Iterator[Column]:
    """Yield one column per position or distance."""
    positions = list(
        dict.fromkeys(entry[position_key] for cache in caches for entry in cache[list_key])
    )
    for number, position in enumerate(positions):
        cells = tuple(
            next(
                (
                    format_cell(entry)
                    for entry in cache[list_key]
                    if entry[position_key] == position
                ),
                ABSENT,
            )
            for cache in caches
        )
        yield Column(f"{position:,}", cells, CACHE_COLUMN_RANK + len(positions) - number)


def _kl_cell(entry: Row) -> str:
    """Format the mean KL divergence."""
    return significant(entry["kl_mean"])


def _key_gain_cell(entry: Row) -> str:
    """Format the gain in log-probability of a planted key."""
    return ABSENT if entry["key_gain"] is None else significant(entry["key_gain"])


def _key_hit_cell(entry: Row) -> str:
    """Format the percentage of key tokens that are ranked first."""
    hit_share = entry["keys_found"]
    return ABSENT if hit_share is None else significant(100 * hit_share)


def _cell_with_error(entry: Row, mean: str, error: str) -> str:
    """Format a figure with its standard error."""
    return ABSENT if entry[mean] is None else value_and_error(entry[mean], entry[error])
