"""Rows of an interrupted evaluation, kept in the user's cache until the same evaluation completes.

One file holds the rows of the first models. Its name is a digest of everything that figures depend on: options, text,
versions, machine, threads, and every file of every model by size and times. If any of it differs, the name does.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantforge.artifacts import manifest
from quantforge.errors import QuantForgeError
from quantforge.files.disk import save
from quantforge.files.opener import read_object
from quantforge.files.reader import CARD, Checkpoint
from quantforge_files.roles import MANIFEST
from quantforge_files.system import user_cache
from quantforge_kernels.cpu import instruction_sets

if TYPE_CHECKING:
    from quantforge.evaluation.compare_models import EvaluationOptions
    from quantforge.settings import Settings

SECONDS = 14 * 24 * 3600  # after which rows are deleted


class KeptRows:
    """Rows of the first models of an evaluation, in a file; without a place nothing is kept."""

    def __init__(self, place: Path | None = None) -> None:
        self.place = place
        self.rows: list[Mapping[str, Any]] = []
        # A damaged file counts as none.
        with suppress(QuantForgeError, OSError, KeyError, TypeError):
            rows = read_object(place, MANIFEST, None)["rows"] if place else []
            self.rows = [*rows] if all(row and isinstance(row, dict) for row in rows) else []

    def keep(self, row: Mapping[str, Any]) -> None:
        """Keep the row of the next model; a cache that cannot be written keeps none."""
        if self.place is None:
            return
        try:
            self.place.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"rows": [*self.rows, row]})
            save(self.place, text.encode(), overwrite=True)
            self.rows.append(row)
        except (QuantForgeError, OSError):
            self.place = None


@contextmanager
def keeping(
    models: Sequence[Checkpoint], options: EvaluationOptions, settings: Settings
) -> Iterator[KeptRows]:
    """Keep rows while the body measures and writes; delete them if it completes.

    Nothing is kept if figures depend on more than the key covers: code and data of tasks, an engine, an adapter.

    Args:
        models: the reference and the others.
        options: of the evaluation.
        settings: likewise.
    """
    kept = KeptRows()
    if not (options.tasks or options.engine or options.correction or settings.adapter):
        kept = KeptRows(user_cache() / "evaluations" / f"{_key(models, options, settings)}.json")
    if count := len(kept.rows):
        settings.note(f"{count} of {len(models)} models were measured before the interruption")
    try:
        yield kept
    except BaseException as error:
        if count := len(kept.rows):
            what = "measures the others" if count < len(models) else "writes what is missing"
            error.add_note(f"{count} of {len(models)} models are kept: the same command {what}")
        raise
    if kept.place is not None:
        with suppress(OSError):
            kept.place.unlink(missing_ok=True)
            for other in kept.place.parent.iterdir():
                if time.time() - other.stat().st_mtime > SECONDS:
                    other.unlink()


def _key(models: Sequence[Checkpoint], options: EvaluationOptions, settings: Settings) -> str:
    files: list[Path] = []
    for path, shards in ((model.path, model.opened.shards) for model in models):
        parts = [*shards, manifest.place_of(path)] if path.is_file() else []
        files += [path.absolute(), *(parts or sorted(path.rglob("*")))]
    seen = [[str(file), *_state(file)] for file in files]
    machine = [
        platform.node(),
        instruction_sets.best_instruction_set(),
        instruction_sets.programs_enabled(),
        instruction_sets.allowed_instruction_set(),
    ]
    chosen = [repr(options), options.text, settings.device, settings.input_bits]
    used = [*chosen, manifest.versions(), machine, torch.get_num_threads()]
    return hashlib.sha256(json.dumps([used, seen], sort_keys=True).encode()).hexdigest()


def _state(file: Path) -> list[int]:
    """Return size and times of a file; nothing for a directory or a card, into which figures are written."""
    if not file.is_file() or file.name == CARD:
        return []
    state = file.stat()
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
