"""Verify an artifact: files, structure, values, logits, in this order, as far as it can be read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantforge.errors import InputError
from quantforge.formats.configuration import quantization_config
from quantforge.quantizers import METHODS, parse_method
from quantforge.verification.artifact import (
    COMPARED,
    NUMBERS,
    Artifact,
    Original,
    open_artifact,
    open_source,
    whole_transforms,
)
from quantforge.verification.beside.file_type import check_file_type
from quantforge.verification.beside.foreign import check_foreign
from quantforge.verification.beside.within import check_within
from quantforge.verification.findings import Report
from quantforge.verification.forward import Observed, check_alone, check_divergence, observe
from quantforge.verification.numbers import Numbers
from quantforge.verification.release import check_release, check_signed
from quantforge.verification.side_files import check_side_files
from quantforge.verification.structure import check_structure


@dataclass(frozen=True, slots=True)
class VerificationOptions:
    """Options of a verification: what is used beside the artifact.

    Attributes:
        source: the model that it was made from.
        engine: a name of `quantforge formats`' engines that has to load it.
        forward: run the model once.
        device: where it runs.
        key: the public key of whoever signed it.
    """

    source: Path | None = None
    engine: str | None = None
    forward: bool = True
    device: str = "cpu"
    key: Path | None = None


@torch.no_grad()
def verify(path: Path, options: VerificationOptions | None = None) -> Report:
    """Look at an artifact of any format that is read.

    Raises:
        InputError: there is nothing at ``path``, or the source cannot be read.
        UsageError: no engine has that name.
    """
    options = options or VerificationOptions()
    if not path.exists():
        raise InputError(f"{path}: no such file or directory", "check the path", file=str(path))
    report = Report(path, options.source)
    document = check_release(report)
    source = open_source(options.source, whole_transforms(document)) if options.source else None
    check_signed(report, options.key)
    artifact = open_artifact(report)
    if artifact is None:
        return report
    check_structure(report, artifact, options.engine)
    check_foreign(report, artifact, source)
    check_file_type(report, artifact)
    check_within(report, artifact)
    if source is None:
        report.skip("no source was named (--source)", *COMPARED)
    else:
        check_side_files(report, artifact, source)
    observed = _observed(report, artifact, source, options)
    inputs = observed.inputs if observed else None
    numbers = Numbers(report, artifact, source, inputs, twice=_twice(document))
    numbers.check()
    if not _folds(document):
        report.tuned = sorted({*numbers.factors.norms, *numbers.factors.rows})
    if source is not None:
        _check_copy(report, artifact, source)
    _forward(report, artifact, source, numbers, observed, options)
    return report


def _twice(document: dict[str, Any] | None) -> bool:
    """Return whether a manifest says that the source of the artifact was quantized already."""
    found = document or {}
    return bool(found.get("lineage")) or "requantized" in found.get("event_counts", {})


def _folds(document: dict[str, Any] | None) -> bool:
    """Return whether a manifest says that factors were folded."""
    method = (document or {}).get("method")
    words = method.split("+") if isinstance(method, str) else ()
    return any(word in METHODS and parse_method(word)[0] for word in words)


def _check_copy(report: Report, artifact: Artifact, source: Original) -> None:
    """Report a directory of plain weights that all equal the source's: it is a copy, not a result."""
    if artifact.layouts or not report.path.is_dir():
        return
    own, other = artifact.checkpoint.entries, source.checkpoint.entries
    changed = any(
        name not in other or other[name].dtype != entry.dtype for name, entry in own.items()
    )
    if not changed and not any(item.check == "kept-changed" for item in report.findings):
        report.add("nothing-quantized", report.path.name, "every tensor equals the source")


def _observed(
    report: Report, artifact: Artifact, source: Original | None, options: VerificationOptions
) -> Observed | None:
    """Run the source, where there is one that can be run."""
    known = source is not None and source.matched.architecture is not None
    if not options.forward or not known or artifact.matched.architecture is None:
        return None
    assert source is not None
    config = artifact.checkpoint.config
    cache = quantization_config(config).get("kv_cache_scheme") is not None
    return observe(report, source, options.device, cache=cache)


def _rounds_inputs_of_experts(artifact: Artifact) -> bool:
    layouts = (artifact.layout(t) for t in artifact.matched.tensors if t.expert >= 0)
    return any(layout is not None and layout.scheme.input is not None for layout in layouts)


def _forward(
    report: Report,
    artifact: Artifact,
    source: Original | None,
    numbers: Numbers,
    observed: Observed | None,
    options: VerificationOptions,
) -> None:
    if not options.forward:
        report.skip("not asked for (--no-forward)", "logits")
    elif artifact.matched.architecture is None:
        report.skip("the runtime does not know the family", "logits")
    elif _rounds_inputs_of_experts(artifact):
        report.skip("the runtime does not round the inputs of experts", "logits")
    elif any(item.check in {*NUMBERS, "unreadable", "incomplete"} for item in report.findings):
        report.skip("tensors cannot be read", "logits")
    elif source is not None and observed is not None:
        check_divergence(report, artifact, source, numbers, observed, options.device)
    elif source is None:
        check_alone(report, options.device)
