"""Contents of a model directory, a safetensors file or a GGUF file, from headers alone."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantforge.architectures.draft_heads import type_of
from quantforge.arguments import check_arguments
from quantforge.artifacts import manifest
from quantforge.artifacts.manifest import recorded_adapters, recorded_kept_experts
from quantforge.errors import InputError, NotReadError
from quantforge.files.computed_tensors import ADAPTER, KEPT_EXPERTS
from quantforge.files.hub import resolve
from quantforge.files.reader import Checkpoint
from quantforge.files.safetensors import read_header
from quantforge.formats import detect_format
from quantforge.formats.gguf import KEY
from quantforge.formats.gguf.importance_file import is_importance_matrix, read_imatrix
from quantforge.formats.gguf.parsing import is_gguf, read_gguf
from quantforge.formats.gguf.source import GgufCheckpoint, stored_headers
from quantforge.formats.gguf.tokenizer_files import template_files
from quantforge.formats.match_quantized import match_headers
from quantforge.formats.open_model import open_model
from quantforge.planning.notes import facts
from quantforge.plans import DTYPE_BITS, FileTensorInfo
from quantforge_calibration.chat_templates import TemplateSet, choose, read_templates
from quantforge_calibration.source_error import SourceError


@dataclass(frozen=True, slots=True)
class Inspected:
    """Headers, understood.

    Attributes:
        path, format, model_type: what it is; format and type are empty for a bare safetensors file.
        schemes: number of layers by scheme, and by type for tensors that are not quantized.
        weights: number of weights, counting a quantized layer by its logical shape.
        tensor_bytes, file_bytes: of all tensors, and of the weight files.
        quantized_bytes, quantized_weights: of the quantized layers alone.
        provenance: what the manifest says, if there is one, or that it is damaged.
        tensors: every tensor, with the type and the shape in elements that its file states.
        notes: what became of a declared quantization that is left over, or in an unusual place; chat templates that
            are not used or cannot be read.
        chat_templates: the names of those that transformers takes.
    """

    path: Path
    format: str
    model_type: str
    schemes: dict[str, int]
    weights: int
    tensor_bytes: int
    file_bytes: int
    quantized_bytes: int
    quantized_weights: int
    provenance: dict[str, Any]
    tensors: tuple[FileTensorInfo, ...]
    notes: tuple[str, ...] = ()
    chat_templates: tuple[str, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        """Return bits per weight over everything that is stored; NaN without weights."""
        return 8 * self.tensor_bytes / self.weights if self.weights else math.nan

    @property
    def bits_per_quantized_weight(self) -> float:
        """Return bits per weight of the quantized layers alone; NaN without such layers."""
        return (
            8 * self.quantized_bytes / self.quantized_weights
            if self.quantized_weights
            else math.nan
        )

    def document(self) -> dict[str, object]:
        """Return the findings as plain data (``quantforge.inspect/1``)."""
        return {
            "schema": "quantforge.inspect/1",
            "path": str(self.path),
            "format": self.format,
            "model_type": self.model_type,
            "schemes": self.schemes,
            "weights": self.weights,
            "tensor_bytes": self.tensor_bytes,
            "file_bytes": self.file_bytes,
            "bits_per_weight": self.bits_per_weight,
            "bits_per_quantized_weight": self.bits_per_quantized_weight,
            "provenance": self.provenance,
            "notes": list(self.notes),
            "chat_templates": list(self.chat_templates),
            "tensors": [
                {"name": t.name, "dtype": t.dtype, "shape": t.shape, "bytes": t.nbytes}
                for t in self.tensors
            ],
        }


@check_arguments()
def inspect(path: str | Path, *, offline: bool = False) -> Inspected:
    """Inspect a model, a safetensors file, a GGUF file or an importance matrix, which has values but no weights.

    Args:
        path: a file, a directory, or ``org/name[@revision]``.
        offline: never ask the hub.

    Raises:
        InputError: it is none of these, or damaged.
    """
    path = Path(path) if Path(path).is_file() else resolve(str(path), offline)
    if path.is_file() and is_importance_matrix(path):
        return _importance(path)
    if path.is_file() and not is_gguf(path):
        if path.suffix != ".safetensors":
            raise InputError(
                f"{path}: neither a safetensors nor a GGUF file", "give one, or a model directory"
            )
        entries = read_header(path)
        return _summary(path, "", "", [entry.held() for entry in entries.values()], {}, [path])
    try:
        checkpoint = open_model(path)
    except NotReadError:
        if not path.is_file():
            raise
        file = read_gguf(path)
        arch = file.value("general.architecture", str)
        return _summary(path, f"{KEY} (not read)", arch, stored_headers(file), {}, list(file.files))
    model_type = type_of(checkpoint.config)
    key, layers = _understood(checkpoint)
    found = _summary(path, key, model_type, checkpoint.held(), layers, list(checkpoint.shards))
    templates = _chat_templates(checkpoint)
    notes = (*facts(checkpoint), *templates.notes)
    return replace(found, notes=notes, chat_templates=tuple(templates.named))


def _chat_templates(checkpoint: Checkpoint) -> TemplateSet:
    try:
        if isinstance(checkpoint, GgufCheckpoint):
            return choose(template_files(checkpoint.file), checkpoint.path)
        return read_templates(checkpoint.path)
    except (InputError, SourceError) as error:
        return TemplateSet({}, notes=(error.message,))


def _importance(path: Path) -> Inspected:
    found = read_imatrix(path)
    held = tuple(
        FileTensorInfo(name, "F32", tuple(entry.means.shape), 4 * entry.means.numel())
        for name, entry in found.entries.items()
    )
    told: dict[str, Any] = {"text": found.dataset or None, "chunks": found.chunks or None}
    told["tokens"] = found.chunks * found.chunk_size or None
    return replace(
        _summary(path, "importance matrix", "", [], {}, [path]),
        schemes={"mean squares of columns": len(held)},
        provenance=told,
        tensor_bytes=sum(one.nbytes for one in held),
        tensors=held,
    )


def _understood(checkpoint: Checkpoint) -> tuple[str, dict[tuple[str, ...], tuple[str, int]]]:
    """Return the format and its layers: stored names to scheme and number of weights; none where no format reads it.

    Raises:
        InputError: the tensors are not those that the configuration asks for.
    """
    config = checkpoint.config
    try:
        form = detect_format(config)
    except InputError:
        return f"{config['quantization_config'].get('quant_method')} (not read)", {}
    stored = checkpoint.headers()
    layouts = form.find_layouts(config, stored)
    match_headers(checkpoint, {layout.module: layout for layout in layouts}, stored)
    return form.KEY, {
        layout.tensor_names: (str(layout.scheme), math.prod(layout.shape)) for layout in layouts
    }


def _summary(
    path: Path,
    form: str,
    model_type: str,
    held: Sequence[FileTensorInfo],
    layers: dict[tuple[str, ...], tuple[str, int]],
    files: list[Path],
) -> Inspected:
    names = {name for group in layers for name in group}
    plain = [tensor for tensor in held if tensor.name not in names]
    schemes = Counter(scheme for scheme, _ in layers.values())
    schemes.update(tensor.dtype for tensor in plain)
    blocks = [tensor for tensor in plain if tensor.dtype not in DTYPE_BITS]  # decoded alone
    quantized = sum(count for _, count in layers.values())
    quantized += sum(math.prod(tensor.shape) for tensor in blocks)
    names.update(tensor.name for tensor in blocks)
    return Inspected(
        path=path,
        format=form,
        model_type=model_type,
        schemes=dict(schemes),
        weights=quantized
        + sum(math.prod(tensor.shape) for tensor in plain if tensor.name not in names),
        tensor_bytes=sum(tensor.nbytes for tensor in held),
        file_bytes=sum(file.stat().st_size for file in files),
        quantized_bytes=sum(tensor.nbytes for tensor in held if tensor.name in names),
        quantized_weights=quantized,
        provenance=_provenance(path),
        tensors=tuple(held),
    )


def _provenance(path: Path) -> dict[str, Any]:
    """Return what the manifest says, that it cannot be read, or nothing where there is none."""
    known, place = manifest.read_manifest(path), manifest.manifest_path(path)
    if known is None:
        return {"manifest": "damaged: nothing of it is read"} if os.path.lexists(place) else {}
    keys = ("method", "versions", "source", "event_counts", "calibration")
    changes = {ADAPTER: recorded_adapters(known), KEPT_EXPERTS: recorded_kept_experts(known)}
    told = {subject: "; ".join(said) for subject, said in changes.items() if said}
    return {key: known[key] for key in keys if key in known} | told
