"""The manifest of a result: its sources, what was done, and its files. Identical runs write identical bytes.

It holds no time, host, path or measurement: those go to a log if requested (``--log``), and to files that ``eval``
writes. ``quantforge.manifest.json`` is written last; a directory without it is incomplete. For the source it records
sizes and digests of its files, and changes of the whole source: merged adapters and kept experts.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quantforge import __version__
from quantforge.errors import InputError, IntegrityError
from quantforge.events import KINDS, Event
from quantforge.files.checksums import Checksums, compute_checksums
from quantforge.files.computed_tensors import ADAPTER, KEPT_EXPERTS
from quantforge.files.opener import FILES, read_object
from quantforge.files.output_names import MANIFEST_SUFFIX, present_names, recorded_name, side_path
from quantforge.files.previous_output import MANIFEST as NAME_OF_DIRECTORY
from quantforge.files.previous_output import SCHEMA, SIGNATURE_SUFFIX, other_version
from quantforge.files.reader import CONFIG_FILE, Checkpoint
from quantforge.plans import Action, Plan
from quantforge.recipe import AdapterOptions, Recipe, from_toml
from quantforge_files.roles import MANIFEST, WEIGHTS, FileRole

NAME = NAME_OF_DIRECTORY
MUTABLE = frozenset({"README.md"})  # evaluation figures are written into it later
# Key in what `read` returns of a file that was renamed: its name in the manifest
RECORDED_NAME = "recorded_name"
_KEPT_OF_ALL = re.compile(r"(\d+) of (\d+)")
# Packages whose version may change the result.
VERSIONED_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")

_LINEAGE_FIELDS = (
    "source", "method", "format", "recipe", "calibration", "event_counts", "base_model", "lineage",
)  # fmt: skip


def sha256(path: Path, inside: Path | None, role: FileRole = WEIGHTS) -> str:
    """Return the hex digest of a file, read in chunks; errors as `Opener.open_checked`."""
    with FILES.stream(path, role, inside) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(root: Path, paths: Iterable[Path], workers: int = 1) -> dict[str, dict[str, Any]]:
    """Return ``{name relative to root: {bytes, sha256}}``, sorted by name, reading ``workers`` files in parallel.

    Raises:
        InputError: a file cannot be read.
    """

    def entry(name: str) -> tuple[str, dict[str, Any]]:
        return name, {"bytes": (root / name).stat().st_size, "sha256": sha256(root / name, root)}

    try:
        with ThreadPoolExecutor(workers) as pool:
            return dict(pool.map(entry, sorted(str(path.relative_to(root)) for path in paths)))
    except OSError as error:
        raise InputError(
            f"{error.filename}: {error.strerror}",
            "check links and permissions",
            file=error.filename,
        ) from error


def versions() -> dict[str, str]:
    """Return the versions of everything that can change the result's bytes."""
    base_versions = {"quantforge": __version__, "python": platform.python_version()}
    return {**base_versions, "machine": platform.machine()} | {
        name: _package_version(name) for name in VERSIONED_PACKAGES
    }


