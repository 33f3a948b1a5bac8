"""The card of a folder of results that are one file each: what they are, which to take, and the code that loads one.

It has two delimited parts, one for what the files are and one for measured figures, and nothing else of it is ever
replaced: a person may write between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantforge.formats.targets import Snippet
from quantforge.results.card import cell, code
from quantforge.results.card_figures import EMPTY_FIGURES, EMPTY_INDEX, MutablePart
from quantforge.results.significant import significant, size

FILES_PART = MutablePart("<!-- quantforge files: begin -->", "<!-- quantforge files: end -->")
GB = 1e9
MEMORIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
TYPICAL = 5.0  # bits per weight of the file that is loaded in the examples, about
_ABSENT = "-"


@dataclass(frozen=True, slots=True)
class FolderFile:
    """One file of a folder.

    Attributes:
        name: of the file, or the first of numbered ones.
        method: by which it was quantized.
        bits: bits per weight; 0 where that is not known.
        nbytes: of the file, or of all numbered ones.
        needed: bytes of memory in use; None where that is not known.
        divergence: from the source, nats per token; None where it was not measured.
    """

    name: str
    method: str
    bits: float
    nbytes: int
    needed: float | None
    divergence: float | None


def new_card(fields: str, title: str, origin: str, content: str) -> str:
    """Return a new card.

    Args:
        fields: the front matter as YAML.
        title: its heading.
        origin: the original model.
        content: of the part about the files, see `files_part`.
    """
    empty = "\n".join(
        [
            "---",
            fields,
            EMPTY_INDEX,
            "---",
            "",
            f"# {title}",
            "",
            f"Results made of {origin} by QuantForge.",
            "",
            FILES_PART.empty,
            "",
            EMPTY_FIGURES,
            "",
        ]
    )
    return FILES_PART.replaced(empty, content)


def files_part(files: Sequence[FolderFile], context: int, snippets: Sequence[Snippet]) -> str:
    """Return what is said of the files, as Markdown.

    Args:
        files: of the folder.
        context: tokens of the sequence for which memory is given.
        snippets: code that loads one of them.
    """
    files = sorted(files, key=lambda file: (file.nbytes, file.name))
    lines = [
        "## Files",
        "",
        "| name | method | bits of quantized weights | file | KL, nats per token |",
        "|---|---|---:|---:|---:|",
        *(_row(file) for file in files),
        "",
        *_which(files, context),
    ]
    lines += ["## Loading", ""]
    for item in snippets:
        lines += [f"### {item.engine}", "", f"```{item.language}", item.code, "```", ""]
    lines += [
        "Beside each file lies its manifest, with recipe, events and checksums:"
        " `quantforge verify FILE` checks it, `quantforge reproduce FILE --source MODEL` makes it again."
    ]
    return "\n".join(lines)


def _row(file: FolderFile) -> str:
    divergence = _ABSENT if file.divergence is None else significant(file.divergence)
    bits = significant(file.bits) if file.bits else _ABSENT
    cells = (code(file.name), cell(file.method), bits, size(file.nbytes), divergence)
    return f"| {' | '.join(cells)} |"


def _which(files: Sequence[FolderFile], context: int) -> Iterator[str]:
    """Yield which file to take, as far as that is known."""
    measured = _measured(files)
    yield from ("## Which one", "")
    if all(file.needed is not None for file in files):
        yield from ("| memory | file | needs |", "|---:|---|---:|")
        for memory, best in _advised(files):
            yield f"| {memory} GB | {code(best.name)} | {size(best.needed or 0)} |"
        yield ""
        yield (
            f"Needs: weights, cache and activations of one sequence of {context} tokens; system and engine take more."
        )
    yield f"The file is the one with the {'least divergence' if measured else 'most bits per weight'}."
    beaten = {file.name: better for file in files if (better := _better(file, files))}
    if measured and beaten:
        told = "; ".join(f"{code(name)} ({code(other)})" for name, other in beaten.items())
        yield ""
        yield f"Another is no larger and closer to the source: {told}."
    yield ""


def shown_file(files: Sequence[FolderFile]) -> FolderFile:
    """Return the file that the examples load: one of those that are advised, and measured if any is."""
    advised = [best for _, best in _advised(files)] or [_closest(files, measured=_measured(files))]
    measured = [file for file in files if file.divergence is not None]
    both = [file for file in advised if file in measured]
    return min(both or measured or advised, key=lambda file: abs(file.bits - TYPICAL))


def _advised(files: Sequence[FolderFile]) -> list[tuple[int, FolderFile]]:
    """Return which file to take from which memory in GB on; none where it is not known what they need."""
    if any(file.needed is None for file in files):
        return []
    found: list[tuple[int, FolderFile]] = []
    for memory in MEMORIES:
        fitting = [file for file in files if (file.needed or 0) <= memory * GB]
        best = _closest(fitting, measured=_measured(files)) if fitting else None
        if best is not None and (not found or best is not found[-1][1]):
            found.append((memory, best))
    return found


def _measured(files: Sequence[FolderFile]) -> bool:
    return all(file.divergence is not None for file in files)


def _closest(files: Sequence[FolderFile], *, measured: bool) -> FolderFile:
    return min(files, key=lambda file: _loss(file, measured=measured))


def _loss(file: FolderFile, *, measured: bool) -> tuple[float, int]:
    return (file.divergence or 0.0) if measured else -file.bits, file.nbytes


def _better(file: FolderFile, files: Sequence[FolderFile]) -> str | None:
    """Return the name of a file that is no larger and diverges less."""
    for other in files:
        if other.divergence is None or file.divergence is None:
            continue
        if other.nbytes <= file.nbytes and other.divergence < file.divergence:
            return other.name
    return None
