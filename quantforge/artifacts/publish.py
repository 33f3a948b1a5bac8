"""Publish a result: write the files that accompany its weights, and make it the output in one step.

A directory gets files copied from the source, the configuration of its format, an index, a card and, last, the
manifest. A file gets its manifest next to it, and on request a ``Modelfile`` and the vision tower in a file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantforge.architectures.configuration import untie_config
from quantforge.artifacts import card, card_figures, manifest
from quantforge.artifacts.card import base_model
from quantforge.artifacts.manifest import source_file_digests, weight_checksums
from quantforge.artifacts.provenance import BILL, STATEMENT, provenance
from quantforge.artifacts.signing import sign_files, unsigned_files
from quantforge.files.checksums import Checksums
from quantforge.files.hub import source_name
from quantforge.files.opener import changed_error
from quantforge.files.output_names import MODELFILE_SUFFIX, final_name, projector_name
from quantforge.files.previous_output import DIRECTORY_SIGNATURE, SIGNATURE_SUFFIX
from quantforge.files.reader import Checkpoint
from quantforge.files.stage import Stage
from quantforge.files.writer import WeightsWriter, index_json
from quantforge.formats import load_format
from quantforge.formats.decoded import unquantized_config
from quantforge.formats.open_model import open_model, tokenizer_side_files
from quantforge.plans import FilePlan, Plan
from quantforge.settings import Settings, rounding_workers
from quantforge_calibration.chat_templates import DEFAULT, read_templates
from quantforge_calibration.source_error import SourceError


def describe_source(
    checkpoint: Checkpoint, checksums: Mapping[Path, Checksums] | None = None
) -> dict[str, Any]:
    """Return the source's manifest entry: its name, and the digest of every file that was read."""
    name, revision = source_name(checkpoint.path)
    return {
        "model": name,
        **({"revision": revision} if revision else {}),
        **checkpoint.source_notes,
        "files": source_file_digests(checkpoint, checksums),
    }


def digest_source(
    checkpoint: Checkpoint, earlier_digests: Mapping[str, Any], settings: Settings
) -> tuple[Checkpoint, dict[str, Any]]:
    """Compute digests of a model's files at the start of a run.

    What planning has read so far has to match these digests, so the small files are compared with the digests of when
    the model was opened (``earlier_digests``), and configuration and headers are read again.

    Returns:
        The checkpoint to read from now on, and the source's manifest entry.

    Raises:
        IntegrityError: the model has changed meanwhile.
    """
    checksums = weight_checksums(checkpoint, rounding_workers(settings))
    source = describe_source(checkpoint, checksums)
    for name, entry in earlier_digests.items():
        if source["files"].get(name) != entry:
            raise changed_error(checkpoint.path / name)
    if open_model(checkpoint.path) != checkpoint.original:
        raise changed_error(checkpoint.path)
    return checkpoint.with_checksums(checksums), source


def stage_side_files(
    stage: Stage, checkpoint: Checkpoint, plan: Plan, source: Mapping[str, Any], settings: Settings
) -> None:
    """Copy the source's side files into the stage at the start of a run, checking them against their digests.

    Raises:
        IntegrityError: a file does not match its digest.
        RefusedError, InputError: as `ProjectorFile.values`.
    """
    if load_format(plan.format).INFO.is_single_file:
        _write_tower(stage, checkpoint, include_tower=settings.mmproj)
        return
    for path in checkpoint.side_files:
        name = str(path.relative_to(checkpoint.path))
        if stage.copy_file(path, name, checkpoint.path) != source["files"][name]["sha256"]:
            raise changed_error(path)
    for name, data in tokenizer_side_files(checkpoint).items():
        stage.write_file(name, data)


def gguf_result_names(out: Path, files: Sequence[FilePlan], settings: Settings) -> frozenset[str]:
    """Return the names of the files of a GGUF result, except those that every such result may have (manifest ...)."""
    names = {final_name(out, file.name) for file in files}
    if settings.modelfile:
        names.add(f"{out.stem}{MODELFILE_SUFFIX}")
    if settings.mmproj:
        names.add(projector_name(out))
    if settings.provenance:
        names |= {f"{out.name}.{name}" for name in (STATEMENT, BILL)}
    return frozenset(names)


