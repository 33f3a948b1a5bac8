"""The manifest: what went in, what was done, what came out. Plain data, the same bytes for the same run.

It holds no time, host, path or measurement: those go to a log where one is asked for (``--log``), and to files that
``eval`` writes. ``quantforge.manifest.json`` is written last; a directory without one is not a release. What it states
of a source are sizes and digests of its files, and changes of all of it: adapters merged into it, experts that stayed.
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
from quantforge.files.checksums import Checksums, take_checksums
from quantforge.files.computed_tensors import ADAPTER, KEPT_EXPERTS
from quantforge.files.opener import FILES, read_object
from quantforge.files.output_names import SIDE, present_names, recorded_name, side_of
from quantforge.files.previous_output import MANIFEST as NAME_OF_DIRECTORY
from quantforge.files.previous_output import SIGNATURE
from quantforge.files.reader import CONFIG, Checkpoint
from quantforge.plans import Action, Plan
from quantforge.recipe import AdapterOptions, Recipe, from_toml
from quantforge_files.roles import MANIFEST, WEIGHTS, FileRole

NAME = NAME_OF_DIRECTORY
MUTABLE = frozenset({"README.md"})  # figures of an evaluation are written into it later
SCHEMA = "quantforge.manifest/1"
CALLED = (
    "recorded_name"  # in what `read` returns of a file that was renamed: its name in the manifest
)
_COUNTS = re.compile(r"(\d+) of (\d+)")
# Packages whose version may change a byte.
DECIDING = ("torch", "transformers", "tokenizers", "numpy")

_PASSED_ON = (
    "source", "method", "format", "recipe", "calibration", "event_counts", "base_model", "lineage",
)  # fmt: skip


def sha256(path: Path, inside: Path | None, role: FileRole = WEIGHTS) -> str:
    """Return the hex digest of a file, read in chunks; errors as `Opener.opened`."""
    with FILES.stream(path, role, inside) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(root: Path, paths: Iterable[Path], workers: int = 1) -> dict[str, dict[str, Any]]:
    """Return ``{name relative to root: {bytes, sha256}}``, sorted by name; ``workers`` files are read side by side.

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
    """Return the versions of everything that decides a byte of the result."""
    own = {"quantforge": __version__, "python": platform.python_version()}
    return {**own, "machine": platform.machine()} | {name: _installed(name) for name in DECIDING}


@cache  # it takes a millisecond
def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def manifest(
    plan: Plan,
    recipe: str,
    inputs: Mapping[str, Any],
    calibration: Mapping[str, Any] | None,
    events: Sequence[Event],
    figures: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Return the manifest of a run, without its outputs (see `finish`).

    Args:
        plan: that was carried out.
        recipe: as TOML; empty of an export.
        inputs: the source, see `quantforge.artifacts.publish.describe_source`.
        calibration: the calibration text, None where none was read.
        events: all of the run.
        figures: by name of a tensor; those that are not finite are left out.
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
        "left_behind": list(plan.left_behind),
        "bits_per_weight": round(plan.bits_per_weight, 6) if plan.quantized() else None,
        "tensors": [
            {
                "name": tensor.name,
                "action": tensor.action.value,
                "rule": tensor.rule,
                **({"scheme": str(tensor.scheme)} if tensor.scheme else {}),
                **{
                    key: float(f"{value:.6g}")
                    for key, value in figures.get(tensor.name, {}).items()
                    if math.isfinite(value)  # JSON has no word for others
                },
            }
            for tensor in plan.tensors
        ],
        "quantized": sum(tensor.action is Action.QUANTIZE for tensor in plan.tensors),
        **of_events(events),
    }


def of_events(events: Sequence[Event]) -> dict[str, Any]:
    """Return what a manifest says of events."""
    return {
        "events": [event.to_json() for event in events],
        "event_counts": dict(sorted(Counter(event.kind for event in events).items())),
    }


def lineage(result: Path) -> dict[str, Any]:
    """Return what the manifest of a model says of how it was made, for the manifest of what is made from it."""
    said = read(result) or {}
    return {key: said[key] for key in _PASSED_ON if key in said}


