"""Model card of a folder with several single-file results (GGUF).

The card lists the files, recommends one for each memory size, and shows code that loads one. It is made from the
manifests and headers of the files and from measured figures. It has two delimited parts, one about the files and one
for figures; nothing else is ever replaced, so that a person may edit the rest.
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
    hub_library,
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
from quantforge.files.disk import save_file
from quantforge.files.opener import FILES
from quantforge.files.reader import Checkpoint
from quantforge.formats import FORMATS, load_format
from quantforge.formats.open_model import open_model, tokenizer_side_files
from quantforge.planning.capacity import Load
from quantforge_calibration.chat_templates import DEFAULT, choose_templates
from quantforge_files.roles import CARD as CARD_ROLE

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import Evaluation

MAX_CONTEXT = 8192  # tokens for which memory is stated, or fewer if the model has fewer positions
FILES_PART = MutablePart("<!-- quantforge files: begin -->", "<!-- quantforge files: end -->")
GB = 1e9
MEMORY_SIZES = (
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
    80,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
)
TYPICAL_BITS = 5.0  # the examples load the file whose bits per weight are nearest to this
_MISSING_CELL = "-"


def check_evaluation_card(folder: Path, models: Sequence[Path]) -> None:
    """Check, before anything is measured, that figures can be written into the card of a folder.

    Raises:
        UsageError, InputError: as `check_card`; for files: an existing card lacks a part, or a file has no manifest or
            cannot be opened.
    """
    folder_files = _filter_folder_files(folder, models)
    if not folder_files:
        check_card(folder, models)
        return
    for model in folder_files:
        if manifest.read_manifest(model) is None:
            raise InputError(
                f"{model}: no manifest beside it",
                "only results of ours have cards",
                file=str(model),
            )
    _list_results(folder)  # all are opened for the card
    check_folder_card(folder)


def check_folder_card(folder: Path) -> None:
    """Check that a folder's card, if it exists, has all its parts; errors as `check_evaluation_card`."""
    if (folder / CARD).exists():
        read_card(folder)
        _replace_files_part(folder / CARD, folder, "")


def write_evaluation_card(
    folder: Path, evaluation: Evaluation, source: Checkpoint, base: str
) -> None:
    """Write measured figures into the card of a folder; a folder of files gets its card made or renewed first."""
    from quantforge.evaluation.card_section import measured_section, model_index

    rows = {Path(row["path"]): row for row in evaluation.rows[1:]}
    if folder_files := _filter_folder_files(folder, rows):
        divergence = {
            _numbered_files(file_path)[0].name: rows[file_path]["kl_mean"]
            for file_path in folder_files
        }
        write_folder_card(folder, divergence, source, base)
    write_figures(folder, measured_section(evaluation, folder), model_index(evaluation, folder))


@dataclass(frozen=True, slots=True)
class FolderFile:
    """One result of a folder, for its card.

    Attributes:
        name: name of the file, or of the first of numbered files.
        method: method that it was quantized with.
        bits: bits per weight; 0 if unknown.
        nbytes: size of the file, or of all numbered files.
        memory_bytes: memory that is needed to run it.
        divergence: KL divergence from the source in nats per token; None if not measured.
    """

    name: str
    method: str
    bits: float
    nbytes: int
    memory_bytes: float
    divergence: float | None


