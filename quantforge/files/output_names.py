"""File names of a result that is a single file or numbered files, and of its side files.

The manifest of ``X.gguf`` describes the present ``X.gguf``, whatever name it records, since somebody may have renamed
the file together with its manifest. A file that has the recorded name may be another result, and is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MANIFEST_SUFFIX = ".quantforge.json"
MODELFILE_SUFFIX = ".Modelfile"
PART_NUMBER = re.compile(r"-(\d{5})-of-(\d{5})(\.[^.]*)?\Z")


def final_name(out: Path, name: str) -> str:
    """Return the final name of a planned weight file: the output's name, with the number of the part."""
    match = PART_NUMBER.search(name)
    return out.name if match is None else f"{out.stem}-{match[1]}-of-{match[2]}{out.suffix}"


def projector_name(out: Path) -> str:
    """Return the file name for the vision tower of a GGUF result; programs recognize it by the prefix ``mmproj``."""
    return f"mmproj-{side_path(out, '').stem}-F16.gguf"


def part_paths(file: Path) -> list[Path]:
    """Return the paths of all parts of a set of numbered files; for any other file, its own path."""
    match = PART_NUMBER.search(file.name)
    if match is None:
        return [file]
    prefix, count, suffix = file.name[: match.start()], match[2], match[3] or ""
    return [file.with_name(f"{prefix}-{n:05}-of-{count}{suffix}") for n in range(1, int(count) + 1)]


def side_path(file: Path, suffix: str = MANIFEST_SUFFIX) -> Path:
    """Return the path of a file's manifest, or of the side file with ``suffix``; numbered files share one."""
    match = PART_NUMBER.search(file.name)
    name = file.name if match is None else file.name[: match.start()] + (match[3] or "")
    return file.with_name(name + suffix)


def recorded_name(outputs: Iterable[str], result: Path) -> str:
    """Return the name that a manifest records for a result of one file, or of numbered files.

    Args:
        outputs: names that the manifest lists.
        result: the file, or one of its parts.

    Returns:
        The recorded name, or the present one if the manifest lists no such file, or several.
    """
    present_name = side_path(result, "").name
    names = {_without_number(name) for name in outputs if not name.endswith(MODELFILE_SUFFIX)}
    # What lies beside the file of a result has its name in its own.
    names = {name for name in names if not any(_is_side_file(name, other) for other in names)}
    return names.pop() if len(names) == 1 and present_name not in names else present_name


def present_names(outputs: Mapping[str, Any], result: Path, recorded: str) -> dict[str, Any]:
    """Rename the outputs of a manifest to the present name of the result."""
    present_path, stem = side_path(result, ""), Path(recorded).stem
    projector = projector_name(Path(recorded))

    def rename(name: str) -> str:
        if _without_number(name) == recorded:
            return final_name(present_path, name)
        if name.startswith(f"{recorded}."):
            return present_path.name + name.removeprefix(recorded)
        if name == projector:
            return projector_name(present_path)
        return present_path.stem + MODELFILE_SUFFIX if name == stem + MODELFILE_SUFFIX else name

    return {rename(name): entry for name, entry in outputs.items()}


def _is_side_file(name: str, main_name: str) -> bool:
    return name.startswith(f"{main_name}.") or name == projector_name(Path(main_name))


def _without_number(name: str) -> str:
    """Return the name of a numbered file without its number; a path is returned as it is."""
    return side_path(Path(name), "").name if Path(name).name == name else name
