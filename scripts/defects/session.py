"""Plants defects by seed, asks judge and `verify`, and keeps what they say in a file of lines."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import quantforge
from scripts.defects import beside, headers, mistakes, numbers, tokens
from scripts.defects.artifacts import FAMILIES, Healthy
from scripts.defects.damage import Damage, Finding, damage_of
from scripts.defects.files import Copy
from scripts.defects.judge import judge

Plant = Callable[[Copy, random.Random], str | None]
KINDS: dict[str, Plant] = {
    "scales": numbers.scales,
    "codes": numbers.codes,
    "zero points, minima, indices": numbers.zeros,
    "parameters of a second level": numbers.more,
    "exchanged": numbers.exchanged,
    "kept tensors": numbers.kept,
    "raw bytes": headers.raw,
    "bits flipped": mistakes.flipped,
    "codes shifted by one": mistakes.shifted,
    "scales of another layer": mistakes.neighbours_scales,
    "zero points off by one": mistakes.zero_points,
    "transposed matrix": mistakes.transposed,
    "halves exchanged": mistakes.halves,
    "permutation undone": mistakes.permuted,
    "norm off by one": mistakes.norms,
    "stale layers": mistakes.stale,
    "configuration": beside.configuration,
    "rope setting": mistakes.rope,
    "key that loads code": mistakes.loads_code,
    "description of the quantization": headers.described,
    "tokenizer": tokens.tokenizer,
    "settings": beside.settings,
    "chat template": mistakes.chat_template,
    "files added": beside.added,
    "files removed": beside.removed,
    "keys of GGUF": headers.gguf_keys,
}
OF_GGUF = {"keys of GGUF"}
FROM_SOURCE = {
    "transposed matrix",
    "halves exchanged",
    "permutation undone",
    "norm off by one",
    "stale layers",
}
# What `verify` says of a defect, from best to worst: an error that names it, a warning that names it, only findings
# that do not say where it is, nothing.
ERROR, WARNING, UNNAMED, NOTHING = "error", "warning", "unnamed", ""


@dataclass(frozen=True)
class Record:
    """One defect: what was planted, why it counts, what `verify` said with the source and alone."""

    name: str
    kind: str
    family: str
    artifact: str
    text: str
    reason: str
    before: float
    after: float
    error: float
    said: str
    alone: str
    texts: list[str]
    alone_texts: list[str]
    seconds: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether it is no harmless one."""
        return bool(self.reason)

    @property
    def released(self) -> bool:
        """Whether it was planted in the released model."""
        return self.name.startswith("released")

    @property
    def found(self) -> bool:
        """Whether a finding names it."""
        return self.said in {ERROR, WARNING}

    @property
    def found_alone(self) -> bool:
        """Whether a finding names it without the source."""
        return self.alone in {ERROR, WARNING}


def findings(path: Path, source: Path | None, *, forward: bool = True) -> list[Finding]:
    """What `verify` finds; a refusal is an error, and so is what it will not judge. A crash is raised."""
    try:
        report = quantforge.verify(path, source, forward=forward)
    except quantforge.QuantForgeError as error:
        return [Finding("unreadable", error.file or path.name, str(error))]
    found = [
        Finding(one.check, one.where, one.detail, str(one.severity)) for one in report.findings
    ]
    if report.unsupported:  # by what the configuration says of the format
        where = path.name if path.is_file() else "config.json"
        found.append(Finding("unreadable", where, report.unsupported))
    return found


def look(path: Path, source: Path | None, damage: Damage, *, quick: bool) -> tuple[str, list[str]]:
    """What `verify` says of a damaged artifact: how well, and the findings; a crash is no finding.

    With ``quick`` the forward pass is left out where the damage is found without it.
    """
    try:
        found = findings(path, source, forward=not quick)
        said = _best(found, damage)
        if quick and said != ERROR:
            found = findings(path, source)
            said = _best(found, damage)
    except Exception as error:  # a bug, to be told and not to be counted as found
        return NOTHING, [f"CRASH {type(error).__name__}: {error}"[:200]]
    ranked = sorted(found, key=lambda item: (not damage.named(item), item.severity != ERROR))
    return said, [_line(item) for item in ranked[:4]]


def _best(found: Sequence[Finding], damage: Damage) -> str:
    named = {item.severity for item in found if damage.named(item)}
    if ERROR in named:
        return ERROR
    return WARNING if named else UNNAMED if found else NOTHING


def _line(item: Finding) -> str:
    return f"{item.severity} {item.check} {item.where}: {item.detail}"[:200]


