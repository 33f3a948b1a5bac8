"""Compare two models of any formats: how they were made, their tensors, values and side files.

Side files are those besides the weights; ``config.json`` is compared entry by entry, except for entries on how weights
are stored. Two GGUF files are compared byte for byte. The model card, to which figures may be added later, is ignored.
Between a directory and a GGUF file, which stores the tokenizer in its own keys, only the chat template is compared.

Quantized tensors are decoded. Two tensors of the same type and shape are compared value by value; if they differ, and
for all others, the signal-to-noise ratio of the second relative to the first is computed. A folded scale counts as a
difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantforge.artifacts import manifest
from quantforge.files.reader import Checkpoint
from quantforge.formats.open_model import tokenizer_side_files
from quantforge.progress import report_step
from quantforge.recipe import read_toml
from quantforge.verification.opening import SourceModel, open_source
from quantforge.verification.side_files import STORAGE_KEYS

SCHEMA = "quantforge.diff/2"
CONFIG, TEMPLATE_FILE = "config.json", "chat_template.jinja"
# Entries of a configuration on how weights are stored; the tensors show this themselves.
STORAGE_ENTRIES = STORAGE_KEYS | {"dtype", "torch_dtype"}
_MANIFEST_KEYS = (
    "method",
    "format",
    "model_type",
    "versions",
    "source",
    "calibration",
    "event_counts",
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences between two models.

    Attributes:
        first, second: paths of the models.
        recorded_differences: differing entries of the configurations, manifests and recipes, ``{key: [first,
            second]}``.
        unmatched_tensors: names of tensors that only one model has, ``{"first": [...], "second": [...]}``.
        tensors: signal-to-noise ratio in decibels of the tensors that differ (infinite: stored differently but equal in
            value; -infinite: the first is zero, or a value is not finite; NaN: the shapes differ).
        files: names of side files that differ or that only one model has.
        compared: number of tensors that both models have.
        unmatched_files: side files that only one model has, ``{"first": [...], "second": [...]}``.
        missing_records: which of ``manifest`` and ``recipe`` each model lacks, in the same form.
        uncompared: names of side files that only one container stores as files.
    """

    first: Path
    second: Path
    recorded_differences: Mapping[str, list[Any]]
    unmatched_tensors: Mapping[str, list[str]]
    tensors: Mapping[str, float]
    files: list[str]
    compared: int
    unmatched_files: Mapping[str, list[str]]
    missing_records: Mapping[str, list[str]]
    uncompared: list[str]

    @property
    def equal(self) -> bool:
        """Return whether values and files are equal, regardless of how they were made and are stored."""
        has_changed = any(value != math.inf for value in self.tensors.values())
        return not has_changed and not self.files and not any(self.unmatched_tensors.values())

    def document(self) -> dict[str, Any]:
        """Return the difference as plain data (``quantforge.diff/2``)."""
        return {
            "schema": SCHEMA,
            "first": str(self.first),
            "second": str(self.second),
            "equal": self.equal,
            "recorded": dict(self.recorded_differences),
            "tensors_only_in": dict(self.unmatched_tensors),
            "tensors": [
                {
                    "name": name,
                    "snr_db": None if not math.isfinite(value) else round(value, 3),
                    "equal_values": value == math.inf,
                }
                for name, value in self.tensors.items()
            ],
            "compared_tensors": self.compared,
            "files": self.files,
            "files_only_in": dict(self.unmatched_files),
            "files_not_compared": self.uncompared,
            "not_recorded": dict(self.missing_records),
        }


