"""The verbs: what the command line calls, and what a program may call instead.

Everything that can be refused is refused before torch is imported and before a byte is written; whatever fails later
leaves the output as it was, and beside it either a run that the same command goes on with, or nothing.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge import card, manifest
from quantforge.allocator import return_freed_memory
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.publish import Stage
from quantforge.checkpoint.reader import Checkpoint, open_checkpoint
from quantforge.checkpoint.writer import WeightsWriter, index_json
from quantforge.errors import InputError
from quantforge.events import Event
from quantforge.exporting import Conversion, Exported, plan_export
from quantforge.formats import format_of
from quantforge.plan import Planned, make_plan, shards_of
from quantforge.planned import Plan
from quantforge.recipe import Recipe, to_toml
from quantforge.settings import Settings, check_device

if TYPE_CHECKING:
    from quantforge.calibrate import Calibrated
    from quantforge.workspace import Workspace

SPARE_BYTES = 1 << 20  # for configuration, card, manifest and journal, beside weights and copies


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run made."""

    out: Path
    plan: Plan
    events: tuple[Event, ...]
    resumed: bool


def plan(model: str, recipe: Recipe, *, offline: bool = False, in_memory: bool = True) -> Plan:
    """What `quantize` would do; nothing is written. Errors as `make_plan`."""
    return make_plan(recipe, open_checkpoint(resolve(model, offline)), in_memory=in_memory).plan


def quantize(model: str, recipe: Recipe, out: Path, settings: Settings) -> Outcome:
    """Quantize a model into a directory; run again after any interruption, it goes on.

    Raises:
        QuantForgeError: bad input, a refusal, a busy output, no space: ``out`` is then what it was before.
    """
    checkpoint = open_checkpoint(resolve(model, settings.offline))
    planned = make_plan(recipe, checkpoint, in_memory=settings.activations == "memory")
    settings.policy.check(planned.plan.substitutions)
    with Stage(out, settings.overwrite, checkpoint.path) as stage:
        stage.check_space(_space(checkpoint, planned, recipe, settings))
        return _run(checkpoint, planned, recipe, stage, settings)


def export(
    model: str, recipe: Recipe, out: Path, settings: Settings, *, allow_inexact: bool = False
) -> Outcome | Exported:
    """Move a model into another format; one that is not quantized is rounded plainly into its grid.

    Raises:
        QuantForgeError: as `quantize`; in particular the target cannot hold the numbers (exactly).
    """
    checkpoint = open_checkpoint(resolve(model, settings.offline))
    if not isinstance(checkpoint.config.get("quantization_config"), Mapping):
        return quantize(model, recipe, out, settings)
    conversion = plan_export(checkpoint, recipe)
    plan = conversion.plan
    with Stage(out, settings.overwrite, checkpoint.path) as stage:
        stage.clear()
        stage.check_space(plan.output_bytes + _side_bytes(checkpoint))
        try:
            verdict = conversion.settle(allow_inexact=allow_inexact)
            settings.policy.check(conversion.events)
            shards = shards_of(plan.tensors, recipe.max_shard_bytes)
            with WeightsWriter(stage.path, shards) as writer:
                conversion.write(writer, allow_inexact=allow_inexact)
            _publish(
                stage, checkpoint, plan, recipe.max_shard_bytes, _exported(checkpoint, conversion)
            )
        except BaseException:  # an export is not resumed: it only copies
            stage.discard()
            raise
    return Exported(
        stage.out, conversion.source_key, plan.format, len(conversion.layers), verdict,
        plan.output_bytes, tuple(conversion.events),
    )  # fmt: skip


def _exported(checkpoint: Checkpoint, conversion: Conversion) -> dict[str, Any]:
    """The manifest of an export; what the source's own manifest says of its origin is passed on as it is."""
    document = manifest.manifest(
        conversion.plan, "", _source(checkpoint), None, conversion.events, {}
    )
    earlier = manifest.read(checkpoint.path) or {}
    passed_on = ("source", "method", "recipe", "calibration", "lineage")
    document["lineage"] = {key: earlier[key] for key in passed_on if key in earlier}
    return document


def _run(
    checkpoint: Checkpoint, planned: Planned, recipe: Recipe, stage: Stage, settings: Settings
) -> Outcome:
    check_device(settings.device)
    import torch

    from quantforge.execution import Run

    return_freed_memory()  # the peak that the plan promises is of what is alive
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    plan = planned.plan
    planned = _settle_tied(planned, checkpoint)
    calibrated = _calibrated(checkpoint, planned, recipe, settings)
    source = _source(checkpoint)
    work = _workspace(stage, _fingerprint(recipe, source, calibrated, settings.device))
    try:
        shards = shards_of(plan.tensors, recipe.max_shard_bytes)
        with WeightsWriter(stage.path, shards, done=_done(plan, work.done)) as writer:
            run = Run(planned, checkpoint, recipe, writer, work, settings)
            run.execute(calibrated.sample if calibrated else None)
        events = (*plan.substitutions, *(calibrated.events if calibrated else ()), *run.events())
        settings.policy.check(events)
        described = calibrated.describe() if calibrated else None
        document = manifest.manifest(
            plan, to_toml(recipe), source, described, events, run.figures()
        )
        _publish(stage, checkpoint, plan, recipe.max_shard_bytes, document)
    except InputError:
        work.remove()  # the same input fails again, and mended it is another: nothing to go on with
        stage.discard()
        raise
    except BaseException:
        work.close()
        raise
    work.remove()
    return Outcome(stage.out, plan, events, work.resumed)


