"""Sections of the page beside its charts: tables, answers side by side, and the commands that make it all again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.evaluation.columns import ABSENT, Column, fitting
from quantforge.evaluation.tasks import YAML
from quantforge.evaluation.verdict import MARK, Verdict
from quantforge.evaluation.windows import Protocol
from quantforge.results.significant import UNITS, significant

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import EvaluationOptions

Part = tuple[str, bool]  # text, and whether it differs
Row = Mapping[str, Any]
SHORT = 20  # letters of a cell that stays on one line
SHOWN_PROMPTS = 8  # of long lists the first; the document has all
BUILTIN_TEXT, BUILTIN_PROMPTS = "builtin evaluation text", "builtin prompts"
_SCALES = {unit: 1000.0**power for power, unit in enumerate(UNITS)} | {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class ReportCell:
    """Text of a cell, the number by which it is sorted (or the text), and whether it is the best."""

    text: str
    key: str
    best: bool


@dataclass(frozen=True, slots=True)
class SortableTable:
    """A table of the page; the first column names the row."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[ReportCell, ...], ...]


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """Answer of one model to a prompt, its words marked where the reference has others."""

    model: str
    about: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """How a model was made: the commands, and the recipe that they read."""

    model: str
    commands: tuple[str, ...]
    file: str
    recipe: str


def sortable(caption: str, columns: Sequence[Column]) -> SortableTable:
    """Return the columns that have a figure as a table of the page; best values keep their mark."""
    kept = [column for column in fitting(columns, None) if column.header]
    rows = tuple(
        tuple(
            ReportCell(_unbroken(text := column.cells[row]), sort_key(text), row in column.best)
            for column in kept
        )
        for row in range(len(kept[0].cells))
    )
    return SortableTable(caption, tuple(column.header for column in kept), rows)


def _unbroken(text: str) -> str:
    """Return a cell whose spaces do not break, if it is short."""
    return text.replace(" ", "\N{NO-BREAK SPACE}") if len(text) <= SHORT else text


def plain_table(caption: str, names: Mapping[str, Mapping[str, float | None]]) -> SortableTable:
    """Return figures by model and name as a table; a dash where there is none."""
    headers = list(dict.fromkeys(key for found in names.values() for key in found))
    rows = tuple(
        (
            ReportCell(name, name, False),
            *(_figure(found.get(key)) for key in headers),
        )
        for name, found in names.items()
    )
    return SortableTable(caption, ("model", *headers), rows)


def _figure(value: float | None) -> ReportCell:
    if value is None:
        return ReportCell(ABSENT, "", False)
    return ReportCell(significant(value), str(value), False)


def sort_key(text: str) -> str:
    """Return the number that a cell begins with, in the unit without a prefix; the text where it begins with none."""
    words = text.removeprefix(MARK).replace(",", " ").split()
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        return "" if text == ABSENT else text
    return str(value * _SCALES.get(words[1] if len(words) > 1 else "", 1.0))


def answers(
    prompts: Sequence[str], names: Sequence[str], rows: Sequence[Row]
) -> list[tuple[str, list[ShownAnswer]]]:
    """Return the prompts, each with the answer of every model, the reference first."""
    found = [row["generated"]["answers"] for row in rows]
    return [
        (prompt, [_shown(name, given[place], found[0][place]) for name, given in zip(names, found, strict=True)])
        for place, prompt in enumerate(prompts[:SHOWN_PROMPTS])
    ]  # fmt: skip


def _shown(name: str, answer: Row, reference: Row) -> ShownAnswer:
    about = f"{answer['tokens']} tokens" + ("" if answer["ended"] else ", cut there")
    if "parts_at" in answer:
        place = answer["parts_at"]
        about += ", the same as the reference's" if place is None else f", parts after {place}"
        about += f"; KL {significant(answer['kl_mean'])}"
    return ShownAnswer(
        name, about, tuple(marked(answer["text"].strip("\n"), reference["text"].strip("\n")))
    )


def evaluation_command(
    names: Sequence[str],
    protocol: Protocol,
    prompts: Mapping[str, Any] | None,
    options: EvaluationOptions | None,
) -> str:
    """Return the command that makes this evaluation again: every option that a figure depends on.

    Files and directories are named, and have to be there.
    """
    words = ["quantforge", "eval", *names]
    found = options is not None and options.text_found
    if protocol.text != BUILTIN_TEXT and not found:
        words += ["--text", _file(protocol.text)]
    words += ["--windows", str(protocol.windows), "--length", str(protocol.length)]
    if prompts is not None:
        name = prompts["name"]
        words += ["--generated", "builtin" if name == BUILTIN_PROMPTS else _file(name)]
        words += ["--generated-tokens", str(prompts["new_tokens"])]
        words += ["--chat-template"] if prompts["chat_template"] else []
    if options is not None:
        words += _further(options)
    words += [] if protocol.speed_dtype else ["--no-speed"]
    words += [] if protocol.input_bits == 16 else ["--input-bits", str(protocol.input_bits)]
    if protocol.device != "cpu":
        words += ["--device", protocol.device]
    elif protocol.speed_dtype:
        words += ["--threads", str(protocol.threads)]
    return shlex.join([*words, "--report", "report.html"])


def _further(options: EvaluationOptions) -> Iterator[str]:
    """Yield the options that the protocol does not state."""
    if options.tasks is not None:
        tasks = options.tasks
        names = [Path(name).name if name.endswith(YAML) else name for name in tasks.names]
        yield from ("--tasks", ",".join(names))
        yield from ("--task-limit", str(tasks.limit)) if tasks.limit else ()
        yield from ("--allow-code",) if tasks.code else ()
    if options.caches:
        yield from ("--cache", ",".join(options.caches))
    if options.engine:
        yield from ("--engine", options.engine)
    if options.adapter is not None:
        yield from ("--adapter", options.adapter.resolve().name)
    if options.correction is not None:
        yield from ("--correction", options.correction.resolve().name)


def origins(rows: Iterable[Row], verdict: Verdict) -> Iterator[Origin]:
    """Yield how each model was made that says so."""
    for name, row in zip(verdict.names, rows, strict=True):
        made = row.get("made_by")
        if not made or not made["source"] or not made["recipe"]:
            continue
        stem = name.replace("/", "-")
        file, step = f"{stem}.toml", f"{stem}-source" if made["exported"] else name
        commands = [
            shlex.join(["quantforge", "quantize", made["source"], "--recipe", file, "-o", step])
        ]
        if made["exported"]:
            commands.append(
                shlex.join(["quantforge", "export", step, "--format", row["format"], "-o", name])
            )
        yield Origin(name, tuple(commands), file, made["recipe"])


def _file(name: str) -> str:
    """Return a cited source without its digest."""
    return name.partition(" (SHA-256")[0]


def marked(text: str, reference: str) -> list[Part]:
    """Cut a text into parts that it shares with a reference, in order, and parts that differ."""
    words, others = (re.findall(r"\s+|[^\s]+", item) for item in (text, reference))
    found: list[Part] = []
    matcher = SequenceMatcher(None, words, others, autojunk=False)
    for kind, first, last, _, _ in matcher.get_opcodes():
        part = "".join(words[first:last])
        if part:
            found.append((part, kind != "equal" and not part.isspace()))
    return found
