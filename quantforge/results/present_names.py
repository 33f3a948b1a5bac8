"""Names that the files of a result have now, where somebody has renamed the file with its manifest.

A manifest beside ``X.gguf`` speaks of ``X.gguf``, whatever it calls it: under the recorded name may lie another file,
which is a neighbour and is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quantforge.checkpoint.publish_file import MODELFILE, placed, projector_name, side_of


def recorded_name(outputs: Iterable[str], result: Path) -> str:
    """Return what a manifest calls a result that is one file, or numbered ones: the name of the whole.

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
    """Return the outputs of a manifest under the names that follow from that of the file which it lies beside."""
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
