"""Evaluation text of the demo model: modules of Python's standard library that it was not trained on.

It is read from the running Python and not shipped with the package, since it belongs to the Python Software Foundation.
``scripts/demo_text.py`` reads the training and calibration text in the same way.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quantforge.files.opener import FILES
from quantforge_files.roles import TEXT

# Names of top-level modules or packages by topic. Names that this version of Python lacks are skipped.
EVALUATION: Mapping[str, str] = {
    "archives and compression": "tarfile zipfile gzip bz2 lzma _compression compression",
    "statistics and chance": "statistics random fractions numbers",
}
# Data tables and tests inside packages of which the rest is used.
SKIPPED_PARTS = frozenset({"test", "tests", "__pycache__"})
SKIPPED_FILES = frozenset({"html/entities.py"})


@dataclass(frozen=True, slots=True)
class Document:
    """One file or one page of documentation: its name and its text."""

    name: str
    text: str


def evaluation_text() -> str:
    """Return the evaluation text, which must never be used for training; empty if this Python has no source files."""
    return joined(documents(EVALUATION))


def documents(table: Mapping[str, str]) -> Iterator[Document]:
    """Yield the source files of the modules in a table: topics in the order of the table, files sorted."""
    library = Path(sysconfig.get_path("stdlib"))
    for names in table.values():
        for name in sorted(names.split()):
            for path in _module_files(library, name):
                data = FILES.read(path, TEXT, None)
                text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
                if text.strip():
                    yield Document(path.relative_to(library).as_posix(), text)


def _module_files(library: Path, name: str) -> list[Path]:
    """Return the source files of one top-level module or package, sorted."""
    candidates = [library / f"{name}.py", *(library / name).rglob("*.py")]
    relative = sorted(path.relative_to(library) for path in candidates if path.is_file())
    return [
        library / path
        for path in relative
        if SKIPPED_PARTS.isdisjoint(path.parts) and path.as_posix() not in SKIPPED_FILES
    ]


def joined(documents: Iterable[Document]) -> str:
    """Return the texts of all documents, joined by line breaks."""
    return "\n".join(document.text for document in documents)
