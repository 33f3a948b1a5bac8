"""Options of ``quantforge eval``, in the groups of its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantforge.architectures.cache_kinds import FORM, WORDS, completions
from quantforge.cli.completion import among

SCORED, SPEED, WRITTEN = "What is scored", "Speed and memory", "What comes of it"

Reference = Annotated[
    str,
    typer.Argument(help="The model to compare with.", metavar="REFERENCE"),
]
Descendants = Annotated[
    list[str] | None,
    typer.Argument(help="Models that descend from it.", metavar="[MODEL]..."),
]
Text = Annotated[
    str | None,
    typer.Option(
        "--text",
        metavar="SOURCE",
        help="What is scored: a SOURCE as for --calibration (default: the reference's evaluation.txt, else builtin).",
        rich_help_panel=SCORED,
    ),
]
WindowCount = Annotated[
    int,
    typer.Option(
        "--windows", metavar="N", help="At most so many windows.", min=1, rich_help_panel=SCORED
    ),
]
WindowLength = Annotated[
    int,
    typer.Option(
        "--length", metavar="N", help="Tokens of a window.", min=2, rich_help_panel=SCORED
    ),
]
PerplexityLimit = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Exit 6 when perplexity rises by more, e.g. 2%.",
        rich_help_panel=WRITTEN,
    ),
]
DivergenceLimit = Annotated[
    float | None,
    typer.Option(
        metavar="NATS",
        help="Exit 6 when the mean KL divergence is larger, in nats.",
        rich_help_panel=WRITTEN,
    ),
]
Reports = Annotated[
    list[Path] | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Also write FILE.md, .html (pip install 'quantforge[report]') or .json (repeatable).",
        rich_help_panel=WRITTEN,
    ),
]
Summary = Annotated[
    Path | None,
    typer.Option(
        "--summary",
        metavar="FILE",
        help="Also add table and verdict to FILE as Markdown: a CI's job summary.",
        rich_help_panel=WRITTEN,
    ),
]
ReplaceReports = Annotated[
    bool, typer.Option("--overwrite", help="Replace reports that exist.", rich_help_panel=WRITTEN)
]
Wide = Annotated[
    bool,
    typer.Option(
        "--wide", help="All columns, also those for experts, however wide.", rich_help_panel=WRITTEN
    ),
]
Card = Annotated[
    Path | None,
    typer.Option(
        "--card",
        metavar="DIR",
        help="Also write the figures into DIR's README.md.",
        rich_help_panel=WRITTEN,
    ),
]
Speed = Annotated[bool, typer.Option(help="Measure speed and memory too.", rich_help_panel=SPEED)]
Caches = Annotated[
    str | None,
    typer.Option(
        "--cache",
        metavar="KIND,...",
        autocompletion=completions,
        help=f"KV caches ({', '.join(WORDS)}, {FORM}): what each costs, by position; the first also for speed.",
        rich_help_panel=SCORED,
    ),
]
GgufEngine = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        autocompletion=among(("llama.cpp",)),
        help="llama.cpp: score GGUF files in it too (pip install 'quantforge[llamacpp]').",
        rich_help_panel=SCORED,
    ),
]
TaskNames = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="NAMES",
        help="lm-eval's tasks, or YAML files (pip install 'quantforge[eval]').",
        rich_help_panel=SCORED,
    ),
]
TaskLimit = Annotated[
    int,
    typer.Option(
        "--task-limit",
        metavar="N",
        help="Documents of each task; 0 is all.",
        min=0,
        rich_help_panel=SCORED,
    ),
]
Generated = Annotated[
    str | None,
    typer.Option(
        "--generated",
        metavar="PROMPTS",
        help="Also score along the reference's own answers: a file, or builtin.",
        rich_help_panel=SCORED,
    ),
]
GeneratedTokens = Annotated[
    int | None,
    typer.Option(
        "--generated-tokens",
        help="Tokens of an answer, at most (default: 128).",
        min=1,
        rich_help_panel=SCORED,
    ),
]
ChatTemplate = Annotated[
    bool,
    typer.Option(
        "--chat-template",
        help="Render the prompts through the model's template (sandboxed).",
        rich_help_panel=SCORED,
    ),
]
Correction = Annotated[
    Path | None,
    typer.Option(
        "--correction",
        metavar="DIR",
        help="Put this adapter (of PEFT's LoRA) on the one model that is compared; no speed of it.",
        rich_help_panel=SCORED,
    ),
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Let YAML files of --tasks run the code they name.",
        rich_help_panel=SCORED,
    ),
]
