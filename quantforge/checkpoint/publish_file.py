"""A result that is a file, or numbered files, instead of a directory: staged beside its place like one.

For an output ``DIR/name.gguf`` the stage is a directory as for any result. Publishing renames what it holds into
``DIR``, one file after another: first what stands beside the weights, then the weights (the first of numbered files
last, because that is the one that is opened), and the manifest ``name.gguf.quantforge.json`` at the end. A rename
replaces an earlier file in one step; its manifest is removed before, so that no manifest ever stands beside a file that
it does not describe. A kill in between leaves the old file, or the new one, whole and loadable, at worst without its
manifest. Before the first rename the stage durably lists the names to come: the next run on this output finds the list
and makes the renames that are missing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from quantforge.checkpoint.disk import writing
from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.publish import MANIFEST, Stage
from quantforge.errors import RefusedError
from quantforge_files.roles import JOURNAL

SIDE, SIGNATURE = ".quantforge.json", ".sig"
_MOVING = ".moving.json"  # in a stage that is being published: the names of its files, but for the manifest
_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.[^.]*)?$")


class FileStage(Stage):
    """See `Stage`; the output is a file."""

    def place(self, name: str) -> str:
        """The final name of a weight file: the output's own, with the number of the part."""
        part = _PART.search(name)
        if part is None:
            return self.out.name
        return f"{self.out.stem}-{part[1]}-of-{part[2]}{self.out.suffix}"

    def publish(self) -> None:
        """Move everything to its place; see the module.

        Raises:
            RefusedError: the output appeared or changed since the run began.
            ResourceError: the disk failed.
        """
        self._check_place()
        with writing(self.out, 0):
            self._disk.sync(self.path)
        staged = {path.name for path in self.path.iterdir() if path.is_file()} - {MANIFEST}
        self.write_file(_MOVING, json.dumps(sorted(staged)).encode())
        with writing(self.out, 0):
            self._disk.sync(self.path)
            self._move()

    def _recover(self, published: int) -> None:
        super()._recover(published)
        if (self.path / _MOVING).is_file():
            self._move()

    def _move(self) -> None:
        """Make the renames that the stage lists and that are not made yet; the manifest is the last of them."""
        if (self.path / MANIFEST).exists():
            names = [
                Path(name)
                for name in json.loads(FILES.read(self.path / _MOVING, JOURNAL, self.path))
            ]
            weights = [name for name in names if name.name == self.out.name or self._is_part(name)]
            beside = [name for name in names if name not in weights]
            for old in self._earlier():
                if Path(old.name) not in names:  # its manifest is not
                    old.unlink()
            for name in (*beside, *reversed(weights)):
                if (self.path / name).exists():
                    self._disk.rename(self.path / name, self.out.with_name(name.name))
            self._disk.sync(self.out.parent)
            self._disk.rename(self.path / MANIFEST, side_of(self.out))
            self._disk.sync(self.out.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the stage, unless some of it is at its place already: the next run finishes that."""
        if not ((self.path / _MOVING).exists() and (self.path / MANIFEST).exists()):
            super().discard()

    def _check_exchange(self) -> None:
        """Nothing is swapped: a rename replaces a file."""

    def _check_place(self) -> None:
        found = [self.out] if self.out.is_symlink() else self._earlier()
        if not found:
            return
        first = found[0]
        if first.is_symlink() or not first.is_file():
            raise RefusedError(f"{first}: is no file", "give the name of a file", file=str(first))
        if not self._overwrite:
            raise RefusedError(
                f"{first}: exists",
                "replace it with --overwrite, or choose another --output",
                file=str(first),
            )
        if not side_of(self.out).is_file():
            raise RefusedError(
                f"{first}: is not a result of quantforge (no {side_of(self.out).name} beside it) and is kept",
                "choose another --output, or remove the file yourself",
                file=str(first),
            )

    def _is_part(self, path: Path) -> bool:
        part = _PART.search(path.name)
        return part is not None and path.name[: part.start()] == self.out.stem

    def _earlier(self) -> list[Path]:
        """The files of an earlier result: the file or its parts, then its signature and its manifest."""
        parts = sorted(path for path in self.out.parent.iterdir() if self._is_part(path))
        found = [self.out, *parts] if self.out.exists() else parts
        signature, side = side_of(self.out, SIGNATURE), side_of(self.out)
        found += [signature] if found and signature.exists() else []
        return [*found, side] if side.exists() else found


def side_of(file: Path, suffix: str = SIDE) -> Path:
    """Where the manifest of a file (or what else has a ``suffix``) is: of numbered files, beside where one would be."""
    part = _PART.search(file.name)
    name = file.name if part is None else file.name[: part.start()] + (part[3] or "")
    return file.with_name(name + suffix)
