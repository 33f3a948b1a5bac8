"""Rows of models that an interrupted evaluation had finished: kept in the user's cache for the same evaluation.

The same is: protocol, options, versions, machine, reference, and for each row every file of its model (all parts of a
numbered one, and its manifest) by size and times of the file system. Anything else is measured again. Once an
evaluation ends well, and what is written of it is written, the rows of its models are removed, and those that nobody
came back for after `DAYS`.

Each run writes a file of its own, so that two of one evaluation at a time lose nothing to each other. It begins with
the rows of all files of the evaluation, and then removes those files that nobody has written to since.
"""

from __future__ import annotations

import hashlib
import json
import platform
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.checkpoint.disk import save
from quantforge.checkpoint.foreign_json import read_object
from quantforge.checkpoint.reader import CARD
from quantforge.errors import QuantForgeError
from quantforge.evaluation.delivery import hand_over
from quantforge.evaluation.figures import KEYS
from quantforge.formats.opening import open_model
from quantforge.results import manifest
from quantforge_files.roles import MANIFEST
from quantforge_files.system import user_cache
from quantforge_kernels.cpu import features

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import EvaluationOptions
    from quantforge.evaluation.windows import Protocol

DAYS = 14
SHAPELESS = (KeyError, TypeError, ValueError, AttributeError)
_DAY = 86400


class KeptRows:
    """Rows of one evaluation.

    Args:
        place: of their files, which are called so and something more; None keeps nothing.
        paths: the reference and the models, whose rows are asked for by their places in this list.
    """

    def __init__(self, place: Path | None, paths: Sequence[Path]) -> None:
        self._place = place and place.with_name(f"{place.name}.{secrets.token_hex(8)}.json")
        # The row of the reference is another than that of the same model among the others.
        self._names = [
            f"{_fingerprint(path)} {'model' if n else 'reference'}" for n, path in enumerate(paths)
        ]
        self._rows: dict[str, dict[str, Any]] = {}
        self._before: Mapping[str, dict[str, Any]] = {}
        self._taken: dict[Path, int] = {}  # files whose rows are among these, as of a time
        if place is None:
            return
        _forget_old(place.parent)
        for file in sorted(place.parent.glob(f"{place.name}.*.json")):
            with suppress(QuantForgeError, OSError, *SHAPELESS):  # damaged: measured again
                self._taken[file] = file.stat().st_mtime_ns
                self._rows |= _rows_of(file)
        self._before = {**self._rows}

    def of(self, number: int) -> dict[str, Any] | None:
        """Return a row of an earlier run, None if none is kept."""
        return self._before.get(self._names[number])

    def count(self) -> int:
        """Return how many rows are kept."""
        return sum(name in self._rows for name in self._names)

    def keep(self, number: int, row: Mapping[str, Any]) -> None:
        """Keep the row of a model; a cache that cannot be written keeps none."""
        if self._place is None:
            return
        self._rows[self._names[number]] = dict(row)
        try:
            self._write(self._place)
        except (QuantForgeError, OSError):
            self._rows.clear()

    def remove(self) -> None:
        """Remove the rows of these models: the evaluation has ended well.

        Those of others, and then the reference's, are kept for the evaluation that was interrupted.
        """
        if self._place is None:
            return
        reference, *models = self._names
        for name in models:
            self._rows.pop(name, None)
        with suppress(QuantForgeError, OSError):
            if self._rows.keys() - {reference}:
                self._write(self._place)
                return
            self._drop_taken()
            self._place.unlink(missing_ok=True)
            self._place.parent.rmdir()  # if it was the last

    def _write(self, place: Path) -> None:
        text = json.dumps({"digest": _digest(self._rows), "rows": self._rows})
        place.parent.mkdir(parents=True, exist_ok=True)
        save(place, text.encode(), overwrite=True)
        self._drop_taken()

    def _drop_taken(self) -> None:
        """Remove the files that the rows were taken from, but for those that another run has written to since."""
        for file, seen in self._taken.items():
            with suppress(FileNotFoundError):
                if file.stat().st_mtime_ns == seen:
                    file.unlink()
        self._taken.clear()


def _rows_of(file: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a file that are whole; none where it is damaged."""
    known = read_object(file, MANIFEST, None)
    rows = {str(name): {**row} for name, row in known["rows"].items()}
    if known["digest"] != _digest(rows):
        return {}
    return {name: row for name, row in rows.items() if row.keys() == KEYS}


@contextmanager
def keeping(
    paths: Sequence[Path], protocol: Protocol, options: EvaluationOptions
) -> Iterator[KeptRows]:
    """Keep the rows of an evaluation while the body measures, and tell what is kept when that fails.

    Where it ends well they go to the `quantforge.evaluation.delivery` of the figures.

    Nothing is kept where figures depend on more than can be compared: code and data of tasks, an engine, an adapter.

    Args:
        paths: the reference and the models.
        protocol: of the evaluation.
        options: of the evaluation.
    """
    place = None
    adapters = (options.adapter, options.correction)
    if options.tasks is None and not options.engine and adapters == (None, None):
        prompts = None if options.prompts is None else options.prompts.to_json()
        told = [
            protocol.to_json(),
            prompts,
            options.speed,
            options.cache,
            options.caches,
            manifest.versions(),
        ]
        machine = [platform.node(), features.feature(), features.switched_on(), features.limit()]
        key = _digest([told, machine, _fingerprint(paths[0])])
        place = user_cache() / "evaluations" / key
    kept = KeptRows(place, paths)
    if count := kept.count():
        options.note(f"{count} of {len(paths)} models were measured before the interruption")
    try:
        yield kept
    except BaseException as error:
        if count := kept.count():
            how = "the same command measures the others"
            error.add_note(f"{count} of {len(paths)} models are kept: {how}")
        raise
    hand_over(kept)


def _fingerprint(path: Path) -> str:
    """Return a digest of the files of a model but its card, by name, size and times, not of what is in them."""
    one = not path.is_dir()
    files = [*open_model(path).shards, manifest.place_of(path)] if one else sorted(path.rglob("*"))
    told = []
    for file in files:
        if file.is_file() and file.name != CARD:
            seen = file.stat()
            told.append([str(file), seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino])
    return _digest([str(path.absolute()), told])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _forget_old(folder: Path) -> None:
    with suppress(OSError):
        for path in folder.glob("*.json"):
            if time.time() - path.stat().st_mtime > DAYS * _DAY:
                path.unlink()
