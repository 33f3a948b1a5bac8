"""Results of a verification: findings (check, place, severity), and which checks were skipped.

Every check is either made, made in part, or skipped with a reason, so a missing finding never means that nothing was
checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

SCHEMA = "quantforge.verify/2"
# What is checked, in this order.
CHECKS: Mapping[str, str] = {
    "manifest": "the files are exactly those of the manifest, byte for byte",
    "signature": "the files are those that the owner of the key signed",
    "unreadable": "configuration, index and tensors can be read and agree with each other",
    "incomplete": "every tensor of the model is there once, in the right shape",
    "nothing-quantized": "if the configuration declares a quantization, something is quantized",
    "ignore-list": "the configuration lists exactly the layers that are left unquantized",
    "fused-layers": "layers that engines load as one matrix (q, k, v; gate, up) share their scheme and global scale",
    "vocabulary": "every token has a row in the embedding",
    "settings": "configuration, tokenizer and generation settings agree with each other",
    "unexpected-files": "no extra file is there that a loader would read or run",
    "source": "the source named with --source is the one that the manifest records",
    "configuration": "the configuration means the same as that of the source",
    "gguf-keys": "the keys of a GGUF file follow from the source",
    "side-files": "tokenizer, chat template, generation settings and licenses are those of the source",
    "not-finite": "every stored number is finite",
    "scale": "every scale is present, finite and plausible",
    "zero-points": "zero points are stored as the configuration declares",
    "unquantized-changed": "tensors that are not quantized equal those of the source",
    "scale-fold": "a factor that was folded out of one tensor was folded into its partner",
    "quantization-error": "a quantized tensor loses no more than rounding to its scheme costs",
    "group-error": "no group, row or column of a quantized tensor is further off than rounding explains",
    "swapped-tensors": "every tensor holds its own weights, in their order",
    "logits": "a forward pass gives finite logits, close to those of the source",
    "engine": "the engine named with --for loads the files",
}
FILE_CHECKS = ("manifest", "signature")  # need no format to be read
COMPARED = (
    "source",
    "configuration",
    "gguf-keys",
    "side-files",
    "scale-fold",
    "quantization-error",
)  # need a source
# Checks that are made in part without a source, and what they still cover.
WITHOUT_SOURCE: Mapping[str, str] = {
    "unquantized-changed": "gains of a norm against those of the blocks beside it",
    "group-error": "rows and columns of one code",
    "swapped-tensors": "codes and scales that two tensors share",
}


class Severity(StrEnum):
    """Severity of a finding: how certain it is that the artifact is broken."""

    ERROR = "error"  # proven
    WARNING = "warning"  # unusual: worth a look, and a failure with --strict


@dataclass(frozen=True, slots=True)
class Finding:
    """A defect, or something unusual, that a check found.

    Attributes:
        check: a key of `CHECKS`.
        where: the file or tensor.
        detail: what is wrong with it.
        severity: an error if it is proven, else a warning.
    """

    check: str
    where: str
    detail: str
    severity: Severity = Severity.ERROR

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise ValueError(f"unknown check {self.check!r}")


@dataclass(slots=True)
class Report:
    """Report of a verification.

    Attributes:
        path: the artifact.
        source: the model that it was compared with.
        format: key of its format, "" if that could not be read.
        model_type: its family, "" if that could not be read.
        findings: findings in the order of their discovery.
        skipped: reasons by check, for checks that were not made.
        partial: what was covered by check, for checks that were made in part because there is no source.
        notes: information without influence on the result.
        unsigned: files that the verified signature does not cover.
        tensors: error figures of each quantized tensor.
        figures: figures of the forward pass.
        unrecorded_factors: modules with folded scales that cancel out but that no manifest records.
        unsupported: why artifacts of this kind cannot be verified; "" if they can.
    """

    path: Path
    source: Path | None = None
    format: str = ""
    model_type: str = ""
    findings: list[Finding] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    partial: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unsigned: list[str] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    unrecorded_factors: list[str] = field(default_factory=list)
    unsupported: str = ""

    def add(self, check: str, where: str, detail: str, severity: Severity = Severity.ERROR) -> None:
        """Record a finding; unprintable characters, which a malicious file may contain, are escaped."""
        self.skipped.pop(check, None)
        self.findings.append(Finding(check, _escape(where), _escape(detail), severity))

    def warn(self, check: str, where: str, detail: str) -> None:
        """Record a warning, see `add`."""
        self.add(check, where, detail, Severity.WARNING)

    def skip(self, reason: str, *checks: str) -> None:
        """Record that checks are not made, except those that already have findings."""
        with_findings = {item.check for item in self.findings}
        self.skipped |= {check: _escape(reason) for check in checks if check not in with_findings}

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(item.severity is severity for item in self.findings)

    def failed(self, *, strict: bool = False) -> bool:
        """Return whether there is an error or, with ``strict``, any finding."""
        return bool(self.findings) if strict else self.count(Severity.ERROR) > 0

    @property
    def structure_only(self) -> bool:
        """Return whether values were compared with nothing: there was no manifest, signature or source."""
        return {"manifest", "signature", "quantization-error"} <= self.skipped.keys()

    def document(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the report as plain data (``quantforge.verify/2``)."""
        return {
            "schema": SCHEMA,
            "path": str(self.path),
            "source": None if self.source is None else str(self.source),
            "format": self.format,
            "model_type": self.model_type,
            "ok": not self.failed(strict=strict) and not self.unsupported,
            "unsupported": self.unsupported,
            "structure_only": self.structure_only,
            "findings": [asdict(item) for item in self.findings],
            "checked": [c for c in CHECKS if c not in self.skipped and c not in self.partial],
            "partial": self.partial,
            "skipped": self.skipped,
            "notes": self.notes,
            "unsigned": self.unsigned,
            "tensors": self.tensors,
            "unrecorded_factors": self.unrecorded_factors,
            "forward": self.figures,
        }


def _escape(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