def publish(
    stage: Stage,
    checkpoint: Checkpoint,
    plan: Plan,
    files: Sequence[FilePlan],
    document: dict[str, Any],
    *,
    settings: Settings,
) -> None:
    """Write everything that accompanies the weights (the manifest last), sign it, and make it the output in one step.

    Raises:
        RefusedError: the output contains files that do not belong to a result.
        UsageError, InputError: the result cannot be signed, see `quantforge.artifacts.signing`.
    """
    is_single_file = load_format(plan.format).INFO.is_single_file
    if is_single_file:
        if settings.modelfile:
            _write_modelfile(stage, files[0])
    else:
        _write_directory(stage, checkpoint, plan, files, document, settings)
    if settings.provenance:
        _write_provenance(stage, document, f"{stage.out.name}." if is_single_file else "")
    if not is_single_file:
        if settings.sign is None:  # left by an interrupted run that was to be signed
            (stage.path / DIRECTORY_SIGNATURE).unlink(missing_ok=True)
        weights = (stage.final_name(file.name) for file in files)
        stage.check_no_foreign_files({stage.manifest, DIRECTORY_SIGNATURE, *weights})
    key, workers = settings.sign, rounding_workers(settings)
    stage.write_file(
        stage.manifest, manifest.finish_manifest(document, stage.path, stage.manifest, workers)
    )
    if key is not None:
        unsigned = unsigned_files(stage.out.name, one_file=is_single_file)
        name = f"{stage.out.name}{SIGNATURE_SUFFIX}" if is_single_file else DIRECTORY_SIGNATURE
        stage.write_file(name, sign_files(stage.path, key, unsigned=unsigned))
    stage.publish()


def _write_modelfile(stage: Stage, first: FilePlan) -> None:
    """Write the Modelfile with which Ollama loads a GGUF file (the ``first`` of numbered ones)."""
    from quantforge.formats.gguf.modelfile import modelfile

    text = modelfile(stage.path / stage.final_name(first.name))
    stage.write_file(f"{stage.out.stem}{MODELFILE_SUFFIX}", text.encode())


def _write_directory(
    stage: Stage,
    checkpoint: Checkpoint,
    plan: Plan,
    files: Sequence[FilePlan],
    document: dict[str, Any],
    settings: Settings,
) -> None:
    """Write the configuration of the format, the index and the card, and add their fields to the manifest."""
    # Imported late: it imports torch, which planning does without
    from quantforge.model.transformers_layout import running_names
    from quantforge.model.transformers_loading import resolve_verdicts

    config = unquantized_config(checkpoint)
    if plan.unties_head:
        config = untie_config(config)
    engines = resolve_verdicts(plan.engines, config, plan.tensors)
    plan = replace(plan, running=running_names(plan, config), engines=engines)
    for name, data in load_format(plan.format).side_files(plan, config).items():
        stage.write_file(name, data)
    if len(files) > 1:
        shards = [[tensor for tensor, _ in file.places] for file in files]
        stage.write_file("model.safetensors.index.json", index_json(shards))
    document["mutable"] = card_figures.MUTABLE
    base = base_model(settings.base_model, document, checkpoint.config)
    document |= {"base_model": base} if base else {}
    text = card.model_card(
        plan, document, base, checkpoint.card, chat=has_chat_template(stage.path)
    )
    stage.write_file(card_figures.CARD, text)


def _write_tower(stage: Stage, checkpoint: Checkpoint, *, include_tower: bool) -> None:
    """Write the vision tower into a file of its own, or remove one that an interrupted run has left."""
    name = projector_name(stage.out)
    if not include_tower:
        (stage.path / name).unlink(missing_ok=True)  # left by an interrupted run
        return
    from quantforge.formats.gguf.projector_file import projector_file

    file = projector_file(checkpoint, name)
    with WeightsWriter(stage.path, [file.plan]) as writer:
        for name, value in file.values(checkpoint):
            writer.write(name, value)


def _write_provenance(stage: Stage, document: Mapping[str, Any], prefix: str) -> None:
    """Write the provenance files; ``prefix`` is the name of a result that is a file."""
    for name, data in provenance(document, stage.path, stage.out.name).items():
        stage.write_file(prefix + name, data)


def has_chat_template(directory: Path) -> bool:
    """Return whether a directory has a default chat template."""
    try:
        return DEFAULT in read_templates(directory).templates
    except SourceError:  # invalid templates are copied, but not used here
        return False
