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

from quantforge.api.quantize import quantize
from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.artifacts import manifest
from quantforge.artifacts.manifest import check_same_source
from quantforge.artifacts.provenance import BILL, STATEMENT, bom_result_name
from quantforge.errors import InputError
from quantforge.execution.progress import report_to
from quantforge.files.hub import resolve
from quantforge.files.opener import read_object
from quantforge.files.output_names import MODELFILE, present_names, projector_name, side_of
from quantforge.formats.open_model import open_model
from quantforge.planning.local_paths import check_adapter_given, check_calibration_given
from quantforge.recipe import from_toml
from quantforge.settings import Settings
from quantforge_files.roles import MANIFEST

SCHEMA = "quantforge.reproduce/1"
NAMING = (BILL, STATEMENT, MODELFILE)  # files that say what the result is called


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A result that was made again.

    Attributes:
        path: the result.
        files: how many files were compared.
        differing: names of files that came out otherwise than they are now, are missing, or are new.
        edited: those of them that are not what the manifest states: somebody has changed or removed them since.
        left_out: names of files that were not compared, since they state the name of the result.
        versions: packages that are of another version now, ``{name: [then, now]}``.
    """

    path: Path
    files: int
    differing: tuple[str, ...]
    edited: tuple[str, ...]
    left_out: tuple[str, ...]
    versions: Mapping[str, list[str]]

    def document(self) -> dict[str, Any]:
        """Return the comparison as plain data (``quantforge.reproduce/1``)."""
        return {
            "schema": SCHEMA,
            "path": str(self.path),
            "files": self.files,
            "equal": not self.differing,
            "differing": list(self.differing),
            "edited": list(self.edited),
            "left_out": list(self.left_out),
            "versions": dict(self.versions),
        }


@check_arguments()
@torch_defaults()
def reproduce(
    path: str | Path,
    source: str | Path,
    settings: Settings | None = None,
    keep: str | Path | None = None,
) -> Reproduced:
    """Run the recipe of a manifest again and compare all files that it lists, but for the card, with what comes out.

    Args:
        path: a result with a manifest.
        source: the model that it was made from.
        settings: how to run.
        keep: where the second result stays; a temporary directory when left out. Under another name than that of
            the result, `NAMING` are not compared.

    Raises:
        InputError: no manifest that holds a recipe, or what it was made with is not given.
        IntegrityError: ``source`` is not the model that the manifest names.
        QuantForgeError: as `quantize`.
    """
    path, settings = Path(path), settings or Settings()
    document = manifest.read_with_recipe(
        path, "only results of `quantize` can be made again; verify others with --source"
    )
    recipe = from_toml(document["recipe"], str(path))
    check_calibration_given(recipe.calibration, settings)
    check_adapter_given(recipe.adapter, settings.adapter)
    original = resolve(str(source), settings.offline)
    check_same_source(document.get("source", {}).get("files", {}), open_model(original))
    stated = tuple(document["outputs"])
    settings = replace(
        settings,
        provenance=any(name.endswith(STATEMENT) for name in stated),
        modelfile=not path.is_dir() and any(name.endswith(MODELFILE) for name in stated),
        mmproj=not path.is_dir() and projector_name(path) in stated,
    )
    again = "requantized" in document["event_counts"]
    with report_to(settings.progress):
        if keep is not None:
            quantize(source, recipe, keep, settings, requantize=again)
            return _compared(path, document, Path(keep))
        with TemporaryDirectory(prefix="quantforge-") as directory:
            out = Path(directory) / _called(path, document)
            quantize(source, recipe, out, settings, requantize=again)
            return _compared(path, document, out)


def _compared(path: Path, then: Mapping[str, Any], out: Path) -> Reproduced:
    again = manifest.read_manifest(out)
    assert again is not None
    naming = () if side_of(out, "").name == _called(path, then) else NAMING
    root = path if path.is_dir() else path.parent
    outputs = {
        name: entry for name, entry in then["outputs"].items() if name not in manifest.MUTABLE
    }
    left_out = tuple(sorted(name for name in outputs if name.endswith(naming))) if naming else ()
    lying = {name: _digest(root / name, root) for name in outputs.keys() - {*left_out}}
    made = again["outputs"]
    made = made if path.is_dir() else present_names(made, path, side_of(out, "").name)
    found = {
        name: entry["sha256"]
        for name, entry in made.items()
        if name not in manifest.MUTABLE and not (naming and name.endswith(naming))
    }
    names = sorted(lying.keys() | found.keys())
    before, now = then.get("versions", {}), again["versions"]
    return Reproduced(
        path=path,
        files=len(names),
        differing=tuple(name for name in names if lying.get(name) != found.get(name)),
        edited=tuple(name for name in sorted(lying) if lying[name] != outputs[name]["sha256"]),
        left_out=left_out,
        versions={
            key: [before.get(key, ""), now.get(key, "")]
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        },
    )


def _called(path: Path, document: Mapping[str, Any]) -> str:
    """Return the name that a result had when it was made, as far as it is known: of the whole, not of a part."""
    present, bill = side_of(path, "").name, document["outputs"].get(BILL)
    if bill is None or _digest(path / BILL, path) != bill["sha256"]:
        return str(document.get(manifest.RECORDED_NAME, present))
    name = bom_result_name(read_object(path / BILL, MANIFEST, path))
    return name if Path(name).name == name else present


def _digest(path: Path, root: Path) -> str:
    """Return the digest of a file as it lies there, "" where it is missing or cannot be read."""
    try:
        return manifest.sha256(path, root)
    except (InputError, OSError):
        return ""
