"""Plants defects by seed, asks judge and `verify`, and tabulates."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantforge.errors import QuantForgeError
from quantforge.verification.findings import Report, Severity
from quantforge.verification.verify import VerificationOptions, verify
from scripts.defects import beside, headers, numbers, tokens
from scripts.defects.artifacts import FAMILIES, Healthy
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
    "configuration": beside.configuration,
    "description of the quantization": headers.described,
    "tokenizer": tokens.tokenizer,
    "settings and templates": beside.settings,
    "files added": beside.added,
    "files removed": beside.removed,
    "keys of GGUF": headers.gguf_keys,
    "raw bytes": headers.raw,
}
OF_GGUF = {"keys of GGUF"}
# Checks that the forward pass of the source has no part in.
BESIDE = {
    "configuration",
    "side-files",
    "foreign",
    "unreadable",
    "incomplete",
    "ignore-list",
    "vocabulary",
}
LEAST, LEAST_KIND, FEW = 0.95, 0.9, 10


@dataclass
class Record:
    """One defect: what was planted, why it counts, what `verify` said with and without the source."""

    number: int
    kind: str
    family: str
    artifact: str
    text: str
    reason: str
    before: float
    after: float
    error: float
    found: bool
    alone: bool
    said: list[str]
    alone_said: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether it is no harmless one."""
        return bool(self.reason)


def look(path: Path, source: Path | None, *, quick: bool = False) -> tuple[bool, list[str]]:
    """Whether `verify` finds something, and what; a crash is no finding.

    With ``quick`` the forward pass is left out where what lies beside the weights is objected to without it.
    """
    try:
        if quick:
            report = verify(path, VerificationOptions(source, forward=False))
            objected = {item.check for item in report.findings if item.severity is Severity.ERROR}
            if objected & BESIDE:
                return True, _said(report)
        report = verify(path, VerificationOptions(source))
    except QuantForgeError as error:
        return True, [f"refused: {error}"[:200]]
    except Exception as error:  # a bug, to be told and not to be counted as found
        return False, [f"CRASH {type(error).__name__}: {error}"[:200]]
    return report.failed(), _said(report)


def _said(report: Report) -> list[str]:
    ranked = sorted(report.findings, key=lambda item: item.severity is not Severity.ERROR)
    return [f"{item.severity} {item.check} {item.where}: {item.detail}"[:200] for item in ranked][
        :4
    ]


def _planted(
    bases: Sequence[Healthy], kind: str, families: Sequence[str], chance: random.Random, place: Path
) -> tuple[Healthy, Copy, str] | None:
    """The first of the families that has anything for the kind, or None."""
    for family in families:
        found = [base for base in bases if base.family == family]
        for _ in range(8):
            if not found:
                break
            healthy = chance.choice(found)
            copy = Copy(healthy.path, place)
            text = KINDS[kind](copy, chance)
            if text:
                return healthy, copy, text
            copy.remove_all()
    return None


