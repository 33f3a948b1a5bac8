"""``general.file_type`` of a GGUF file against the types of its tensors, and the version of their codes.

Where the types of all tensors are those of another mixture than the stated one, the number is wrong: an error. Where
they only fit another mixture better, it is a warning: a program may choose types tensor by tensor, and no number means
that.
"""

from __future__ import annotations

from collections import Counter

from quantforge.errors import InputError
from quantforge.formats.gguf import mixture
from quantforge.formats.gguf.metadata import QUANTIZATION_VERSION
from quantforge.formats.gguf.nearest_mixture import distances, in_blocks
from quantforge.formats.gguf.parsing import GgufFile
from quantforge.formats.gguf.source import GgufCheckpoint
from quantforge.verification.beside.trees import plain, shown
from quantforge.verification.findings import Report, Severity
from quantforge.verification.opening import Artifact

KEY = "general.file_type"
VERSION = "general.quantization_version"


def check_file_type(report: Report, artifact: Artifact) -> None:
    """Report a file type whose mixture fits the tensors worse than another, and a version that codes are not of."""
    checkpoint = artifact.checkpoint
    if not isinstance(checkpoint, GgufCheckpoint):
        return
    metadata = checkpoint.file.metadata
    if VERSION in metadata and metadata[VERSION].value != QUANTIZATION_VERSION:
        text = f"{VERSION} = {shown(metadata[VERSION].value)}, codes are of {QUANTIZATION_VERSION}"
        report.add("keys", plain(report.path.name), text)
    present = {KEY, VERSION} & metadata.keys()
    if len(present) == 1 and artifact.layouts:  # what quantizes a file writes both
        (missing,) = {KEY, VERSION} - present
        report.add("keys", plain(report.path.name), f"{missing} is missing beside {present.pop()}")
    if KEY not in metadata:
        return
    stated = metadata[KEY].value
    shapes = {name: (tensor.type, tensor.shape) for name, tensor in checkpoint.file.tensors.items()}
    try:
        near = distances(shapes, _shape(checkpoint.file))
    except InputError:
        return  # a key of a wrong type, which the comparison of the keys tells
    if not near:
        return
    if stated not in near or near[stated] > min(near.values()):
        counts = Counter(in_blocks(shapes).values())
        kinds = ", ".join(f"{kind} x{count}" for kind, count in counts.most_common(3))
        text = f"{KEY} = {shown(stated)}, the tensors are {kinds}"
        exact = min(near.values()) == 0
        report.add(
            "keys", plain(report.path.name), text, Severity.ERROR if exact else Severity.WARNING
        )


def _shape(file: GgufFile) -> mixture.Shape:
    """Return what a file says of the model; raise `InputError` for a key of another type."""
    arch = file.value("general.architecture", str)
    layers, heads, kv_heads, experts = (
        file.value(f"{arch}.{key}", int, otherwise)
        for key, otherwise in (
            ("block_count", 1), ("attention.head_count", 1), ("attention.head_count_kv", 1), ("expert_count", 0),
        )
    )  # fmt: skip
    return mixture.Shape(layers, heads, kv_heads, experts)