@cache  # it takes a millisecond
def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def build_manifest(
    plan: Plan,
    recipe: str,
    inputs: Mapping[str, Any],
    calibration: Mapping[str, Any] | None,
    events: Sequence[Event],
    metrics: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Return the manifest of a run without its outputs (see `finish_manifest`).

    Args:
        plan: the plan that was executed.
        recipe: the recipe as TOML; empty for an export.
        inputs: the source, see `quantforge.artifacts.publish.describe_source`.
        calibration: description of the calibration text; None if none was read.
        events: all events of the run.
        metrics: measured figures by name of a tensor; figures that are not finite are left out.
    """
    return {
        "schema": SCHEMA,
        "method": plan.method,
        "format": plan.format,
        "model_type": plan.model_type,
        "versions": versions(),
        "recipe": recipe,
        "source": dict(inputs),
        "calibration": None if calibration is None else dict(calibration),
        "not_copied": list(plan.not_copied),
        "bits_per_weight": round(plan.bits_per_weight, 6) if plan.quantized() else None,
        "tensors": [
            {
                "name": tensor.name,
                "action": tensor.action.value,
                "rule": tensor.rule,
                **({"scheme": str(tensor.scheme)} if tensor.scheme else {}),
                **{
                    key: float(f"{value:.6g}")
                    for key, value in metrics.get(tensor.name, {}).items()
                    if math.isfinite(value)  # JSON has no infinity or NaN
                },
            }
            for tensor in plan.tensors
        ],
        "quantized_tensors": sum(tensor.action is Action.QUANTIZE for tensor in plan.tensors),
        **event_fields(events),
    }


def event_fields(events: Sequence[Event]) -> dict[str, Any]:
    """Return the manifest fields for events."""
    return {
        "events": [event.to_json() for event in events],
        "event_counts": dict(sorted(Counter(event.kind for event in events).items())),
    }


def lineage_fields(result: Path) -> dict[str, Any]:
    """Return the fields of a model's manifest that are copied into the manifest of what is made from it."""
    document = read_manifest(result) or {}
    return {key: document[key] for key in _LINEAGE_FIELDS if key in document}


def finish_manifest(
    document: Mapping[str, Any], stage: Path, manifest_name: str = NAME, workers: int = 1
) -> bytes:
    """Return the bytes of the manifest, completed with the digests of the other files in ``stage``.

    The manifest (named ``manifest_name``) and the signature of an interrupted publication are ignored.
    """
    files = [path for path in sorted(stage.rglob("*")) if path.is_file()]
    files = [
        path for path in files if path.name != manifest_name and path.suffix != SIGNATURE_SUFFIX
    ]
    full_document = {**document, "outputs": file_digests(stage, files, workers)}
    return (json.dumps(full_document, indent=1, ensure_ascii=False) + "\n").encode()


# Types of the manifest fields that are used: of a table, those of its keys; under `_EVERY_VALUE`, that of all values.
_EVERY_VALUE = ""
_EVENT = {"kind", "where", "detail"}
_FILE = {"bytes": int, "sha256": str}
_SHAPE: Mapping[str, Any] = {
    **dict.fromkeys(("schema", "recipe", "method", "format", "model_type"), str),
    "source": {"model": str, "revision": str, "files": {_EVERY_VALUE: _FILE}},
    "base_model": str,
    "outputs": {_EVERY_VALUE: _FILE},
    "versions": {_EVERY_VALUE: str},
    "event_counts": {_EVERY_VALUE: int},
    "events": [dict.fromkeys(_EVENT, str)],
}


def _has_shape(value: object, shape: Any) -> bool:
    if isinstance(shape, type):
        return type(value) is shape
    if isinstance(shape, list):
        return isinstance(value, list) and all(_has_shape(item, shape[0]) for item in value)
    if not isinstance(value, Mapping):
        return False
    if _EVERY_VALUE in shape:
        return all(_has_shape(item, shape[_EVERY_VALUE]) for item in value.values())
    return all(_has_shape(value[key], inner) for key, inner in shape.items() if key in value)


def manifest_path(result: Path) -> Path:
    """Return the path of the manifest of a directory or a file."""
    return result / NAME if result.is_dir() else side_path(result)


def read_with_recipe(result: Path, otherwise: str) -> dict[str, Any]:
    """Return the manifest of a result, which has to hold a recipe.

    Args:
        result: the directory or file.
        otherwise: hint on what to do if there is no recipe.

    Raises:
        InputError: there is no manifest, it cannot be read, or it holds no recipe.
    """
    path, document = manifest_path(result), read_manifest(result)
    if document is not None and document.get("recipe"):
        return document
    if document is not None:
        message = f"{path}: it holds no recipe: what it describes was exported, not quantized"
    elif text := other_schema(result):
        message = f"{path}: {text}"
        otherwise = "read it with the version that wrote it, or quantize the model again"
    elif os.path.lexists(path):
        message = f"{path}: it is damaged, or no manifest of quantforge"
    else:
        message = f"{result}: no {path.name} {'in' if result.is_dir() else 'beside'} it, which would hold its recipe"
        manifests = path.parent.glob(f"*{MANIFEST_SUFFIX}")
        orphaned = [
            candidate
            for candidate in manifests
            if not candidate.with_name(candidate.name.removesuffix(MANIFEST_SUFFIX)).exists()
        ]
        if orphaned and not result.is_dir():
            otherwise = f"beside it lies {orphaned[0].name}, whose file is missing: if it is this one, rename it back"
    raise InputError(message, otherwise, file=str(path))


def read_manifest(result: Path) -> dict[str, Any] | None:
    """Return the manifest of a directory or a file; None if there is none or it is invalid.

    The fields that are used have the expected types, and ``outputs`` is present. If a file was renamed together with
    its manifest, ``outputs`` has the present names and the field `RECORDED_NAME` is added.
    """
    path = manifest_path(result)
    try:
        data = read_object(path, MANIFEST, path.parent)
    except InputError:
        return None
    if data.get("schema") != SCHEMA or "outputs" not in data:
        return None
    entry: Any = data
    while entry is not None:  # of this result, and of those that it was made from
        if not _has_shape(entry, _SHAPE):
            return None
        entry = entry.get("lineage")
    events, outputs = data.get("events", ()), data["outputs"].values()
    if any(event.keys() != _EVENT or event["kind"] not in KINDS for event in events):
        return None
    if not all(output.keys() == _FILE.keys() for output in outputs):
        return None
    data.pop(RECORDED_NAME, None)
    recorded = "" if result.is_dir() else recorded_name(data["outputs"], result)
    if recorded not in {"", side_path(result, "").name}:
        data |= {
            "outputs": present_names(data["outputs"], result, recorded),
            RECORDED_NAME: recorded,
        }
    return data


def other_schema(result: Path) -> str:
    """Return a clause that names both schemas if a result has a manifest of another version; "" otherwise."""
    path = manifest_path(result)
    try:
        return other_version(read_object(path, MANIFEST, path.parent), SCHEMA)
    except InputError:
        return ""


def iterate_lineage(document: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield a manifest and those of the results that it was made from, the latest first."""
    while isinstance(document, Mapping):
        yield document
        document = document.get("lineage")


def recipes_in_lineage(document: Mapping[str, Any] | None) -> Iterator[Recipe]:
    """Yield the recipes of a manifest and its lineage, the latest first; errors as `from_toml`."""
    for item in iterate_lineage(document):
        if text := item.get("recipe"):
            try:
                yield from_toml(text, "the recipe of its manifest")
            except InputError as error:
                hint = "make the result again, or go on without its manifest: move that file away"
                raise InputError(
                    f"{error.message} (written by another version, or by hand)", hint
                ) from error


def recorded_adapter(document: Mapping[str, Any] | None) -> AdapterOptions | None:
    """Return the adapter that was merged into a result, according to the recipes of its manifest and lineage.

    Returns:
        The last adapter; empty options if the recipes name none; None if there is no recipe.
    """
    adapters = [recipe.adapter for recipe in recipes_in_lineage(document)]
    return next(
        (adapter for adapter in adapters if adapter.source), adapters[0] if adapters else None
    )


def digest_small_files(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return size and digest of each file of a model other than its weights, by its name inside the model."""
    if checkpoint.path.is_file():
        return {}
    return file_digests(checkpoint.path, [checkpoint.path / CONFIG_FILE, *checkpoint.side_files])


def weight_checksums(checkpoint: Checkpoint, workers: int = 1) -> dict[Path, Checksums]:
    """Return the checksums of each weight file by its path, reading ``workers`` files in parallel."""
    root = checkpoint.path.parent if checkpoint.path.is_file() else checkpoint.path
    with ThreadPoolExecutor(workers) as pool:
        checksums = pool.map(partial(compute_checksums, model_dir=root), checkpoint.shards)
        return dict(zip(checkpoint.shards, checksums, strict=True))


def source_file_digests(
    checkpoint: Checkpoint, checksums: Mapping[Path, Checksums] | None = None
) -> dict[str, dict[str, Any]]:
    """Return size and digest of every file of a model that is read, by its name inside the model."""
    root = checkpoint.path.parent if checkpoint.path.is_file() else checkpoint.path
    weights = {
        str(path.relative_to(root)): {"bytes": checksum.size, "sha256": checksum.sha256}
        for path, checksum in (checksums or weight_checksums(checkpoint)).items()
    }
    return dict(sorted({**weights, **digest_small_files(checkpoint)}.items()))


def check_same_source(recorded: Mapping[str, Any], original: Checkpoint) -> None:
    """Refuse a model whose configuration or weights differ from those that a manifest records.

    For a source that is a GGUF file, the manifest records nothing else, and the file's name does not matter.

    Raises:
        IntegrityError: naming the files that differ.
    """
    digests = source_file_digests(original)
    weights = [name for name in recorded if name.endswith(".safetensors") or name == CONFIG_FILE]
    weights = weights or list(recorded)
    if original.path.is_file():
        differ = sorted(name for name in weights if recorded[name] not in digests.values())
    else:
        differ = sorted(name for name in weights if digests.get(name) != recorded[name])
    if differ or not weights:
        raise IntegrityError(
            f"{original.path}: not the model that this one was made from: {', '.join(differ) or 'no files recorded'}",
            "give the right --source, or quantize it anew: quantforge quantize SOURCE --format ...",
        )


def recorded_adapters(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts of a manifest and its lineage on merged adapters, in the order of merging."""
    return _recorded_facts(document, ADAPTER)


def recorded_kept_experts(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts of a manifest and its lineage on kept experts, in the order of pruning."""
    return _recorded_facts(document, KEPT_EXPERTS)


def _recorded_facts(document: Mapping[str, Any], subject: str) -> tuple[str, ...]:
    facts: list[str] = []
    entry: Any = document
    while isinstance(entry, Mapping):
        source = entry.get("source")
        text = source.get(subject) if isinstance(source, Mapping) else None
        facts += [text] if isinstance(text, str) else []
        entry = entry.get("lineage")
    return tuple(reversed(facts))


def all_adapters(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the texts on adapters of a model, from its manifest and from how it is read now."""
    return _all_facts(checkpoint, ADAPTER)


def all_kept_experts(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the texts on kept experts of a model, from its manifest and from how it is read now."""
    return _all_facts(checkpoint, KEPT_EXPERTS)


def _all_facts(checkpoint: Checkpoint, subject: str) -> tuple[str, ...]:
    current = checkpoint.source_notes.get(subject)
    earlier = _recorded_facts(read_manifest(checkpoint.path) or {}, subject)
    return earlier if current is None else (*earlier, current)


def adapter_name(text: str) -> str:
    """Return the name of an adapter, which comes first in a manifest's text on it."""
    return text.rpartition(": ")[0] or text


def kept_experts_word(text: str) -> str:
    """Return the part of a name for kept experts, such as ``6of8experts``; "" if the text is not understood."""
    counts = _KEPT_OF_ALL.match(text)
    return f"{counts[1]}of{counts[2]}experts" if counts else ""
