"""``reproduce``: make a result again from its manifest and compare every byte.

The manifest has the digests of the source files and the whole recipe. The same package versions on the same kind of
processor give the same bytes. If they differ, different versions are the likely cause and are reported.
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
from quantforge.files.hub import resolve_model
from quantforge.files.opener import read_object
from quantforge.files.output_names import MODELFILE_SUFFIX, present_names, projector_name, side_path
from quantforge.formats.open_model import open_model
from quantforge.planning.local_paths import check_adapter_given, check_calibration_given
from quantforge.progress import report_to
from quantforge.recipe import from_toml
from quantforge.settings import Settings
from quantforge_files.roles import MANIFEST

SCHEMA = "quantforge.reproduce/1"
NAMED_FILES = (BILL, STATEMENT, MODELFILE_SUFFIX)  # files that contain the name of the result


@dataclass(frozen=True, slots=True)
class Reproduced:
    """Comparison of a result with its reproduction.

    Attributes:
        path: the original result.
        files: number of compared files.
        differing: names of files that differ, are missing, or are new.
        edited: the differing files that no longer match the manifest: somebody has changed or removed them.
        left_out: names of files that were not compared, since they contain the name of the result.
        versions: packages whose version has changed, ``{name: [then, now]}``.
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
    """Run the recipe of a manifest again, and compare all files it lists except the card with the new ones.

    Args:
        path: a result with a manifest.
        source: the model that it was made from.
        settings: how to run.
        keep: path to keep the second result at; a temporary directory when left out. If its name differs from that
            of the original, `NAMED_FILES` are not compared.

    Raises:
        InputError: there is no manifest with a recipe, or a file that the recipe needs is not given.
        IntegrityError: ``source`` is not the model in the manifest.
        QuantForgeError: as `quantize`.
    """
    path, settings = Path(path), settings or Settings()
    document = manifest.read_with_recipe(
        path, "only results of `quantize` can be made again; verify others with --source"
    )
    recipe = from_toml(document["recipe"], str(path))
    check_calibration_given(recipe.calibration, settings)
    check_adapter_given(recipe.adapter, settings.adapter)
    original = resolve_model(str(source), settings.offline)
    check_same_source(document.get("source", {}).get("files", {}), open_model(original))
    outputs = tuple(document["outputs"])
    settings = replace(
        settings,
        provenance=any(name.endswith(STATEMENT) for name in outputs),
        modelfile=not path.is_dir() and any(name.endswith(MODELFILE_SUFFIX) for name in outputs),
        mmproj=not path.is_dir() and projector_name(path) in outputs,
    )
    requantized = "requantized" in document["event_counts"]
    with report_to(settings.progress):
        if keep is not None:
            quantize(source, recipe, keep, settings, requantize=requantized)
            return _compare_results(path, document, Path(keep))
        with TemporaryDirectory(prefix="quantforge-") as directory:
            out = Path(directory) / _original_name(path, document)
            quantize(source, recipe, out, settings, requantize=requantized)
            return _compare_results(path, document, out)


def _compare_results(path: Path, recorded: Mapping[str, Any], out: Path) -> Reproduced:
    rebuilt = manifest.read_manifest(out)
    assert rebuilt is not None
    ignored = () if side_path(out, "").name == _original_name(path, recorded) else NAMED_FILES
    root = path if path.is_dir() else path.parent
    outputs = {
        name: entry for name, entry in recorded["outputs"].items() if name not in manifest.MUTABLE
    }
    left_out = tuple(sorted(name for name in outputs if name.endswith(ignored))) if ignored else ()
    digests_by_name = {name: _digest(root / name, root) for name in outputs.keys() - {*left_out}}
    rebuilt_outputs = rebuilt["outputs"]
    rebuilt_outputs = (
        rebuilt_outputs
        if path.is_dir()
        else present_names(rebuilt_outputs, path, side_path(out, "").name)
    )
    rebuilt_digests = {
        name: entry["sha256"]
        for name, entry in rebuilt_outputs.items()
        if name not in manifest.MUTABLE and not (ignored and name.endswith(ignored))
    }
    names = sorted(digests_by_name.keys() | rebuilt_digests.keys())
    recorded_versions, current_versions = recorded.get("versions", {}), rebuilt["versions"]
    return Reproduced(
        path=path,
        files=len(names),
        differing=tuple(
            name for name in names if digests_by_name.get(name) != rebuilt_digests.get(name)
        ),
        edited=tuple(
            name
            for name in sorted(digests_by_name)
            if digests_by_name[name] != outputs[name]["sha256"]
        ),
        left_out=left_out,
        versions={
            key: [recorded_versions.get(key, ""), current_versions.get(key, "")]
            for key in sorted(recorded_versions.keys() | current_versions.keys())
            if recorded_versions.get(key) != current_versions.get(key)
        },
    )


def _original_name(path: Path, document: Mapping[str, Any]) -> str:
    """Return the name that a result had when it was made, as far as that is known."""
    current_name, bill_entry = side_path(path, "").name, document["outputs"].get(BILL)
    if bill_entry is None or _digest(path / BILL, path) != bill_entry["sha256"]:
        return str(document.get(manifest.RECORDED_NAME, current_name))
    name = bom_result_name(read_object(path / BILL, MANIFEST, path))
    return name if Path(name).name == name else current_name


def _digest(path: Path, root: Path) -> str:
    """Return the SHA-256 digest of a file; "" if it is missing or unreadable."""
    try:
        return manifest.sha256(path, root)
    except (InputError, OSError):
        return ""
