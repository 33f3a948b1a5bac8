"""The source that is named against the one that manifests record: by the digests of its files of weights.

A manifest knows files, not tensors. Where the same bytes of tensors are cut into files otherwise, digests say nothing:
that is a warning of its own, and what stands in the tensors is left to the checks that compare them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from quantforge.checkpoint.hub import source_name
from quantforge.checkpoint.reader import Checkpoint
from quantforge.execution.progress import tell
from quantforge.formats.opening import open_model
from quantforge.results import manifest
from quantforge.verification.artifact import COMPARED, Artifact
from quantforge.verification.findings import CHECKS, Report
from quantforge.verification.stated_changes import chain

_CHECK = "source"
_SHOWN = 12  # letters of a digest
_WEIGHTS = (".safetensors", ".gguf")  # endings of files of weights
_HEADERS = (
    4  # times those of the files that are there: what the headers of the same tensors take at most
)


class RecordedAs(Enum):
    """A source that is named, by what manifests record of it."""

    COMPARABLE = "the source, or nobody knows"
    OTHER = "another model"
    SWAPPED = "made from the artifact"


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Source as a manifest states it: its name, the size of each file by its digest, the sizes of its weights."""

    name: str
    files: Mapping[str, int]
    weights: tuple[int, ...]


def check_source(
    report: Report, artifact: Artifact, document: Mapping[str, Any] | None, source: Path
) -> RecordedAs:
    """Report a source that no manifest of the artifact's chain records.

    Names do not matter, nor do files beside the weights: a model may have been moved, its card rewritten.

    Args:
        report: of the artifact.
        artifact: as opened.
        document: its manifest, None without one.
        source: the source that is named.

    Returns:
        what it is; it is only compared with where it is `RecordedAs.COMPARABLE`.

    Raises:
        InputError: a file of the source cannot be read.
    """
    recorded = _recorded(document)
    given, name = open_model(source), source_name(source)[0]
    tell("the source's digests")
    if _made_of(artifact.checkpoint.opened, _recorded(manifest.read(source))):
        text = f"{name} was made from {report.path.name}: swapped?"
        report.add(_CHECK, report.path.name, f"{text} quantforge verify RESULT --source MODEL")
        done = {"manifest", "signature", _CHECK}
        report.skip("result and source are swapped", *(item for item in CHECKS if item not in done))
        return RecordedAs.SWAPPED
    if recorded and not _made_of(given, recorded):
        made = " or ".join(f"{one.name} ({_told(one.files)})" for one in recorded)
        text = f"by its manifest it was made from {made}; "
        if cut := next((one for one in recorded if _cut_otherwise(given, one)), None):
            text += (
                f"{name} holds as many bytes of tensors in other files ({len(given.shards)}, not {len(cut.weights)}):"
                " they may be the same tensors, which digests of files do not tell"
            )
            report.warn(_CHECK, report.path.name, text)
        elif [*chain(document)][-1] == {}:  # an export of a result without a manifest
            report.skip(f"{text[:-2]}, of which no manifest says what it was made from", _CHECK)
        else:
            text += f"the weights of {name} are others, and nothing else is compared with them"
            report.add(
                _CHECK, report.path.name, f"{text}: name what it was made from with --source"
            )
            report.skip("the source that is named is another model", *COMPARED[1:])
            return RecordedAs.OTHER
    if not recorded:
        report.skip("no manifest records the digests of a source", _CHECK)
    return RecordedAs.COMPARABLE


def _recorded(document: Mapping[str, Any] | None) -> list[_Recorded]:
    """Return what a manifest, and those that it passes on, state of sources, where they name files."""
    return [found for item in chain(document) if (found := _stated(item)).files]


def _stated(document: Mapping[str, Any]) -> _Recorded:
    source = document.get("source")
    stated = source if isinstance(source, Mapping) else {}
    found = list(_entries(stated.get("files")))
    return _Recorded(
        str(stated.get("model", "a source without a name")),
        {digest: size for _, digest, size in found},
        tuple(sorted(size for name, _, size in found if name.endswith(_WEIGHTS))),
    )


def _entries(files: Any) -> Iterator[tuple[str, str, int]]:
    """Yield name, digest and size of every file of a table that states them."""
    for name, entry in files.items() if isinstance(files, Mapping) else ():
        digest, size = (
            entry.get(key) if isinstance(entry, Mapping) else None for key in ("sha256", "bytes")
        )
        if isinstance(digest, str) and isinstance(size, int):
            yield str(name), digest, size


def _made_of(model: Checkpoint, recorded: list[_Recorded]) -> bool:
    """Return whether all files of weights of a model are among those of one record; each is digested once."""
    root = model.path.parent if model.path.is_file() else model.path

    @cache
    def digest(path: Path) -> str:
        return manifest.sha256(path, root)

    # A file of another size needs no digest.
    return any(
        all(path.stat().st_size in one.files.values() for path in model.shards)
        and all(digest(path) in one.files for path in model.shards)
        for one in recorded
    )


def _cut_otherwise(model: Checkpoint, recorded: _Recorded) -> bool:
    """Return whether a model may hold the tensors of a record in other files: as many bytes, but for the headers."""
    sizes = sorted(path.stat().st_size for path in model.shards)
    tensors = sum(tensor.nbytes for tensor in model.held())
    most = _HEADERS * (sum(sizes) - tensors)
    return sizes != [*recorded.weights] and 0 < sum(recorded.weights) - tensors <= most


def _told(files: Mapping[str, int]) -> str:
    digest = max(files, key=lambda one: (files[one], one))
    return f"SHA-256 {digest[:_SHOWN]}..."
