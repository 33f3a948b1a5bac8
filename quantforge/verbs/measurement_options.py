"""Choices of an evaluation by their names, and refusals of those that mean nothing or have no effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from quantforge.architectures.cache_kinds import listed
from quantforge.arguments import check_names, check_types
from quantforge.errors import UsageError, nearest

ENGINES = ("llama.cpp",)
# What has an effect beside another choice alone.
_BESIDE = {
    "generated_tokens": "generated",
    "chat_template": "generated",
    "task_limit": "tasks",
    "allow_code": "tasks",
}


class MeasurementOptions(TypedDict, total=False):
    """Choices of an evaluation; what is left out is as `EvaluationOptions` has it."""

    text: str | None  # a source as for ``--calibration``; None is `own_text`
    windows: int  # at most so many
    length: int  # tokens of a window
    speed: bool  # measure speed and memory too
    cache: (
        str | Sequence[str]
    )  # KV caches to try, see `quantforge.architectures.cache_kinds`; the first for speed too
    engine: str  # one of `ENGINES` scores GGUF files too; none when empty
    tasks: str | Sequence[str] | None  # of lm-evaluation-harness: names, or YAML files
    task_limit: int  # documents of each task; 0 is all
    allow_code: bool  # let YAML files run the code that they name
    card: str | Path | None  # of whose card the figures of its models become a part
    generated: str  # prompts that every model answers: a source, see `read_prompts`
    generated_tokens: int  # an answer has at most so many
    correction: str | Path | None  # an adapter that is put on the one model that is compared
    chat_template: bool  # render the prompts through the reference's chat template, in a sandbox


def check_measurement(options: Mapping[str, Any], models: int = 0) -> None:
    """Refuse choices (`MeasurementOptions`) before any work; ``models`` are compared with the reference.

    Raises:
        UsageError: a name or a value that means nothing, or one without what it would have an effect on.
    """
    if not isinstance(options, Mapping):
        raise UsageError(f"measured = {options!a:.60}: no options", 'e.g. {"windows": 20}')
    check_names(options, MeasurementOptions.__annotations__)
    check_types(MeasurementOptions, options)
    engine = options.get("engine", "")
    caches_of(options)
    if engine and engine not in ENGINES:
        raise UsageError(f"--engine {engine}: unknown", nearest(engine, ENGINES))
    correction = options.get("correction")
    if correction and (models != 1 or options.get("card")):
        raise UsageError(
            f"--correction {correction}: of one model, and for no card",
            "quantforge eval SOURCE MODEL --correction ADAPTER, without it for other models",
        )
    for name, needed in _BESIDE.items():
        if options.get(name) and not options.get(needed):
            flag, other = f"--{name.replace('_', '-')}", f"--{needed}"
            raise UsageError(
                f"{flag} has no effect without {other}", f"add {other}, or leave it out"
            )


def caches_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the KV caches that are asked for; errors as `listed`."""
    given = options.get("cache", ())
    if isinstance(given, str):
        return listed(given)
    return listed(",".join(given)) if given else ()


def check_engine(engine: str, paths: Sequence[Path]) -> None:
    """Refuse an engine that has no file to score, or is not installed, before any work.

    Args:
        engine: one of `ENGINES`, or none.
        paths: of all models.

    Raises:
        UsageError: none of the models is a GGUF file, or the package is missing.
    """
    if not engine:
        return
    if not any(path.is_file() for path in paths):
        raise UsageError(
            f"--engine {engine} scores GGUF files, and none of the models is one",
            "leave it out, or make one: quantforge export MODEL --format gguf",
        )
    from quantforge.evaluation.llama_cpp import check_installed

    check_installed()
