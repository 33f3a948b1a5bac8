"""A result that is a file, or numbered files, instead of a directory: staged beside its place like one.

For an output ``DIR/name.gguf`` the stage is a directory as for any result. Publishing renames what it holds into
``DIR``, one file after another: first what stands beside the weights, then the weights (the first of numbered files
last, because that is the one that is opened), and the manifest ``name.gguf.quantforge.json`` at the end. A rename
replaces an earlier file in one step; its manifest is removed before, so that no manifest ever stands beside a file that
it does not describe. A kill in between leaves the old file, or the new one, whole and loadable, at worst without its
manifest. Before the first rename the stage durably lists the names to come, and the files of the earlier result with
their sizes: the next run on this output finds the list and makes what is missing of the removals and renames.

``DIR`` belongs to others too. Only what the earlier result's manifest lists is removed or replaced, and only under
names that a result of this name has; what else has a name to come, or would be taken for a part of the result, is a
refusal that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from quantforge.checkpoint.disk import DISK, Disk, writing
from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.previous_output import (
    SIGNATURE,
    PreviousOutput,
    already_there,
    read_previous_output,
    size_of,
)
from quantforge.checkpoint.stage import Stage
from quantforge.errors import InputError, IntegrityError, RefusedError
from quantforge_files.roles import JOURNAL

SIDE = ".quantforge.json"
MODELFILE = ".Modelfile"
_MOVING = ".moving.json"  # in a stage that is being published
_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.[^.]*)?\Z")


class FileStage(Stage):
    """Stage of an output that is a file; all else is as in `Stage`.

    Args:
        names: of all files that will be published, as far as they are known before the work.
    """

    def __init__(
        self,
        out: Path,
        overwrite: bool,
        source: Path | None = None,
        *,
        names: Collection[str] = (),
        disk: Disk = DISK,
    ) -> None:
        super().__init__(out, overwrite, source, disk=disk)
        self.manifest = side_of(self.out).name
        beside = (self.manifest, side_of(self.out, SIGNATURE).name)
        self._names = {self.out.name, *beside, *names}

    def place(self, name: str) -> str:
        """Return the final name of a weight file: the output's own, with the number of the part."""
        return placed(self.out, name)

    def publish(self) -> None:
        """Move everything to its place; see the module.

        Raises:
            RefusedError: the output appeared or changed since the run began.
            BusyError: the lock was removed, and another run has begun.
            ResourceError: the disk failed.
        """
        staged = {path.name for path in self.path.iterdir() if path.is_file()} - {self.manifest}
        self._names |= staged
        self._check_place()
        before = self._earlier()
        with writing(self.out, 0):
            self._lock.keep()
            self._disk.sync(self.path)
        plan = {"names": sorted(staged), "earlier": dict(before.files) if before else {}}
        self.write_file(_MOVING, json.dumps(plan).encode())
        with writing(self.out, 0):
            self._disk.sync(self.path)
            self._move()

    def _recover(self, published: int) -> None:
        super()._recover(published)
        if (self.path / _MOVING).is_file():
            self._move()

    def _move(self) -> None:
        """Make the removals and renames that the stage lists and that are not made yet; the manifest is the last."""
        if (self.path / self.manifest).exists():
            names, before = self._planned()
            to_come = [name for name in names if (self.path / name).exists()]
            self._check_free([*to_come, self.manifest], before.files)
            weights = [name for name in names if name == self.out.name or self._is_part(name)]
            beside = [name for name in names if name not in weights]
            old = {name: size for name, size in before.files.items() if name not in names}
            PreviousOutput(before.root, old).remove()  # its manifest with it
            for name in (*beside, *reversed(weights)):
                if name in to_come:
                    self._disk.rename(self.path / name, self.out.with_name(name))
            self._disk.sync(self.out.parent)
            self._disk.rename(self.path / self.manifest, self.out.with_name(self.manifest))
            self._disk.sync(self.out.parent)
        self.discard()

    def _planned(self) -> tuple[list[str], PreviousOutput]:
        """Return what the stage lists: names to come, and the files that are replaced."""
        place = self.path / _MOVING
        try:
            found = json.loads(FILES.read(place, JOURNAL, self.path))
            names, before = found["names"], found["earlier"]
            good = all(self._own(name) for name in {*names, *before})
            good = good and all(type(size) is int for size in before.values())
        except (InputError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            good = False
        if not good:
            raise IntegrityError.at(
                place, "is no list of this run", f"start afresh: rm -r {self._lock.directory}"
            )
        return names, PreviousOutput(self.out.parent, before)

    def discard(self) -> None:
        """Remove the stage, unless some of it is at its place already: the next run finishes that."""
        if not ((self.path / _MOVING).exists() and (self.path / self.manifest).exists()):
            super().discard()

    def _check_exchange(self) -> None:
        """Accept every file system: nothing is swapped, since a rename replaces a file."""

    def _check_place(self) -> None:
        before = self._earlier() if self._overwrite else None
        parts = {path.name for path in self.out.parent.iterdir() if self._is_part(path.name)}
        self._check_free(self._names | parts, before.files if before else {})
        if before is not None:
            before.check()

    def _check_free(self, names: Collection[str], before: Mapping[str, int]) -> None:
        """Refuse what has a name to come and is not of the earlier result; its size says whether it is."""
        for name in sorted(names):
            path = self.out.with_name(name)
            found = size_of(path.parent, name)
            if found is None or found == before.get(name):
                continue
            if found < 0:
                why, hint = "is no file", "give the name of a file"
            elif not self._overwrite:
                raise already_there(path, self.out, side_of(self.out))
            elif not side_of(self.out).is_file() and not before:
                side = side_of(self.out).name
                why = f"is not a result of quantforge (no {side} beside it) and is kept"
                hint = "choose another --output, or remove the file yourself"
            else:
                why = "is not as the manifest of the earlier result lists it, and it is kept"
                hint = "move it away, or choose another --output"
            raise RefusedError.at(path, why, hint)

    def _earlier(self) -> PreviousOutput | None:
        """Return the files of the earlier result, None if there is none."""
        side = side_of(self.out)
        if size_of(side.parent, side.name) is None:
            return None
        signature = side_of(self.out, SIGNATURE).name
        return read_previous_output(side.parent, side.name, signature, self._own)

    def _own(self, name: str) -> bool:
        """Return whether a file beside the output can be one of its result."""
        return Path(name).name == name and (
            name in {self.out.name, f"{self.out.stem}{MODELFILE}", projector_name(self.out)}
            or name.startswith(f"{self.out.name}.")
            or self._is_part(name)
        )

    def _is_part(self, name: str) -> bool:
        part = _PART.search(name)
        own = (self.out.stem, self.out.suffix)
        return part is not None and (name[: part.start()], part[3] or "") == own


def placed(out: Path, name: str) -> str:
    """Return the name of a weight file of a plan: that of the output, with the number of the part."""
    part = _PART.search(name)
    return out.name if part is None else f"{out.stem}-{part[1]}-of-{part[2]}{out.suffix}"


def projector_name(out: Path) -> str:
    """Return the name of the file of a GGUF result's vision tower, which programs know by its first word."""
    return f"mmproj-{side_of(out, '').stem}-F16.gguf"


def set_of(file: Path) -> list[Path]:
    """Return the paths of all parts of the set of numbered files that one belongs to; of another file, itself."""
    part = _PART.search(file.name)
    if part is None:
        return [file]
    head, count, end = file.name[: part.start()], part[2], part[3] or ""
    return [file.with_name(f"{head}-{n:05}-of-{count}{end}") for n in range(1, int(count) + 1)]


def side_of(file: Path, suffix: str = SIDE) -> Path:
    """Return the path of a file's manifest, or other ``suffix``; for numbered files, as if they were one file."""
    part = _PART.search(file.name)
    name = file.name if part is None else file.name[: part.start()] + (part[3] or "")
    return file.with_name(name + suffix)