def write_folder_card(
    folder: Path,
    divergence: Mapping[str, float],
    source: Checkpoint,
    base: str = "",
    only: Iterable[Path] = (),
    repository: str = "",
) -> None:
    """Write the card of a folder, or renew its part about the files; the rest of the card stays.

    Args:
        folder: directory with single-file results.
        divergence: nats per token by file name (of numbered files, the first), for those that were measured.
        source: the model that the files were made from.
        base: name of the original model on the hub, if the user states it.
        only: the files to describe; all results in the folder when empty.
        repository: hub repository that the folder is uploaded to; "" if unknown.

    Raises:
        InputError: an existing card has no part for files.
        ResourceError: the card cannot be written.
    """
    paths = list(only) or _list_results(folder)
    documents = {path: manifest.read_manifest(path) or {} for path in paths}
    plans = {path: capacity(path, Load(context=1)) for path in paths}
    context = min(MAX_CONTEXT, *(file_capacity.positions for _, file_capacity in plans.values()))
    files = [
        FolderFile(
            name=path.name,
            method=str(documents[path].get("method") or "as it was"),
            bits=_bits(documents[path]),
            nbytes=sum(file.stat().st_size for file in _numbered_files(path)),
            memory_bytes=file_capacity.needed_bytes(context=context),
            divergence=divergence.get(path.name),
        )
        for path, (_, file_capacity) in plans.items()
    ]
    name = choose_example_file(files).name
    example_path = next(path for path in paths if path.name == name)
    plan, document = plans[example_path][0], documents[example_path]
    info = load_format(plan.format).INFO
    has_template = (
        DEFAULT
        in choose_templates(tokenizer_side_files(open_model(example_path)), example_path).templates
    )
    code = snippets(info, plan.engines, example_path.name, chat=has_template, repository=repository)
    files_text = render_files_part(files, context, code)
    card_path = folder / CARD
    if card_path.exists():
        text = _replace_files_part(card_path, folder, files_text)
    else:
        base_name = base_model(base, document, source.config)
        fields = front_matter(
            base_name,
            hub_library(plan),
            [plan.format],
            source_card_fields(source.card),
            tuned=bool(recorded_adapters(document)),
        )
        title = f"{_title(base_name, document)} ({plan.format})"
        text = _new_card(fields, title, origin(document, base_name), files_text)
    data = text.encode("utf-8", "surrogateescape")
    if not card_path.is_file() or FILES.read(card_path, CARD_ROLE, folder) != data:
        save_file(card_path, data, overwrite=True)


def _title(base: str, document: Mapping[str, Any]) -> str:
    """Return the title of a card: the original model, with merged adapters and kept experts."""
    model = first(document).get("source", {}).get("model")
    phrases = [base.rpartition("/")[2] or cell(str(model))]
    phrases += [f"with {cell(adapter_name(entry))}" for entry in recorded_adapters(document)]
    phrases += [f"with {kept_experts_text(entry)}" for entry in recorded_kept_experts(document)]
    return " ".join(phrases)


def _new_card(fields: str, title: str, origin_text: str, files_text: str) -> str:
    """Return the text of a new card from its front matter (``fields``) and its part about the files."""
    lines = ["---", fields, EMPTY_INDEX, "---", "", f"# {title}", ""]
    lines += [f"Results made of {origin_text} by QuantForge.", ""]
    lines += [FILES_PART.empty, "", EMPTY_FIGURES, ""]
    return FILES_PART.replaced("\n".join(lines), files_text)


def _list_results(folder: Path) -> list[Path]:
    """Return the result files in a folder that have a manifest, sorted by name.

    Of numbered files only the first is returned, with which all are opened.
    """
    suffixes = {load_format(key).INFO.file_suffix for key in FORMATS} - {""}
    paths = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in suffixes and path.is_file() and manifest.read_manifest(path) is not None
    ]
    return [path for path in paths if _numbered_files(path)[0].name == path.name]


def _filter_folder_files(folder: Path, models: Iterable[Path]) -> list[Path]:
    """Return the models that are files inside of a folder."""
    return [model for model in models if model.is_file() and is_in_folder(model, folder)]


def _numbered_files(path: Path) -> tuple[Path, ...]:
    """Return all numbered files of a result, given one of them; errors as `open_model`."""
    return open_model(path).shards


def _bits(document: Mapping[str, Any]) -> float:
    """Return the bits per quantized weight of a manifest; 0 if it states no valid number."""
    bits: Any = document.get("bits_per_weight")
    return float(bits) if type(bits) in {int, float} and 0 < bits < math.inf else 0.0


def _replace_files_part(card_path: Path, folder: Path, files_text: str) -> str:
    text = FILES.read(card_path, CARD_ROLE, folder).decode("utf-8", "surrogateescape")
    try:
        return FILES_PART.replaced(text, files_text)
    except ValueError as error:
        raise InputError(
            f"{card_path}: the part about the files is not between one line '{FILES_PART.begin}' and one line"
            f" '{FILES_PART.end}'",
            "put these two lines where it should stand, or move the card away",
            file=str(card_path),
        ) from error


