"""Resume interrupted evaluations: finished rows are stored in the user's cache until the evaluation completes.

One file stores the rows of the models measured so far. Its name is a hash of everything that the results depend on:
options, text, versions, machine, threads, and sizes and times of all model files. If any of these change, so does the
name.
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
from quantforge.files.disk import save_file
from quantforge.files.opener import read_object
from quantforge.files.reader import CARD_FILE, Checkpoint
from quantforge_files.roles import MANIFEST
from quantforge_files.system import user_cache_directory
from quantforge_kernels.cpu import instruction_sets

if TYPE_CHECKING:
    from quantforge.evaluation.measurement_options import EvaluationOptions
    from quantforge.settings import Settings

SCHEMA = "quantforge.eval/2"  # of the document, whose rows are stored
MAX_AGE_SECONDS = 14 * 24 * 3600  # older files are deleted


class SavedRows:
    """Rows of the models measured so far, stored in a file; if ``path`` is None, nothing is stored."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows: list[Mapping[str, Any]] = []
        # A damaged file is ignored.
        with suppress(QuantForgeError, OSError, KeyError, TypeError):
            rows = read_object(path, MANIFEST, None)["rows"] if path else []
            self.rows = [*rows] if all(row and isinstance(row, dict) for row in rows) else []

    def add(self, row: Mapping[str, Any]) -> None:
        """Store the row of the next model; if the cache is not writable, stop storing rows."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"rows": [*self.rows, row]})
            save_file(self.path, text.encode(), overwrite=True)
            self.rows.append(row)
        except (QuantForgeError, OSError):
            self.path = None


@contextmanager
def resume_rows(
    models: Sequence[Checkpoint], options: EvaluationOptions, settings: Settings
) -> Iterator[SavedRows]:
    """Context manager that stores rows while an evaluation runs, and deletes them when it completes.

    Nothing is stored if the results depend on more than the key covers: tasks, another engine, or an adapter.

    Args:
        models: the reference and the other models.
        options: options of the evaluation.
        settings: settings of the run.
    """
    saved = SavedRows()
    if not (options.tasks or options.engine or options.correction or settings.adapter):
        saved = SavedRows(
            user_cache_directory() / "evaluations" / f"{_cache_key(models, options, settings)}.json"
        )
    if count := len(saved.rows):
        settings.note(f"{count} of {len(models)} models were measured before the interruption")
    try:
        yield saved
    except BaseException as error:
        if count := len(saved.rows):
            continuation = (
                "measures the others" if count < len(models) else "writes what is missing"
            )
            error.add_note(
                f"{count} of {len(models)} models are kept: the same command {continuation}"
            )
        raise
    if saved.path is not None:
        with suppress(OSError):
            saved.path.unlink(missing_ok=True)
            for old_file in saved.path.parent.iterdir():
                if time.time() - old_file.stat().st_mtime > MAX_AGE_SECONDS:
                    old_file.unlink()


def _cache_key(models: Sequence[Checkpoint], options: EvaluationOptions, settings: Settings) -> str:
    """Return a hash of everything that the results depend on."""
    files: list[Path] = []
    for path, shards in ((model.path, model.original.shards) for model in models):
        model_files = [*shards, manifest.manifest_path(path)] if path.is_file() else []
        files += [path.absolute(), *(model_files or sorted(path.rglob("*")))]
    file_states = [[str(file), *_file_state(file)] for file in files]
    machine = [
        platform.node(),
        instruction_sets.best_instruction_set(),
        instruction_sets.programs_enabled(),
        instruction_sets.allowed_instruction_set(),
    ]
    chosen_options = [repr(options), options.text, settings.device, settings.input_bits]
    environment = [SCHEMA, *chosen_options, manifest.versions(), machine, torch.get_num_threads()]
    return hashlib.sha256(
        json.dumps([environment, file_states], sort_keys=True).encode()
    ).hexdigest()


def _file_state(file: Path) -> list[int]:
    """Return size and times of a file; [] for a directory, or for a model card, which evaluations modify."""
    if not file.is_file() or file.name == CARD_FILE:
        return []
    state = file.stat()
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
