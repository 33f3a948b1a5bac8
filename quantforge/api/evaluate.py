"""Evaluate: a reference and its descendants, whatever their format, measured on one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from quantforge.api.folder_cards import check_card_of, write_card_of
from quantforge.api.scored_text import (
    BUILTIN,
    BYTES_OF_TOKEN,
    own_text,
    prompts_name,
    read_prompts,
    read_text,
    text_name,
)
from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import as_list, check_arguments, check_names, check_types
from quantforge.artifacts import manifest
from quantforge.cache_kinds import parse_cache_kinds
from quantforge.errors import InputError, UsageError, nearest
from quantforge.evaluation.tasks import Tasks, check, check_files
from quantforge.execution.progress import phase, report_step, report_to
from quantforge.files.hub import resolve
from quantforge.formats import detect_format
from quantforge.formats.open_model import open_model
from quantforge.formats.sources.adapter import open_adapter
from quantforge.formats.sources.low_precision import decode_if_unsupported
from quantforge.recipe import AdapterOptions
from quantforge.settings import Settings, check_device

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation, EvaluationOptions
    from quantforge.evaluation.reference_text import Prompts
    from quantforge.files.reader import Checkpoint

LARGER = 1.1  # times the size of its reference: such a model was hardly made from it
ENGINES = ("llama.cpp",)
# Choices that have no effect without another one.
_NEEDS = {
    "generated_tokens": "generated",
    "chat_template": "generated",
    "task_limit": "tasks",
    "allow_code": "tasks",
}


class MeasurementOptions(TypedDict, total=False):
    """Choices of an evaluation, as a caller gives them; defaults are those of `EvaluationOptions`."""

    text: str | None  # a source as for ``--calibration``; None is `own_text`
    windows: int  # at most so many
    length: int  # tokens of a window
    speed: bool  # measure speed and memory too
    # KV caches to try, see `quantforge.cache_kinds`; the first for speed too
    cache: str | Sequence[str]
    engine: str  # one of `ENGINES` scores GGUF files too; none when empty
    tasks: str | Sequence[str] | None  # of lm-evaluation-harness: names, or YAML files
    task_limit: int  # documents of each task; 0 is all
    allow_code: bool  # let YAML files run the code that they name
    card: str | Path | None  # of whose card the figures of its models become a part
    generated: str  # prompts that every model answers: a source, see `read_prompts`
    generated_tokens: int  # an answer has at most so many
    correction: str | Path | None  # an adapter that is put on the one model that is compared
    chat_template: bool  # render the prompts through the reference's chat template, in a sandbox


@check_arguments(MeasurementOptions)
@torch_defaults()
def evaluate(
    reference: str | Path,
    models: str | Path | Sequence[str | Path] = (),
    settings: Settings | None = None,
    **options: Unpack[MeasurementOptions],
) -> Evaluation:
    """Measure perplexity, divergence from the reference, size, memory, speed and tasks.

    Args:
        reference: the model to compare with.
        models: models that descend from it, or a single one.
        settings: how to run.
        options: see `MeasurementOptions`.

    Raises:
        UsageError: an option that there is not, or has a value that means nothing here or no effect.
        InputError: a model, the text, a task or the card cannot be used, or a result is NaN or infinite.
        RefusedError: a task file would run code, or a model cannot be scored here.
    """
    settings = settings or Settings()
    descendants = as_list(models)
    check_measurement(options, len(descendants))
    with report_to(settings.progress), phase("preparing", 1.0, "headers of the models"):
        paths = [resolve(str(name), settings.offline) for name in (reference, *descendants)]
        _check_engine(options.get("engine", ""), paths)
        checkpoints = [decode_if_unsupported(open_model(path)) for path in paths]
        for checkpoint in checkpoints:  # what cannot be read shows before anything is loaded
            detect_format(checkpoint.config)
            if checkpoint.declaration_note:
                settings.note(f"{checkpoint.path}: quantization: {checkpoint.declaration_note}")
        for checkpoint in checkpoints[1:]:
            _note_swapped(checkpoints[0].opened, checkpoint.opened, settings)
            _note_other_adapter(checkpoints[0].path, checkpoint.path, settings, options.get("card"))
        if card := options.get("card"):
            check_card_of(Path(card), paths[1:])
        check_device(settings.device)
        tasks = _tasks(options, offline=settings.offline)
        report_step("libraries")
        import torch

        from quantforge.evaluation.compare_models import compare_models
        from quantforge.evaluation.kept_rows import keep_rows
        from quantforge.numerics.allocator import return_freed_memory

        chosen = _evaluation_options(paths[0], options, tasks, settings)
        return_freed_memory()  # so that peaks of memory count only what is in use
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        with keep_rows(checkpoints, chosen, settings) as kept:
            evaluation = compare_models(checkpoints, chosen, settings, kept)
            if card:
                write_card_of(Path(card), evaluation, checkpoints[0].opened, settings.base_model)
        return evaluation


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
    _caches_of(options)
    if engine and engine not in ENGINES:
        raise UsageError(f"--engine {engine}: unknown", nearest(engine, ENGINES))
    correction = options.get("correction")
    if correction and (models != 1 or options.get("card")):
        raise UsageError(
            f"--correction {correction}: of one model, and for no card",
            "quantforge eval SOURCE MODEL --correction ADAPTER, without it for other models",
        )
    for name, needed in _NEEDS.items():
        if options.get(name) and not options.get(needed):
            flag, other = f"--{name.replace('_', '-')}", f"--{needed}"
            raise UsageError(
                f"{flag} has no effect without {other}", f"add {other}, or leave it out"
            )


def _caches_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the KV caches that are asked for; errors as `parse_cache_kinds`."""
    given = options.get("cache", ())
    if isinstance(given, str):
        return parse_cache_kinds(given)
    return parse_cache_kinds(",".join(given)) if given else ()


