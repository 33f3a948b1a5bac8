"""Card of a folder of results that are one file each, made of their manifests and headers, and of measured figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.checkpoint.disk import save
from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import InputError
from quantforge.evaluation.folder_card import (
    FILES_PART,
    FolderFile,
    files_part,
    new_card,
    shown_file,
)
from quantforge.formats import FORMATS, format_of
from quantforge.formats.opening import open_model, side_data
from quantforge.formats.targets import snippets
from quantforge.planning.capacity import Load
from quantforge.results import manifest
from quantforge.results.card import (
    base_model,
    carried_fields,
    cell,
    first,
    front_matter,
    origin,
    with_experts,
)
from quantforge.results.card_figures import CARD, check_card, of_folder, read_card, write_figures
from quantforge.results.manifest import adapter_name, stated_adapters, stated_experts
from quantforge.verbs.plan import capacity
from quantforge_calibration.chat_templates import DEFAULT, choose
from quantforge_files.roles import CARD as CARD_ROLE

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import Evaluation

CONTEXT = 8192  # tokens, for which memory is told, as far as the model has positions


def files_of(folder: Path) -> list[Path]:
    """Return the results in a folder that are files and have their manifest beside them, by name.

    Of numbered files it is the first, with which all are opened.
    """
    suffixes = {format_of(key).ABOUT.suffix for key in FORMATS} - {""}
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in suffixes and path.is_file() and manifest.read(path) is not None
    ]
    return [path for path in found if _parts(path)[0].name == path.name]


def _parts(path: Path) -> tuple[Path, ...]:
    """Return all files of a result that one of them names; errors as `open_model`."""
    return open_model(path).shards


def check_card_of(folder: Path, models: Sequence[Path]) -> None:
    """Refuse, before anything is measured, a card that figures cannot be written into.

    Raises:
        UsageError, InputError: as `check_card`; of files, a card that is there lacks a part, or one has no manifest or
            cannot be opened.
    """
    inside = _files(folder, models)
    if not inside:
        check_card(folder, models)
    for model in inside:
        if manifest.read(model) is None:
            raise InputError(
                f"{model}: no manifest beside it",
                "only results of ours have cards",
                file=str(model),
            )
    if inside:
        files_of(folder)  # all are opened for the card
        check_folder_card(folder)


def check_folder_card(folder: Path) -> None:
    """Refuse a card of a folder that lacks a part; one that is not there yet passes. Errors as `check_card_of`."""
    if (folder / CARD).exists():
        read_card(folder)
        _replaced(folder / CARD, folder, "")


def write_measured(folder: Path, found: Evaluation, source: Checkpoint, base: str) -> None:
    """Put measured figures into the card of a folder; of a folder of files it is made or renewed first."""
    from quantforge.evaluation.card_section import index, section

    rows = {Path(row["path"]): row for row in found.rows[1:]}
    if inside := _files(folder, rows):
        told = {_parts(path)[0].name: rows[path]["kl_mean"] for path in inside}
        write_folder_card(folder, told, source, base)
    write_figures(folder, section(found, folder), index(found, folder))


def _files(folder: Path, models: Iterable[Path]) -> list[Path]:
    return [model for model in models if model.is_file() and of_folder(model, folder)]


def write_folder_card(
    folder: Path, divergence: Mapping[str, float], source: Checkpoint, base: str = "", only: Iterable[Path] = (),
    repository: str = "",
) -> None:  # fmt: skip
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
    paths = list(only) or files_of(folder)
    documents = {path: manifest.read(path) or {} for path in paths}
    known = {path: capacity(path, Load(context=1)) for path in paths}
    context = min(CONTEXT, *(room.positions for _, room in known.values()))
    files = [
        FolderFile(
            path.name, str(documents[path].get("method") or "as it was"), _bits(documents[path]),
            sum(part.stat().st_size for part in _parts(path)), room.needed(context=context), divergence.get(path.name),
        ) for path, (_, room) in known.items()
    ]  # fmt: skip
    name = shown_file(files).name
    shown = next(path for path in paths if path.name == name)
    plan, document = known[shown][0], documents[shown]
    about = format_of(plan.format).ABOUT
    chat = DEFAULT in choose(side_data(open_model(shown)), shown).named
    code = snippets(about, plan.engines, shown.name, chat=chat, repository=repository)
    content = files_part(files, context, code)
    place = folder / CARD
    if place.exists():
        text = _replaced(place, folder, content)
    else:
        named = base_model(base, document, source.config)
        stated = first(document).get("source", {}).get("model")
        merged = stated_adapters(document)
        words = [named.rpartition("/")[2] or cell(str(stated))]
        words += [f"with {cell(adapter_name(said))}" for said in merged]
        words += [f"with {with_experts(said)}" for said in stated_experts(document)]
        title = f"{' '.join(words)} ({plan.format})"
        carried = carried_fields(source.card)
        fields = front_matter(named, about.library, [plan.format], carried, tuned=bool(merged))
        text = new_card(fields, title, origin(document, named), content)
    data = text.encode("utf-8", "surrogateescape")
    if not place.is_file() or FILES.read(place, CARD_ROLE, folder) != data:
        save(place, data, overwrite=True)


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
