"""``evaluate``: measure a reference model and models derived from it, of any format, on one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from quantforge.api.folder_cards import check_evaluation_card, write_evaluation_card
from quantforge.api.scored_text import (
    BUILTIN,
    MAX_BYTES_PER_TOKEN,
    find_reference_text,
    prompts_name,
    read_prompts,
    read_text,
    text_name,
)
from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import as_list, check_arguments, check_names, check_types
from quantforge.artifacts import manifest
from quantforge.cache_kinds import parse_cache_kinds
from quantforge.errors import InputError, UsageError, nearest_hint
from quantforge.evaluation.tasks import Tasks, check, check_files
from quantforge.files.hub import resolve_model
from quantforge.formats import detect_format
from quantforge.formats.open_model import open_model
from quantforge.formats.sources.adapter import open_adapter
from quantforge.formats.sources.low_precision import decode_if_unsupported
from quantforge.progress import phase, report_step, report_to
from quantforge.recipe import AdapterOptions
from quantforge.settings import Settings, check_device

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation
    from quantforge.evaluation.measurement_options import EvaluationOptions
    from quantforge.evaluation.reference_text import Prompts
    from quantforge.files.reader import Checkpoint

MAX_SIZE_RATIO = 1.1  # a model larger than its reference by more than this was hardly made from it
ENGINES = ("llama.cpp",)
# Options that have no effect without another option.
_REQUIRED_OPTIONS = {
    "generated_tokens": "generated",
    "chat_template": "generated",
    "task_limit": "tasks",
    "allow_code": "tasks",
}


class MeasurementOptions(TypedDict, total=False):
    """Keyword options of `evaluate`; the defaults are those of `EvaluationOptions`."""

    text: str | None  # a source as for ``--calibration``; None means `find_reference_text`
    windows: int  # maximum number of windows
    length: int  # tokens of a window
    speed: bool  # measure speed and memory too
    # KV caches to try, see `quantforge.cache_kinds`; speed is measured with the first
    cache: str | Sequence[str]
    engine: str  # one of `ENGINES`, which then scores GGUF files too; "" for none
    tasks: str | Sequence[str] | None  # of lm-evaluation-harness: names, or YAML files
    task_limit: int  # documents of each task; 0 means all
    allow_code: bool  # let YAML files run the code that they name
    card: str | Path | None  # directory whose README.md gets the figures of its models
    generated: str  # prompts that every model answers: a source, see `read_prompts`
    generated_tokens: int  # maximum length of an answer
    correction: str | Path | None  # a LoRA adapter that is applied to the compared model
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
        models: models derived from it, or a single one.
        settings: how to run.
        options: see `MeasurementOptions`.

    Raises:
        UsageError: an option is unknown, or its value is invalid or has no effect.
        InputError: a model, the text, a task or the card cannot be used, or a result is NaN or infinite.
        RefusedError: a task file would run code, or a model cannot be scored here.
    """
    settings = settings or Settings()
    descendants = as_list(models)
    check_measurement_options(options, len(descendants))
    with report_to(settings.progress), phase("preparing", 1.0, "headers of the models"):
        paths = [resolve_model(str(name), settings.offline) for name in (reference, *descendants)]
        _check_engine(options.get("engine", ""), paths)
        checkpoints = [decode_if_unsupported(open_model(path)) for path in paths]
        for checkpoint in checkpoints:  # raises for unreadable models before anything is loaded
            detect_format(checkpoint.config)
            if checkpoint.declaration_note:
                settings.note(f"{checkpoint.path}: quantization: {checkpoint.declaration_note}")
        for checkpoint in checkpoints[1:]:
            _note_swapped_models(checkpoints[0].original, checkpoint.original, settings)
            _check_same_adapter(checkpoints[0].path, checkpoint.path, settings, options.get("card"))
        if card := options.get("card"):
            check_evaluation_card(Path(card), paths[1:])
        check_device(settings.device)
        tasks = _requested_tasks(options, offline=settings.offline)
        report_step("libraries")
        import torch

        from quantforge.evaluation.compare_models import compare_models
        from quantforge.evaluation.saved_rows import resume_rows
        from quantforge.numerics.allocator import return_freed_memory

        evaluation_options = _evaluation_options(paths[0], options, tasks, settings)
        return_freed_memory()  # so that peaks of memory count only what is in use
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        with resume_rows(checkpoints, evaluation_options, settings) as saved_rows:
            evaluation = compare_models(checkpoints, evaluation_options, settings, saved_rows)
            if card:
                write_evaluation_card(
                    Path(card), evaluation, checkpoints[0].original, settings.base_model
                )
        return evaluation


def check_measurement_options(options: Mapping[str, Any], num_models: int = 0) -> None:
    """Check `MeasurementOptions` before any work; ``num_models`` models are compared with the reference.

    Raises:
        UsageError: an unknown name, an invalid value, or an option without the one that it depends on.
    """
    if not isinstance(options, Mapping):
        raise UsageError(f"measured = {options!a:.60}: no options", 'e.g. {"windows": 20}')
    check_names(options, MeasurementOptions.__annotations__)
    check_types(MeasurementOptions, options)
    engine = options.get("engine", "")
    _cache_kinds(options)
    if engine and engine not in ENGINES:
        raise UsageError(f"--engine {engine}: unknown", nearest_hint(engine, ENGINES))
    correction = options.get("correction")
    if correction and (num_models != 1 or options.get("card")):
        raise UsageError(
            f"--correction {correction}: of one model, and for no card",
            "quantforge eval SOURCE MODEL --correction ADAPTER, without it for other models",
        )
    for name, required in _REQUIRED_OPTIONS.items():
        if options.get(name) and not options.get(required):
            flag, required_flag = f"--{name.replace('_', '-')}", f"--{required}"
            raise UsageError(
                f"{flag} has no effect without {required_flag}",
                f"add {required_flag}, or leave it out",
            )


