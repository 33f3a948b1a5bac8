"""Files of an earlier result: the only ones that an overwrite may ever remove or replace.

Its manifest lists them with their sizes, and whatever is there beside them, or has another size, is somebody's and is
kept: the overwrite is refused with its name. The card is no exception, although `verify` allows it to change: who has
written figures into it does not want to lose them. The manifest itself belongs to the result, and so does a signature
that lists this very manifest. Names lead nowhere else: no links, no way up, and beside a file only names of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from quantforge.checkpoint.bundle import listed
from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.foreign_json import parse_object
from quantforge.errors import InputError, RefusedError
from quantforge_files.roles import MANIFEST, SIGNATURE

_SCHEMA = "quantforge.manifest/"
_SHOWN = 5
_DEEPEST = 8  # parts of a name
_ODD = -1  # instead of the size of what is no regular file


@dataclass(frozen=True, slots=True)
class Earlier:
    """The files of a result: bytes by name inside of ``root``, the manifest last. Some may be missing by now."""

    root: Path
    files: Mapping[str, int]

    def check(self) -> None:
        """Refuse when one of the files is not as the manifest lists it.

        Raises:
            RefusedError: naming it.
        """
        for name, size in self.files.items():
            found = size_of(self.root, name)
            if found not in {None, size}:
                raise self._kept([name], f"is not the file of {size} bytes that the manifest lists")

    def check_alone(self) -> None:
        """Refuse when the directory holds anything else; errors as `check`."""
        self.check()
        if others := sorted(self._others(self.root, "")):
            raise self._kept(
                others, "is no file of the earlier result: its manifest does not list it"
            )

    def remove(self) -> None:
        """Remove the files, the manifest last, and the directories that become empty inside of ``root``."""
        for name, size in self.files.items():
            if size_of(self.root, name) == size:
                (self.root / name).unlink()
        for folder in sorted(self._folders(), reverse=True):
            with suppress(OSError):
                (self.root / folder).rmdir()

    def _folders(self) -> set[str]:
        parents = {parent for name in self.files for parent in PurePosixPath(name).parents}
        return {str(parent) for parent in parents} - {"."}

    def _others(self, folder: Path, prefix: str) -> Iterator[str]:
        folders = self._folders()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False) and name in folders:
                    yield from self._others(folder / entry.name, f"{name}/")
                elif name not in self.files:
                    yield name

    def _kept(self, names: list[str], why: str) -> RefusedError:
        place = self.root / names[0]
        rest = ", ".join(names[1:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
        also = f" (and {rest})" if rest else ""
        return RefusedError(
            f"{place}: {why}{also}, and it is kept",
            "move it away, or choose another --output",
            file=str(place),
        )


def earlier(root: Path, manifest: str, signature: str, own: Callable[[str], bool]) -> Earlier:
    """Read what belongs to a result.

    Args:
        root: the directory of its files.
        manifest: its name in there.
        signature: the name of a signature, which may be missing.
        own: whether a name can be one of this result.

    Raises:
        RefusedError: the manifest cannot be read, lists no files with their sizes, or lists files of others.
    """
    place = root / manifest
    if size_of(root, manifest) in {None, _ODD}:
        raise _unknown(place, f"{place}: no regular file")
    try:
        data = FILES.read(place, MANIFEST, root)
        document = parse_object(data, place)
    except InputError as error:
        raise _unknown(place, error.message) from error
    outputs = document.get("outputs")
    if not str(document.get("schema")).startswith(_SCHEMA) or not isinstance(outputs, Mapping):
        raise _unknown(place, f"{place}: is no manifest that lists the files of a result")
    files: dict[str, int] = {}
    for name, entry in outputs.items():
        size = entry.get("bytes") if isinstance(entry, Mapping) else None
        if not _inside(name) or not own(name) or name in {manifest, signature}:
            raise _unknown(place, f"{place}: lists {name[:80]!r}, which is no file of this result")
        if type(size) is not int:
            raise _unknown(place, f"{place}: states no size of {name[:80]!r}")
        files[name] = size
    bundle = size_of(root, signature)
    if bundle is not None and _signs(root / signature, manifest, data):
        files[signature] = bundle
    return Earlier(root, {**files, manifest: len(data)})


def already_there(path: Path, out: Path, manifest: Path) -> RefusedError:
    """Return the refusal of a result where another one is: what that was made from, and what to type.

    Args:
        path: the file or directory that is in the way.
        out: the result that was to be written.
        manifest: that of the result which is there; without one, or with a damaged one, nothing is said of it.
    """
    number = next(
        number for number in itertools.count(2) if not os.path.lexists(_numbered(out, number))
    )
    empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    replaceable = empty or os.path.lexists(manifest)
    return RefusedError(
        f"{path}: exists{_made_from(manifest)}",
        f"another name: -o {shlex.quote(str(_numbered(out, number)))}"
        + (", or replace it with --overwrite" if replaceable else ""),
        file=str(path),
    )


def _numbered(out: Path, number: int) -> Path:
    """Return another name, which keeps the ending of a file."""
    stem, dot, suffix = out.name.rpartition(".") if not out.is_dir() else (out.name, "", "")
    return out.with_name(f"{stem}-{number}{dot}{suffix}")


def _made_from(manifest: Path) -> str:
    """Return the end of a sentence: what the result of a manifest was made from, and how."""
    try:
        said = parse_object(FILES.read(manifest, MANIFEST, manifest.parent), manifest)
    except InputError:
        return ""
    source = said.get("source")
    model = source.get("model") if isinstance(source, Mapping) else None
    how = (
        f"{key} {said[key]}"
        for key in ("method", "format")
        if isinstance(said.get(key), str) and said[key]
    )
    return f", made from {model} ({', '.join(how)})" if isinstance(model, str) else ""


def size_of(root: Path, name: str) -> int | None:
    """Return how many bytes a regular file below ``root`` has; -1 for a link or anything else, None if missing."""
    parts = PurePosixPath(name).parts
    for depth in range(1, len(parts) + 1):
        try:
            found = root.joinpath(*parts[:depth]).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return _ODD
        if depth < len(parts) and not stat.S_ISDIR(found.st_mode):
            return _ODD
    return found.st_size if stat.S_ISREG(found.st_mode) else _ODD


def _inside(name: str) -> bool:
    """Return whether a name stays inside, and is written in the one way in which a name is written."""
    path = PurePosixPath(name)
    return (
        0 < len(path.parts) <= _DEEPEST
        and not path.is_absolute()
        and ".." not in path.parts
        and str(path) == name
        and "\0" not in name
    )


def _signs(place: Path, manifest: str, data: bytes) -> bool:
    """Return whether a file is a signature that lists this manifest; the key does not matter here."""
    try:
        data_of = FILES.read(place, SIGNATURE, place.parent)
        return listed(place, data_of).get(manifest) == hashlib.sha256(data).hexdigest()
    except InputError:
        return False


def _unknown(place: Path, what: str) -> RefusedError:
    return RefusedError(
        f"{what}; nothing says which files here may be removed",
        "choose another --output, or remove the earlier result yourself",
        file=str(place),
    )