def _check_engine(engine: str, paths: Sequence[Path]) -> None:
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


def _note_swapped(reference: Checkpoint, model: Checkpoint, settings: Settings) -> None:
    """Note a reference that seems to descend from a model: it is quantized and smaller."""
    small, large = (
        sum(entry.header().nbytes for entry in one.entries.values()) for one in (reference, model)
    )
    if "quantization_config" in reference.config and LARGER * small < large:
        name, other = reference.path, model.path
        settings.note(
            f"{name} is the reference, and it is quantized and smaller than {other}: were they meant"
            f" the other way round? quantforge eval {other} {name}"
        )


def _note_other_adapter(
    reference: Path, model: Path, settings: Settings, card: str | Path | None
) -> None:
    """Note a model that was made with another adapter than its reference has; refuse to write its figures on a card."""
    message = _other_adapter(reference, model, settings.adapter)
    if not message:
        return
    place = model.resolve()
    if card is not None and Path(card).resolve() in {place, *place.parents}:
        raise UsageError(
            f"--card {card}: {message}",
            "leave --card out: it would state figures against another model than the one that it names",
        )
    settings.note(message)


def _other_adapter(reference: Path, model: Path, adapter: Path | None) -> str:
    """Return a message where a model was made with another adapter than its reference has, else ""."""
    try:
        made, has = (
            manifest.recorded_adapter(manifest.read_manifest(path)) for path in (model, reference)
        )
    except InputError:  # `verify` tells what is wrong with a manifest
        return ""
    if made is None or (adapter is None and not made.source):
        return ""
    if adapter is not None:
        has = AdapterOptions(adapter.resolve().name, open_adapter(adapter).digests)
    has = has or AdapterOptions()
    if has.sha256 == made.sha256:
        return ""
    if not made.source:
        return (
            f"{model} was made without the adapter {has.source}, which is merged into the reference"
        )
    other = f"with the adapter {has.source}" if has.source else "without it"
    text = f"{model} was made with the adapter {made.source}, and the reference is measured {other}"
    if has.source and adapter is None:  # the reference's own, to which one more would be added
        return text
    return f"{text}: --adapter DIR merges {made.source} into {reference}"


def _tasks(options: MeasurementOptions, *, offline: bool) -> Tasks | None:
    """Return the tasks that are asked for, refused where their names and files alone show that they cannot be run."""
    names = options.get("tasks")
    if names is None:
        return None
    tasks = Tasks(
        tuple(map(str, as_list(names))),
        options.get("task_limit", 0),
        options.get("allow_code", False),
        offline,
    )
    check_files(tasks)
    return tasks


def _evaluation_options(
    reference: Path, options: MeasurementOptions, tasks: Tasks | None, settings: Settings
) -> EvaluationOptions:
    """Check the tasks, read text and prompts, and return the choices with them; errors as `evaluate`."""
    from quantforge.evaluation.compare_models import EvaluationOptions

    if tasks is not None:
        check(tasks)
    given: Mapping[str, Any] = {**options}
    same = ("windows", "length", "speed", "engine")  # what is passed on as it is
    text = options.get("text")
    source = own_text(reference) if text is None else text
    if text is None and source != BUILTIN:
        settings.note(f"--text {source}: the text that lies beside the reference")
    wanted = EvaluationOptions(
        text="",
        text_name=text_name(source),
        text_found=text is None,
        caches=_caches_of(options),
        tasks=tasks,
        prompts=_prompts(reference, options, settings),
        correction=Path(put) if (put := options.get("correction")) else None,
        **{key: given[key] for key in same if key in given},
    )
    most = BYTES_OF_TOKEN * wanted.windows * wanted.length
    return replace(wanted, text=read_text(source, most, offline=settings.offline))


def _prompts(reference: Path, options: MeasurementOptions, settings: Settings) -> Prompts | None:
    """Read the prompts that the models answer, if any; errors as `evaluate`."""
    source, chat = options.get("generated"), options.get("chat_template", False)
    if not source:
        return None
    from quantforge.evaluation.reference_text import NEW_TOKENS, Prompts

    texts = read_prompts(
        source, reference if chat else None, offline=settings.offline, note=settings.note
    )
    most = options.get("generated_tokens") or NEW_TOKENS
    return Prompts(prompts_name(source), tuple(texts), most, chat)
