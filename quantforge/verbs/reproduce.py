"""Making a result again from its manifest, and comparing every byte.

The manifest names the source by the digests of its files and holds the whole recipe. With the same versions of the
packages named in it, on the same kind of processor, the same bytes come out; where they do not, the versions that
differ are the first suspects and are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quantforge.checkpoint.hub import resolve
from quantforge.checkpoint.publish_file import side_of
from quantforge.errors import InputError
from quantforge.execution.progress import followed
from quantforge.formats.opening import open_model
from quantforge.planning.cited_files import check_given
from quantforge.recipe import from_toml
from quantforge.results import manifest
from quantforge.results.provenance import BILL, STATEMENT
from quantforge.settings import Settings
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.quantize import quantize
from quantforge.verbs.requantize import check_same

SCHEMA = "quantforge.reproduce/1"
NAMING = (BILL, STATEMENT, ".Modelfile")  # files that say what the result is called


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A result that was made again.

    Attributes:
        path: the result.
        files: how many files were compared.
        differing: names of files that came out otherwise, are missing, or are new.
        versions: packages that are of another version now, ``{name: [then, now]}``.
    """

    path: Path
    files: int
    differing: tuple[str, ...]
    versions: Mapping[str, list[str]]

    def document(self) -> dict[str, Any]:
        """Return the comparison as plain data (``quantforge.reproduce/1``)."""
        return {
            "schema": SCHEMA,
            "path": str(self.path),
            "files": self.files,
            "equal": not self.differing,
            "differing": list(self.differing),
            "versions": dict(self.versions),
        }


@torch_defaults()
def reproduce(
    path: str | Path,
    source: str | Path,
    settings: Settings | None = None,
    keep: str | Path | None = None,
) -> Reproduced:
    """Run the recipe of a manifest again and compare the digests of all files.

    Args:
        path: a result with a manifest.
        source: the model that it was made from.
        settings: how to run.
        keep: where the second result stays; a temporary directory when left out. Under another name than that of
            the result, `NAMING` are not compared.

    Raises:
        InputError: no manifest that holds a recipe.
        IntegrityError: ``source`` is not the model that the manifest names.
        QuantForgeError: as `quantize`.
    """
    path, settings = Path(path), settings or Settings()
    document = manifest.read(path)
    if document is None or not document.get("recipe"):
        raise InputError(
            f"{path}: no {manifest.NAME} that holds a recipe",
            "only results of `quantize` can be made again; verify others with --source",
        )
    recipe = from_toml(document["recipe"], str(path))
    check_given(recipe.calibration, settings)
    original = resolve(str(source), settings.offline)
    check_same(document.get("source", {}).get("files", {}), open_model(original))
    stated = tuple(document["outputs"])
    settings = replace(
        settings,
        provenance=any(name.endswith(STATEMENT) for name in stated),
        modelfile=not path.is_dir() and any(name.endswith(".Modelfile") for name in stated),
    )
    with followed(settings.progress):
        if keep is not None:
            quantize(source, recipe, keep, settings)
            return _compared(path, document, Path(keep))
        with TemporaryDirectory(prefix="quantforge-") as directory:
            out = Path(directory) / side_of(path, "").name  # of the whole, not of a part
            quantize(source, recipe, out, settings)
            return _compared(path, document, out)


def _compared(path: Path, then: Mapping[str, Any], out: Path) -> Reproduced:
    again = manifest.read(out)
    assert again is not None
    own = [side_of(place, "") for place in (path, out)]
    left_out = () if own[0].name == own[1].name else NAMING
    stems = ["" if place.is_dir() else place.stem for place in own]
    stated, found = (
        {
            stems[0] + name.removeprefix(stem): entry["sha256"]
            for name, entry in one["outputs"].items()
            if name not in manifest.MUTABLE and not name.endswith(left_out)
        }
        for one, stem in zip((then, again), stems, strict=True)
    )
    names = sorted(stated.keys() | found.keys())
    before, now = then.get("versions", {}), again["versions"]
    return Reproduced(
        path=path,
        files=len(names),
        differing=tuple(name for name in names if stated.get(name) != found.get(name)),
        versions={
            key: [before.get(key, ""), now.get(key, "")]
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        },
    )
