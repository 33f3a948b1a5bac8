"""Findings on an artifact: each names a check, a place and the figures; a report is all of them.

A check is either done or skipped with a reason: silence never means that something was looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

SCHEMA = "quantforge.verify/1"
CHECKS: Mapping[str, str] = {
    "manifest": "files are those of the manifest, byte for byte, none more and none less",
    "signature": "the files are those that the owner of a key has signed",
    "unreadable": "configuration, index, headers and tensors can be read, and agree with each other",
    "incomplete": "every tensor of the model is there exactly once, with its shape",
    "nothing-quantized": "something is quantized",
    "ignore-list": "the configuration says of every linear whether it is quantized, truthfully",
    "siblings": "linears that engines load as one matrix have one scheme",
    "vocabulary": "every token has a row in the embedding",
    "settings": "configuration, tokenizer and settings agree with each other, and with what is quantized",
    "foreign": "no file lies there that a loader would read and that is no part of the model",
    "source": "the source that is named is one that the manifest, or one that it passes on, records",
    "configuration": "every key of the configuration means what it means in the source",
    "keys": "every key of a GGUF file follows from the source",
    "side-files": "tokenizer, chat template, generation settings and licences are those of the source",
    "not-finite": "every stored number is finite",
    "scale": "every scale is present, finite, plausible and not zero for codes that are not",
    "zero-convention": "zero points are stored as the configuration says",
    "kept-changed": "what is not quantized equals the source, but for factors that were folded",
    "fold": "a factor that was folded out of one tensor was folded into its partner",
    "noise": "a quantized tensor loses no more than its scheme has to",
    "groups": "no group, row or column of a quantized tensor is further from the source's than rounding brings it",
    "swapped": "every tensor holds its own weights, in their order",
    "logits": "a forward pass gives finite logits, near those of the source",
    "engine": "the engine that was named loads the files",
}


class Severity(StrEnum):
    """Severity of a finding: whether an artifact with it may be used."""

    ERROR = "error"
    WARNING = "warning"  # an error under --strict


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: ``check`` is a key of `CHECKS`, ``where`` a file or a tensor."""

    check: str
    where: str
    detail: str
    severity: Severity = Severity.ERROR

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise ValueError(f"unknown check {self.check!r}")

    def to_json(self) -> dict[str, str]:
        """Return the finding as plain data."""
        return {
            "check": self.check,
            "severity": self.severity.value,
            "where": self.where,
            "detail": self.detail,
        }


@dataclass(slots=True)
class Report:
    """Everything that was found, in the order of looking.

    Attributes:
        path, source: what was looked at, and what it was compared with.
        format, model_type: what it is, as far as it could be read.
        findings: what is wrong.
        skipped: checks that were not made, with the reason.
        unjudged: why it cannot be judged, where it is of a kind that is not read; "" otherwise.
        notes: what is no fault, but worth knowing: of names.
        unsigned: files that a signature which was checked does not cover.
        tensors: figures of each quantized tensor.
        tuned: modules that carry factors which no manifest records and which cancel: no fault, but worth knowing.
        figures: of the forward pass.
    """

    path: Path
    source: Path | None = None
    format: str = ""
    model_type: str = ""
    findings: list[Finding] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unsigned: list[str] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    tuned: list[str] = field(default_factory=list)
    unjudged: str = ""

    def add(self, check: str, where: str, detail: str, severity: Severity = Severity.ERROR) -> None:
        """Record a finding; whatever is not printable in it is escaped, since it may be a stranger's."""
        self.findings.append(Finding(check, _escaped(where), _escaped(detail), severity))

    def warn(self, check: str, where: str, detail: str) -> None:
        """Record a finding that is an error only under ``--strict``."""
        self.add(check, where, detail, Severity.WARNING)

    def skip(self, reason: str, *checks: str) -> None:
        """Say that checks are not made."""
        self.skipped.update(dict.fromkeys(checks, reason))

    def failed(self, *, strict: bool = False) -> bool:
        """Return whether the artifact must not be used."""
        return any(strict or item.severity is Severity.ERROR for item in self.findings)

    @property
    def structure_only(self) -> bool:
        """Return whether neither a manifest, nor a signature, nor a source says what the bytes should be."""
        return {"manifest", "signature", "kept-changed"} <= self.skipped.keys()

    def document(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the report as plain data (``quantforge.verify/1``)."""
        return {
            "schema": SCHEMA,
            "path": str(self.path),
            "source": None if self.source is None else str(self.source),
            "format": self.format,
            "model_type": self.model_type,
            "ok": not self.failed(strict=strict) and not self.unjudged,
            "unjudged": self.unjudged,
            "structure_only": self.structure_only,
            "findings": [item.to_json() for item in self.findings],
            "checked": [check for check in CHECKS if check not in self.skipped],
            "skipped": self.skipped,
            "notes": self.notes,
            "unsigned": self.unsigned,
            "tensors": self.tensors,
            "tuned": self.tuned,
            "forward": self.figures,
        }


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
