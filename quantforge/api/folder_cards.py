"""The card of a folder of results that are one file each: what they are, which to take, and the code that loads one.

It is made of the manifests and headers of the files and of measured figures. It has two delimited parts, one for what
the files are and one for measured figures, and nothing else of it is ever replaced: a person may write between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.api.plan import capacity
from quantforge.artifacts import manifest
from quantforge.artifacts.card import (
    base_model,
    cell,
    code,
    first,
    front_matter,
    kept_experts_text,
    origin,
    source_card_fields,
)
from quantforge.artifacts.card_figures import (
    CARD,
    EMPTY_FIGURES,
    EMPTY_INDEX,
    MutablePart,
    check_card,
    is_in_folder,
    read_card,
    write_figures,
)
from quantforge.artifacts.manifest import adapter_name, recorded_adapters, recorded_kept_experts
from quantforge.artifacts.number_text import significant, size
from quantforge.engines import Snippet, snippets
from quantforge.errors import InputError
from quantforge.files.disk import save
from quantforge.files.opener import FILES
from quantforge.files.reader import Checkpoint
from quantforge.formats import FORMATS, load_format
from quantforge.formats.open_model import open_model, tokenizer_side_files
from quantforge.planning.capacity import Load
from quantforge_calibration.chat_templates import DEFAULT, choose
from quantforge_files.roles import CARD as CARD_ROLE

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation

CONTEXT = 8192  # tokens, for which memory is told, as far as the model has positions
FILES_PART = MutablePart("<!-- quantforge files: begin -->", "<!-- quantforge files: end -->")
GB = 1e9
MEMORIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
TYPICAL = 5.0  # bits per weight of the file that is loaded in the examples, about
_ABSENT = "-"


def check_card_of(folder: Path, models: Sequence[Path]) -> None:
    """Refuse, before anything is measured, a card that figures cannot be written into.

    Raises:
        UsageError, InputError: as `check_card`; of files, a card that is there lacks a part, or one has no manifest or
            cannot be opened.
    """
    inside = _files_in(folder, models)
    if not inside:
        check_card(folder, models)
        return
    for model in inside:
        if manifest.read_manifest(model) is None:
            raise InputError(
                f"{model}: no manifest beside it",
                "only results of ours have cards",
                file=str(model),
            )
    _results_in(folder)  # all are opened for the card
    check_folder_card(folder)


def check_folder_card(folder: Path) -> None:
    """Refuse a card of a folder that lacks a part; one that is not there yet passes. Errors as `check_card_of`."""
    if (folder / CARD).exists():
        read_card(folder)
        _replaced(folder / CARD, folder, "")


def write_card_of(folder: Path, found: Evaluation, source: Checkpoint, base: str) -> None:
    """Put measured figures into the card of a folder; of a folder of files it is made or renewed first."""
    from quantforge.evaluation.card_section import index, section

    rows = {Path(row["path"]): row for row in found.rows[1:]}
    if inside := _files_in(folder, rows):
        divergence = {_parts(path)[0].name: rows[path]["kl_mean"] for path in inside}
        write_folder_card(folder, divergence, source, base)
    write_figures(folder, section(found, folder), index(found, folder))


@dataclass(frozen=True, slots=True)
class FolderFile:
    """One file of a folder.

    Attributes:
        name: of the file, or the first of numbered ones.
        method: by which it was quantized.
        bits: bits per weight; 0 where that is not known.
        nbytes: of the file, or of all numbered ones.
        needed: bytes of memory in use.
        divergence: from the source, nats per token; None where it was not measured.
    """

    name: str
    method: str
    bits: float
    nbytes: int
    needed: float
    divergence: float | None


def write_folder_card(
    folder: Path,
    divergence: Mapping[str, float],
    source: Checkpoint,
    base: str = "",
    only: Iterable[Path] = (),
    repository: str = "",
) -> None:
    """Make the card of a folder, or renew what it says of the files; the rest of a card stays.

    Args:
        folder: with results that are one file each.
        divergence: nats per token of those that were measured, by the name of the file in the folder (of
            numbered ones, the first).
        source: what the files were made from.
        base: the original model's name on the hub, as a user states it.
        only: the files that it speaks of; all results in the folder when empty.
        repository: on the hub, to which the folder is uploaded; "" where that is not known.

    Raises:
        InputError: a card that is there has no part for files.
        ResourceError: it cannot be written.
    """
    paths = list(only) or _results_in(folder)
    documents = {path: manifest.read_manifest(path) or {} for path in paths}
    known = {path: capacity(path, Load(context=1)) for path in paths}
    context = min(CONTEXT, *(room.positions for _, room in known.values()))
    files = [
        FolderFile(
            name=path.name,
            method=str(documents[path].get("method") or "as it was"),
            bits=_bits(documents[path]),
            nbytes=sum(part.stat().st_size for part in _parts(path)),
            needed=room.needed(context=context),
            divergence=divergence.get(path.name),
        )
        for path, (_, room) in known.items()
    ]
    name = shown_file(files).name
    shown = next(path for path in paths if path.name == name)
    plan, document = known[shown][0], documents[shown]
    about = load_format(plan.format).INFO
    chat = DEFAULT in choose(tokenizer_side_files(open_model(shown)), shown).named
    code = snippets(about, plan.engines, shown.name, chat=chat, repository=repository)
    content = files_part(files, context, code)
    place = folder / CARD
    if place.exists():
        text = _replaced(place, folder, content)
    else:
        named = base_model(base, document, source.config)
        fields = front_matter(
            named,
            about.hub_library,
            [plan.format],
            source_card_fields(source.card),
            tuned=bool(recorded_adapters(document)),
        )
        title = f"{_title(named, document)} ({plan.format})"
        text = _new_card(fields, title, origin(document, named), content)
    data = text.encode("utf-8", "surrogateescape")
    if not place.is_file() or FILES.read(place, CARD_ROLE, folder) != data:
        save(place, data, overwrite=True)


def _title(base: str, document: Mapping[str, Any]) -> str:
    """Return the name of the original model, with the adapters and experts that were merged."""
    stated = first(document).get("source", {}).get("model")
    words = [base.rpartition("/")[2] or cell(str(stated))]
    words += [f"with {cell(adapter_name(said))}" for said in recorded_adapters(document)]
    words += [f"with {kept_experts_text(said)}" for said in recorded_kept_experts(document)]
    return " ".join(words)


def _new_card(fields: str, title: str, original: str, content: str) -> str:
    """Return a new card; ``fields`` are the front matter, and ``content`` is that of `files_part`."""
    lines = ["---", fields, EMPTY_INDEX, "---", "", f"# {title}", ""]
    lines += [f"Results made of {original} by QuantForge.", ""]
    lines += [FILES_PART.empty, "", EMPTY_FIGURES, ""]
    return FILES_PART.replaced("\n".join(lines), content)


def _results_in(folder: Path) -> list[Path]:
    """Return the results in a folder that are files and have their manifest beside them, by name.

    Of numbered files it is the first, with which all are opened.
    """
    suffixes = {load_format(key).INFO.file_suffix for key in FORMATS} - {""}
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in suffixes and path.is_file() and manifest.read_manifest(path) is not None
    ]
    return [path for path in found if _parts(path)[0].name == path.name]


def _files_in(folder: Path, models: Iterable[Path]) -> list[Path]:
    """Return those of some models that are files of a folder."""
    return [model for model in models if model.is_file() and is_in_folder(model, folder)]


def _parts(path: Path) -> tuple[Path, ...]:
    """Return all files of a result that one of them names; errors as `open_model`."""
    return open_model(path).shards


def _bits(document: Mapping[str, Any]) -> float:
    """Return bits per quantized weight; 0 where the manifest states no such number."""
    stated: Any = document.get("bits_per_weight")
    return float(stated) if type(stated) in {int, float} and 0 < stated < math.inf else 0.0


def _replaced(place: Path, folder: Path, content: str) -> str:
    text = FILES.read(place, CARD_ROLE, folder).decode("utf-8", "surrogateescape")
    try:
        return FILES_PART.replaced(text, content)
    except ValueError as error:
        raise InputError(
            f"{place}: the part about the files is not between one line '{FILES_PART.begin}' and one line"
            f" '{FILES_PART.end}'",
            "put these two lines where it should stand, or move the card away",
            file=str(place),
        ) from error


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
    """Yield which file to take."""
    measured = _measured(files)
    yield from ("## Which one", "")
    yield from ("| memory | file | needs |", "|---:|---|---:|")
    for memory, best in _advised(files):
        yield f"| {memory} GB | {code(best.name)} | {size(best.needed)} |"
    yield ""
    yield f"Needs: weights, cache and activations of one sequence of {context} tokens; system and engine take more."
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
    """Return which file to take from which memory in GB on; none where all need more than the largest."""
    found: list[tuple[int, FolderFile]] = []
    for memory in MEMORIES:
        fitting = [file for file in files if file.needed <= memory * GB]
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