def _cache_kinds(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the requested KV caches; errors as `parse_cache_kinds`."""
    cache = options.get("cache", ())
    if isinstance(cache, str):
        return parse_cache_kinds(cache)
    return parse_cache_kinds(",".join(cache)) if cache else ()


def _check_engine(engine: str, paths: Sequence[Path]) -> None:
    """Check that an engine is installed and has a file to score, before any work.

    Args:
        engine: one of `ENGINES`, or "".
        paths: paths of all models.

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


def _note_swapped_models(reference: Checkpoint, model: Checkpoint, settings: Settings) -> None:
    """Warn that reference and model may be swapped: the reference is quantized and smaller."""
    reference_bytes, model_bytes = (
        sum(entry.to_stored_tensor().nbytes for entry in checkpoint.entries.values())
        for checkpoint in (reference, model)
    )
    if "quantization_config" in reference.config and MAX_SIZE_RATIO * reference_bytes < model_bytes:
        reference_path, model_path = reference.path, model.path
        settings.note(
            f"{reference_path} is the reference, and it is quantized and smaller than {model_path}: were they meant"
            f" the other way round? quantforge eval {model_path} {reference_path}"
        )


def _check_same_adapter(
    reference: Path, model: Path, settings: Settings, card: str | Path | None
) -> None:
    """Warn that model and reference have different adapters; raise `UsageError` if figures would go into its card."""
    message = _adapter_mismatch(reference, model, settings.adapter)
    if not message:
        return
    path = model.resolve()
    if card is not None and Path(card).resolve() in {path, *path.parents}:
        raise UsageError(
            f"--card {card}: {message}",
            "leave --card out: it would state figures against another model than the one that it names",
        )
    settings.note(message)


def _adapter_mismatch(reference: Path, model: Path, adapter: Path | None) -> str:
    """Return a message if a model was made with another adapter than its reference, else ""."""
    try:
        model_adapter, reference_adapter = (
            manifest.recorded_adapter(manifest.read_manifest(path)) for path in (model, reference)
        )
    except InputError:  # `verify` reports what is wrong with a manifest
        return ""
    if model_adapter is None or (adapter is None and not model_adapter.source):
        return ""
    if adapter is not None:
        reference_adapter = AdapterOptions(adapter.resolve().name, open_adapter(adapter).digests)
    reference_adapter = reference_adapter or AdapterOptions()
    if reference_adapter.sha256 == model_adapter.sha256:
        return ""
    if not model_adapter.source:
        return f"{model} was made without the adapter {reference_adapter.source}, which is merged into the reference"
    suffix = (
        f"with the adapter {reference_adapter.source}" if reference_adapter.source else "without it"
    )
    text = f"{model} was made with the adapter {model_adapter.source}, and the reference is measured {suffix}"
    if reference_adapter.source and adapter is None:  # another adapter would be added
        return text
    return f"{text}: --adapter DIR merges {model_adapter.source} into {reference}"


def _requested_tasks(options: MeasurementOptions, *, offline: bool) -> Tasks | None:
    """Return the requested tasks, or None; raise if their names or files show that they cannot run."""
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
    """Check the tasks, read text and prompts, and return the complete options; errors as `evaluate`."""
    from quantforge.evaluation.measurement_options import EvaluationOptions

    if tasks is not None:
        check(tasks)
    given_options: Mapping[str, Any] = {**options}
    unchanged = ("windows", "length", "speed", "engine")  # passed on unchanged
    text = options.get("text")
    source = find_reference_text(reference) if text is None else text
    if text is None and source != BUILTIN:
        settings.note(f"--text {source}: the text that lies beside the reference")
    resolved = EvaluationOptions(
        text="",
        text_name=text_name(source),
        text_found=text is None,
        caches=_cache_kinds(options),
        tasks=tasks,
        prompts=_requested_prompts(reference, options, settings),
        correction=Path(adapter) if (adapter := options.get("correction")) else None,
        **{key: given_options[key] for key in unchanged if key in given_options},
    )
    max_bytes = MAX_BYTES_PER_TOKEN * resolved.windows * resolved.length
    return replace(resolved, text=read_text(source, max_bytes, offline=settings.offline))


def _requested_prompts(
    reference: Path, options: MeasurementOptions, settings: Settings
) -> Prompts | None:
    """Read the prompts that all models answer; None if none are requested. Errors as `evaluate`."""
    source, templated = options.get("generated"), options.get("chat_template", False)
    if not source:
        return None
    from quantforge.evaluation.reference_text import NEW_TOKENS, Prompts

    texts = read_prompts(
        source, reference if templated else None, offline=settings.offline, note=settings.note
    )
    max_tokens = options.get("generated_tokens") or NEW_TOKENS
    return Prompts(prompts_name(source), tuple(texts), max_tokens, templated)