def finish(document: Mapping[str, Any], stage: Path, own: str = NAME, workers: int = 1) -> bytes:
    """Return the manifest's bytes with the digests of every file in ``stage`` that it can speak of.

    A publication that is made again finds the manifest (its ``own`` name) and the signature of the interrupted one.
    """
    files = [path for path in sorted(stage.rglob("*")) if path.is_file()]
    files = [path for path in files if path.name != own and path.suffix != SIGNATURE]
    complete = {**document, "outputs": digests(stage, files, workers)}
    return (json.dumps(complete, indent=1, ensure_ascii=False) + "\n").encode()


# What readers take from a manifest: its type, of a table those of its keys, under `_EACH` that of all its values.
_EACH = ""
_EVENT = {"kind", "where", "detail"}
_FILE = {"bytes": int, "sha256": str}
_SHAPE: Mapping[str, Any] = {
    **dict.fromkeys(("schema", "recipe", "method", "format", "model_type"), str),
    "source": {"model": str, "revision": str, "files": {_EACH: _FILE}},
    "base_model": str,
    "outputs": {_EACH: _FILE},
    "versions": {_EACH: str},
    "event_counts": {_EACH: int},
    "events": [dict.fromkeys(_EVENT, str)],
}


def _sound(value: object, shape: Any) -> bool:
    if isinstance(shape, type):
        return type(value) is shape
    if isinstance(shape, list):
        return isinstance(value, list) and all(_sound(item, shape[0]) for item in value)
    if not isinstance(value, Mapping):
        return False
    if _EACH in shape:
        return all(_sound(item, shape[_EACH]) for item in value.values())
    return all(_sound(value[key], inner) for key, inner in shape.items() if key in value)


def place_of(result: Path) -> Path:
    """Return where the manifest of a directory, or of a file, lies."""
    return result / NAME if result.is_dir() else side_of(result)


def with_recipe(result: Path, otherwise: str) -> dict[str, Any]:
    """Return the manifest of a result, which holds a recipe; ``otherwise`` is what to do where there is none.

    Raises:
        InputError: there is no manifest, it cannot be read, or it holds no recipe.
    """
    place, document = place_of(result), read(result)
    if document is not None and document.get("recipe"):
        return document
    if document is not None:
        what = f"{place}: it holds no recipe: what it describes was exported, not quantized"
    elif os.path.lexists(place):
        what = f"{place}: it is damaged, or no manifest of quantforge"
    else:
        what = f"{result}: no {place.name} {'in' if result.is_dir() else 'beside'} it, which would hold its recipe"
        beside = place.parent.glob(f"*{SIDE}")
        lone = [one for one in beside if not one.with_name(one.name.removesuffix(SIDE)).exists()]
        if lone and not result.is_dir():
            otherwise = f"beside it lies {lone[0].name}, whose file is missing: if it is this one, rename it back"
    raise InputError(what, otherwise, file=str(place))


def read(result: Path) -> dict[str, Any] | None:
    """Return the manifest of a directory or of a file, or None when it has none that can be read.

    Whatever keys it has, what readers take of them is of the type that they expect, and ``outputs`` is there; those of
    a file that was renamed with its manifest have their present names, and `CALLED` is there.
    """
    path = place_of(result)
    try:
        data = read_object(path, MANIFEST, path.parent)
    except InputError:
        return None
    if data.get("schema") != SCHEMA or "outputs" not in data:
        return None
    told: Any = data
    while told is not None:  # of this result, and of those that it was made from
        if not _sound(told, _SHAPE):
            return None
        told = told.get("lineage")
    events, outputs = data.get("events", ()), data["outputs"].values()
    if any(event.keys() != _EVENT or event["kind"] not in KINDS for event in events):
        return None
    if not all(entry.keys() == _FILE.keys() for entry in outputs):
        return None
    data.pop(CALLED, None)
    called = "" if result.is_dir() else recorded_name(data["outputs"], result)
    if called not in {"", side_of(result, "").name}:
        data |= {"outputs": present_names(data["outputs"], result, called), CALLED: called}
    return data