@torch.no_grad()
def difference(first: Path, second: Path) -> Difference:
    """Compare two models of any readable format; errors as `open_source`."""
    first_model, second_model = (
        open_source(first, one_by_one=True),
        open_source(second, one_by_one=True),
    )
    names = [model.model_layout.by_name.keys() for model in (first_model, second_model)]
    common_names = sorted(names[0] & names[1])
    tensors = {}
    for index, name in enumerate(common_names):
        report_step(name, index, len(common_names))
        if not _tensors_equal(first_model, second_model, name):
            tensors[name] = _snr_db(first_model.weight(name), second_model.weight(name))
    files = [_side_files(model.checkpoint) for model in (first_model, second_model)]
    uncompared: set[str] = set()
    if first_model.checkpoint.path.is_dir() != second_model.checkpoint.path.is_dir():
        common_files = files[0].keys() & files[1].keys()
        uncompared = (files[0].keys() | files[1].keys()) - (common_files & {TEMPLATE_FILE})
        files = [
            {name: files_of_side[name] for name in files_of_side.keys() - uncompared}
            for files_of_side in files
        ]
    differing = {name for name in files[0] | files[1] if files[0].get(name) != files[1].get(name)}
    entries = [_recorded_entries(model) for model in (first_model, second_model)]
    return Difference(
        first=first,
        second=second,
        recorded_differences=_differing_entries(*entries),
        unmatched_tensors=_exclusive_names(*names),
        tensors=tensors,
        files=sorted(
            {*differing, *_differing_model_files(first_model.checkpoint, second_model.checkpoint)}
        ),
        compared=len(common_names),
        unmatched_files=_exclusive_names(*(files_of_side.keys() for files_of_side in files)),
        missing_records={
            "first": _missing_documents(entries[0]),
            "second": _missing_documents(entries[1]),
        },
        uncompared=sorted(uncompared),
    )


def _exclusive_names(first: Set[str], second: Set[str]) -> dict[str, list[str]]:
    return {"first": sorted(first - second), "second": sorted(second - first)}


def _tensors_equal(first_model: SourceModel, second_model: SourceModel, name: str) -> bool:
    """Return whether a tensor, after decoding, has the same type, shape and values in both models."""
    tensors = [
        (model, model.model_layout.by_name[name].header) for model in (first_model, second_model)
    ]
    if tensors[0][1].dtype != tensors[1][1].dtype or tensors[0][1].shape != tensors[1][1].shape:
        return False
    first, second = (model.checkpoint.read(stored.name) for model, stored in tensors)
    return torch.equal(first, second) or torch.equal(_raw_bytes(first), _raw_bytes(second))


def _raw_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor; unlike values, they compare equal for NaN."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _snr_db(first: Tensor | None, second: Tensor | None) -> float:
    """Return the signal-to-noise ratio in decibels of the second tensor, see `Difference.tensors`."""
    assert first is not None
    assert second is not None  # both models have a tensor of this name
    if first.shape != second.shape:
        return math.nan
    signal = float(first.double().square().sum())
    error = float((first.double() - second.double()).square().sum())
    if error == 0:
        return math.inf
    return 10 * math.log10(signal / error) if signal > 0 and math.isfinite(error) else -math.inf


def _side_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    return (
        checkpoint.read_side_files()
        if checkpoint.path.is_dir()
        else tokenizer_side_files(checkpoint)
    )


def _differing_model_files(first_model: Checkpoint, second_model: Checkpoint) -> Iterator[str]:
    """Yield the names of differing model files: the configuration, or whole GGUF files."""
    folders = [model.path.is_dir() for model in (first_model, second_model)]
    if all(folders):
        first, second = (
            {key: value for key, value in model.config.items() if key not in STORAGE_ENTRIES}
            for model in (first_model, second_model)
        )
        if first != second:
            yield CONFIG
    elif not any(folders):
        digests = {manifest.sha256(file, None) for file in first_model.shards}
        yield from (
            file.name for file in second_model.shards if manifest.sha256(file, None) not in digests
        )


def _differing_entries(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the entries of configuration, manifest and recipe that differ."""
    pairs = {key: [first.get(key), second.get(key)] for key in sorted(first.keys() | second.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _missing_documents(entries: Mapping[str, Any]) -> list[str]:
    kinds = {key.partition(".")[0] for key in entries}
    return [kind for kind in ("manifest", "recipe") if kind not in kinds]


def _recorded_entries(model: SourceModel) -> dict[str, Any]:
    entries = {f"config.{key}": value for key, value in model.checkpoint.config.items()}
    document = manifest.read_manifest(model.checkpoint.path) or {}
    entries |= {f"manifest.{key}": document[key] for key in _MANIFEST_KEYS if key in document}
    origin = f"{model.checkpoint.path}: the recipe of its manifest"
    recipe = read_toml(str(document.get("recipe", "")), origin)
    return entries | {f"recipe.{key}": value for key, value in recipe.items()}
