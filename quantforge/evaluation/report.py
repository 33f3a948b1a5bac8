"""A finished evaluation as a file: Markdown, the document of ``--json``, or one page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from quantforge.evaluation.cache_tables import cache_notes, cache_tables
from quantforge.evaluation.columns import Column, fitting, left_out
from quantforge.evaluation.evaluate import Evaluation
from quantforge.evaluation.report_page.assemble import assemble
from quantforge.evaluation.text_tables import IN_ENGINE, ON_FRONT, quality_columns, speed_columns
from quantforge.evaluation.verdict import MARK, short_names, unsteady
from quantforge.results.significant import significant

Table = tuple[str, list[Column]]  # with its title
FOREIGN = 100  # perplexity of a reference from which on the text is none that it was trained for

ANSWERS = {  # columns on answers
    "KL of answers": "as KL, along these answers, ± over prompts",
    "parts after": "mean tokens for which a model's own answer is the reference's",
    "length": "of a model's own answers, 1 is as long as the reference's",
}


def render(evaluation: Evaluation, kind: str) -> str:
    """Return the report as ``markdown``, ``html`` or ``json``, with `short_names` in place of paths: others read it."""
    names = short_names([str(row["path"]) for row in evaluation.rows])
    rows = tuple({**row, "path": name} for row, name in zip(evaluation.rows, names, strict=True))
    return _KINDS[kind](replace(evaluation, rows=rows))


def notes(evaluation: Evaluation, shown: Collection[str]) -> tuple[str, ...]:
    """Return the notes under the tables: the protocol, and what the figures mean.

    Args:
        evaluation: whose they are.
        shown: titles of the columns that a reader sees; nothing is said of others.
    """
    protocol = evaluation.protocol
    error, found = "± is one standard error over windows", []
    if "KL" in shown:
        found.append("KL: exact, reference against model, whole vocabulary, nats per token")
        error += ", of differences paired by window"
    if {"KL", "perplexity"} & {*shown}:
        found.append(error)
    if "bits" in shown:
        found.append("bits: of a quantized weight, head and embedding included where they are")
    lines = [f"protocol: {protocol}; token ids sha256 {protocol.tokens_sha256[:16]}"]
    lines += ["; ".join(found)] if found else []
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
    lines += cache_notes(evaluation.caches)
    if protocol.speed_dtype:
        lines.append(_of_speed(evaluation, shown))
    return tuple(lines)


def _of_answers(evaluation: Evaluation, shown: Collection[str]) -> list[str]:
    """Return the line on prompts and answers, none where there are none or no figure of them is shown."""
    asked, explained = (
        evaluation.prompts,
        [f"{one}: {ANSWERS[one]}" for one in ANSWERS if one in shown],
    )
    if asked is None or not explained:
        return []
    answers = evaluation.rows[0]["generated"]["answers"]
    count, tokens = len(answers), sum(one["tokens"] for one in answers)
    prompts = f"{count} prompt{'s' * (count > 1)} ({asked.name})"
    said = f"answers: the reference's, always its most likely token, to {prompts}"
    said += f", {tokens} tokens in all, at most {asked.new_tokens} each"
    return ["; ".join([said, *explained])]


def _of_speed(evaluation: Evaluation, shown: Collection[str]) -> str:
    protocol = evaluation.protocol
    said = f"speed and memory: one sequence where no batch is named, {protocol.speed_dtype}"
    if protocol.device == "cpu":
        said += ", 1 thread" if protocol.threads == 1 else f", {protocol.threads} threads"
    used = {row["decoder"] for row in evaluation.rows if row["decoder"]}
    if len(used) > 1:
        named = "" if "decoder" in shown else " (--wide names them)"
        said += f"; decoders differ{named}, and their figures do not compare"
    names = zip(evaluation.verdict.names, evaluation.rows, strict=True)
    if marked := [name for name, row in names if unsteady(row)]:
        said += f"; {MARK}: unsteady, as on a machine with other work: {', '.join(marked)}"
    shares = [
        row["processor_share"] for row in evaluation.rows if row["processor_share"] is not None
    ]
    if shares:
        said += (
            f"; the threads got {min(shares):.0%} or more of the processor time that they asked for"
        )
    if "bandwidth %" in shown:
        said += "; bandwidth: share of the measured read bandwidth"
    return said


def tables(evaluation: Evaluation, width: int | None, *, wide: bool = False) -> list[Table]:
    """Return the tables with their titles: quality, and speed and caches where they were measured; see `fitting`."""
    return [
        (title, fitting(columns, width, wide=wide)) for title, columns in _everything(evaluation)
    ]


def _everything(evaluation: Evaluation) -> list[Table]:
    rows, verdict = evaluation.rows, evaluation.verdict
    against = f", against {verdict.names[0]} (the reference)" if len(rows) > 1 else ""
    found = [(f"Quality{against}", quality_columns(rows, verdict))]
    if evaluation.protocol.speed_dtype:
        found.append(("Speed and memory", speed_columns(rows, verdict)))
    return found + cache_tables(rows, verdict.names)


def absent_columns(evaluation: Evaluation, drawn: Sequence[Table]) -> str:
    """Return a line on the columns that the tables of `tables` lack, see `left_out`."""
    everything = [column for _, columns in _everything(evaluation) for column in columns]
    return left_out(everything, [column for _, columns in drawn for column in columns])


def titles(drawn: Sequence[Table]) -> frozenset[str]:
    """Return the titles of all columns of some tables."""
    return frozenset(column.header for _, columns in drawn for column in columns)


def markdown(evaluation: Evaluation) -> str:
    """Return the tables as Markdown, with the verdict and the protocol; best values are bold."""
    verdict, drawn = evaluation.verdict, tables(evaluation, None)
    parts = [_markdown_table(columns) for _, columns in drawn]
    front = f"`{ON_FRONT}`: no other is as small and closer (Pareto front)"
    parts.append(_listed([*verdict.sentences, *([front] if verdict.front else [])]))
    parts.append(_listed(notes(evaluation, titles(drawn))))
    return "\n".join(part for part in parts if part)


def _markdown_table(columns: Sequence[Column]) -> str:
    def cell(column: Column, index: int) -> str:
        text = _escape(column.cells[index])
        return f"**{text}**" if index in column.best else text

    lines: list[Sequence[str]] = [[column.header for column in columns], ["---:"] * len(columns)]
    count = len(columns[0].cells)
    lines += [[cell(column, index) for column in columns] for index in range(count)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _listed(lines: Sequence[str]) -> str:
    return "".join(f"* {line}\n" for line in lines)


def json_document(evaluation: Evaluation) -> str:
    """Return the document of ``--json``."""
    return json.dumps(evaluation.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("*", "\\*")


_KINDS: Mapping[str, Callable[[Evaluation], str]] = {
    "markdown": markdown,
    "html": lambda evaluation: assemble(
        evaluation, notes(evaluation, titles(tables(evaluation, None, wide=True)))
    ),
    "json": json_document,
}
