"""Evaluate: a reference and its descendants, whatever their format, measured on one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from quantforge.arguments import as_list, check_arguments
from quantforge.checkpoint.hub import resolve
from quantforge.errors import InputError, UsageError
from quantforge.evaluation.tasks import Tasks, check, check_files
from quantforge.execution.progress import followed, phase, tell
from quantforge.formats import detect
from quantforge.formats.opening import open_model
from quantforge.formats.sources.adapter import open_adapter
from quantforge.formats.sources.low_precision import readable
from quantforge.recipe import AdapterOptions
from quantforge.results import manifest
from quantforge.settings import Settings, check_device
from quantforge.verbs.asked_prompts import prompts_name, read_prompts
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.folder_cards import check_card_of, write_measured
from quantforge.verbs.measurement_options import (
    MeasurementOptions,
    caches_of,
    check_engine,
    check_measurement,
)
from quantforge.verbs.scored_text import BUILTIN, BYTES_OF_TOKEN, own_text, read_text, text_name

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint
    from quantforge.evaluation.evaluate import Evaluation, EvaluationOptions
    from quantforge.evaluation.generated import Prompts

LARGER = 1.1  # times the size of a reference: what a descendant is not


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
    with followed(settings.progress), phase("preparing", 1.0, "headers of the models"):
        paths = [resolve(str(name), settings.offline) for name in (reference, *descendants)]
        check_engine(options.get("engine", ""), paths)
        opened = [open_model(path) for path in paths]
        for checkpoint in opened:  # what cannot be read shows before anything is loaded
            detect(readable(checkpoint).config)
            if checkpoint.quantization:
                settings.note(f"{checkpoint.path}: quantization: {checkpoint.quantization}")
        for checkpoint in opened[1:]:
            if _descends(opened[0], checkpoint):
                name, other = opened[0].path, checkpoint.path
                settings.note(
                    f"{name} is the reference, and it is quantized and smaller than {other}: were they meant"
                    f" the other way round? quantforge eval {other} {name}"
                )
            if said := _apart(opened[0].path, checkpoint.path, settings.adapter):
                _keep_out(options.get("card"), checkpoint.path, said)
                settings.note(said)
        if card := options.get("card"):
            check_card_of(Path(card), paths[1:])
        check_device(settings.device)
        tasks = _tasks(options, offline=settings.offline)
        tell("libraries")
        import torch

        from quantforge.evaluation.evaluate import evaluate as measure
        from quantforge.evaluation.kept_rows import keeping
        from quantforge.numerics.allocator import return_freed_memory

        measurement = _measurement(paths[0], options, tasks, settings)
        return_freed_memory()  # the peaks that are told are of what is alive
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        with keeping(paths, measurement) as kept:
            found = measure(paths[0], paths[1:], measurement, kept)
            if card:
                write_measured(Path(card), found, opened[0], settings.base_model)
        return found


def _descends(reference: Checkpoint, model: Checkpoint) -> bool:
    """Return whether a reference seems to descend from a model: it is quantized, and takes less room."""
    small, large = (
        sum(entry.stored().nbytes for entry in one.entries.values()) for one in (reference, model)
    )
    return "quantization_config" in reference.config and LARGER * small < large


def _apart(reference: Path, model: Path, adapter: Path | None) -> str:
    """Return what is to be said where a model was made with another adapter than its reference has; "" for nothing."""
    from quantforge.verification.opening import declared_adapter  # imports torch

    try:
        made, has = (declared_adapter(manifest.read(path)) for path in (model, reference))
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
    said = f"{model} was made with the adapter {made.source}, and the reference is measured {other}"
    if has.source and adapter is None:  # the reference's own, to which one more would be added
        return said
    return f"{said}: --adapter DIR merges {made.source} into {reference}"


def _keep_out(card: str | Path | None, model: Path, said: str) -> None:
    """Refuse to write figures into the card of a model that was not made from what its reference is."""
    place = model.resolve()
    if card is not None and Path(card).resolve() in {place, *place.parents}:
        raise UsageError(
            f"--card {card}: {said}",
            "leave --card out: it would state figures against another model than the one that it names",
        )


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


def _measurement(
    reference: Path, options: MeasurementOptions, tasks: Tasks | None, settings: Settings
) -> EvaluationOptions:
    """Have tasks checked, read text and prompts, and return what an evaluation takes; errors as `evaluate`."""
    from quantforge.evaluation.evaluate import EvaluationOptions

    if tasks is not None:
        check(tasks)
    given: Mapping[str, Any] = {**options}
    same = ("windows", "length", "speed", "engine")  # what is passed on as it is
    caches = caches_of(options)
    text = options.get("text")
    source = own_text(reference) if text is None else text
    if text is None and source != BUILTIN:
        settings.note(f"--text {source}: the text that lies beside the reference")
    wanted = EvaluationOptions(
        text="",
        text_name=text_name(source),
        text_found=text is None,
        cache=caches[0] if caches else "",
        caches=caches,
        device=settings.device,
        tasks=tasks,
        prompts=_prompts(reference, options, settings),
        activations=Path.cwd() if settings.activations == "disk" else None,
        adapter=settings.adapter,
        correction=Path(put) if (put := options.get("correction")) else None,
        input_bits=settings.input_bits,
        note=settings.note,
        **{key: given[key] for key in same if key in given},
    )
    most = BYTES_OF_TOKEN * wanted.windows * wanted.length
    return replace(wanted, text=read_text(source, most, offline=settings.offline))


def _prompts(reference: Path, options: MeasurementOptions, settings: Settings) -> Prompts | None:
    """Read the prompts that the models answer, if any; errors as `evaluate`."""
    source, chat = options.get("generated"), options.get("chat_template", False)
    if not source:
        return None
    from quantforge.evaluation.generated import NEW_TOKENS, Prompts

    texts = read_prompts(
        source, reference if chat else None, offline=settings.offline, note=settings.note
    )
    most = options.get("generated_tokens") or NEW_TOKENS
    return Prompts(prompts_name(source), tuple(texts), most, chat)