def _calibrated(
    checkpoint: Checkpoint, planned: Planned, recipe: Recipe, settings: Settings
) -> Calibrated | None:
    if not planned.plan.options["needs"]:
        return None
    from quantforge.calibrate import calibrate
    from quantforge.self_calibration import own_rows

    found = calibrate(
        checkpoint.path, recipe.calibration, planned.plan,
        offline=settings.offline, own_rows=own_rows(checkpoint.path, recipe.calibration, settings.device),
    )  # fmt: skip
    settings.policy.check([*planned.plan.substitutions, *found.events])
    return found


def _settle_tied(planned: Planned, checkpoint: Checkpoint) -> Planned:
    """A tied head that is stored twice must be stored equal: the plan stores it once, or unties it."""
    from quantforge.architectures.match import resolve_tied

    def equal(first: str, second: str) -> bool:
        import torch

        rows, step = checkpoint.entries[first].shape[0], 4096
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            pair = [checkpoint.read_rows(name, start, stop) for name in (first, second)]
            if not torch.equal(*pair):
                return False
        return True

    return Planned(planned.plan, resolve_tied(planned.matched, equal))


def _workspace(stage: Stage, fingerprint: Mapping[str, str]) -> Workspace:
    """The journal of this run beside the stage, or that of the run that it goes on with."""
    from quantforge.workspace import Workspace

    directory = stage.path.with_name(f".{stage.out.name}.qf-journal")
    if stage.empty:  # what the journal speaks of was published or removed
        shutil.rmtree(directory, ignore_errors=True)
    work = Workspace(directory, fingerprint)
    if not work.resumed:
        stage.clear()
    return work


def _fingerprint(
    recipe: Recipe, source: Mapping[str, Any], calibrated: Calibrated | None, device: str
) -> dict[str, str]:
    """Everything that decides a byte of the result, by the name under which a mismatch is reported."""
    return {
        "recipe": hashlib.sha256(to_toml(recipe).encode()).hexdigest(),
        "calibration": calibrated.sample.report.digest if calibrated else "",
        "device": device,
        **{f"version of {name}": text for name, text in manifest.versions().items()},
        **{f"source file {name}": entry["sha256"] for name, entry in source["files"].items()},
    }


def _done(plan: Plan, units: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that the finished units have written."""
    names = []
    for tensor in plan.tensors:
        unit = "outer" if tensor.part < 0 else f"block {tensor.part}"
        if ("head" if tensor.name in plan.late else unit) in units:
            names += [stored.name for stored in tensor.stored]
    return names


def _source(checkpoint: Checkpoint) -> dict[str, Any]:
    """The source for the manifest: its name, and the digest of every file that was read."""
    files = [checkpoint.path / "config.json", *checkpoint.shards, *checkpoint.side_files]
    name, revision = source_name(checkpoint.path)
    return {
        "model": name,
        **({"revision": revision} if revision else {}),
        "files": manifest.digests(checkpoint.path, files),
    }


def source_name(path: Path) -> tuple[str, str]:
    """The name of a model without any trace of where it lies, and its revision if it came from the hub."""
    path = path.resolve()
    if path.parent.name == "snapshots":
        repository = path.parent.parent.name.removeprefix("models--")
        return repository.replace("--", "/", 1), path.name
    return path.name, ""


def _space(checkpoint: Checkpoint, planned: Planned, recipe: Recipe, settings: Settings) -> int:
    """Bytes beside the output at the fullest moment."""
    dimensions = planned.matched.dimensions
    states = 0
    if settings.activations == "disk" and planned.plan.options["needs"] and dimensions:
        states = 4 * recipe.calibration.samples * recipe.calibration.length * dimensions.hidden
    return planned.plan.output_bytes + _side_bytes(checkpoint) + states


def _side_bytes(checkpoint: Checkpoint) -> int:
    return SPARE_BYTES + sum(path.stat().st_size for path in checkpoint.side_files)


def _publish(
    stage: Stage, checkpoint: Checkpoint, plan: Plan, max_shard_bytes: int, document: dict[str, Any]
) -> None:
    """Put everything beside the weights, the manifest last, and make it the output in one step."""
    shards = shards_of(plan.tensors, max_shard_bytes)
    for path in checkpoint.side_files:
        stage.copy_file(path, str(path.relative_to(checkpoint.path)), checkpoint.path)
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    if plan.options["untie"]:
        config = _untied(config)
    for name, data in format_of(plan.format).side_files(plan, config).items():
        stage.write_file(name, data)
    if len(shards) > 1:
        stage.write_file("model.safetensors.index.json", index_json(shards))
    base = base_model(document, checkpoint.config)
    stage.write_file("README.md", card.model_card(plan, document, base, checkpoint.card))
    stage.write_file(manifest.NAME, manifest.finish(document, stage.path))
    stage.publish()


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration for a head of its own; families differ in where they look, so that all places say so."""
    nested = config.get("text_config")
    inner = {"text_config": _untied(nested)} if isinstance(nested, Mapping) else {}
    return {**config, **inner, "tie_word_embeddings": False}


def base_model(document: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The name of the original model for the card: of the hub if it is known, else of its directory."""
    named = config.get("_name_or_path")
    if isinstance(named, str) and card.is_hub_name(named):
        return named
    origin = document.get("lineage", {}).get("source")
    known = origin.get("model") if isinstance(origin, Mapping) else None
    return str(known or document["source"]["model"])
