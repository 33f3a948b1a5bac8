"""``inspect``: show the contents of a model or weight file, from headers alone."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantforge.architectures.draft_heads import model_type_or_draft
from quantforge.arguments import check_arguments
from quantforge.artifacts import manifest
from quantforge.artifacts.manifest import recorded_adapters, recorded_kept_experts
from quantforge.errors import InputError, NotReadError
from quantforge.files.computed_tensors import ADAPTER, KEPT_EXPERTS
from quantforge.files.hub import resolve_model
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
from quantforge_calibration.chat_templates import TemplateSet, choose_templates, read_templates
from quantforge_calibration.source_error import SourceError


@dataclass(frozen=True, slots=True)
class Inspected:
    """Contents of a model or weight file, as its headers declare them.

    Attributes:
        path, format, model_type: path, format key and model type; the last two are "" for a bare safetensors file.
        schemes: number of layers by scheme, and of unquantized tensors by dtype.
        weights: number of weights; a quantized layer counts with its logical shape.
        tensor_bytes, file_bytes: size of all tensors, and of the weight files.
        quantized_bytes, quantized_weights: size and number of weights of the quantized layers alone.
        provenance: selected fields of the manifest, or a message if it is damaged.
        tensors: every tensor, with its stored dtype and shape in elements.
        notes: remarks on an unusual or stale quantization config, and on chat templates that are not used or not
            readable.
        chat_templates: names of the chat templates that transformers uses.
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
        """Return the bits per weight over all tensors; NaN without weights."""
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
        """Return the contents as plain data (``quantforge.inspect/2``)."""
        return {
            "schema": "quantforge.inspect/2",
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
    """Inspect a model, a safetensors file, a GGUF file or an importance matrix.

    Args:
        path: a file, a directory, or ``org/name[@revision]``.
        offline: never ask the hub.

    Raises:
        InputError: the path is none of these, or damaged.
    """
    path = Path(path) if Path(path).is_file() else resolve_model(str(path), offline)
    if path.is_file() and is_importance_matrix(path):
        return _inspect_importance_matrix(path)
    if path.is_file() and not is_gguf(path):
        if path.suffix != ".safetensors":
            raise InputError(
                f"{path}: neither a safetensors nor a GGUF file", "give one, or a model directory"
            )
        entries = read_header(path)
        return _build_result(
            path, "", "", [entry.to_tensor_info() for entry in entries.values()], {}, [path]
        )
    try:
        checkpoint = open_model(path)
    except NotReadError:
        if not path.is_file():
            raise
        file = read_gguf(path)
        arch = file.value("general.architecture", str)
        return _build_result(
            path, f"{KEY} (not read)", arch, stored_headers(file), {}, list(file.files)
        )
    model_type = model_type_or_draft(checkpoint.config)
    key, layers = _find_quantized_layers(checkpoint)
    inspected = _build_result(
        path, key, model_type, checkpoint.tensor_infos(), layers, list(checkpoint.shards)
    )
    templates = _chat_templates(checkpoint)
    notes = (*facts(checkpoint), *templates.notes)
    return replace(inspected, notes=notes, chat_templates=tuple(templates.templates))


def _chat_templates(checkpoint: Checkpoint) -> TemplateSet:
    try:
        if isinstance(checkpoint, GgufCheckpoint):
            return choose_templates(template_files(checkpoint.file), checkpoint.path)
        return read_templates(checkpoint.path)
    except (InputError, SourceError) as error:
        return TemplateSet({}, notes=(error.message,))


def _inspect_importance_matrix(path: Path) -> Inspected:
    matrix = read_imatrix(path)
    tensors = tuple(
        FileTensorInfo(name, "F32", tuple(entry.means.shape), 4 * entry.means.numel())
        for name, entry in matrix.entries.items()
    )
    provenance: dict[str, Any] = {"text": matrix.dataset or None, "chunks": matrix.chunks or None}
    provenance["tokens"] = matrix.chunks * matrix.chunk_size or None
    return replace(
        _build_result(path, "importance matrix", "", [], {}, [path]),
        schemes={"mean squares of columns": len(tensors)},
        provenance=provenance,
        tensor_bytes=sum(tensor.nbytes for tensor in tensors),
        tensors=tensors,
    )


def _find_quantized_layers(
    checkpoint: Checkpoint,
) -> tuple[str, dict[tuple[str, ...], tuple[str, int]]]:
    """Return the format and the quantized layers; no layers if the format is not supported.

    Returns:
        The key of the format, and for the stored tensor names of each layer its scheme and number of weights.


    Raises:
        InputError: the tensors do not match the configuration.
    """
    config = checkpoint.config
    try:
        format_module = detect_format(config)
    except InputError:
        return f"{config['quantization_config'].get('quant_method')} (not read)", {}
    headers = checkpoint.stored_tensors()
    layouts = format_module.find_layouts(config, headers)
    match_headers(checkpoint, {layout.module: layout for layout in layouts}, headers)
    return format_module.KEY, {
        layout.tensor_names: (str(layout.scheme), math.prod(layout.shape)) for layout in layouts
    }


def _build_result(
    path: Path,
    format_key: str,
    model_type: str,
    tensors: Sequence[FileTensorInfo],
    layers: dict[tuple[str, ...], tuple[str, int]],
    files: list[Path],
) -> Inspected:
    quantized_names = {name for group in layers for name in group}
    unquantized = [tensor for tensor in tensors if tensor.name not in quantized_names]
    schemes = Counter(scheme for scheme, _ in layers.values())
    schemes.update(tensor.dtype for tensor in unquantized)
    # GGUF block types
    blocks = [tensor for tensor in unquantized if tensor.dtype not in DTYPE_BITS]
    quantized = sum(count for _, count in layers.values())
    quantized += sum(math.prod(tensor.shape) for tensor in blocks)
    quantized_names.update(tensor.name for tensor in blocks)
    return Inspected(
        path=path,
        format=format_key,
        model_type=model_type,
        schemes=dict(schemes),
        weights=quantized
        + sum(
            math.prod(tensor.shape) for tensor in unquantized if tensor.name not in quantized_names
        ),
        tensor_bytes=sum(tensor.nbytes for tensor in tensors),
        file_bytes=sum(file.stat().st_size for file in files),
        quantized_bytes=sum(tensor.nbytes for tensor in tensors if tensor.name in quantized_names),
        quantized_weights=quantized,
        provenance=_read_provenance(path),
        tensors=tuple(tensors),
    )


def _read_provenance(path: Path) -> dict[str, Any]:
    """Return selected fields of the manifest; a message if it is damaged, {} if it is missing."""
    document, path_of_manifest = manifest.read_manifest(path), manifest.manifest_path(path)
    if document is None:
        return (
            {"manifest": manifest.other_schema(path) or "damaged: nothing of it is read"}
            if os.path.lexists(path_of_manifest)
            else {}
        )
    keys = ("method", "versions", "source", "event_counts", "calibration")
    changes = {ADAPTER: recorded_adapters(document), KEPT_EXPERTS: recorded_kept_experts(document)}
    change_texts = {subject: "; ".join(texts) for subject, texts in changes.items() if texts}
    return {key: document[key] for key in keys if key in document} | change_texts