def tried(
    bases: Sequence[Healthy], seed: int, number: int, place: Path, *, keep: bool = False
) -> Record | None:
    """Plant one defect, judge and verify; None where no artifact has anything of its kind."""
    kind = list(KINDS)[number % len(KINDS)]
    turn = (number // len(KINDS) + number % len(KINDS) * 3) % len(FAMILIES)
    families = ("gguf",) if kind in OF_GGUF else FAMILIES[turn:] + FAMILIES[:turn]
    chance = random.Random(f"{seed}-{number}")
    planted = _planted(bases, kind, families, chance, place / f"{seed}-{number}")
    if planted is None:
        return None
    healthy, copy, text = planted
    began = time.process_time()
    verdict = judge(copy, healthy)
    quick = not any(name.endswith((".safetensors", ".gguf")) for name in copy.changed)
    found, said = look(copy.path, healthy.source, quick=quick)
    alone, alone_said = look(copy.path, None)
    seconds = round(time.process_time() - began, 2)
    if not keep:
        copy.remove_all()
    return Record(
        number, kind, healthy.family, healthy.name, text, verdict.reason, verdict.before, verdict.after,
        verdict.error, found, alone, said, alone_said[:2], seconds,
    )  # fmt: skip


class Log:
    """Lines of JSON in a file: one for each defect, one for each healthy artifact with what was said of it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _lines(self) -> list[dict[str, Any]]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [json.loads(line) for line in lines]

    def _add(self, line: dict[str, Any], text: str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def record(self, record: Record) -> None:
        """Add a defect."""
        state = "harmless" if not record.counts else "found" if record.found else "MISSED"
        parts = (
            record.kind,
            record.artifact,
            record.text,
            record.reason,
            "; ".join(record.said[:1]),
        )
        self._add(
            asdict(record),
            f"{record.number:3} {state:8} {record.seconds:4.1f} s {' | '.join(parts)}",
        )

    def healthy(self, item: Healthy) -> None:
        """Verify a healthy artifact with and without its source; warnings alone are no alarm."""
        alarms = []
        for source, text in ((item.source, ""), (None, " without the source")):
            failed, said = look(item.path, source)
            alarms += [f"{item.name}{text}: {alarm}" for alarm in said if failed]
        self._add(
            {"healthy": item.name, "alarms": alarms}, "\n".join([f"healthy {item.name}", *alarms])
        )

    def done(self) -> set[int | str]:
        """Numbers and names that are in the file."""
        return {line["healthy"] if "healthy" in line else line["number"] for line in self._lines()}

    def all(self) -> tuple[list[Record], list[str], int]:
        """All records by number, all alarms, and the number of healthy artifacts."""
        lines = self._lines()
        records = [Record(**line) for line in lines if "healthy" not in line]
        looked = [line for line in lines if "healthy" in line]
        alarms = [alarm for line in looked for alarm in line["alarms"]]
        return sorted(records, key=lambda record: record.number), alarms, len(looked)


def shares(records: Sequence[Record], key: str) -> list[tuple[str, int, int, int, int]]:
    """Per kind or family: planted, counted, found, found without the source."""
    rows = []
    for name in dict.fromkeys(getattr(record, key) for record in records):
        mine = [record for record in records if getattr(record, key) == name]
        counted = [record for record in mine if record.counts]
        rows.append(
            (
                name,
                len(mine),
                len(counted),
                sum(r.found for r in counted),
                sum(r.alone for r in counted),
            )
        )
    return rows


def passes(records: Sequence[Record], alarms: Sequence[str]) -> bool:
    """Whether the targets are reached."""
    counted = [record for record in records if record.counts]
    whole = sum(record.found for record in counted) >= LEAST * len(counted)
    kinds = all(
        found >= LEAST_KIND * many
        for _, _, many, found, _ in shares(records, "kind")
        if many >= FEW
    )
    return whole and kinds and not alarms


def table(
    records: Sequence[Record], healthy: int, alarms: Sequence[str], notes: Sequence[str]
) -> str:
    """The report in Markdown."""
    lines = [*notes, ""]
    for key, title in (("kind", "kind"), ("family", "format")):
        lines += [
            f"| {title} | planted | count | found | share | without the source |",
            "|---|---|---|---|---|---|",
        ]
        rows = sorted(shares(records, key)) if key == "family" else shares(records, key)
        total = ("**all**", *(sum(row[n] for row in rows) for n in range(1, 5)))
        for name, planted, counted, found, alone in [*rows, total]:
            share = [f"{part / counted:.0%}" if counted else "" for part in (found, alone)]
            lines.append(f"| {name} | {planted} | {counted} | {found} | {share[0]} | {share[1]} |")
        lines.append("")
    read = [
        r
        for r in records
        if r.reason.startswith(("cannot", "gguf-py cannot")) or "cannot be read" in r.reason
    ]
    lines += [
        f"Of those that count {len(read)} cannot be read or run at all."
        f" Of {sum(not r.counts for r in records)} harmless ones `verify` objects to"
        f" {sum(r.found and not r.counts for r in records)}.",
        f"Healthy artifacts: {healthy}, of which {len(alarms)} raised a false alarm.",
        *(f"- {alarm}" for alarm in alarms),
        "",
    ]
    missed = [record for record in records if record.counts and not record.found]
    if missed:
        lines += [
            "Not found:",
            "",
            "| number | kind | artifact | defect | why it counts |",
            "|---|---|---|---|---|",
        ]
        lines += [
            "| {} | {} | {} | {} | {} |".format(
                r.number,
                r.kind,
                r.artifact,
                *(t.replace("|", "/").replace("\n", " ") for t in (r.text, r.reason)),
            )
            for r in missed
        ]
    return "\n".join(lines).rstrip() + "\n"