def _planted(
    bases: Sequence[Healthy], kind: str, families: Sequence[str], chance: random.Random, place: Path
) -> tuple[Healthy, Copy, str] | None:
    """The first of the families that has anything for the kind, or None."""
    again = kind in FROM_SOURCE
    for family in families:
        found = [b for b in bases if b.family == family and (b.tensor_by_tensor or not again)]
        for _ in range(3 if again else 8):
            if not found:
                break
            healthy = chance.choice(found)
            copy = Copy(healthy.path, place, healthy.source, healthy.command)
            text = KINDS[kind](copy, chance)
            if text:
                return healthy, copy, text
            copy.remove_all()
    return None


def tried(
    bases: Sequence[Healthy], seed: int, name: str, place: Path, *, keep: bool = False
) -> Record | None:
    """Plant one defect, judge and verify; None where no artifact has anything of its kind.

    Args:
        bases: the artifacts that may be damaged.
        seed: of the whole run.
        name: ``GROUP-NUMBER``: the number chooses the kind, and with the group and the seed everything else.
        place: a folder for copies.
        keep: leave the copy there.
    """
    number = int(name.rpartition("-")[2])
    kind = list(KINDS)[number % len(KINDS)]
    turn = (number // len(KINDS) + number % len(KINDS) * 3) % len(FAMILIES)
    families = ("gguf",) if kind in OF_GGUF else FAMILIES[turn:] + FAMILIES[:turn]
    chance = random.Random(f"{seed}-{name}")
    planted = _planted(bases, kind, families, chance, place / f"{seed}-{name}")
    if planted is None:
        return None
    healthy, copy, text = planted
    began = time.process_time()
    verdict = judge(copy, healthy)
    damage = damage_of(copy)
    quick = not any(name.endswith((".safetensors", ".gguf")) for name in copy.changed)
    said, texts = look(copy.path, healthy.source, damage, quick=quick)
    alone, alone_texts = look(copy.path, None, damage, quick=quick)
    seconds = round(time.process_time() - began, 2)
    if not keep:
        copy.remove_all()
    return Record(
        name, kind, healthy.family, healthy.name, text, verdict.reason, verdict.before,
        verdict.after, verdict.error, said, alone, texts, alone_texts[:2], seconds,
    )  # fmt: skip


@dataclass(frozen=True)
class Looked:
    """A healthy artifact, and all findings: errors and warnings, with the source and alone."""

    healthy: str
    errors: list[str]
    warnings: list[str]
    alone_errors: list[str]
    alone_warnings: list[str]
    seconds: float


def looked(item: Healthy) -> Looked:
    """Verify a healthy artifact with and without its source; a crash counts as an error."""
    path, source, lines = item.path, item.source, []
    began = time.process_time()
    for compared in (source, None):
        try:
            found = findings(path, compared)
        except (
            Exception
        ) as error:  # a bug: it counts as an error, and the others are still verified
            lines += [[f"CRASH {type(error).__name__}: {error}"[:200]], []]
            continue
        lines += [[_line(f) for f in found if f.severity == s] for s in (ERROR, WARNING)]
    return Looked(item.name, *lines, round(time.process_time() - began, 2))


class Log:
    """Lines of JSON in a file: one for each defect, one for each healthy artifact."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _lines(self) -> list[dict[str, Any]]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [json.loads(line) for line in lines]

    def add(self, item: Record | Looked) -> None:
        """Add one, and tell of it."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(item)) + "\n")
        sys.stderr.write(_told(item) + "\n")
        sys.stderr.flush()

    def done(self) -> set[str]:
        """Names that are in the file."""
        return {line.get("name") or line["healthy"] for line in self._lines()}

    def all(self) -> tuple[list[Record], list[Looked]]:
        """All defects by kind and name, and all healthy artifacts."""
        lines = self._lines()
        records = [Record(**line) for line in lines if "healthy" not in line]
        order = list(KINDS)
        records.sort(key=lambda r: (order.index(r.kind), r.name))
        return records, [Looked(**line) for line in lines if "healthy" in line]


def _told(item: Record | Looked) -> str:
    if isinstance(item, Looked):
        alone = [f"{text} (without the source)" for text in item.alone_errors + item.alone_warnings]
        parts = [
            f"healthy {item.healthy} {item.seconds:.1f} s",
            *item.errors,
            *item.warnings,
            *alone,
        ]
        return "\n  ".join(parts[:6])
    state = item.said or "MISSED" if item.counts else "harmless"
    parts = [item.kind, item.artifact, item.text, item.reason, "; ".join(item.texts[:1])]
    return f"{item.name} {state:8} {item.seconds:4.1f} s {' | '.join(parts)}"
