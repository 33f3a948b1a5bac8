"""Evaluate: a reference and its descendants, whatever their format, measured on one text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from quantforge.checkpoint.hub import resolve
from quantforge.errors import UsageError, nearest
from quantforge.formats import detect
from quantforge.formats.opening import open_model
from quantforge.model import lean_imports as lean
from quantforge.settings import Settings, check_device
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.scored_text import BUILTIN, read_text, text_name

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import Evaluation, EvaluationOptions

CACHES = ("16bit", "int8", "fp8", "int4")
ENGINES = ("llama.cpp",)
BYTES_OF_TOKEN = 32  # more than a token has: so much text is enough


class MeasurementOptions(TypedDict, total=False):
    """Choices of an evaluation; what is left out is as `EvaluationOptions` has it, the text is the built-in one."""

    text: str  # a source as for ``--calibration``
    windows: int  # at most so many
    length: int  # tokens of a window
    speed: bool  # measure speed and memory too
    cache: str  # kind of the KV cache for speed, one of `CACHES`
    engine: str  # one of `ENGINES` scores GGUF files too; none when empty
    tasks: Sequence[str] | None  # of lm-evaluation-harness: names, or YAML files
    task_limit: int  # documents of each task; 0 is all
    allow_code: bool  # let YAML files run the code that they name
    progress: Callable[[str, int, int], None]  # what is done, windows done, windows


@torch_defaults()
def evaluate(
    reference: str | Path,
    models: Sequence[str | Path] = (),
    settings: Settings | None = None,
    **options: Unpack[MeasurementOptions],
) -> Evaluation:
    """Measure perplexity, divergence from the reference, size, memory, speed and tasks.

    Args:
        reference: the model to compare with.
        models: models that descend from it.
        settings: how to run; `Settings.progress` is not called, the option ``progress`` is.
        options: see `MeasurementOptions`.

    Raises:
        UsageError: an option has a value that means nothing here.
        InputError: a model, the text or a task cannot be used, or a result is no number.
        RefusedError: a task file would run code.
    """
    settings = settings or Settings()
    cache, engine = options.get("cache", CACHES[0]), options.get("engine", "")
    if cache not in CACHES:
        raise UsageError(f"--cache {cache}: no such kind", nearest(cache, CACHES))
    if engine and engine not in ENGINES:
        raise UsageError(f"--engine {engine}: unknown", nearest(engine, ENGINES))
    paths = [resolve(str(name), settings.offline) for name in (reference, *models)]
    for path in paths:
        detect(open_model(path).config)  # what cannot be read shows before anything is loaded
    check_device(settings.device)
    if options.get("tasks") is not None:
        lean.forbid()  # lm-eval uses transformers in its own ways
    import torch

    from quantforge.evaluation.evaluate import evaluate as measure
    from quantforge.numerics.allocator import return_freed_memory

    measurement = _measurement(options, settings)
    return_freed_memory()  # the peaks that are told are of what is alive
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return measure(paths[0], paths[1:], measurement)


def _measurement(options: MeasurementOptions, settings: Settings) -> EvaluationOptions:
    """Check the tasks, read the text, and return what an evaluation takes; errors as `evaluate`."""
    from quantforge.evaluation.evaluate import EvaluationOptions
    from quantforge.evaluation.harness import Tasks, check

    tasks, names = None, options.get("tasks")
    if names is not None:
        tasks = Tasks(tuple(names), options.get("task_limit", 0), options.get("allow_code", False))
        check(tasks)
    given: Mapping[str, Any] = {**options}
    same = ("windows", "length", "speed", "engine", "progress")  # what is passed on as it is
    cache = options.get("cache", CACHES[0])
    source = options.get("text", BUILTIN)
    wanted = EvaluationOptions(
        text="",
        text_name=text_name(source),
        cache="" if cache == CACHES[0] else cache,
        device=settings.device,
        tasks=tasks,
        activations=Path.cwd() if settings.activations == "disk" else None,
        **{key: given[key] for key in same if key in given},
    )
    most = BYTES_OF_TOKEN * wanted.windows * wanted.length
    return replace(wanted, text=read_text(source, most, offline=settings.offline))
