"""Names of the files of a result that is a file, or numbered files: of the parts, and of what lies beside them.

A manifest beside ``X.gguf`` speaks of ``X.gguf``, whatever it calls it, for somebody may have renamed the file with its
manifest: under the recorded name may lie another file, which is a neighbour and is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SIDE = ".quantforge.json"
MODELFILE = ".Modelfile"
NUMBERED = re.compile(r"-(\d{5})-of-(\d{5})(\.[^.]*)?\Z")


def placed(out: Path, name: str) -> str:
    """Return the final name of a planned weight file: the output's name, with the number of the part."""
    part = NUMBERED.search(name)
    return out.name if part is None else f"{out.stem}-{part[1]}-of-{part[2]}{out.suffix}"


def projector_name(out: Path) -> str:
    """Return the name of the file of a GGUF result's vision tower, which programs know by its first word."""
    return f"mmproj-{side_of(out, '').stem}-F16.gguf"


def set_of(file: Path) -> list[Path]:
    """Return the paths of all parts of the set of numbered files that one belongs to; of another file, itself."""
    part = NUMBERED.search(file.name)
    if part is None:
        return [file]
    head, count, end = file.name[: part.start()], part[2], part[3] or ""
    return [file.with_name(f"{head}-{n:05}-of-{count}{end}") for n in range(1, int(count) + 1)]


def side_of(file: Path, suffix: str = SIDE) -> Path:
    """Return the path of a file's manifest, or other ``suffix``; for numbered files, as if they were one file."""
    part = NUMBERED.search(file.name)
    name = file.name if part is None else file.name[: part.start()] + (part[3] or "")
    return file.with_name(name + suffix)


def recorded_name(outputs: Iterable[str], result: Path) -> str:
    """Return the name under which a manifest lists a result of one file, or of numbered files.

    Args:
        outputs: names that the manifest lists.
        result: the file, or one of its parts.

    Returns:
        The present name too where the manifest lists no such file, or several.
    """
    own = side_of(result, "").name
    wholes = {_whole(name) for name in outputs if not name.endswith(MODELFILE)}
    # What lies beside the file of a result has its name in its own.
    wholes = {one for one in wholes if not any(_beside(one, other) for other in wholes)}
    return wholes.pop() if len(wholes) == 1 and own not in wholes else own


def present_names(outputs: Mapping[str, Any], result: Path, recorded: str) -> dict[str, Any]:
    """Rename the outputs of a manifest to match the present name of the file beside it."""
    own, stem = side_of(result, ""), Path(recorded).stem
    tower = projector_name(Path(recorded))

    def present(name: str) -> str:
        if _whole(name) == recorded:
            return placed(own, name)
        if name.startswith(f"{recorded}."):
            return own.name + name.removeprefix(recorded)
        if name == tower:
            return projector_name(own)
        return own.stem + MODELFILE if name == stem + MODELFILE else name

    return {present(name): entry for name, entry in outputs.items()}


def _beside(name: str, whole: str) -> bool:
    return name.startswith(f"{whole}.") or name == projector_name(Path(whole))


def _whole(name: str) -> str:
    """Return the name of a whole file of which ``name`` may be a part; as it is if it leads elsewhere."""
    return side_of(Path(name), "").name if Path(name).name == name else name