def render_files_part(
    files: Sequence[FolderFile], context: int, snippets: Sequence[Snippet]
) -> str:
    """Return the part of the card about the files, as Markdown.

    Args:
        files: the results of the folder.
        context: sequence length for which memory is stated.
        snippets: code that loads one of them.
    """
    files = sorted(files, key=lambda file: (file.nbytes, file.name))
    lines = [
        "## Files",
        "",
        "| name | method | bits of quantized weights | file | KL, nats per token |",
        "|---|---|---:|---:|---:|",
        *(_table_row(file) for file in files),
        "",
        *_choice_lines(files, context),
    ]
    lines += ["## Loading", ""]
    for item in snippets:
        lines += [f"### {item.engine}", "", f"```{item.language}", item.code, "```", ""]
    lines += [
        "Beside each file lies its manifest, with recipe, events and checksums:"
        " `quantforge verify FILE` checks it, `quantforge reproduce FILE --source MODEL` makes it again."
    ]
    return "\n".join(lines)


def _table_row(file: FolderFile) -> str:
    divergence = _MISSING_CELL if file.divergence is None else significant(file.divergence)
    bits = significant(file.bits) if file.bits else _MISSING_CELL
    cells = (code(file.name), cell(file.method), bits, size(file.nbytes), divergence)
    return f"| {' | '.join(cells)} |"


def _choice_lines(files: Sequence[FolderFile], context: int) -> Iterator[str]:
    """Yield the lines of the section that recommends a file for each memory size."""
    all_measured = _all_measured(files)
    yield from ("## Which one", "")
    yield from ("| memory | file | needs |", "|---:|---|---:|")
    for memory, best in _recommended_files(files):
        yield f"| {memory} GB | {code(best.name)} | {size(best.memory_bytes)} |"
    yield ""
    yield f"Needs: weights, cache and activations of one sequence of {context} tokens; system and engine take more."
    yield f"The file is the one with the {'least divergence' if all_measured else 'most bits per weight'}."
    dominated = {file.name: better for file in files if (better := _better_file_name(file, files))}
    if all_measured and dominated:
        pairs = "; ".join(
            f"{code(name)} ({code(better_name)})" for name, better_name in dominated.items()
        )
        yield ""
        yield f"Another is no larger and closer to the source: {pairs}."
    yield ""


def choose_example_file(files: Sequence[FolderFile]) -> FolderFile:
    """Return the file that the examples load: a recommended one, and a measured one if possible."""
    recommended = [best for _, best in _recommended_files(files)] or [
        _best_file(files, measured=_all_measured(files))
    ]
    measured_files = [file for file in files if file.divergence is not None]
    candidates = [file for file in recommended if file in measured_files]
    return min(
        candidates or measured_files or recommended, key=lambda file: abs(file.bits - TYPICAL_BITS)
    )


def _recommended_files(files: Sequence[FolderFile]) -> list[tuple[int, FolderFile]]:
    """Return pairs of memory in GB and the file to use from that size on; empty if no file fits the largest."""
    recommended: list[tuple[int, FolderFile]] = []
    for memory in MEMORY_SIZES:
        files_that_fit = [file for file in files if file.memory_bytes <= memory * GB]
        best = _best_file(files_that_fit, measured=_all_measured(files)) if files_that_fit else None
        if best is not None and (not recommended or best is not recommended[-1][1]):
            recommended.append((memory, best))
    return recommended


def _all_measured(files: Sequence[FolderFile]) -> bool:
    return all(file.divergence is not None for file in files)


def _best_file(files: Sequence[FolderFile], *, measured: bool) -> FolderFile:
    return min(files, key=lambda file: _sort_key(file, measured=measured))


def _sort_key(file: FolderFile, *, measured: bool) -> tuple[float, int]:
    return (file.divergence or 0.0) if measured else -file.bits, file.nbytes


def _better_file_name(file: FolderFile, files: Sequence[FolderFile]) -> str | None:
    """Return the name of another file that is not larger and diverges less, or None."""
    for other in files:
        if other.divergence is None or file.divergence is None:
            continue
        if other.nbytes <= file.nbytes and other.divergence < file.divergence:
            return other.name
    return None
