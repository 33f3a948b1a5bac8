"""What the records of a run come to: counts, whether the targets of `verify` are reached, a table in Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scripts.defects.session import ERROR, UNNAMED, Looked, Record

# Shares of the defects that count: found with the source in bundled models and in the released one, with an error, in
# each kind of which `FEW` count, and without the source. Of healthy artifacts: those that may have a warning.
BUNDLED, RELEASED, WITH_ERROR, KIND, ALONE = 0.95, 0.9, 0.5, 0.8, 0.4
FEW = 10
WARNED = 0.1


@dataclass(frozen=True)
class Counts:
    """Counts of a group of defects: planted, those that count, and of these those that were found."""

    planted: int
    counted: int
    found: int
    error: int
    unnamed: int
    alone: int

    @classmethod
    def of(cls, records: Sequence[Record]) -> Counts:
        """Count."""
        counted = [record for record in records if record.counts]
        return cls(
            len(records),
            len(counted),
            sum(r.found for r in counted),
            sum(r.said == ERROR for r in counted),
            sum(r.said == UNNAMED for r in counted),
            sum(r.found_alone for r in counted),
        )

    def reaches(self, share: float, part: Callable[[Counts], int]) -> bool:
        """Whether a part is at least this share of those that count."""
        return part(self) >= share * self.counted


def listed(records: Sequence[Record]) -> str:
    """Return a line of JSON for each defect: what was planted where, whether it counts and is found."""
    keys = ("name", "kind", "artifact", "text", "counts", "found")
    lines = ({key: getattr(record, key) for key in keys} for record in records)
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def compare(before: str, after: str) -> int:
    """Print in what two lists differ; return 5 if something else was planted, or less is found."""
    old, new = (
        {line["name"]: line for line in map(json.loads, text.splitlines())}
        for text in (before, after)
    )
    lost = 0
    for name in sorted({*old, *new}):
        first, second = old.get(name), new.get(name)
        if first != second:
            print(f"{name}\n  {first}\n  now {second}")
        planted = [
            line and (line["kind"], line["artifact"], line["text"]) for line in (first, second)
        ]
        lost += planted[0] != planted[1] or (first["found"] and not second["found"])
    print(
        f"{len(old)} defects before, {len(new)} now; {lost} were not planted again or are no longer found"
    )
    return 5 if lost else 0


def failures(records: Sequence[Record], healthy: Sequence[Looked]) -> Iterator[str]:
    """The targets that are missed."""
    every = Counts.of(records)
    for title, released, least in (
        ("bundled models", False, BUNDLED),
        ("the released model", True, RELEASED),
    ):
        counts = Counts.of([record for record in records if record.released is released])
        if not counts.reaches(least, lambda c: c.found):
            yield f"found in {title}: {_share(counts.found, counts.counted)}, at least {least:.0%} are wanted"
    if not every.reaches(WITH_ERROR, lambda c: c.error):
        yield f"with an error: {_share(every.error, every.counted)}, at least {WITH_ERROR:.0%} are wanted"
    if not every.reaches(ALONE, lambda c: c.alone):
        yield f"without the source: {_share(every.alone, every.counted)}, at least {ALONE:.0%} are wanted"
    for kind, counts in _by(records, "kind"):
        if counts.counted >= FEW and not counts.reaches(KIND, lambda c: c.found):
            yield f"{kind}: {_share(counts.found, counts.counted)} found, at least {KIND:.0%} are wanted"
    wrong = [item for item in healthy if item.errors or item.alone_errors]
    if wrong:
        yield f"{len(wrong)} healthy artifacts with an error, none is wanted"
    for title, warned in (("", [i for i in healthy if i.warnings]),
                          (" without the source", [i for i in healthy if i.alone_warnings])):  # fmt: skip
        if len(warned) > WARNED * len(healthy):
            share = _share(len(warned), len(healthy))
            yield f"healthy artifacts with a warning{title}: {share}, at most {WARNED:.0%} are wanted"


def table(records: Sequence[Record], healthy: Sequence[Looked], notes: Sequence[str]) -> str:
    """The report in Markdown."""
    lines = [*notes, ""]
    if records:
        lines += _tables(records)
    if healthy:
        lines += _healthy(healthy)
    missed = list(failures(records, healthy))
    lines += (
        [*(f"- Not reached: {text}." for text in missed), ""]
        if missed
        else ["All targets are reached.", ""]
    )
    left = [record for record in records if record.counts and not record.found]
    if left:
        lines += ["Not found, or not named:", "",
                  "| defect | kind | artifact | what was done | why it counts | what was said |",
                  "|---|---|---|---|---|---|"]  # fmt: skip
        for r in left:
            said = r.texts[0] if r.texts else ""
            cells = (r.name, r.kind, r.artifact, r.text, r.reason, said)
            lines.append(f"| {' | '.join(_cell(text) for text in cells)} |")
    return "\n".join(lines).rstrip() + "\n"


def _tables(records: Sequence[Record]) -> Iterator[str]:
    for key, title in (("kind", "kind"), ("family", "format"), ("model", "model")):
        yield f"| {title} | planted | count | found | share | with an error | not named | without the source |"
        yield "|---|---|---|---|---|---|---|---|"
        for name, c in [*_by(records, key), ("**all**", Counts.of(records))]:
            shares = [_share(part, c.counted) for part in (c.found, c.error, c.unnamed, c.alone)]
            yield f"| {name} | {c.planted} | {c.counted} | {c.found} | {' | '.join(shares)} |"
        yield ""
    harmless = [record for record in records if not record.counts]
    objected = sum(bool(record.said) for record in harmless)
    yield f"`verify` objects to {objected} of the {len(harmless)} defects that do not count."
    yield ""


def _healthy(healthy: Sequence[Looked]) -> Iterator[str]:
    yield "| healthy artifacts of | artifacts | error | warning | error, alone | warning, alone |"
    yield "|---|---|---|---|---|---|"
    sources = dict.fromkeys(item.healthy.partition("/")[0] for item in healthy)
    for name in (*sources, "**all**"):
        mine = [item for item in healthy if name in {"**all**", item.healthy.partition("/")[0]}]
        counts = [sum(bool(getattr(item, key)) for item in mine)
                  for key in ("errors", "warnings", "alone_errors", "alone_warnings")]  # fmt: skip
        yield f"| {name} | {len(mine)} | {' | '.join(map(str, counts))} |"
    yield ""
    for item in healthy:
        texts = [
            *item.errors,
            *item.warnings,
            *(f"{t} (alone)" for t in item.alone_errors + item.alone_warnings),
        ]
        if texts:
            more = f", and {len(texts) - 1} more" if len(texts) > 1 else ""
            yield f"- {item.healthy}: {_cell(texts[0])}{more}"
    yield ""


def _by(records: Sequence[Record], key: str) -> Iterator[tuple[str, Counts]]:
    def value(record: Record) -> str:
        if key == "model":
            return "released" if record.released else "bundled"
        return str(getattr(record, key))

    for name in dict.fromkeys(map(value, records)):
        yield name, Counts.of([record for record in records if value(record) == name])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
