"""The verbs: what the command line calls, and what a program may call instead."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge import card, manifest
from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.publish import Stage
from quantforge.checkpoint.reader import Checkpoint, open_checkpoint
from quantforge.checkpoint.writer import WeightsWriter, index_json
from quantforge.events import Event
from quantforge.exporting import Exported, plan_export
from quantforge.formats import format_of
from quantforge.plan import Planned, make_plan, shards_of
from quantforge.planned import Plan, StoredTensor
from quantforge.recipe import Recipe, to_toml

if TYPE_CHECKING:
    from quantforge.calibrate import Calibrated
    from quantforge.execution import Settings

SPARE_BYTES = 1 << 20  # for side files, manifest and journal, beside the weights and the copies


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
        stage.check_space(planned.plan.output_bytes + _side_bytes(checkpoint))
        return _run(model, checkpoint, planned, recipe, stage, settings)


def export(
    model: str, recipe: Recipe, out: Path, settings: Settings, *, allow_inexact: bool = False
) -> Outcome | Exported:
    """Move a model into another format; one that is not quantized is rounded plainly into its grid.

    Raises:
        RefusedError: the target cannot hold the numbers (exactly).
    """
    checkpoint = open_checkpoint(resolve(model, settings.offline))
    if not isinstance(checkpoint.config.get("quantization_config"), Mapping):
        return quantize(model, recipe, out, settings)
    conversion = plan_export(checkpoint, recipe)
    plan = conversion.plan
    with Stage(out, settings.overwrite, checkpoint.path) as stage:
        stage.check_space(plan.output_bytes + _side_bytes(checkpoint))
        verdict = conversion.settle(allow_inexact=allow_inexact)
        settings.policy.check(conversion.events)
        shards = shards_of(plan.tensors, recipe.max_shard_bytes)
        with WeightsWriter(stage.path, shards) as writer:
            conversion.write(writer, allow_inexact=allow_inexact)
        earlier = manifest.read(checkpoint.path) or {}
        text = str(earlier.get("recipe", ""))
        inputs = {"model": model, "files": manifest.digests(checkpoint.path, _inputs(checkpoint))}
        document = manifest.manifest(
            plan, text, inputs, earlier.get("calibration"), conversion.events, {}
        )
        document["lineage"] = {key: earlier[key] for key in ("source", "method") if key in earlier}
        _write_side_files(stage, checkpoint, plan, text, shards, document, tuple(conversion.events))
        stage.write_file(manifest.NAME, manifest.finish(document, stage.path))
        stage.publish()
    return Exported(
        stage.out, conversion.source_key, plan.format, len(conversion.layers), verdict,
        plan.output_bytes, tuple(conversion.events),
    )  # fmt: skip


def _run(
    model: str,
    checkpoint: Checkpoint,
    planned: Planned,
    recipe: Recipe,
    stage: Stage,
    settings: Settings,
) -> Outcome:
    import torch

    from quantforge.execution import Run
    from quantforge.workspace import Workspace

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    plan = planned.plan
    planned = _settle_tied(planned, checkpoint)
    calibrated = _calibrated(checkpoint, planned, recipe, settings)
    inputs = {"model": model, "files": manifest.digests(checkpoint.path, _inputs(checkpoint))}
    shards = shards_of(plan.tensors, recipe.max_shard_bytes)
    work = Workspace(
        stage.path.with_name(f".{stage.out.name}.qf-journal"),
        _fingerprint(recipe, inputs, calibrated),
    )
    try:
        with WeightsWriter(stage.path, shards, done=_done(plan, work.done)) as writer:
            run = Run(planned, checkpoint, recipe, writer, work, settings)
            run.execute(calibrated.sample if calibrated else None)
        events = (*plan.substitutions, *(calibrated.events if calibrated else ()), *run.events())
        settings.policy.check(events)
        described = calibrated.describe() if calibrated else None
        document = manifest.manifest(
            plan, to_toml(recipe), inputs, described, events, run.figures()
        )
        _write_side_files(stage, checkpoint, plan, to_toml(recipe), shards, document, events)
        stage.write_file(manifest.NAME, manifest.finish(document, stage.path))
        stage.publish()
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
    """A tied head that is stored twice must be stored equal: the plan has dropped one of them."""
    from quantforge.architectures.match import resolve_tied

    def equal(first: str, second: str) -> bool:
        from torch import equal

        rows = checkpoint.entries[first].shape[0]
        step = 4096
        return all(
            equal(
                *(
                    checkpoint.read_rows(name, start, min(start + step, rows))
                    for name in (first, second)
                )
            )
            for start in range(0, rows, step)
        )

    return Planned(planned.plan, resolve_tied(planned.matched, equal))


def _fingerprint(
    recipe: Recipe, inputs: Mapping[str, Any], calibrated: Calibrated | None
) -> dict[str, str]:
    """Everything that decides a byte of the result, by the name under which a mismatch is reported."""
    files = json.dumps(inputs["files"], sort_keys=True).encode()
    return {
        "recipe": hashlib.sha256(to_toml(recipe).encode()).hexdigest(),
        "source": hashlib.sha256(files).hexdigest(),
        "calibration": calibrated.sample.report.digest if calibrated else "",
        **{f"version of {name}": text for name, text in manifest.versions().items()},
    }


def _done(plan: Plan, units: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that the finished units have written."""
    names = []
    for tensor in plan.tensors:
        unit = "outer" if tensor.part < 0 else f"block {tensor.part}"
        if tensor.name in plan.late:
            unit = "head"
        if unit in units:
            names += [stored.name for stored in tensor.stored]
    return names


def _inputs(checkpoint: Checkpoint) -> list[Path]:
    return [checkpoint.path / "config.json", *checkpoint.shards, *checkpoint.side_files]


def _side_bytes(checkpoint: Checkpoint) -> int:
    return SPARE_BYTES + sum(path.stat().st_size for path in checkpoint.side_files)


def _write_side_files(
    stage: Stage,
    checkpoint: Checkpoint,
    plan: Plan,
    recipe: str,
    shards: tuple[tuple[StoredTensor, ...], ...],
    document: Mapping[str, Any],
    events: tuple[Event, ...],
) -> None:
    config = {
        key: value for key, value in checkpoint.config.items() if key != "quantization_config"
    }
    if plan.options["untie"]:
        config["tie_word_embeddings"] = False
    for path in checkpoint.side_files:
        stage.copy_file(path, str(path.relative_to(checkpoint.path)), checkpoint.path)
    for name, data in format_of(plan.format).side_files(plan, config).items():
        stage.write_file(name, data)
    if len(shards) > 1:
        stage.write_file("model.safetensors.index.json", index_json(shards))
    base = base_model(document["source"]["model"], checkpoint)
    text = card.model_card(plan, recipe, base, checkpoint.card, events, document["calibration"])
    stage.write_file("README.md", text)


def base_model(model: str, checkpoint: Checkpoint) -> str:
    """The name of the source for the card: what its configuration says, else the last part of the path."""
    named = checkpoint.config.get("_name_or_path")
    if isinstance(named, str) and named and not named.startswith(("/", ".")):
        return named
    return Path(model).name if Path(model).exists() else model.partition("@")[0]