def with_lineage(document: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield a manifest and those of the results that it was made from, the last result first."""
    while isinstance(document, Mapping):
        yield document
        document = document.get("lineage")


def recipes(document: Mapping[str, Any] | None) -> Iterator[Recipe]:
    """Yield the recipes of a manifest and its lineage, in the same order; errors as `from_toml`."""
    for item in with_lineage(document):
        if text := item.get("recipe"):
            try:
                yield from_toml(text, "the recipe of its manifest")
            except InputError as error:
                hint = "make the result again, or go on without its manifest: move that file away"
                raise InputError(
                    f"{error.message} (written by another version, or by hand)", hint
                ) from error


def declared_adapter(document: Mapping[str, Any] | None) -> AdapterOptions | None:
    """Return the adapter that was merged into a result, as the recipes of its manifest and its lineage declare.

    Returns:
        the last adapter; empty options if the recipes name none; None if there is no recipe.
    """
    found = [recipe.adapter for recipe in recipes(document)]
    return next((one for one in found if one.source), found[0] if found else None)


def small_files(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return size and digest of each file beside the weights of a model, by its name inside of the model."""
    if checkpoint.path.is_file():
        return {}
    return digests(checkpoint.path, [checkpoint.path / CONFIG, *checkpoint.side_files])


def checksums_of(checkpoint: Checkpoint, workers: int = 1) -> dict[Path, Checksums]:
    """Return the checksums of each file of weights, by its path; ``workers`` files are read side by side."""
    root = checkpoint.path.parent if checkpoint.path.is_file() else checkpoint.path
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(partial(take_checksums, inside=root), checkpoint.shards)
        return dict(zip(checkpoint.shards, found, strict=True))


def files_of_source(
    checkpoint: Checkpoint, checksums: Mapping[Path, Checksums] | None = None
) -> dict[str, dict[str, Any]]:
    """Return size and digest of every file of a model that is read, by its name inside of the model."""
    root = checkpoint.path.parent if checkpoint.path.is_file() else checkpoint.path
    weights = {
        str(path.relative_to(root)): {"bytes": known.size, "sha256": known.sha256}
        for path, known in (checksums or checksums_of(checkpoint)).items()
    }
    return dict(sorted({**weights, **small_files(checkpoint)}.items()))


def check_same(stated: Mapping[str, Any], original: Checkpoint) -> None:
    """Refuse a model whose configuration or weights are not those that a manifest states.

    Of a source that is a GGUF file, the manifest states nothing else, and its name does not matter.

    Raises:
        IntegrityError: naming the files.
    """
    found = files_of_source(original)
    weights = [name for name in stated if name.endswith(".safetensors") or name == CONFIG]
    weights = weights or list(stated)
    if original.path.is_file():
        differ = sorted(name for name in weights if stated[name] not in found.values())
    else:
        differ = sorted(name for name in weights if found.get(name) != stated[name])
    if differ or not weights:
        raise IntegrityError(
            f"{original.path}: not the model that this one was made from: {', '.join(differ) or 'no files recorded'}",
            "give the right --source, or quantize it anew: quantforge quantize SOURCE --format ...",
        )


def stated_adapters(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a manifest, and those that it passes on, say of adapters, the first that was merged first."""
    return _stated(document, ADAPTER)


def stated_experts(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what they say of experts that were kept where others were removed, in the order of the removals."""
    return _stated(document, KEPT_EXPERTS)


def _stated(document: Mapping[str, Any], subject: str) -> tuple[str, ...]:
    found: list[str] = []
    told: Any = document
    while isinstance(told, Mapping):
        source = told.get("source")
        said = source.get(subject) if isinstance(source, Mapping) else None
        found += [said] if isinstance(said, str) else []
        told = told.get("lineage")
    return tuple(reversed(found))


def adapters_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what is said of the adapters of a model: by the manifest that it has, and as it is read."""
    return _of(checkpoint, ADAPTER)


def experts_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what is said of the experts that a model kept: by the manifest that it has, and as it is read."""
    return _of(checkpoint, KEPT_EXPERTS)


def _of(checkpoint: Checkpoint, subject: str) -> tuple[str, ...]:
    said = checkpoint.facts.get(subject)
    earlier = _stated(read(checkpoint.path) or {}, subject)
    return earlier if said is None else (*earlier, said)


def adapter_name(said: str) -> str:
    """Return the name of an adapter, which stands before what is said of it."""
    return said.rpartition(": ")[0] or said


def experts_word(said: str) -> str:
    """Return what a name of a result says of the experts that were kept: ``6of8experts``; "" for foreign words."""
    counts = _COUNTS.match(said)
    return f"{counts[1]}of{counts[2]}experts" if counts else ""
